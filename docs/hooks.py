"""How `make docs` turns the pages into a site; mkdocs.yml names this file.

The pages are also read as plain Markdown in the repository. Three things have to be changed for the site:

- Files outside of docs/ that readers need become part of the site (`PAGES` and `ATTACHMENTS`).
- Links that leave docs/ lead to these files or to the API reference. All others become the path of the file.
- Python-Markdown wants nested lists indented by four spaces, not two.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "overview.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "models/task-model.md": "src/snapstream/assets/task-model/README.md",
    "models/task-model-mla.md": "src/snapstream/assets/task-model-mla/README.md",
}
"""Pages of the site that are files outside of docs/."""
ATTACHMENTS = ("deploy/snapstream.service", "deploy/grafana-dashboard.json")
"""Files outside of docs/ that pages offer for download; they have the same path in the site."""
REFERENCE = {
    "src/snapstream/engine/llm.py": "snapstream.LLM",
    "src/snapstream/engine/context.py": "snapstream.Context",
    "src/snapstream/engine/requests/output.py": "snapstream.RequestOutput",
    "src/snapstream/config/sampling.py": "snapstream.SamplingParams",
    "src/snapstream/config/budget.py": "snapstream.CacheBudget",
    "src/snapstream/config/memory.py": "snapstream.MemoryBudget",
    "src/snapstream/config/engine.py": "snapstream.EngineConfig",
    "src/snapstream/errors.py": "snapstream.SnapStreamError",
    "src/snapstream/integrations/transformers/cache.py": "snapstream.integrations.transformers.SnapStreamCache",
    "src/snapstream/config/policy.py": "snapstream.config.policy.Policy",
    "src/snapstream/engine/engine.py": "snapstream.engine.engine.Engine",
}
"""Sources that the API reference describes, with their anchors there."""

LINK = re.compile(r'(?P<image>!?)\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s]+)(?:\s+"[^"]*")?\)')
_FENCE = re.compile(r"^(?P<indent> *)(?P<mark>```+|~~~+)")
_CODE = re.compile(r"(?<!`)(`+)(?!`)(?:(?!\n\s*\n).)+?(?<!`)\1(?!`)", re.DOTALL)
_ITEM = re.compile(r"([-*+]|\d+\.) ")


def fenced(text: str) -> Iterator[tuple[str, int | None]]:
    """Lines of a page, each with the indentation of the code block that it belongs to, or ``None``."""
    mark, indent = "", 0
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line)
        if mark:
            yield line, indent
            if found and found["mark"].startswith(mark) and line.strip() == found["mark"]:
                mark = ""
        elif found:
            mark, indent = found["mark"], len(found["indent"])
            yield line, indent
        else:
            yield line, None


def without_code(text: str) -> str:
    """The page with spaces in place of all code, so that positions stay the same."""
    lines = [line if code is None else re.sub(r"[^\n]", " ", line) for line, code in fenced(text)]
    return _CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), "".join(lines))


def links(text: str) -> Iterator[re.Match[str]]:
    """Links and images of a page; text in code is blank."""
    return LINK.finditer(without_code(text))


def is_external(target: str) -> bool:
    """Whether a link leads to another site."""
    return re.match(r"[a-z]+:", target) is not None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/ to the site."""
    from mkdocs.structure.files import File

    for place, source in {**PAGES, **{path: path for path in ATTACHMENTS}}.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Make a page of the repository a page of the site."""
    place = page.file.src_uri
    source = PAGES.get(place, f"docs/{place}")
    return nested_lists(rewritten_links(markdown, source, place))


def rewritten_links(markdown: str, source: str, place: str) -> str:
    """The page with links to where the files are in the site.

    Args:
        markdown: The page.
        source: Its path in the repository.
        place: Its path in the site.
    """
    parts, end = [], 0
    for link in links(markdown):
        target, _, anchor = link["target"].partition("#")
        if not target or is_external(target):
            continue
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        begin, stop = link.span("text")
        text = markdown[begin:stop]
        found = in_site(path)
        if found is None:
            new = f"`{path}`" if f"/{path}".endswith(f"/{text.strip('`')}") else f"{text} (`{path}`)"
        else:
            goal, _, own = found.partition("#")
            goal = posixpath.relpath(goal, posixpath.dirname(place) or ".")
            anchor = anchor or own
            new = f"{link['image']}[{text}]({goal}{'#' if anchor else ''}{anchor})"
        parts += [markdown[end : link.start()], new]
        end = link.end()
    return "".join([*parts, markdown[end:]])


def in_site(path: str) -> str | None:
    """Where a file of the repository is in the site, or ``None``."""
    if path in REFERENCE:
        return f"api.md#{REFERENCE[path]}"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in ATTACHMENTS:
        return path
    return {source: place for place, source in PAGES.items()}.get(path)


def nested_lists(markdown: str) -> str:
    """The page with everything inside of lists indented twice as far."""
    lines, inside = [], False
    for line, code in fenced(markdown):
        indent = len(line) - len(line.lstrip(" "))
        if line.strip() and not indent and code is None:
            inside = _ITEM.match(line) is not None
        elif code == 0:
            inside = False
        lines.append(" " * (indent if code is None else code) + line if inside and line.strip() else line)
    return "".join(lines)

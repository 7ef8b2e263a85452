"""Links between pages: each leads to a file and a heading that exist, on GitHub and in the site of `make docs`."""

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def load_hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = load_hooks()
MODEL = "models/task-model-mla.md"
DOCS = sorted((ROOT / "docs").glob("**/*.md"))
PAGES = [*DOCS, *(ROOT / source for source in hooks.PAGES.values())]


def anchors(text):
    """Anchors that GitHub gives to the headings of a page."""
    prose = [line for line, code in hooks.fenced(text) if code is None]
    titles = [match[1] for line in prose if (match := re.match(r"#{1,6} +(.*?)(?: +#+)?\s*$", line))]
    seen, found = Counter(), set()
    for title in titles:
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken(page):
    """Links of a page that lead nowhere, each with the reason."""
    for link in hooks.links(page.read_text(encoding="utf-8")):
        target, _, anchor = link["target"].partition("#")
        if hooks.is_external(link["target"]):
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.is_file():
            yield f"{link['target']}: no such file"
        elif anchor and (path.suffix != ".md" or anchor not in anchors(path.read_text(encoding="utf-8"))):
            yield f"{link['target']}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert list(broken(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_is_of_a_kind_that_is_not_checked(page):
    text = hooks.without_code(page.read_text(encoding="utf-8"))
    assert not re.search(r"^\[[^\]]+\]:|<(a|img) ", text, re.MULTILINE)
    assert text.count("](") == len(list(hooks.links(text)))


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# One\n\n## `Two`, and 3\n\n## One\n\n```sh\n# not a heading\n```\n")
    good = ["other.md", "other.md#one", "other.md#two-and-3", "other.md#one-1", "#here", "https://example.org/x#y"]
    bad = ["another.md", "other.md#two", "other.md#one-2", "other.md#not-a-heading", "#there", "image.png"]
    links = [f"[a `b`\nc]({target})" for target in [*good, *bad]]
    page.write_text("\n".join(["# Here\n", *links, "`[in code](none.md)`\n"]))
    assert [found.partition(": ")[0] for found in broken(page)] == bad


def navigation():
    """Pages in the navigation of the site."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = re.search(r"^nav:\n((?:[ ].*\n)+)", text, re.MULTILINE)[1]
    return re.findall(r": (\S+\.md)$", nav, re.MULTILINE)


def test_every_page_is_in_the_navigation_once():
    expected = [str(page.relative_to(ROOT / "docs")) for page in DOCS] + list(hooks.PAGES)
    assert sorted(navigation()) == sorted(expected)


def test_every_page_is_in_the_index():
    index = ROOT / "docs" / "index.md"
    linked = {
        (index.parent / link["target"].partition("#")[0]).resolve() for link in hooks.links(index.read_text("utf-8"))
    }
    assert set(PAGES) - {index} <= linked


def test_the_site_has_what_it_adds():
    reference = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for path in [*hooks.PAGES.values(), *hooks.ATTACHMENTS, *hooks.REFERENCE]:
        assert (ROOT / path).is_file(), path
    for name in hooks.REFERENCE.values():
        assert f"\n::: {name}\n" in reference, name


@pytest.mark.parametrize(
    ("link", "source", "place", "expected"),
    [
        ("[a](b.md#c)", "docs/a.md", "a.md", "[a](b.md#c)"),
        ("[a](#c)", "docs/a.md", "a.md", "[a](#c)"),
        ("![a](docs/kept.svg)", "README.md", "overview.md", "![a](kept.svg)"),
        ("[a](../CONTRIBUTING.md#rules)", "docs/a.md", "a.md", "[a](contributing.md#rules)"),
        ("[`a`](../task-model/README.md)", hooks.PAGES[MODEL], MODEL, "[`a`](task-model.md)"),
        ("[a](../src/snapstream/config/budget.py)", "docs/a.md", "a.md", "[a](api.md#snapstream.CacheBudget)"),
        ("[a](../src/snapstream/config/budget.py)", "docs/a.md", "b/a.md", "[a](../api.md#snapstream.CacheBudget)"),
        ("[the tests](../tests/conftest.py)", "docs/a.md", "a.md", "the tests (`tests/conftest.py`)"),
        ("[conftest.py](../tests/conftest.py)", "docs/a.md", "a.md", "`tests/conftest.py`"),
        ("`[a](../b.py)`\n```\n[a](../b.py)\n```\n", "docs/a.md", "a.md", "`[a](../b.py)`\n```\n[a](../b.py)\n```\n"),
    ],
)
def test_links_of_the_site(link, source, place, expected):
    assert hooks.rewritten_links(link, source, place) == expected


def test_nested_lists_of_the_site():
    text = "- a\n  b\n  - c\n\n    d\n  ```\n    code\n  ```\n\nText\n  more\n\n    code\n"
    wide = "- a\n    b\n    - c\n\n        d\n    ```\n      code\n    ```\n\nText\n  more\n\n    code\n"
    assert hooks.nested_lists(text) == wide

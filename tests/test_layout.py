"""The table of folders in CONTRIBUTING.md, beside what the folders really import."""

import ast
import graphlib
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "snapstream"
TOP = {path.stem for path in PACKAGE.glob("*.py")} - {"cli"}
BY_NAME = {("config", "compression")}
"""Not upward, and said so."""


def table():
    """Folders in reading order, and what each is said to import."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z_/]+)/` \|[^|]*\|([^|]*)\|$", text[text.index("| folder |") :], re.MULTILINE)
    return {folder: set(re.findall(r"`([a-z_/]+)`", imports)) for folder, imports in rows}


def folder_of(module):
    """The folder of a module of this package, given without the package's name; ``None`` for those at the top."""
    first, *rest = module.split(".")
    if first in TOP or not first:
        return None
    return f"integrations/{rest[0]}" if first == "integrations" and rest else "commands" if first == "cli" else first


def imported(path):
    """Modules of this package that a file imports when it runs, by statements or by name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "snapstream":
            yield from (f"snapstream.{alias.name}" for alias in node.names if alias.name != "__version__")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            if (
                re.fullmatch(r"snapstream(\.\w+){2,}", name)
                and (PACKAGE.parent / f"{name.replace('.', '/')}.py").exists()
            ):
                yield name


def real():
    """What each folder imports."""
    found = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        folder = folder_of(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        for module in imported(path):
            name, _, rest = module.partition(".")
            target = folder_of(rest) if name == "snapstream" else None
            if folder and target and target != folder:
                found[folder].add(target)
    return found


def test_every_folder_is_there():
    folders = {
        f"integrations/{path.name}" if path.parent.name == "integrations" else path.name
        for path in (*PACKAGE.iterdir(), *(PACKAGE / "integrations").iterdir())
        if (path / "__init__.py").exists() and path.name != "integrations"
    }
    assert set(table()) == folders
    said = re.findall(
        r"^\| top level \|([^|]*)\|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert set(re.findall(r"`(\w+)\.py`", said[0])) == TOP - {"__init__", "__main__"}


@pytest.mark.parametrize("folder", table())
def test_imports_are_those_of_the_table(folder):
    assert real()[folder] == table()[folder]


def test_imports_point_upward():
    order = list(table())
    wrong = {
        (folder, target)
        for folder, targets in real().items()
        for target in targets
        if order.index(target) > order.index(folder)
    }
    assert wrong == BY_NAME


def test_every_module_of_the_engine_is_in_the_text():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    missing = [
        path.stem
        for path in (PACKAGE / "engine").rglob("*.py")
        if path.stem != "__init__" and not re.search(rf"`{path.stem}`", text)
    ]
    assert not missing


def test_there_is_no_circle_of_imports():
    """Of modules, when they are loaded; what functions import later does not count."""
    files = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    graph = {}
    for name, path in files.items():
        loaded = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
        whole = {node.module for node in loaded}
        parts = {f"{node.module}.{alias.name}" for node in loaded for alias in node.names}
        graph[name] = (whole | parts) & files.keys()
    assert len(graph) > 200
    graphlib.TopologicalSorter(graph).prepare()  # which raises an error with the circle

"""How much one must read to understand FeDXL: it stays what one person reads beside the paper in one sitting."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

from fedxl import FeDXL2

ROOT = Path(__file__).parents[1]
ROOMS = ("fedxl.algorithms.", "fedxl.risks.")
FEATURES = r"label|quer|privat|noise|clip|guard|even|lend|one_class|pool_|sorted|momentum|adam|survival"


def imports(path: Path) -> set[str]:
    """The modules that a file imports; a package counts as the modules that it re-exports the names from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for item in node.names:
                found |= {node.module, f"{node.module}.{item.name}"} | re_exported(node.module, item.name)
        elif isinstance(node, ast.Import):
            found |= {item.name for item in node.names}
    return found


def re_exported(package: str, name: str) -> set[str]:
    front = ROOT.joinpath(*package.split("."), "__init__.py")
    if not front.exists() or not f"{package}.".startswith(ROOMS):
        return set()
    nodes = [node for node in ast.walk(ast.parse(front.read_text())) if isinstance(node, ast.ImportFrom)]
    return {node.module for node in nodes if node.module and name in [item.name for item in node.names]}


def to_read() -> set[Path]:
    """What algorithms/fedxl.py imports within algorithms/ and risks/, directly or not."""
    seen, todo = set(), [ROOT / "fedxl/algorithms/fedxl.py"]
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            modules = [module for module in imports(path) if module.startswith(ROOMS)]
            paths = [ROOT.joinpath(*module.split(".")).with_suffix(".py") for module in modules]
            todo += [path for path in paths if path.exists()]
    return seen


def test_fedxl_is_read_in_one_sitting():
    found = to_read()
    assert len(found) <= 10, sorted(path.name for path in found)
    assert sum(path.read_text().count("\n") for path in found) <= 1800
    assert (ROOT / "fedxl/algorithms/fedxl.py").read_text().count("\n") <= 400
    assert len(dataclasses.fields(FeDXL2)) <= 12


def test_no_type_is_an_empty_tuple():
    for path in (ROOT / "fedxl/algorithms").glob("*.py"):
        assert "tuple[()]" not in path.read_text(), path.name


def test_no_condition_of_a_step_names_a_feature():
    for name in ("step.py", "fedxl.py", "local_pair.py"):
        tree = ast.parse((ROOT / "fedxl/algorithms" / name).read_text())
        steps = {
            "pull",
            "own_pull",
            "active",
            "entries",
            "descend",
            "begin",
            "start",
            "step",
            "score_fresh",
            "finish",
        }
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.name in steps:
                tests = [node.test for node in ast.walk(function) if isinstance(node, (ast.If, ast.IfExp, ast.While))]
                named = [ast.unparse(test) for test in tests if re.search(FEATURES, ast.unparse(test))]
                assert not named, f"{name}, {function.name}: {named}"


def test_the_walks_of_the_design_page_are_short():
    """From a CSV row to a tensor, and from a score to a number in the report: six files each, which exist."""
    text = (ROOT / "docs/design.md").read_text()
    walks = [line for line in text[text.index("Two walks") :].splitlines() if line.startswith(("- **", "  `"))]
    joined = " ".join(walks).split("- **")[1:3]
    assert len(joined) == 2
    for walk in joined:
        found = re.findall(r"`([a-z_/]+\.py)`", walk)
        assert 1 < len(found) <= 6, found
        known = {path.relative_to(ROOT / "fedxl").as_posix() for path in (ROOT / "fedxl").rglob("*.py")}
        assert all(any(name.endswith(file) for name in known) for file in found), found

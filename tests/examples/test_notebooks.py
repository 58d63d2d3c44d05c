"""The notebooks of examples/: their cells run as plain Python, with fewer rounds, and what they hold was executed."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pandas", reason="notebooks use all that fedxl[dev] brings")
pytest.importorskip("pyarrow", reason="notebooks use all that fedxl[dev] brings")
NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


def cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def run(source: str, names: dict[str, Any]) -> Any:
    """What a cell shows: the value of its last line."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in cells(path):
        source = "".join(cell["source"])
        shown = run(source.replace("rounds=20", "rounds=4").replace('"rounds": 20', '"rounds": 4'), names)
        kinds = {kind for output in cell["outputs"] for kind in output.get("data", {})}
        if hasattr(shown, "_repr_html_"):
            assert shown._repr_html_().startswith("<div")
            assert "text/html" in kinds, "executed with this version: make notebooks"
        assert (shown is None) or "text/plain" in kinds
    assert not list(tmp_path.iterdir()), "a reader's folder stays as it was"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_was_executed_from_top_to_bottom(path):
    assert path.stat().st_size < 200_000
    assert [cell["execution_count"] for cell in cells(path)] == list(range(1, len(cells(path)) + 1))
    outputs = [output for cell in cells(path) for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert "/home/" not in path.read_text()
    assert "/tmp/" not in path.read_text()

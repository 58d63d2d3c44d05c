"""The Python code of the guide to data runs, as one program from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "data.md"


def test_the_code_of_the_guide_runs(tmp_path, monkeypatch, capsys):
    for needed in ("pandas", "pyarrow"):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    section = GUIDE.read_text().partition("## In Python")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) >= 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert names["result"].metrics["test"]["auroc"] > 0
    assert names["data"].names == ["north", "south"]
    assert "algorithm.name" in capsys.readouterr().out

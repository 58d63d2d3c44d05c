"""The code of the guide to evaluation runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "evaluation.md"


@pytest.mark.skipif(not GUIDE.exists(), reason="the guides are not in the source archive")
def test_the_guide_runs(capsys):
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        exec(block, names)
    out = capsys.readouterr().out
    assert re.search(r"^auroc +0\.9\d+ \(0\.\d+ to 0\.\d+\), DeLong, Wilson's form$", out, re.MULTILINE)
    assert re.search(r"^ap .* p = 0\.\d+, BCa bootstrap, 2000 draws, corrected for few positives$", out, re.MULTILINE)

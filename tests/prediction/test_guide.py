"""Every command and every example of the guide runs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.prediction.conftest import patients, write
from tests.prediction.test_predict import command

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "after.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def test_the_guide_runs(trained, tmp_path, monkeypatch):
    shutil.copytree(trained / "run", tmp_path / "runs" / "patients-1")
    write(tmp_path / "new.csv", patients(20, 1))
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks("bash") for line in block.strip().splitlines()]
    assert len(lines) >= 3
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "fedxl"
        command(*words)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks("python"))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    probability, *_ = done.stdout.split()
    first = (tmp_path / "scores.csv").read_text().splitlines()[1].split(",")
    assert abs(float(probability) - float(first[2])) < 1e-5, "by hand from ONNX, as fedxl predict has it"

"""The examples run as their first lines say: from a copy of their folder, by the command and by Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
OWN = sorted(path.stem for path in EXAMPLES.glob("own_*.py"))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
# What a run of each must have in its records, and its config must name.
EXPECTED = {
    "own_algorithm": ({"auroc", "risk"}, "own_algorithm:FeDXLProx"),
    "own_metric": ({"sensitivity", "missed", "auroc"}, "own_metric:sensitivity"),
    "own_data": ({"auroc"}, "own_data:load"),
    "own_risk": ({"auroc", "risk"}, "own_risk:push"),
}


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(EXAMPLES, tmp_path / "examples"))


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", OWN)
def test_an_example_is_short(name):
    lines = [line for line in (EXAMPLES / f"{name}.py").read_text().splitlines() if line.strip()]
    assert len(lines) < 40
    assert (EXAMPLES / f"{name}.toml").is_file()


@pytest.mark.parametrize("name", list(EXPECTED))
def test_by_its_name_in_toml(folder, name):
    metrics, named = EXPECTED[name]
    assert named in (folder / f"{name}.toml").read_text()
    out = run(folder, "-m", "fedxl", "train", f"{name}.toml", "--out", "run")
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics <= records[0]["validation"].keys()
    assert records[-1]["test"]["auroc"] > 0.75, "it has learnt something"
    assert f"auroc {records[-1]['test']['auroc']:.4f}" in out
    assert run(folder, "-m", "fedxl", "resume", "run"), "what is resumed finds them, too"


def test_ones_own_metric_chooses_the_model_and_is_reported(folder):
    out = run(folder, "-m", "fedxl", "train", "own_metric.toml", "--out", "run")
    *looks, last = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    values = [look["validation"]["sensitivity"] for look in looks]
    best = [look for look, value in zip(looks, values, strict=True) if value == max(values)]
    assert last["best_round"] == min(best, key=lambda look: look["validation"]["risk"])["round"]
    assert all(
        look["validation"]["missed"] == pytest.approx(1 - value) for look, value in zip(looks, values, strict=True)
    )
    assert f"sensitivity {last['test']['sensitivity']:.4f}" in out
    report = run(folder, "-m", "fedxl", "report", "run", "--all", "--markdown")
    assert "| sensitivity | missed |" in report.splitlines()[0]
    assert f"{last['test']['sensitivity']:.4f}" in report


@pytest.mark.parametrize("name", OWN)
def test_from_python(folder, name):
    assert run(folder, f"{name}.py").strip()

"""Time to event at three hospitals, from tables to probabilities: one of them has seen no event."""

from __future__ import annotations

import contextlib
import csv
import json
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("pandas", reason="the example writes its tables with pandas")

import pandas as pd

from fedxl.cli.main import app
from fedxl.config.experiment import load_data, read
from fedxl.data.examples import Examples
from fedxl.evaluation import scores

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def folder(tmp_path) -> Path:
    place = Path(shutil.copytree(EXAMPLES, tmp_path / "examples"))
    with contextlib.chdir(place):
        runpy.run_path("make_patients.py", run_name="__main__")
    return place


def fedxl(place: Path, *command: str) -> str:
    with contextlib.chdir(place):
        done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def frame(data: Examples) -> pd.DataFrame:
    """Scaled features as a run reads them, without those that are the others' complement."""
    found = pd.DataFrame(data.x.double().numpy()).assign(time=data.time.numpy(), event=data.y[:, 0].numpy())
    return found.loc[:, found.nunique() > 1]


@pytest.mark.filterwarnings("ignore:Starting with pandas version")  # what lifelines calls
def test_three_hospitals_learn_what_lifelines_learns_of_all_their_patients(folder):
    """The C-index of test patients, beside that of a Cox model of the pooled training patients."""
    lifelines = pytest.importorskip("lifelines", reason="needs lifelines")
    assert "No problems found" in fedxl(folder, "data", "check", "survival.toml")
    fedxl(folder, "train", "survival.toml", "--out", "run")
    members = json.loads((folder / "run" / "run.json").read_text())["members"]
    assert {member["name"]: member["positives"] > 0 for member in members} == {
        "clinic": False, "north": True, "south": True,
    }  # fmt: skip
    last = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])["test"]
    with contextlib.chdir(folder):
        data = load_data(read(Path("survival.toml")))
    test = frame(data.test)
    fitted = lifelines.CoxPHFitter(penalizer=0.01).fit(frame(data.train), "time", "event")
    pooled = fitted.score(test, "concordance_index")
    assert last["cindex"] > 0.7
    assert last["cindex"] == pytest.approx(pooled, abs=0.03)
    kept = scores.load(folder / "run" / "scores.npz")["test"]
    values, events = kept.flat
    assert last["cindex"] == pytest.approx(lifelines.utils.concordance_index(kept.time, -values, events), abs=1e-12)


def test_the_older_are_told_to_die_earlier(folder):
    """Predictions for two new patients who differ by their age alone."""
    fedxl(folder, "train", "survival.toml", "--out", "run")
    rows = pd.read_csv(folder / "patients" / "north.csv").iloc[[0, 0]].assign(age=[45.0, 80.0], patient=["a", "b"])
    rows.drop(columns=["days", "status"]).to_csv(folder / "new.csv", index=False)
    fedxl(folder, "predict", "run", "new.csv", "-o", "scores.csv")
    with (folder / "scores.csv").open(newline="") as file:
        young, old = csv.DictReader(file)
    horizons = [name for name in young if name.startswith("survival@")]
    assert len(horizons) == 3
    found = np.array([[float(row[name]) for name in horizons] for row in (young, old)])
    assert (found[0] > found[1]).all()
    assert (np.diff(found) <= 0).all()
    assert ((found > 0) & (found < 1)).all()

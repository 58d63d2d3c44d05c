"""Three hospitals with tables and images, from files to a decision by commands alone: simulated and deployed.

Their images at real sites: tests/docs/test_deployments.py, by the commands of the guide.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("cryptography", reason="needs fedxl[deploy]")

from fedxl.cli.main import app
from fedxl.cli.processes import free_port
from fedxl.data.tables.prepare import Preparation
from fedxl.data.tables.table import read_new
from fedxl.evaluation import histogram, scores
from tests.deploy.deployment import processes_in

EXAMPLES = Path(__file__).parents[2] / "examples"
HOSPITALS = ("east", "north", "south")  # numbered as the simulator does, by name
pytestmark = pytest.mark.deploy


@pytest.fixture
def folder(tmp_path) -> Path:
    place = Path(shutil.copytree(EXAMPLES, tmp_path / "examples"))
    with contextlib.chdir(place):
        runpy.run_path("make_hospitals.py", run_name="__main__")
    return place


def fedxl(place: Path, *command: str) -> str:
    """What a command prints. It runs in this process: to import torch takes seconds each time."""
    with contextlib.chdir(place):
        done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def deploy(place: Path) -> None:
    """`fedxl deploy local`, which watches over processes of its own."""
    command = [sys.executable, "-m", "fedxl", "deploy", "local", "federation"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def predictions(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def decided(place: Path, run: str, new: str) -> None:
    """Report, predict and export; the export says the same once the run and all training data are gone."""
    fedxl(place, "report", run, "--html", "report.html")
    page = (place / "report.html").read_text()
    assert all(hospital in page for hospital in HOSPITALS)
    assert page.count("<svg") >= 5
    shutil.copy(place / new, place / "new.csv")
    shutil.copytree((place / new).parent / "images", place / "images", dirs_exist_ok=True)
    fedxl(place, "predict", run, "new.csv", "-o", "scores.csv")
    found = predictions(place / "scores.csv")
    assert len(found) == len((place / "new.csv").read_text().splitlines()) - 1
    assert {row["class"] for row in found} == {"0", "1"}
    assert all(0 <= float(row["probability"]) <= 1 for row in found)
    fedxl(place, "export", run, "-o", "model")
    assert json.loads((place / "model" / "model.json").read_text())["onnx"]
    card = (place / "model" / "README.md").read_text()
    assert all(f"| {hospital} |" in card for hospital in HOSPITALS)
    shutil.rmtree(place / run)
    shutil.rmtree(place / "hospitals")
    fedxl(place, "predict", "model", "new.csv", "-o", "again.csv")
    assert (place / "again.csv").read_bytes() == (place / "scores.csv").read_bytes()


@pytest.mark.parametrize("name", ["patients", "images"])
def test_simulated(folder, name):
    config = {"patients": "table.toml", "images": "images.toml"}[name]
    told = fedxl(folder, "data", "check", config)
    assert "No problems found" in told
    assert ("values are missing: mean_area" in told) == (name == "patients")
    fedxl(folder, "train", config, "--out", "run")
    about = json.loads((folder / "run" / "run.json").read_text())
    assert [member["name"] for member in about["members"]] == list(HOSPITALS)
    last = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["test"]["auroc"] > 0.85, "it has learnt something"
    kept = scores.load(folder / "run" / "scores.npz")["test"]
    assert set(kept.by_site()) == set(HOSPITALS)
    decided(folder, "run", f"hospitals/east/{name}.csv")


def with_the_runs_seed(text: str) -> str:
    """Settings with which the simulator's draws and merging are repeated; `init` writes safer ones."""
    safe = {"private_draws = true": "private_draws = false", "sorted_scores = true": "sorted_scores = false"}
    safe |= {'pool_u = "server"': 'pool_u = "clients"', "clip_change = 2.0": "clip_change = 0.0"}
    for words, others in {**safe, 'order = "sorted"': 'order = "drawn"'}.items():
        text = text.replace(words, others)
    return text


def test_deployed_to_three_sites(folder):
    """Each site reads its own table. The server has no data; it gets summaries of columns, scores and curves."""
    fedxl(folder, "train", "table.toml", "--out", "simulated")
    init = ("--sites", ",".join(HOSPITALS), "--config", "table.toml", "--port", str(free_port()), "federation")
    fedxl(folder, "deploy", "init", *init)
    server = folder / "federation" / "server" / "server.toml"
    text = with_the_runs_seed(server.read_text()).replace('evaluate = "server"', 'evaluate = "sites"')
    server.write_text(text[: text.index("\n[data]\n")] + text[text.index("\n[model]\n") :])
    for hospital, told in zip(HOSPITALS, ("scores", "curve", "scores"), strict=True):
        site = folder / "federation" / "sites" / hospital / "site.toml"
        changed = with_the_runs_seed(site.read_text()).replace("hospitals/*/", f"hospitals/{hospital}/")
        site.write_text(changed.replace('evaluate = "none"', f'evaluate = "{told}"'))
        assert "No problems found" in fedxl(folder, "data", "check", str(site))
    deploy(folder)
    assert not processes_in(folder / "federation"), "nobody is left"
    run = folder / "federation" / "server" / "run"
    prepared = [json.loads((place / "preparation.json").read_text()) for place in (run, folder / "simulated")]
    deployed, simulated = map(Preparation.from_json, prepared)
    north = folder / "hospitals" / "north" / "patients.csv"
    x, y = (read_new(one, north).x.numpy() for one in (deployed, simulated))
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    exact = json.loads((folder / "simulated" / "metrics.jsonl").read_text().splitlines()[-1])["test"]["auroc"]
    assert last["test_from"] == "curves of east, north, south"
    assert set(histogram.load(run / "curves.npz")["test"][""]) == set(HOSPITALS)
    assert last["test"]["auroc"] == pytest.approx(exact, abs=last["test_bounds"]["auroc"] + 1e-6)
    decided(folder, "federation/server/run", "hospitals/east/patients.csv")

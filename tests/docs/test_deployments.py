"""Deployments that the documentation shows, with real processes: every line, as a shell runs it."""

from __future__ import annotations

import csv
import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("cryptography", reason="needs fedxl[deploy]")
pytest.importorskip("PIL", reason="needs fedxl[images]")

from fedxl import tree
from fedxl.cli.processes import free_port
from fedxl.data.tables.prepare import Preparation
from fedxl.deploy.provision.settings import read_server, read_site
from fedxl.training.run_writer import load_latest
from tests.deploy.deployment import processes_in
from tests.deploy.federated import secrets_of, simulated
from tests.docs.pages import ROOT, Block, blocks

HOSPITALS = ("east", "north", "south")  # numbered as the simulator does, by name
pytestmark = pytest.mark.deploy


def shell(place: Path, text: str) -> str:
    """What a block of commands prints; `fedxl` and `python` are those of this environment."""
    programs = place / "bin"
    programs.mkdir(exist_ok=True)
    for name, module in (("fedxl", "-m fedxl"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (programs / name).chmod(stat.S_IRWXU)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{programs}:{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def the_block(page: str, words: str) -> Block:
    (found,) = [block for block in blocks(ROOT / page) if words in block.text]
    return found


def assert_equals_simulator(place: Path) -> None:
    """The server's whole state, bit by bit what a simulation with the same secret seeds comes to."""
    run = place / "federation" / "server" / "run"
    found, complaints = load_latest(run / "checkpoints")
    assert found
    assert not complaints
    secrets = secrets_of(run, place / "federation" / "sites", HOSPITALS)
    assert secrets.pool, "`fedxl deploy init` switches it on"
    config = read_server(run.parent / "server.toml").config
    data = read_site(place / "federation" / "sites" / "east" / "site.toml").data
    data = {**data, "path": data["path"].replace("hospitals/east", "hospitals/*")}
    config = replace(config, data=data, run={**config.run, "executor": "loop"})  # sites work one by one
    wanted = simulated(config, secrets)
    for name, tensor in tree.pack(wanted.server).items():
        torch.testing.assert_close(found.tensors[f"server.{name}"], tensor, rtol=0, atol=0, equal_nan=True)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["test_from"] == "curves of east, north, south"
    bound = last["test_bounds"]["auroc"] + 1e-5
    assert last["test"]["auroc"] == pytest.approx(wanted.metrics["test"]["auroc"], abs=bound)
    assert Preparation.from_text((run / "preparation.json").read_text()) == wanted.preparation


def test_the_images_of_three_hospitals_at_real_sites(tmp_path, monkeypatch, capsys):
    """From files to a model that predicts without its run, by the commands of the guide; then what it comes to."""
    place = Path(shutil.copytree(ROOT / "examples", tmp_path / "examples"))
    config = (place / "images.toml").read_text()
    (place / "images.toml").write_text(config.replace("rounds = 10", "rounds = 4"))
    text = the_block("docs/guides/data.md", "fedxl deploy init federation").text
    shown = shell(place, "python make_hospitals.py\n" + text.replace(" --config", f" --port {free_port()} --config"))
    assert shown.count("No problems found") == len(HOSPITALS), "each site checks its own"
    assert not processes_in(place / "federation"), "nobody is left"
    assert_equals_simulator(place)
    page = (place / "report.html").read_text()
    assert all(hospital in page for hospital in HOSPITALS)
    with (place / "scores.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) == len((place / "hospitals" / "east" / "images.csv").read_text().splitlines()) - 1
    assert {row["class"] for row in found} == {"0", "1"}
    assert (place / "again.csv").read_bytes() == (place / "scores.csv").read_bytes()
    card = (place / "model" / "README.md").read_text()
    assert all(f"| {hospital} |" in card for hospital in HOSPITALS)
    monkeypatch.chdir(place)
    exec(the_block("docs/deployment.md", "histogram.load(").text.replace("hospitals/", "federation/"), {})
    assert capsys.readouterr().out.startswith("validation Bounded(value=0.")

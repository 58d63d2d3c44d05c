"""The final model comes to the sites that took part, whole or not at all, and predicts there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from fedxl import UserError
from fedxl.config.experiment import load_data
from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.site import requests
from fedxl.errors import RefusedError
from fedxl.prediction.predictor import load
from fedxl.training.settings import Hooks
from tests.deploy.deployment import Deployment
from tests.deploy.federated import SITES, InProcess, config, deployed, site_file

EXPERIMENT = config("fedxl2", cohort=0, rounds=2)


class Keeping(InProcess):
    """Remembers the last request with a model; site d is away until something was waited for after the last round."""

    kept: Envelope | None = None
    slow = False

    def nodes(self):
        done = self.kept is not None
        return {node: key for node, key in super().nodes().items() if node != "103" or not self.slow or done}

    def send(self, envelopes, kind, seconds):
        self.kept = next(iter(envelopes.values())) if kind == "model" else self.kept
        self.slow = self.slow or (kind == "train" and self.late)
        return super().send(envelopes, kind, seconds)

    late = False


def sent(folder) -> tuple[InProcess, Envelope]:
    carrier = Keeping(folder)
    deployed(folder, EXPERIMENT, carrier, deliver=5.0)
    assert carrier.kept
    return carrier, carrier.kept


def test_each_site_gets_the_model_without_what_is_known_of_the_others(tmp_path):
    lines: list[str] = []
    result = deployed(tmp_path, EXPERIMENT, hooks=Hooks(say=lines.append), deliver=5.0)
    x = load_data(EXPERIMENT).test.x[:20].double()
    expected = result.model(x).detach().flatten()
    for number, name in enumerate(SITES):
        folder = site_file(tmp_path, number).folder / "model"
        assert sorted(path.name for path in folder.iterdir()) == ["model.json", "model.safetensors"]
        assert np.allclose(load(folder).predict(x).scores, expected, atol=1e-12)
        about = json.loads((folder / "model.json").read_text())
        assert about["assessment"] is None
        assert about["training"].keys() == {"settings", "best_round"}
        assert not [key for key in about["training"]["settings"] if key.startswith(("server", "data", "task"))]
        assert about["decisions"][""]["measured"] == {}
        assert f"{name} has the model" in lines


def test_a_site_that_was_away_gets_it_when_it_is_back(tmp_path):
    carrier = Keeping(tmp_path)
    carrier.late = True
    deployed(tmp_path, EXPERIMENT, carrier, deliver=60.0, minimum=1)
    assert (site_file(tmp_path, 3).folder / "model" / "model.json").exists()


def test_a_site_takes_a_model_of_its_own_run_and_of_its_own_networks_only(tmp_path):
    _, good = sent(tmp_path)
    mine = site_file(tmp_path, 0)
    before = {path.name: path.read_bytes() for path in (mine.folder / "model").iterdir()}
    tensors = {**good.tensors}
    if not tensors:  # the last request was the question
        tensors = {name: torch.frombuffer(bytearray(text), dtype=torch.uint8) for name, text in before.items()}
    weights = tensors["model.safetensors"]
    cases = [
        ({"run": "0" * 16}, tensors, mine, "took no part"),
        ({"version": "0"}, tensors, mine, "must be the same"),
        ({}, {**tensors, "evil.py": weights}, mine, "other files"),
        ({}, {**tensors, "model.safetensors": weights.flip(0)}, mine, "its digest differs"),
        ({}, {**tensors, "model.safetensors": weights.float()}, mine, "other files"),
        ({}, {**tensors, "model.json": weights}, mine, "is not a JSON file"),
        ({}, tensors, site_file(tmp_path, 0, models=("linear",)), "does not allow the model 'mlp'"),
        ({}, tensors, site_file(tmp_path, 0, rounds=1), "as many as its site.toml allows"),
    ]
    for facts, content, site, reason in cases:
        with pytest.raises((UserError, RefusedError), match=reason):
            requests.HANDLERS["model"](site, Envelope({**good.facts, **facts}, content))
        assert {path.name: path.read_bytes() for path in (mine.folder / "model").iterdir()} == before


def test_a_folder_of_the_sites_own_is_not_replaced(tmp_path):
    mine = site_file(tmp_path, 1).folder / "model"
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("mine")
    lines: list[str] = []
    deployed(tmp_path, EXPERIMENT, hooks=Hooks(say=lines.append), deliver=5.0)
    assert any("b has not taken the model" in line and "holds something else" in line for line in lines)
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]


def test_a_finished_run_delivers_its_model_and_is_not_tested_again(tmp_path, caplog):
    sites = [site_file(tmp_path, number).folder for number in range(len(SITES))]
    carrier, lines = InProcess(tmp_path, evaluate="metrics"), list[str]()
    deployed(tmp_path, EXPERIMENT, carrier, deliver=5.0, evaluate="sites")
    said = [record.getMessage() for record in caplog.records]
    for split in ("validation", "test"):
        assert sum(line.startswith(f"sent: metrics of {split} data, for the first time in run") for line in said) == 1
    rounds = EXPERIMENT.run["rounds"]
    assert f"round {rounds} of {rounds} done" in said
    assert any(re.fullmatch(r"sent so far, over all runs: \d+ updates, \d+ evaluations", line) for line in said)
    metrics = tmp_path / "server" / "run" / "metrics.jsonl"
    before = metrics.read_text()
    carrier.away = {"101"}
    shutil.rmtree(sites[0] / "model")
    with pytest.raises(AssertionError, match="the run had finished before"):
        deployed(tmp_path, EXPERIMENT, carrier, Hooks(say=lines.append), deliver=5.0, evaluate="sites")
    assert metrics.read_text() == before
    assert (sites[0] / "model" / "model.json").exists()
    assert any("has finished; it is neither continued nor tested again" in line for line in lines)


@pytest.mark.deploy
def test_a_finished_server_serves_it_again_and_fetch_ends(tmp_path):
    with Deployment(tmp_path / "f", ("a", "b"), EXPERIMENT, deliver=600.0) as federation:
        for name in ("server", "a", "b"):
            federation.start(name)
        federation.finished()
        for name in ("a", "b"):
            federation.kill(name)
        site = tmp_path / "f" / "sites" / "a"
        model = (site / "model" / "model.json").read_text()
        (site / "model").rename(site / "earlier")
        federation.start("server")
        federation.start("b")
        done = subprocess.run(
            [sys.executable, "-m", "fedxl", "deploy", "fetch", str(site)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "fedxl predict" in done.stdout
        assert (site / "model" / "model.json").read_text() == model
        federation.finished()

"""Predictions of several labels: a score for each, those that the run itself gave, from its folder and an export."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import fedxl
from fedxl import UserError
from fedxl.cli.main import app
from fedxl.config.experiment import Config, execute
from fedxl.evaluation import labelled
from fedxl.evaluation.intervals import delong
from fedxl.prediction import predictor
from fedxl.prediction.export import export
from tests.prediction.conftest import QUIET, patients
from tests.prediction.test_predict import command, read

pytest.importorskip("pyarrow", reason="needs fedxl[table]")
LABELS = ("sick", "old")
NEW = "score_sick", "score_old"


def findings(count: int, seed: int) -> pd.DataFrame:
    """Patients with two labels; who is old is not known of some."""
    data = pd.DataFrame(patients(count, seed))
    data["sick"] = (data.pop("outcome") == "sick").astype(int)
    data["old"] = (data.age > 55).astype(float).mask(np.arange(count) % 5 == 0)
    return data


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A table with two labels, and the run that was trained on it."""
    place = tmp_path_factory.mktemp("labels")
    findings(200, 0).to_csv(place / "patients.csv", index=False)
    config = Config(
        data={"name": "table", "path": str(place / "patients.csv"), "label": list(LABELS), "site": "hospital",
              "id": "number"},
        model={"name": "mlp", "hidden": [4]},
        risk={"name": "auroc", "labels": list(LABELS)},
        algorithm={"name": "fedxl1", "lr": 0.5},
        run={"rounds": 2, "local_steps": 4, "eval_every": 2, "batch1": 8, "batch2": 8, "device": "cpu"},
    )  # fmt: skip
    execute(config, place / "run", hooks=QUIET)
    return place


def test_rows_get_the_scores_that_the_run_gave_them(folder, tmp_path):
    said = command("predict", folder / "run", folder / "patients.csv", "-o", tmp_path / "scores.csv")
    rows = read(tmp_path / "scores.csv")
    assert tuple(rows[0]) == ("row", *NEW)
    assert "scores only, without probabilities and classes: it has several labels" in said
    scores = np.array([[float(row[name]) for name in NEW] for row in rows])
    data, place = findings(200, 0), {row["row"]: at for at, row in enumerate(rows)}
    made = predictor.load(folder / "run").preparation.read(folder / "patients.csv")
    network = predictor.load(folder / "run").score
    np.testing.assert_allclose(scores, network(made.x).double().numpy(), atol=1e-6)
    kept = labelled.load(folder / "run" / "label_scores.npz")["test"]
    assert len(kept.scores) > 20
    assert max(np.abs(scores - row).max(1).min() for row in kept.scores) < 1e-5, "each is a row's"
    for number, name in enumerate(LABELS):
        known = data[name].notna().to_numpy()
        mine = scores[[place[row] for row in data.number[known]], number]
        auroc = delong(mine, data[name][known].to_numpy(np.int64))
        assert f"has labels: {name}: auroc {auroc.value:.4f} ({auroc.low:.4f} to {auroc.high:.4f})" in said


def test_an_export_gives_the_same_scores(folder, tmp_path):
    found = export(folder / "run", tmp_path / "model")
    assert found.form.labels == LABELS
    assert found.decision is None
    assert "several labels" in found.undecided
    findings(20, 1).drop(columns=list(LABELS)).to_csv(tmp_path / "new.csv", index=False)
    wanted = predictor.load(folder / "run").predict(tmp_path / "new.csv")
    again = predictor.load(tmp_path / "model").predict(tmp_path / "new.csv")
    assert again.labels == LABELS
    np.testing.assert_array_equal(again.scores, wanted.scores)
    card = (tmp_path / "model" / "README.md").read_text()
    assert card.startswith("# Model card: sick, old")
    assert "a score for each of 2 labels" in card
    kept = labelled.load(folder / "run" / "label_scores.npz")["test"].label(0)
    auroc = delong(kept.scores, kept.labels)
    counts = f"{kept.labels.sum()} | {len(kept) - kept.labels.sum()}"
    assert f"| sick | {counts} | {auroc.value:.3f} ({auroc.low:.3f} to {auroc.high:.3f}) |" in card
    about = json.loads((tmp_path / "model" / "model.json").read_text())
    for names in (["sick"], ["sick", "sick"], ["sick", 1], "so"):
        (tmp_path / "model" / "model.json").write_text(json.dumps({**about, "label_names": names}))
        with pytest.raises(UserError, match=r"labels must name each score|two labels have the same name"):
            predictor.load(tmp_path / "model")


@pytest.mark.parametrize("labels", [["a"], ["a", "b", "c"]])
def test_a_result_and_its_folder_predict_arrays(tmp_path, labels):
    rng, count = np.random.default_rng(0), len(labels)
    x = rng.normal(size=(120, 4)).astype(np.float32)
    y = (x[:, :count] > 0.2).astype(float)
    y[::7] = np.nan
    network = torch.nn.Linear(4, count)
    algorithm = fedxl.FeDXL1(fedxl.several(fedxl.auroc(), labels), lr=0.1)
    clients = [(x[:60], y[:60]), (x[60:], y[60:])]
    result = fedxl.fit(network, clients, algorithm, rounds=1, local_steps=2, hooks=QUIET, out=tmp_path / "run")
    found = result.predict(x[:9])
    with torch.no_grad():
        expected = result.model(torch.from_numpy(x)).double().numpy()
    np.testing.assert_allclose(found.scores, expected[:9], atol=1e-6)
    assert found.labels == tuple(labels)
    assert (found.probabilities, found.classes) == (None, None)
    with pytest.raises(UserError, match="it has several labels, and calibration and thresholds are for one"):
        result.predict(x, sensitivity=0.9)
    loaded = predictor.load(tmp_path / "run", model=torch.nn.Linear(4, count))
    np.testing.assert_allclose(loaded.predict(x).scores, expected, atol=1e-6)
    with pytest.raises(UserError, match="there are no classes: it has several labels"):
        loaded.with_threshold(0.0)


def test_arrays_in_a_file_may_have_labels(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    y = (x[:, :2] > 0).astype(float)
    algorithm = fedxl.FeDXL1(fedxl.several(fedxl.auroc(), 2), lr=0.1)
    factory = "tests.prediction.test_labels:two_labels"
    fedxl.fit(two_labels(), [(x, y)], algorithm, rounds=1, local_steps=1, hooks=QUIET, out=tmp_path / "run")
    y[5:, 1] = np.nan
    np.savez(tmp_path / "new.npz", x=x, y=y)
    words = ["predict", tmp_path / "run", tmp_path / "new.npz", "--model", factory, "-o", tmp_path / "scores.parquet"]
    said = command(*words)
    assert pd.read_parquet(tmp_path / "scores.parquet").columns.tolist() == ["row", "score_0", "score_1"]
    assert "new.npz has labels: 0: auroc" in said
    np.savez(tmp_path / "new.npz", x=x, y=y[:, :1])
    wrong = CliRunner().invoke(app, list(map(str, words)))
    assert wrong.exit_code
    assert "must be [n, 2]" in str(wrong.exception)


def two_labels() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)

"""Predictions of several labels: what the run itself gave, and what it means, from its folder and an export."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from typer.testing import CliRunner

import fedxl
from fedxl import UserError
from fedxl.cli.main import app
from fedxl.config.experiment import Config, execute
from fedxl.data.tables.table import read_new
from fedxl.evaluation.decision import decide
from fedxl.evaluation.intervals import delong
from fedxl.evaluation.scores import Scores, load
from fedxl.prediction import predictor
from fedxl.prediction.export import export
from tests.prediction.conftest import QUIET, patients
from tests.prediction.test_predict import command, read

pytest.importorskip("pyarrow", reason="needs fedxl[table]")
LABELS = ("sick", "old", "rare")
NEW = "score_sick", "score_old", "score_rare"
DECIDED = ("sick", "old")


def findings(count: int, seed: int) -> pd.DataFrame:
    """Patients with three labels; who is old is not known of some, and hardly anybody has the third."""
    data = pd.DataFrame(patients(count, seed))
    data["sick"] = (data.pop("outcome") == "sick").astype(int)
    data["old"] = (data.age > 55).astype(float).mask(np.arange(count) % 5 == 0)
    data["rare"] = (np.arange(count) % 23 == 0).astype(int)
    return data


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A table with three labels, and the run that was trained on it."""
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


def too_few(folder: Path) -> str:
    """Why the third label has no decision."""
    rare = load(folder / "run" / "scores.npz")["validation"].by_label()["rare"]
    assert 0 < rare.positives < 5
    return f"{rare.positives} of its {len(rare)} validation examples are positive, and 5 are the fewest"


def test_rows_get_the_scores_that_the_run_gave_them(folder, tmp_path):
    said = command("predict", folder / "run", folder / "patients.csv", "-o", tmp_path / "scores.csv")
    rows = read(tmp_path / "scores.csv")
    own = [f"{kind}_{name}" for name in DECIDED for kind in ("score", "probability", "class")]
    assert list(rows[0]) == ["row", *own, "score_rare"]
    assert f"scores only, without probabilities and classes: rare: {too_few(folder)}" in said
    scores = np.array([[float(row[name]) for name in NEW] for row in rows])
    data, place = findings(200, 0), {row["row"]: at for at, row in enumerate(rows)}
    made = read_new(predictor.load(folder / "run").preparation, folder / "patients.csv")
    network = predictor.load(folder / "run").score
    np.testing.assert_allclose(scores, network(made.x).double().numpy(), atol=1e-6)
    kept = load(folder / "run" / "scores.npz")["test"]
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
    findings(20, 1).drop(columns=list(LABELS)).to_csv(tmp_path / "new.csv", index=False)
    wanted = predictor.load(folder / "run").predict(tmp_path / "new.csv")
    again = predictor.load(tmp_path / "model").predict(tmp_path / "new.csv")
    assert again.labels == LABELS
    for mine, other in zip(again, wanted, strict=True):
        np.testing.assert_array_equal(mine, other)
    card = (tmp_path / "model" / "README.md").read_text()
    assert card.startswith("# Model card: sick, old, rare")
    assert "a score for each of 3 labels" in card
    kept = load(folder / "run" / "scores.npz")["test"].by_label()["sick"]
    auroc = delong(*kept.flat)
    counts = f"{len(kept)} | {kept.positives}"
    assert f"| sick | {counts} | {auroc.value:.3f} ({auroc.low:.3f} to {auroc.high:.3f}) |" in card
    assert f"No probability and no class for rare: {too_few(folder)}" in card
    about = json.loads((tmp_path / "model" / "model.json").read_text())
    for names in (["sick"], ["sick", "sick"], ["sick", 1], "so"):
        (tmp_path / "model" / "model.json").write_text(json.dumps({**about, "labels": names}))
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
    with pytest.raises(UserError, match=r"no threshold of sensitivity 0\.9: the run kept no validation scores"):
        result.predict(x, sensitivity=0.9)
    loaded = predictor.load(tmp_path / "run", model=torch.nn.Linear(4, count))
    np.testing.assert_allclose(loaded.predict(x).scores, expected, atol=1e-6)
    with pytest.raises(UserError, match="there are no classes: the run kept no validation scores"):
        loaded.with_threshold(0.0)


@pytest.mark.parametrize(("calibration", "rule"), [("platt", "specificity"), ("isotonic", "sensitivity")])
def test_each_label_has_its_own_calibration_and_threshold(folder, tmp_path, calibration, rule):
    """Probabilities against scikit-learn's, classes against what the threshold must reach on the validation data."""
    wish = {"calibration": calibration, rule: 0.8}
    held = load(folder / "run" / "scores.npz")["validation"]
    found = predictor.load(folder / "run", **wish).predict(folder / "patients.csv")
    export(folder / "run", tmp_path / "model", onnx=False, **wish)
    again = predictor.load(tmp_path / "model").predict(folder / "patients.csv")
    np.testing.assert_array_equal(again.probabilities, found.probabilities)
    np.testing.assert_array_equal(again.classes, found.classes)
    for number, name in enumerate(DECIDED):
        (own, labels), scores = held.by_label()[name].flat, found.scores[:, number]
        expected = fitted(calibration, own, labels, scores)
        np.testing.assert_allclose(found.probabilities[:, number], expected, atol=1e-4)
        threshold = predictor.load(folder / "run", **wish).decisions.decided[name].threshold
        np.testing.assert_array_equal(found.classes[:, number], scores >= threshold)
        side = labels == (rule == "sensitivity")
        right = ((own >= threshold) == labels)[side].mean()
        others = np.unique(own)
        beyond = (
            others[others > threshold].min() + 1e-9 if rule == "sensitivity" else others[others < threshold].max()
        )
        assert ((own >= beyond) == labels)[side].mean() < 0.8 <= right
    assert np.isnan(found.probabilities[:, 2]).all()
    assert (found.classes[:, 2] == -1).all()
    assert list(found.undecided) == ["rare"]


def fitted(kind: str, scores: np.ndarray, labels: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Probabilities of scikit-learn's: of Platt's targets, each example counts as both classes, by its target."""
    if kind == "isotonic":
        return IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(scores, labels).predict(new)
    positives = labels.sum()
    targets = np.where(labels == 1, (positives + 1) / (positives + 2), 1 / (len(labels) - positives + 2))
    both, weights = np.repeat([1, 0], len(scores)), np.concatenate([targets, 1 - targets])
    scale = scores.std()
    model = LogisticRegression(C=1e10, tol=1e-10).fit(np.tile(scores, 2)[:, None] / scale, both, weights)
    return model.predict_proba(new[:, None] / scale)[:, 1]


def test_a_result_decides_for_the_labels_that_can_be(tmp_path):
    """One label is known of no validation example, one has one class, and one has all that is needed."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, 4)).astype(np.float32)
    y = (x[:, :3] + 0.5 * rng.normal(size=(160, 3)) > 0).astype(float)
    held = y[80:].copy()
    held[:, 1], held[:, 2] = np.nan, 1.0
    algorithm = fedxl.FeDXL1(fedxl.several(fedxl.auroc(), ["a", "b", "c"]), lr=0.1)
    clients, own = [(x[:40], y[:40]), (x[40:80], y[40:80])], torch.nn.Linear(4, 3)
    result = fedxl.fit(
        own, clients, algorithm, rounds=1, hooks=QUIET, validation=(x[80:], held), out=tmp_path / "run"
    )
    found = result.predict(x, specificity=0.7)
    why = {"b": "it is known of no validation example", "c": "0 of its 80 validation examples are negative"}
    assert found.undecided.keys() == why.keys()
    assert all(found.undecided[name].startswith(text) for name, text in why.items())
    negative = found.classes[80:, 0][held[:, 0] == 0]
    assert 0.7 <= np.mean(negative == 0) < 1
    said: list[str] = []
    export(tmp_path / "run", tmp_path / "model", model=torch.nn.Linear(4, 3), specificity=0.7, say=said.append)
    assert any(
        "no threshold of some labels: b: it is known of no validation example; c: 0 of" in line for line in said
    )
    again = predictor.load(tmp_path / "model").predict(x)  # by ONNX, without the code of the network
    np.testing.assert_allclose(again.probabilities[:, 0], found.probabilities[:, 0], atol=1e-5)
    np.testing.assert_array_equal(again.classes, found.classes)
    with pytest.raises(UserError, match="is for one label; of several, give a specificity or a sensitivity"):
        predictor.load(tmp_path / "model").with_threshold(0.0)


def test_decisions_follow_the_columns_whatever_the_order_of_the_validation_scores():
    """Of a label that all sites withhold nothing is known, and counts may name labels in any order."""
    rng = np.random.default_rng(0)
    y = np.arange(60) % 2
    known = {name: Scores.of(rng.normal(size=60) + shift + 2 * y, y) for name, shift in (("c", 5.0), ("a", 0.0))}
    found = decide(("a", "b", "c"), known)
    assert (list(found.labels), found.why_none) == (["a", "b", "c"], "")
    assert found.undecided == {"b": "it is known of no validation example"}
    each = [decide([""], {"": known[name]}).decided[""] for name in ("a", "c")]
    np.testing.assert_array_equal(
        found.probabilities(np.full((1, 3), 2.0))[0, [0, 2]], [one.probabilities(2.0) for one in each]
    )
    np.testing.assert_array_equal(found.classes(np.full((1, 3), 4.0))[0], [1, -1, 0])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d.pop("rare"), "must have one for each label: 'sick', 'old', 'rare'"),
        (lambda d: d.update(more={}), "must have one for each"),
        (lambda d: d["rare"].update(undecided=7), "must be a text"),
        (lambda d: d["sick"].update(threshold=None), "must be a finite number"),
        (lambda d: d.update(sick=[]), "must have calibration, threshold and rule"),
        (lambda d: d.clear(), "must have one for each"),
    ],
)
def test_decisions_of_others_are_checked(folder, tmp_path, change, why):
    export(folder / "run", tmp_path / "model", onnx=False)
    path = tmp_path / "model" / "model.json"
    about = json.loads(path.read_text())
    change(about["decisions"])
    path.write_text(json.dumps(about))
    with pytest.raises(UserError, match=why):
        predictor.load(tmp_path / "model")


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

"""Time to event from a table to predictions: survival at horizons, from a run's folder and from an exported one."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedxl import UserError
from fedxl.cli.main import app
from fedxl.config.experiment import Config, execute
from fedxl.data.tables.prepare import Preparation, fit
from fedxl.data.tables.roles import TableOptions
from fedxl.data.tables.summary import Summary, merge
from fedxl.data.tables.table import read_new, unfitted
from fedxl.evaluation import survival
from fedxl.evaluation.decision import Survival
from fedxl.evaluation.scores import Scores, load
from fedxl.prediction import predictor
from fedxl.prediction.export import export
from tests.prediction.conftest import QUIET, write
from tests.prediction.test_predict import command, read


def patients(count: int, seed: int) -> list[dict[str, object]]:
    """Patients of three hospitals; the old die earlier."""
    rng = np.random.default_rng(seed)
    age, days = rng.normal(60, 10, count), rng.exponential(900, count)
    days *= np.exp((60 - age) / 10)
    last = rng.exponential(1500, count)
    return [
        {
            "number": f"P{number:03}",
            "age": round(age[number], 1),
            "hospital": "nse"[number % 3],
            "days": int(min(days[number], last[number])) + 1,
            "died": int(days[number] <= last[number]),
        }
        for number in range(count)
    ]


def train(folder: Path, rounds: int) -> None:
    """Into the folder's run, from its patients.csv."""
    table = {"name": "table", "path": str(folder / "patients.csv"), "time": "days", "event": "died"}
    config = Config(
        data={**table, "site": "hospital", "id": "number"},
        model={"name": "mlp", "hidden": []},
        risk={"name": "cox"},
        algorithm={"name": "fedxl2", "lr": 0.03},
        run={"rounds": rounds, "local_steps": 4, "eval_every": 2, "batch1": 8, "batch2": 16, "device": "cpu"},
    )
    execute(config, folder / "run", hooks=QUIET)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with patients.csv, new.csv and the run that was trained on the former."""
    found = tmp_path_factory.mktemp("survival")
    write(found / "patients.csv", patients(300, 0))
    write(found / "new.csv", patients(60, 1))
    train(found, rounds=6)
    return found


def breslow(run: Path, scores: np.ndarray, at: float) -> np.ndarray:
    """By hand, from the run's validation scores."""
    held = load(run / "scores.npz")["validation"]
    (h, events), times = held.flat, held.time
    hazard = sum(1 / np.exp(h[times >= time]).sum() for time in times[(events > 0) & (times <= at)])
    return np.exp(-hazard * np.exp(scores))


def test_survival_at_horizons_is_breslows_by_hand(folder, tmp_path):
    said = command("predict", folder / "run", folder / "new.csv", "-o", tmp_path / "a.csv")
    rows = read(tmp_path / "a.csv")
    held = load(folder / "run" / "scores.npz")["validation"]
    quartiles = np.quantile(held.time[held.y[:, 0] > 0], (0.25, 0.5, 0.75), method="nearest")
    horizons = [float(f"{at:.2g}") for at in quartiles]
    names = [f"survival@{at:g}" for at in horizons]
    assert list(rows[0]) == ["row", "score", *names]
    scores = np.array([float(row["score"]) for row in rows])
    for name, at in zip(names, horizons, strict=True):
        found = np.array([float(row[name]) for row in rows])
        np.testing.assert_allclose(found, breslow(folder / "run", scores, at), rtol=1e-10)
    assert f"{', '.join(names)}: probability of no event up to then" in said
    assert "class" not in said
    assert "without probabilities" not in said
    new = patients(60, 1)
    columns = ([row[name] for row in new] for name in ("died", "days"))
    expected = survival.interval("cindex", scores, *columns)
    told = f"has times and events: cindex {expected.value:.4f} ({expected.low:.4f} to {expected.high:.4f})"
    assert told in said
    assert [row["row"] for row in rows] == [row["number"] for row in new]


@pytest.mark.filterwarnings("ignore")  # lifelines calls pandas in ways that pandas 3 warns of
def test_lifelines_gives_the_same_survival_for_the_same_scores():
    """Its Cox model has one feature, our scores, whose coefficient it finds; we take its log partial hazards."""
    lifelines, pandas = (pytest.importorskip(name, reason=f"needs {name}") for name in ("lifelines", "pandas"))
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"x": rng.normal(size=200), "died": rng.random(200) < 0.6})
    frame["days"] = np.ceil(100 * rng.exponential(size=200) * np.exp(-frame["x"]))
    model = lifelines.CoxPHFitter().fit(frame, "days", "died")
    h = model.predict_log_partial_hazard(frame).to_numpy()
    horizons = tuple(np.unique(frame["days"][frame["died"]])[[5, 20, 40]])
    found = Survival.of(Scores.of(h, frame["died"], time=frame["days"].to_numpy()), horizons)
    expected = model.predict_survival_function(frame, horizons).to_numpy().T
    np.testing.assert_allclose(found.probabilities(h), expected, atol=1e-10)


def test_a_run_and_its_export_give_the_same_at_horizons(folder, tmp_path):
    asked = ["--horizon", 100, "--horizon", 365.5]
    command("predict", folder / "run", folder / "new.csv", "-o", tmp_path / "a.csv", *asked)
    said = command("export", folder / "run", "--out", tmp_path / "model", "--no-onnx", *asked)
    assert said.split("\n")[0] == f"in {tmp_path}/model: README.md, model.json, model.safetensors", "no complaint"
    command("predict", tmp_path / "model", folder / "new.csv", "-o", tmp_path / "b.csv")
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()
    assert list(read(tmp_path / "b.csv")[0]) == ["row", "score", "survival@100", "survival@365.5"]
    again = ["predict", tmp_path / "model", folder / "new.csv", "-o", tmp_path / "c.csv", "--horizon", 50]
    with pytest.raises(UserError, match="horizons were chosen when it was exported"):
        command(*again)
    found = predictor.load(tmp_path / "model").predict(folder / "new.csv")
    np.testing.assert_array_equal(found.survival, predictor.load(folder / "run", horizons=(100, 365.5)).predict(
        folder / "new.csv"
    ).survival)  # fmt: skip


def test_the_model_card_speaks_of_times(folder, tmp_path):
    export(folder / "run", tmp_path / "model", onnx=False, horizons=(100.0, 365.0))
    text = (tmp_path / "model" / "README.md").read_text()
    test = load(folder / "run" / "scores.npz")["test"]
    parts = {"all together": test, **test.by_site()}
    for name, one in parts.items():
        found = survival.interval("cindex", *one.flat, one.time)
        row = next(line for line in text.splitlines() if line.startswith(f"| {name} | {len(one)} |"))
        assert f"| {one.positives} | {found.value:.3f} ({found.low:.3f} to {found.high:.3f}) |" in row
    assert "| `survival@365` |" in text
    assert "Breslow" in text
    for word in ("threshold", "positive", "classifier", "calibrated column", "Class 1", "sensitivity"):
        assert word not in text, word
    about = json.loads((tmp_path / "model" / "model.json").read_text())
    assert about["timed"]
    assert list(about["assessment"]["survival"]["brier"]) == ["100", "365"]
    held = load(folder / "run" / "scores.npz")["validation"]
    assert len(about["survival"]["hazard"]) == 2, "its steps are the times of patients, who stay here"
    assert not {f"{time:g}" for time in held.time} & set(re.findall(r"\d+", json.dumps(about["survival"])))


def test_an_export_holds_no_patients_time_and_no_score(tmp_path):
    """Times have many digits, so that a number of the export which is one of them is no accident."""
    rows = patients(200, 4)
    rng = np.random.default_rng(0)
    for row in rows:
        row["days"] = round(int(row["days"]) + rng.random(), 3)
    write(tmp_path / "patients.csv", rows)
    train(tmp_path, rounds=2)
    export(tmp_path / "run", tmp_path / "model", onnx=False)
    held = load(tmp_path / "run" / "scores.npz")
    own = {value for found in held.values() for value in (*found.time.tolist(), *found.scores.flatten().tolist())}
    own |= {float(f"{value:.{digits}g}") for value in own for digits in (5, 6)}
    for name in ("model.json", "README.md"):
        text = (tmp_path / "model" / name).read_text()
        numbers = {float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", text)}
        assert len(numbers) > 30
        assert not numbers & own, name


def test_without_validation_scores_there_is_an_order_alone(folder, tmp_path):
    shutil.copytree(folder / "run", tmp_path / "run")
    (tmp_path / "run" / "scores.npz").unlink()
    said = command("export", tmp_path / "run", "--no-onnx")
    assert "no probability to survive: the run kept no validation scores" in said
    assert "Ranking only" in (tmp_path / "run" / "export" / "README.md").read_text()
    command("predict", tmp_path / "run", folder / "new.csv", "-o", tmp_path / "a.csv")
    assert list(read(tmp_path / "a.csv")[0]) == ["row", "score"]
    with pytest.raises(UserError, match="no probability to survive a horizon: the run kept no validation scores"):
        predictor.load(tmp_path / "run", horizons=[100.0])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--horizon", "1e9"], "no validation example was seen up to the horizon"),
        (["--horizon", "0"], "horizons must be at most 100 times above 0 in ascending order"),
        (["--horizon", "20", "--horizon", "10"], "in ascending order"),
        (["--threshold", "0.1"], "scores of time to event have no classes"),
        (["--specificity", "0.9"], "scores of time to event have no classes"),
    ],
)
def test_mistakes_are_one_line(folder, tmp_path, words, why):
    given = ["predict", str(folder / "run"), str(folder / "new.csv"), "-o", str(tmp_path / "a.csv"), *words]
    done = CliRunner().invoke(app, given)
    assert isinstance(done.exception, UserError)
    assert why in str(done.exception)
    assert "\n" not in str(done.exception)


def test_arrays_may_hold_times(folder, tmp_path):
    held = load(folder / "run" / "scores.npz")["test"]
    shutil.copytree(folder / "run", tmp_path / "run")
    (tmp_path / "run" / "preparation.json").unlink()
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    about.pop("preparation_digest")
    (tmp_path / "run" / "run.json").write_text(json.dumps(about))
    new = read_new(Preparation.from_text((folder / "run" / "preparation.json").read_bytes()), folder / "patients.csv")
    chosen = [new.row.index(row) for row in held.row]
    arrays = {"x": new.x[chosen].numpy(), "y": held.y[:, 0], "time": held.time}
    np.savez(tmp_path / "new.npz", **arrays)
    expected = survival.interval("cindex", *held.flat, held.time)
    assert f"times and events: cindex {expected.value:.4f} (" in command(
        "predict", tmp_path / "run", tmp_path / "new.npz", "-o", tmp_path / "a.csv"
    )
    np.savez(tmp_path / "bad.npz", **arrays | {"time": -held.time})
    with pytest.raises(UserError, match="time must be a number from 0 on for each of the 60 examples"):
        command("predict", tmp_path / "run", tmp_path / "bad.npz", "-o", tmp_path / "a.csv")


def test_horizons_are_for_time_to_event(run, npz, tmp_path):
    with pytest.raises(UserError, match="horizons are for time to event, and this run has none"):
        command("predict", run, npz, "-o", tmp_path / "a.csv", "--horizon", 3)


def test_the_preparation_knows_the_column_of_times(folder, tmp_path):
    made = Preparation.from_text((folder / "run" / "preparation.json").read_bytes())
    assert (made.time, made.label) == ("days", "died")
    rows = patients(20, 2)
    write(tmp_path / "new.csv", rows)
    found = read_new(made, tmp_path / "new.csv")
    assert found.time.tolist() == [row["days"] for row in rows]
    for left_out in ("died", "days"):
        write(tmp_path / "less.csv", [{key: value for key, value in row.items() if key != left_out} for row in rows])
        assert read_new(made, tmp_path / "less.csv").time is None
        said = command("predict", folder / "run", tmp_path / "less.csv", "-o", tmp_path / "a.csv")
        assert "cindex" not in said
        assert "auroc" not in said, "events without times do not say how good a score is"
    write(tmp_path / "bad.csv", [{**row, "days": "soon" if row is rows[3] else row["days"]} for row in rows])
    with pytest.raises(
        UserError, match=r"bad.csv: column 'days' holds 'soon' in row 4; a time is a number from 0 on"
    ):
        read_new(made, tmp_path / "bad.csv")


def test_a_site_tells_its_column_of_times(folder):
    """So that a model that sites train together can be judged on new tables, too."""
    raw = unfitted(
        str(folder / "patients.csv"), options=TableOptions(time="days", event="died", site="hospital", id="number")
    )
    told = raw.summary(0)
    assert Summary.from_json(told.to_json(), told.rows).about["time"] == "days"
    assert fit(merge({"n": told})).time == "days"


def test_a_preparation_of_an_older_version_has_no_times():
    older = {"form": 1, "image": None, "columns": [{"kind": "number", "name": "age", "mean": 0.0, "scale": 1.0}]}
    older |= {
        "label": "died",
        "positive": "1",
        "negative": "0",
        "site": "",
        "id": "",
        "delimiter": "",
        "source": "table",
    }
    made = Preparation.from_json(older)
    assert made.time == ""
    assert "time" not in made.to_json()
    with pytest.raises(UserError, match="has a feature column 'age', which has another meaning"):
        Preparation.from_json({**older, "time": "age"})


GOOD = {"horizons": [1.5, 2.5], "hazard": [0.1, 0.3], "centre": 0.5}


@pytest.mark.parametrize(
    "content",
    [
        None, [], "x", {}, {**GOOD, "hazard": [0.1]}, {**GOOD, "hazard": [0.3, 0.1]}, {**GOOD, "hazard": [-0.1, 0.1]},
        {**GOOD, "hazard": ["a", "b"]}, {**GOOD, "hazard": [[0.1], [0.2]]}, {**GOOD, "hazard": {"a": 1}},
        {**GOOD, "hazard": [0.1, float("inf")]}, {**GOOD, "hazard": [0, 10**400]}, {**GOOD, "hazard": [0.1, [2.0]]},
        {**GOOD, "centre": None}, {**GOOD, "centre": "x"}, {**GOOD, "centre": float("nan")},
        {**GOOD, "centre": 10**400},
        {**GOOD, "horizons": [0, 1]}, {**GOOD, "horizons": [2, 1]}, {**GOOD, "horizons": 3}, {**GOOD, "horizons": []},
        {**GOOD, "horizons": ["a", "b"]}, {**GOOD, "horizons": [True, 2]}, {**GOOD, "horizons": [1, 10**400]},
        {"horizons": list(range(1, 200)), "hazard": list(range(1, 200)), "centre": 0.0},
    ],
)  # fmt: skip
def test_a_survival_of_others_is_checked(content):
    with pytest.raises(UserError) as error:
        Survival.from_json(content)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200
    found = Survival.from_json(GOOD)
    assert Survival.from_json(json.loads(json.dumps(found.to_json()))).to_json() == GOOD

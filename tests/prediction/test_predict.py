"""Predictions for new data: those of the run itself, from its folder, and one line for each mistake."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import fedxl
from fedxl import UserError
from fedxl.cli.main import app
from fedxl.data.sets.digits import digits
from fedxl.evaluation.scores import load
from fedxl.prediction import predictor, table
from fedxl.training.result import Prediction
from tests.prediction.conftest import QUIET, own_network

FACTORY = "tests.prediction.conftest:own_network"


def command(*words: object) -> str:
    """What a command that succeeds says on standard error."""
    done = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stderr


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_predictions_are_those_of_the_run(run, npz, tmp_path):
    said = command("predict", run, npz, "-o", tmp_path / "scores.csv")
    rows, kept = read(tmp_path / "scores.csv"), load(run / "scores.npz")
    assert list(rows[0]) == ["row", "score", "probability", "class"]
    assert [row["row"] for row in rows] == [str(number) for number in range(len(rows))]
    scores = np.array([float(row["score"]) for row in rows])
    np.testing.assert_allclose(scores, kept["test"].scores[:, 0], rtol=1e-6, atol=1e-7)
    # The threshold, by brute force on the validation scores: the least that calls 90 % of the negatives negative.
    negatives = np.sort(kept["validation"].scores[kept["validation"].y == 0])
    least = negatives[int(np.ceil(0.9 * len(negatives))) - 1]
    assert [row["class"] for row in rows] == [str(int(score > least)) for score in scores]
    probabilities = np.array([float(row["probability"]) for row in rows])
    assert (np.argsort(probabilities, kind="stable") == np.argsort(scores, kind="stable")).all()
    assert abs(probabilities.mean() - kept["validation"].y.mean()) < 0.1
    assert "specificity 0.9 on validation data" in said


def test_a_result_predicts_as_its_folder_does(tmp_path):
    data = digits(clients=4)
    options = {"validation": data.validation, "rounds": 2, "local_steps": 2, "eval_every": 1, "hooks": QUIET}
    algorithm = fedxl.FeDXL2(fedxl.auroc(), lr=0.1)
    result = fedxl.fit(own_network(), data.train, algorithm, out=tmp_path / "run", **options)
    found = result.predict(data.test.x, sensitivity=0.8)
    with torch.no_grad():
        np.testing.assert_allclose(found.scores, result.model(data.test.x)[:, 0].numpy(), rtol=1e-6, atol=1e-7)
    with pytest.raises(UserError, match="its code is not in the folder; name the function that builds it"):
        predictor.load(tmp_path / "run")
    np.savez(tmp_path / "new.npz", x=data.test.x.numpy())
    target = tmp_path / "scores.parquet"
    command("predict", tmp_path / "run", tmp_path / "new.npz", "-o", target, "--model", FACTORY, "--sensitivity", 0.8)
    import pyarrow.parquet as pq

    columns = pq.read_table(target).to_pydict()
    np.testing.assert_array_equal(columns["score"], found.scores)
    np.testing.assert_array_equal(columns["probability"], found.probabilities)
    np.testing.assert_array_equal(columns["class"], found.classes)
    assert not np.array_equal(found.classes, result.predict(data.test.x).classes)
    for x, said in {
        "one example": (data.test.x[0], r"takes examples of shape \[n, 1, 8, 8\], not \[1, 8, 8\]"),
        "nan": (torch.full((2, 1, 8, 8), torch.nan), "hold NaN or infinity"),
        "none": (data.test.x[:0], "no examples"),
    }.values():
        with pytest.raises(UserError, match=said):
            result.predict(x)


def test_a_result_takes_what_fit_takes(tmp_path):
    """Data frames by the names of their columns, Datasets, lists, and whole numbers where training had such."""
    rng = np.random.default_rng(0)
    y = np.arange(60) % 2
    frame = pd.DataFrame({"a": rng.integers(0, 5, 60) + y, "b": rng.integers(0, 5, 60), "c": rng.integers(0, 5, 60)})
    algorithm = fedxl.FeDXL1(fedxl.auroc(), lr=0.1)
    options = {"rounds": 2, "local_steps": 2, "batch_size": 8, "hooks": QUIET, "validation": (frame, y)}
    result = fedxl.fit(torch.nn.Linear(3, 1), [(frame, y)], algorithm, out=tmp_path / "run", **options)
    with torch.no_grad():
        expected = result.model(torch.tensor(frame.to_numpy(), dtype=torch.float32))[:, 0].numpy()
    forms = {
        "frame": frame,
        "other order": frame[["c", "a", "b"]],
        "more columns": frame.assign(more=1.0),
        "array": frame.to_numpy(),
        "list": frame.to_numpy().tolist(),
        "floats": torch.tensor(frame.to_numpy(), dtype=torch.float64),
        "dataset": TensorDataset(torch.tensor(frame.to_numpy()), torch.tensor(y)),
    }
    loaded = predictor.load(tmp_path / "run", model=torch.nn.Linear(3, 1))
    for name, x in forms.items():
        np.testing.assert_allclose(result.predict(x).scores, expected, rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(loaded.predict(x).scores, expected, rtol=1e-5, atol=1e-6, err_msg=name)
    with pytest.raises(UserError, match=r"lacks the column\(s\) 'b'"):
        result.predict(frame.rename(columns={"b": "d"}))
    with pytest.raises(UserError, match="trained on arrays and cannot prepare"):
        result.predict("new.csv")


def test_without_validation_scores_there_are_scores_alone(run, npz, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    (folder / "scores.npz").unlink()
    said = command("predict", folder, npz, "-o", tmp_path / "scores.csv")
    assert "scores only, without probabilities and classes: the run kept no validation scores" in said
    assert list(read(tmp_path / "scores.csv")[0]) == ["row", "score"]
    with pytest.raises(UserError, match=r"no threshold of specificity 0\.8: the run kept no validation scores"):
        command("predict", folder, npz, "-o", tmp_path / "scores.csv", "--specificity", 0.8)
    with pytest.raises(UserError, match="there are no classes"):
        command("predict", folder, npz, "-o", tmp_path / "scores.csv", "--threshold", 0.8)


def test_a_threshold_may_be_given(run, npz, tmp_path):
    said = command("predict", run, npz, "-o", tmp_path / "scores.csv", "--threshold", 0.123)
    assert "from score 0.123 on: threshold 0.123" in said
    for row in read(tmp_path / "scores.csv"):
        assert row["class"] == str(int(float(row["score"]) >= 0.123))


def test_a_config_that_was_changed_since_the_training_changes_no_prediction(run, held_back, tmp_path):
    expected = predictor.load(run).predict(held_back.x).scores
    folder = shutil.copytree(run, tmp_path / "run")
    text = (folder / "config.toml").read_text()
    assert "channels = 4" in text
    (folder / "config.toml").write_text(text.replace("channels = 4", "channels = 7"))
    np.testing.assert_array_equal(predictor.load(folder).predict(held_back.x).scores, expected)


def test_more_examples_than_a_block_holds(run, held_back, monkeypatch):
    found = predictor.load(run)
    expected = found.predict(held_back.x).scores
    monkeypatch.setattr("fedxl.training.result.BLOCK", 37)
    np.testing.assert_allclose(found.predict(held_back.x).scores, expected, rtol=1e-6, atol=1e-7)


def test_a_row_that_holds_a_line_break_stays_one_row(tmp_path):
    """A carriage return alone is not quoted by the csv module, and begins a row in a spreadsheet."""
    rows, numbers = ["a\r=HYPERLINK(A1)", "b\n=1", "c\r\n@x"], np.arange(3.0)
    changed = table.write(tmp_path / "s.csv", rows, Prediction(numbers, None, None))
    assert changed == 3
    assert (tmp_path / "s.csv").read_bytes().splitlines() == [
        b"row,score", b"a =HYPERLINK(A1),0.0", b"b =1,1.0", b"c @x,2.0",
    ]  # fmt: skip


def test_what_a_spreadsheet_would_run_is_made_harmless_and_counted(tmp_path):
    rows = [
        "=1+1",
        "+49 30",
        "-17",
        "@SUM(A1)",
        "\t=x",
        "plain",
        'quo"te,comma',
        "-1.5e3",
        "- a",
        "=cmd|'/C'!A0",
    ]
    numbers = np.arange(len(rows), dtype=np.float64)
    prediction = Prediction(numbers, numbers / 10, numbers.astype(np.int64))
    changed = table.write(tmp_path / "s.csv", rows, prediction)
    written = [row["row"] for row in read(tmp_path / "s.csv")]
    assert changed == 6
    assert written == [
        "'=1+1", "'+49 30", "-17", "'@SUM(A1)", "'\t=x", "plain", 'quo"te,comma', "-1.5e3", "'- a", "'=cmd|'/C'!A0",
    ]  # fmt: skip
    assert table.write(tmp_path / "s.parquet", rows, prediction) == 0
    import pyarrow.parquet as pq

    assert pq.read_table(tmp_path / "s.parquet").to_pydict()["row"] == rows


def broken(run: Path, folder: Path, **changes: object) -> Path:
    """A copy of the run with another run.json."""
    shutil.copytree(run, folder)
    about = json.loads((folder / "run.json").read_text())
    for name, value in changes.items():
        about.pop(name) if value is None else about.update({name: value})
    (folder / "run.json").write_text(json.dumps(about))
    return folder


def test_folders_that_cannot_predict_say_why(run, tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        predictor.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds neither a run nor an exported model"):
        predictor.load(tmp_path)
    with pytest.raises(UserError, match="older version, which did not record what its network takes"):
        predictor.load(broken(run, tmp_path / "old", shape=None))
    for number, shape in enumerate(([], [0], [10**9], ["8"], 8, [1] * 20)):
        with pytest.raises(UserError, match="shape"):
            predictor.load(broken(run, tmp_path / f"shape{number}", shape=shape))
    with pytest.raises(UserError, match=r"lacks|must be"):
        predictor.load(broken(run, tmp_path / "other", shape=[3, 8, 8]))
    unfinished = broken(run, tmp_path / "unfinished")
    (unfinished / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"`fedxl resume .*` finishes it"):
        predictor.load(unfinished)
    (unfinished / "run.json").write_text("{" * 100_000)
    with pytest.raises(UserError, match="is not a JSON file"):
        predictor.load(unfinished)


@pytest.mark.parametrize("file", ["model.safetensors", "preparation.json"])
def test_a_damaged_file_of_a_run_is_not_used(trained, tmp_path, file):
    """One bit of a weight, or one digit of a mean: predictions and exports would be others without a word."""
    folder = shutil.copytree(trained / "run", tmp_path / "run")
    content = bytearray((folder / file).read_bytes())
    at = len(content) - 3 if file == "model.safetensors" else content.index(b'"mean"') + 8
    content[at] ^= 1
    (folder / file).write_bytes(content)
    for use in (predictor.load, lambda path: fedxl.export(path, tmp_path / "out")):
        with pytest.raises(UserError, match=f"{file} is damaged .*; copy it again from where it was written"):
            use(folder)
    assert not (tmp_path / "out").exists()


def test_weights_are_checked_where_nobody_has_the_networks_code(tmp_path):
    result_of(torch.nn.Linear(64, 1), tmp_path / "run", torch.zeros(40, 64))
    weights = tmp_path / "run" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        fedxl.export(tmp_path / "run", onnx=False)


def test_a_run_of_an_older_version_has_no_digests_and_that_is_said(trained, tmp_path, caplog):
    folder = shutil.copytree(trained / "run", tmp_path / "run")
    wanted = predictor.load(folder).predict(trained / "patients.csv").scores
    assert not caplog.messages
    about = json.loads((folder / "run.json").read_text())
    del about["preparation_digest"]
    (folder / "run.json").write_text(json.dumps(about))
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")
    assert np.array_equal(predictor.load(folder).predict(trained / "patients.csv").scores, wanted)
    named = [line.split(" is of an older version")[0].rpartition("/")[2] for line in caplog.messages]
    assert named == ["model.safetensors", "preparation.json"]


def result_of(network: torch.nn.Module, out: Path | None, x: torch.Tensor, **more: Any) -> fedxl.Result:
    algorithm = fedxl.FeDXL2(fedxl.auroc(), lr=0.1)
    return fedxl.fit(network, [(x, torch.arange(len(x)) % 2)], algorithm, rounds=1, local_steps=2, out=out, **more)


def test_images_are_in_the_type_of_training(tmp_path):
    """Bytes become floats in [0, 1], other numbers stay as they are: scores would be those of other images."""
    network, y = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 1)), torch.arange(40) % 2
    x = torch.randint(256, (40, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    told = "images are .*, those of training were .*; give them in the same type"
    others = [(x, [x.float(), x / 255, x.long()]), (x.float(), [x]), (x.long(), [x])]
    others += [(x / 255, [x, x.long(), x.float()])]
    for number, (mine, theirs) in enumerate(others):
        result = result_of(network, tmp_path / str(number), mine, validation=(mine, y), test=(mine, y))
        found = predictor.load(tmp_path / str(number), model=network)
        assert np.array_equal(found.predict(mine).scores, result.predict(mine).scores)
        for other in theirs:
            for use in (result.predict, found.predict):
                with pytest.raises(UserError, match=told):
                    use(other)
            for split in ("validation", "test"):
                with pytest.raises(UserError, match=f"{split}: {told}"):
                    result_of(network, None, mine, **{split: (other, y)})
    for same in ((x > 127).float(), x[:1, :, :, :8] / 255, torch.zeros_like(x[:1]).double()):
        found.predict(same)  # black and white in [0, 1]
    flat = x.flatten(1)  # the numbers of a table stay as they are, in every type
    result_of(torch.nn.Linear(64, 1), None, flat, validation=(flat.float(), y)).predict(flat.long())


def test_what_is_no_folder_and_no_network_is_told(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where "" would be, were it taken for a folder
    for given in (3, None, ["run"], "", "a\0b"):
        for use in (fedxl.load, fedxl.export, lambda out: fedxl.export(run, out or "")):
            with pytest.raises(UserError, match="must be a folder, such as 'runs/first', not"):
                use(given)
    with pytest.raises(UserError, match=r"model must be a torch\.nn\.Module, not an int"):
        fedxl.load(run, model=3)
    with pytest.raises(UserError, match="unknown calibration '3'"):
        fedxl.load(run, calibration=3)
    with pytest.raises(UserError, match="specificity must lie between 0 and 1"):
        fedxl.load(run, specificity="a")
    for horizons in (3, None, "a", [0.0], np.zeros(2)):
        for use in (fedxl.load, fedxl.export):
            with pytest.raises(UserError, match=r"horizons must be at most .* times above 0 in ascending order"):
                use(run, horizons=horizons)


def test_a_function_that_needs_arguments_is_told(run, npz, tmp_path):
    words = ["predict", run, npz, "-o", tmp_path / "scores.csv", "--model", "torch.nn:Linear"]
    error = CliRunner().invoke(app, list(map(str, words))).exception
    assert isinstance(error, UserError)
    assert "is called without arguments, but missing a required argument: 'in_features'" in str(error)


def test_a_metric_to_select_by_is_checked_without_validation_data():
    said: list[str] = []
    with pytest.raises(UserError, match="unknown metric to select by 'nonsense'"):
        result_of(torch.nn.Linear(5, 1), None, torch.zeros(40, 5), select="nonsense")
    result_of(torch.nn.Linear(5, 1), None, torch.zeros(40, 5), select="ap", hooks=fedxl.Hooks(say=said.append))
    assert "select = 'ap' chooses nothing: there are no validation data" in said


def test_data_that_cannot_be_read_say_why(run, npz, tmp_path):
    out = tmp_path / "scores.csv"
    np.savez(tmp_path / "noise.npz", y=np.zeros(3))
    np.savez(tmp_path / "texts.npz", x=np.array([["a", "b"]]))
    np.savez(tmp_path / "shape.npz", x=np.zeros((3, 5)))
    np.savez(tmp_path / "rows.npz", x=np.zeros((3, 1, 8, 8)), rows=np.array(["a"]))
    (tmp_path / "new.csv").write_text("a,b\n1,2\n")
    for name, said in {
        "nowhere.npz": "there is no file",
        "noise.npz": "lacks the array x",
        "texts.npz": "rows of numbers",
        "shape.npz": r"takes examples of shape \[n, 1, 8, 8\], not \[3, 5\]",
        "rows.npz": "must name each of the 3 examples",
        "new.csv": "trained on arrays",
    }.items():
        with pytest.raises(UserError, match=said):
            command("predict", run, tmp_path / name, "-o", out)
    assert not out.exists()
    with pytest.raises(UserError, match="is the data file"):
        command("predict", run, npz, "-o", npz)
    with pytest.raises(UserError, match=r"must end in \.csv or \.parquet"):
        command("predict", run, npz, "-o", tmp_path / "scores.txt")


def test_code_that_a_folder_names_is_not_run_unless_allowed(run, tmp_path, monkeypatch):
    folder = broken(run, tmp_path / "run")
    about = json.loads((folder / "run.json").read_text())
    settings = {key: value for key, value in about["settings"].items() if not key.startswith("model.")}
    (tmp_path / "hostile_network.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    about["settings"] = {**settings, "model.name": "hostile_network:build"}
    (folder / "run.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match="code outside of fedxl, which would run here; if you trust it, --allow-code"):
        predictor.load(folder)
    with pytest.raises(SystemExit, match="it ran"):
        predictor.load(folder, allow_code=True)

"""From a table to predictions on other tables: by the run, and by an export when run and training data are gone."""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from fedxl import UserError
from fedxl.evaluation.intervals import delong
from fedxl.evaluation.scores import load
from fedxl.prediction import predictor
from tests.prediction.conftest import patients, write
from tests.prediction.test_predict import command, read


def test_the_rows_of_the_table_get_the_scores_that_the_run_gave_them(trained, tmp_path):
    said = command("predict", trained / "run", trained / "patients.csv", "-o", tmp_path / "scores.csv")
    found = {row["row"]: float(row["score"]) for row in read(tmp_path / "scores.csv")}
    assert len(found) == 300
    kept = load(trained / "run" / "scores.npz")
    for split in ("validation", "test"):
        assert len(kept[split].row) > 20
        mine = [found[row] for row in kept[split].row]
        np.testing.assert_allclose(mine, kept[split].scores[:, 0], rtol=1e-5, atol=1e-6)
    sick = np.array([row["outcome"] == "sick" for row in patients(300, 0)], np.int64)
    auroc = delong(list(found.values()), sick)
    assert f"has labels: auroc {auroc.value:.4f} ({auroc.low:.4f} to {auroc.high:.4f})" in said
    assert "class 1 (outcome = sick)" in said
    held_back = sum(len(kept[split]) for split in ("validation", "test"))
    assert f"{300 - held_back} of 300 rows are among the training data" in said


def test_a_data_frame_is_prepared_as_a_file_is(trained, tmp_path):
    new = patients(30, 2)
    write(tmp_path / "new.csv", new)
    model = predictor.load(trained / "run")
    expected = model.predict(tmp_path / "new.csv").scores
    frame = pd.read_csv(tmp_path / "new.csv")
    np.testing.assert_allclose(model.predict(frame[frame.columns[::-1]]).scores, expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(model.predict(frame.drop(columns="outcome")).scores, expected, rtol=1e-6, atol=1e-7)
    with pytest.raises(UserError, match="'age'"):
        model.predict(frame.drop(columns="age"))


def test_an_export_predicts_when_the_run_and_its_data_are_gone(trained, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "run")
    said = command("export", tmp_path / "run", "--out", tmp_path / "model", "--no-onnx")
    assert "README.md, model.json, model.safetensors" in said
    unknown = [{**row, "number": f"={row['number']}"} for row in patients(20, 1)]
    for row in unknown:
        row.pop("outcome"), row.pop("hospital")
    write(tmp_path / "new.csv", unknown)
    said = command("predict", tmp_path / "run", tmp_path / "new.csv", "-o", tmp_path / "here.csv")
    assert "20 identities look like formulas" in said
    assert read(tmp_path / "here.csv")[0]["row"] == "'=P000"
    assert (tmp_path / "model" / "README.md").read_text().startswith("# Model card: outcome = sick")
    assert str(trained) not in (tmp_path / "model" / "model.json").read_text()
    shutil.rmtree(tmp_path / "run")
    (trained / "patients.csv").rename(trained / "gone")
    try:
        words = [sys.executable, "-m", "fedxl", "predict", "model", "new.csv", "-o", "there.csv"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    finally:
        (trained / "gone").rename(trained / "patients.csv")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "there.csv").read_text() == (tmp_path / "here.csv").read_text()


def test_tables_that_do_not_suit_say_why(trained, tmp_path):
    np.savez(tmp_path / "new.npz", x=np.zeros((2, 5), np.float32))
    with pytest.raises(UserError, match=r"prepares tables \(CSV or Parquet\) itself"):
        command("predict", trained / "run", tmp_path / "new.npz", "-o", tmp_path / "scores.csv")
    write(tmp_path / "new.csv", [{"number": "a", "age": 5}])
    with pytest.raises(UserError, match="'pressure'"):
        command("predict", trained / "run", tmp_path / "new.csv", "-o", tmp_path / "scores.csv")

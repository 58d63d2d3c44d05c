"""What a result is besides a model: a run for reports, and a folder that everything else reads."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

import fedxl
from fedxl.errors import UserError
from fedxl.models import mlp
from fedxl.reporting import document
from fedxl.training.run_folder import read_run
from tests.cli.test_errors import command
from tests.conftest import make_clients

SIZES = [(8, 12), (5, 15), (0, 9)]


def fitted(seed: int = 0, algorithm: fedxl.Algorithm | None = None, **more) -> fedxl.Result:
    """A small run with validation and test data by site."""
    torch.manual_seed(seed)
    held = {name: make_clients([(9, 21)], seed=9 + n)[0] for n, name in enumerate(("validation", "test"))}
    settings = {"rounds": 4, "local_steps": 2, "batch_size": 8, "eval_every": 2, "seed": seed, **held, **more}
    return fedxl.fit(
        mlp((5,), hidden=(4,)), make_clients(SIZES), algorithm or fedxl.FeDXL2(fedxl.auroc()), **settings
    )


def test_a_result_is_the_run_that_its_folder_holds(tmp_path):
    result = fitted(out=tmp_path / "written")
    run, read = result.as_run("written"), read_run(tmp_path / "written")
    for name in ("settings", "rows", "done", "members", "environment", "begun", "chosen_by", "values", "state"):
        assert getattr(run, name) == getattr(read, name), name
    assert [(member.positives, member.negatives) for member in run.members] == SIZES
    assert result.as_run().name == "FeDXL2"
    assert re.fullmatch(r"Run written, test auroc 0\.\d{4}, in .*written", repr(read)), "no rows and no scores"
    page = document.build([result.as_run()])
    assert page.title == "AUROC across 3 sites", "not auroc()"
    assert run.scores["test"].scores.tolist() == read.scores["test"].scores.tolist()
    assert document.render(document.build([run])) == document.render(document.build([read]))


def test_a_saved_result_is_read_like_a_run_that_wrote_its_folder(tmp_path, monkeypatch, capsys):
    result = fitted(out=tmp_path / "written")
    assert result.save(tmp_path / "saved") == tmp_path / "saved"
    saved, written = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("saved", "written"))
    assert saved | {"trained_on_digest": written["trained_on_digest"]} == written, "a saved run has no such digests"
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "written" / name).read_bytes(), name
    x = make_clients([(4, 4)], seed=5)[0][0]
    loaded = fedxl.load(tmp_path / "saved", model=mlp((5,), hidden=(4,)))
    np.testing.assert_array_equal(loaded.predict(x).scores, result.predict(x).scores)
    np.testing.assert_array_equal(loaded.predict(x).probabilities, result.predict(x).probabilities)
    assert fedxl.export(tmp_path / "saved", model=mlp((5,), hidden=(4,)), onnx=False).form == result.form
    code, out, _ = command(monkeypatch, capsys, "report", str(tmp_path / "saved"))
    assert (code, "saved" in out) == (0, True)
    with pytest.raises(UserError, match="already holds a run; choose another folder"):
        result.save(tmp_path / "saved")


def test_an_interrupted_result_is_not_saved_as_if_it_were_finished(tmp_path):
    result = fitted(hooks=fedxl.Hooks(should_stop=lambda: True))
    assert result.as_run().done is None
    with pytest.raises(UserError, match="interrupted"):
        result.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()

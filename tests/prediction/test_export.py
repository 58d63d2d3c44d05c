"""An exported folder: complete, checked, and of use without the run and its data."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fedxl
from fedxl import UserError
from fedxl.config import experiment
from fedxl.data.sets.digits import digits
from fedxl.evaluation import scores
from fedxl.evaluation.intervals import delong
from fedxl.prediction import predictor
from fedxl.prediction.card import text
from fedxl.prediction.export import export
from tests.prediction.conftest import CONFIG, QUIET, compiled_network, own_network
from tests.prediction.test_predict import command, read


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> Path:
    return export(run, tmp_path_factory.mktemp("exports") / "digits").path


def test_the_description_is_complete(run, exported):
    about = json.loads((exported / "model.json").read_text())
    assert about["model"] == {"name": "cnn", "channels": 4}
    assert about["shape"] == [1, 8, 8]
    assert about["fedxl"] == fedxl.__version__
    assert about["onnx"]["largest_error"] <= 1e-5
    assert set(about["files"]) == {"README.md", "model.onnx", "model.safetensors"}
    for name, digest in about["files"].items():
        assert hashlib.sha256((exported / name).read_bytes()).hexdigest() == digest
    assert not (exported / "scores.npz").exists(), "scores and labels of examples stay with the run"
    test = scores.load(run / "scores.npz")["test"]
    assert about["assessment"]["pooled"]["labels"][""]["metrics"]["auroc"]["low"] == delong(*test.flat).low
    assert str(run) not in (exported / "model.json").read_text()


def test_the_card_says_what_the_run_was(run, exported):
    card = (exported / "README.md").read_text()
    test = scores.load(run / "scores.npz")["test"]
    found = delong(*test.flat)
    assert f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})" in card
    about = json.loads((run / "run.json").read_text())
    for member in about["members"]:
        assert (
            f"| {member['name']} | {member['positives'] + member['negatives']:,} | {member['positives']:,} |" in card
        )
    for title in ("What it is not for", "How good it is", "What its scores mean", "Training"):
        assert f"## {title}" in card
    # The config in the card is the run's own.
    tables = tomllib.loads(card.split("```toml\n")[1].split("```")[0])
    again = experiment.simulate(experiment.Config(**tables), lambda line: None)
    assert again.description == experiment.simulate(CONFIG, lambda line: None).description


def test_the_operating_point_is_chosen_at_export(run, exported, npz, tmp_path):
    wished = export(run, tmp_path / "model", onnx=False, calibration="isotonic", sensitivity=0.8)
    assert wished.decisions.decided[""].rule == "sensitivity 0.8"
    card = (tmp_path / "model" / "README.md").read_text()
    assert "isotonic regression" in card
    assert "on test data" in card
    assert "model.onnx" not in wished.digests
    command("predict", run, npz, "-o", tmp_path / "a.csv", "--calibration", "isotonic", "--sensitivity", 0.8)
    command("predict", tmp_path / "model", npz, "-o", tmp_path / "b.csv")
    assert read(tmp_path / "a.csv") == read(tmp_path / "b.csv")
    with pytest.raises(UserError, match="chosen when it was exported; export the run again"):
        command("predict", exported, npz, "-o", tmp_path / "c.csv", "--specificity", 0.8)


def test_a_network_of_the_users_own_predicts_by_onnx(tmp_path):
    data = digits(clients=4)
    options = {"validation": data.validation, "rounds": 2, "local_steps": 2, "eval_every": 1, "hooks": QUIET}
    result = fedxl.fit(
        own_network(), data.train, fedxl.FeDXL2(fedxl.auroc(), lr=0.1), out=tmp_path / "run", **options
    )
    with pytest.raises(UserError, match="its code is not in the folder"):
        export(tmp_path / "run")
    lines: list[str] = []
    found = export(tmp_path / "run", tmp_path / "model", model=result.model, say=lines.append)
    assert lines == [
        "the network is code of your own, which is not exported: predictions use model.onnx, and loading "
        "model.safetensors needs that code"
    ]
    expected = result.predict(data.test.x)
    alone = predictor.load(found.path).predict(data.test.x)
    np.testing.assert_allclose(alone.scores, expected.scores, atol=1e-5)
    mine = own_network()
    given = predictor.load(found.path, model=mine).predict(data.test.x)
    assert torch.equal(mine[1].weight, own_network()[1].weight), "the user's network is left as it is"
    np.testing.assert_array_equal(given.scores, expected.scores)
    card = (found.path / "README.md").read_text()
    assert "trained from Python" in card
    assert "algorithm.name = 'fedxl2'" in card
    bare = export(tmp_path / "run", tmp_path / "bare", onnx=False, say=lines.append)
    assert lines[-1].endswith("without it, model.safetensors cannot be used")
    with pytest.raises(UserError, match=r"holds no model\.onnx"):
        predictor.load(bare.path)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("by_name", [False, True])
def test_a_compiled_network_takes_weights_as_the_network_itself(tmp_path, by_name):
    """What torch.compile returns has other names for the same weights."""
    data, factory = digits(clients=4), "tests.prediction.conftest:compiled_network"
    options = {"validation": data.validation, "rounds": 1, "local_steps": 2, "hooks": QUIET}
    fedxl.fit(own_network(), data.train, fedxl.FeDXL2(fedxl.auroc()), out=tmp_path / "run", **options)
    expected = predictor.load(tmp_path / "run", model=own_network()).predict(data.test.x).scores
    model = experiment.build_network({"name": factory}, (1, 8, 8), ()) if by_name else compiled_network()
    found = export(tmp_path / "run", tmp_path / "model", model=model)
    for folder in (tmp_path / "run", found.path):
        assert np.array_equal(predictor.load(folder, model=model).predict(data.test.x).scores, expected)
    np.savez(tmp_path / "new.npz", x=data.test.x.numpy())
    command("predict", tmp_path / "run", tmp_path / "new.npz", "-o", tmp_path / "scores.csv", "--model", factory)
    experiment.execute(replace(CONFIG, model={"name": factory}), tmp_path / "named", hooks=QUIET)
    assert predictor.load(tmp_path / "named", allow_code=True).predict(data.test.x).scores.shape == expected.shape


def test_an_export_replaces_an_export_and_nothing_else(run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("dear to me")
    with pytest.raises(UserError, match="holds something else"):
        export(run, tmp_path / "mine")
    export(run, tmp_path / "model")
    export(run, tmp_path / "model", onnx=False)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "README.md",
        "model.json",
        "model.safetensors",
    ]
    with pytest.raises(UserError, match="model is an exported model already"):
        export(tmp_path / "model")


def test_without_the_packages_one_line_says_what_to_install(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"ONNX needs onnxruntime; pip install 'fedxl\[export\]', or --no-onnx"):
        export(run, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    export(run, tmp_path / "model", onnx=False)


# What a hostile or damaged folder may hold: a change to model.json, or to the folder, and what is said of it.


def changed(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        about = json.loads((folder / "model.json").read_text())
        (folder / "model.json").write_text(json.dumps({**about, **values}))

    return change


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        content = (folder / "model.safetensors").read_bytes()
        changed(files={"model.safetensors": hashlib.sha256(content).hexdigest()})(folder)

    return rewrite


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def linked(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere")


def piped(folder: Path) -> None:
    import os

    (folder / "model.json").unlink()
    os.mkfifo(folder / "model.json")


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no json": (write("model.json", b"\x00{"), "is not a JSON file"),
    "deep json": (write("model.json", b"[" * 10**6), "is not a JSON file"),
    "long number": (write("model.json", b'{"format": ' + b"1" * 10**5 + b"}"), "is not a JSON file"),
    "huge json": (write("model.json", b" " * (2**24 + 1)), "more than 16,777,216 bytes"),
    "a list": (write("model.json", b"[]"), "must hold a JSON object"),
    "a pipe": (piped, "is not a file"),
    "another format": (changed(format=1), "has the format 1"),
    "no format": (changed(format=None), "has the format None"),
    "a text as shape": (changed(shape="8"), "shape"),
    "a huge shape": (changed(shape=[10**6, 10**6, 10**6]), "weights; at most|must be|needs images|not 1000000"),
    "no shape": (changed(shape=[]), "shape"),
    "dtype": (changed(dtype="__class__"), "dtype must be one of"),
    "weights_dtype": (changed(weights_dtype=["float32"]), "weights_dtype must be one of"),
    "no model name": (changed(model={"channels": 4}), "model.name must be a text"),
    "another model": (changed(model={"name": "mlp"}), r"'1\.weight' must be float32 \[64, 64\]"),
    "unknown model": (changed(model={"name": "cnm"}), "did you mean 'cnn'"),
    "unknown option": (changed(model={"name": "cnn", "chanels": 4}), "did you mean 'model.channels'"),
    "initial weights": (changed(model={"name": "resnet18", "weights": "/etc/passwd"}), "lacks 'conv1.weight'"),
    "huge network": (changed(model={"name": "mlp", "hidden": [30000, 30000]}), r"must be float32 \[30000, 64\]"),
    "deep network": (changed(model={"name": "mlp", "hidden": [1] * 10**5}), "at most 1,000 hidden layers"),
    "code": (changed(model={"name": "os:system"}), "code outside of fedxl, which would run here"),
    "preparation": (changed(preparation={"form": 1}), "cannot read the preparation"),
    "decision": (changed(decisions={"": {"threshold": 1}}), "a decision must have"),
    "no decisions": (changed(decisions=None), "decisions must have one for each label: ''"),
    "another label": (
        changed(decisions={"a": {"undecided": "so"}}),
        "decisions must have one for each",
    ),
    "files": (changed(files={"../../.ssh/id_rsa": "0" * 64}), r"files names '\.\./\.\./\.ssh/id_rsa'"),
    "digest": (changed(files={"model.safetensors": 5}), "must be 64 hex digits"),
    "no files": (changed(files=None), "files"),
    "other weights": (write("model.safetensors", b"x"), "is not the file that was exported"),
    "a link": (linked, "leads out of the folder"),
    "weights gone": (lambda folder: (folder / "model.safetensors").unlink(), "there is no file"),
    "missing tensor": (weights(lambda t: t.pop("0.weight")), r"lacks '0\.weight' \[4, 1, 3, 3\]"),
    "more tensors": (weights(lambda t: t.update(more=torch.zeros(1))), "holds 'more', which this network does not"),
    "wrong shape": (weights(lambda t: t.update({"9.bias": torch.zeros(2)})), r"'9\.bias' must be float32 \[1\]"),
    "wrong type": (weights(lambda t: t.update({"9.bias": torch.zeros(1).half()})), "not float16"),
    "nan": (weights(lambda t: t["9.bias"].fill_(torch.nan)), "holds NaN or infinity"),
    "negative variance": (weights(lambda t: t["1.running_var"].fill_(-1)), "is negative"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_is_one_line(exported, tmp_path, name):
    change, said = HOSTILE[name]
    shutil.copytree(exported, tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(UserError, match=said) as caught:
        predictor.load(tmp_path / "model")
    assert "\n" not in str(caught.value)


def test_text_of_others_does_nothing_in_a_card(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    about = json.loads((folder / "run.json").read_text())
    about["members"][0]["name"] = "<script>alert(1)</script>|x|\n# [a](javascript:b) `c`"
    about["settings"]["data.note"] = "```\n<b>evil"
    (folder / "run.json").write_text(json.dumps(about))
    card = (export(folder, onnx=False).path / "README.md").read_text()
    assert "<script>alert" not in card
    line = next(line for line in card.splitlines() if "alert" in line)
    assert line.startswith("| &lt;script&gt;alert(1)")
    assert len(line.replace("\\|", "").split("|")) == 5, "three cells"
    assert "\\[a\\](javascript" in line
    assert text("*_`") == "\\*\\_\\`"
    assert card.count("````") == 2, "a longer fence around what holds one"

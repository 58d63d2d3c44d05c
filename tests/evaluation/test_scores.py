"""Scores of held-back data: kept with a run, as they were, by split and site."""

from __future__ import annotations

import io
import json
import zipfile

import numpy as np
import pytest
import torch

import fedxl
from fedxl.data.sets.digits import digits
from fedxl.errors import UserError
from fedxl.evaluation.scores import Scores, load, save


def example() -> Scores:
    known = {"site": np.array([1, 0, 1, 1]), "sites": ("a", "b", "c"), "row": ("r1", "r2", "r3", "é")}
    return Scores.of([0.5, -1.0, 2.0, 2.0], [1, 0, 0, 1], **known)


def test_scores_come_back_from_a_file_as_they_were(tmp_path):
    plain = Scores.of([0.1, 0.2], [0, 1])
    save(tmp_path / "scores.npz", {"validation": plain, "test": example()})
    found = load(tmp_path / "scores.npz")
    assert set(found) == {"validation", "test"}
    assert found["validation"].site is found["validation"].group is None
    assert found["validation"].sites == found["validation"].row == ()
    assert found["test"].sites == ("a", "b", "c")
    assert found["test"].row == ("r1", "r2", "r3", "é")
    assert found["test"].labels == ("",)
    np.testing.assert_array_equal(found["test"].scores, example().scores)
    np.testing.assert_array_equal(found["test"].y, example().y)
    np.testing.assert_array_equal(found["test"].site, example().site)


def test_grades_come_back_with_their_queries(tmp_path):
    ranked = Scores.of([0.1, 0.2, 0.3], [0, 3, 1], group=np.array([7, 7, 9]))
    save(tmp_path / "scores.npz", {"test": ranked})
    found = load(tmp_path / "scores.npz")["test"]
    np.testing.assert_array_equal(found.group, ranked.group)
    np.testing.assert_array_equal(found.y, ranked.y)
    assert found.flat[1].tolist() == [0, 1, 1], "grades above 0 are positive"


def test_each_label_has_the_examples_for_which_it_is_known():
    y = np.array([[1, -1], [0, 1], [-1, 0], [1, 1]])
    found = Scores(np.arange(8.0).reshape(4, 2), y, ("x", "y"), row=("a", "b", "c", "d")).by_label()
    assert list(found) == ["x", "y"]
    assert found["x"].row == ("a", "b", "d")
    assert found["y"].flat[0].tolist() == [3, 5, 7]
    assert found["y"].flat[1].tolist() == [1, 0, 1]


def test_each_site_has_its_own():
    parts = example().by_site()
    assert list(parts) == ["a", "b"], "c has none"
    assert parts["b"].row == ("r1", "r3", "é")
    assert parts["b"].y[:, 0].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"y": np.zeros((3, 1), np.int64)}, r"scores \(4, 1\) and labels \(3, 1\) are not of 1 label"),
        ({"labels": ("a", "b")}, "are not of 2 label"),
        ({"site": np.zeros(3, np.int64)}, "do not have one site each"),
        ({"group": np.zeros(5, np.int64)}, "do not have one group each"),
        ({"row": ("a",)}, "do not have one row each"),
    ],
)
def test_columns_of_other_lengths_are_refused(wrong, why):
    with pytest.raises(UserError, match=why):
        Scores(**{"scores": np.zeros((4, 1)), "y": np.zeros((4, 1), np.int64), **wrong})


def arrays(**columns):
    """A split of one label as a file has it."""
    known = {"labels": [""], "sites": np.zeros(0, np.str_), "row": np.zeros(0, np.str_), **columns}
    return {f"test/{name}": column for name, column in known.items()}


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"no archive"])
def test_a_damaged_file_is_told_in_one_line(tmp_path, content):
    (tmp_path / "scores.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"cannot read .*scores\.npz"):
        load(tmp_path / "scores.npz")


def test_arrays_of_another_form_and_archives_of_another_kind_are_told_in_one_line(tmp_path):
    path, right = tmp_path / "scores.npz", arrays(scores=[[1.0], [2.0]], y=[[0], [1]])
    vast = io.BytesIO()
    np.lib.format.write_array_header_1_0(vast, {"descr": "<f8", "fortran_order": False, "shape": (10**13,)})
    for wrong in (
        {"test/row": "r"},
        {"test/site": [0, 0], "test/sites": "a"},
        {"test/scores": np.zeros((2, 1), "f4,i4")},
        {"test/y": [0, 1]},
        {"test/labels": ["a", "b"]},
    ):
        np.savez(path, **{**right, **wrong})
        with pytest.raises(UserError, match=r"cannot read .*scores\.npz"):
            load(path)
    np.savez(path, **right)
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 32  # "patched data", which zipfile does not know
    with zipfile.ZipFile(tmp_path / "vast.npz", "w") as archive:
        archive.writestr("test/scores.npy", vast.getvalue())
    for damaged in (bytes(content), (tmp_path / "vast.npz").read_bytes()):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"cannot read .*scores\.npz"):
            load(path)


def test_labels_and_sites_are_checked(tmp_path):
    with (tmp_path / "s.npz").open("wb") as file:
        np.savez(file, **arrays(scores=[[1.0], [2.0]], y=[[0], [2]]))
    with pytest.raises(UserError, match="labels are not 0, 1 or -1"):
        load(tmp_path / "s.npz")
    with (tmp_path / "s.npz").open("wb") as file:
        np.savez(file, **arrays(scores=[[1.0]], y=[[0]], site=[3], sites=["a"]))
    with pytest.raises(UserError, match="sites have no names"):
        load(tmp_path / "s.npz")
    with (tmp_path / "s.npz").open("wb") as file:
        np.savez(file, test_scores=[1.0, 2.0], test_labels=[0, 1])
    with pytest.raises(UserError, match="older version of fedxl"):
        load(tmp_path / "s.npz")


def test_a_run_keeps_the_scores_of_the_chosen_model_and_says_who_took_part(tmp_path):
    data = digits(clients=4)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 1))
    options = {"validation": data.validation, "test": data.test, "rounds": 4, "local_steps": 2, "eval_every": 1}
    algorithm = fedxl.FeDXL2(fedxl.partial_auc(lam=1.0), lr=0.1)
    result = fedxl.fit(model, data.train, algorithm, out=tmp_path / "run", **options)
    found = load(tmp_path / "run" / "scores.npz")
    for split in ("validation", "test"):
        source = data.validation if split == "validation" else data.test
        with torch.no_grad():
            np.testing.assert_allclose(
                found[split].scores[:, 0], result.model(source.x)[:, 0].numpy(), rtol=1e-5, atol=1e-6
            )
        np.testing.assert_array_equal(found[split].y, source.y.numpy())
        np.testing.assert_array_equal(found[split].site, source.site)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [member["positives"] for member in about["members"]] == [held.positives for held in data.train.holdings()]
    assert about["settings"]["algorithm.name"] == "fedxl2"
    assert about["environment"]["torch"] == torch.__version__

"""Scores of held-back data: kept with a run, as they were, by split and site."""

from __future__ import annotations

import io
import json
import zipfile

import numpy as np
import pytest
import torch

import fedxl
from fedxl.data.digits import digits
from fedxl.errors import UserError
from fedxl.evaluation.scored import Scored, load, save


def example() -> Scored:
    sites = np.array([1, 0, 1, 1])
    return Scored(
        np.array([0.5, -1.0, 2.0, 2.0]), np.array([1, 0, 0, 1]), sites, ("a", "b", "c"), ("r1", "r2", "r3", "é")
    )


def test_scores_come_back_from_a_file_as_they_were(tmp_path):
    plain = Scored(np.array([0.1, 0.2]), np.array([0, 1]))
    save(tmp_path / "scores.npz", {"validation": plain, "test": example()})
    found = load(tmp_path / "scores.npz")
    assert set(found) == {"validation", "test"}
    assert found["validation"].sites is None
    assert found["test"].names == ("a", "b", "c")
    assert found["test"].rows == ("r1", "r2", "r3", "é")
    np.testing.assert_array_equal(found["test"].scores, example().scores)
    np.testing.assert_array_equal(found["test"].sites, example().sites)


def test_each_site_has_its_own():
    parts = example().by_site()
    assert list(parts) == ["a", "b"], "c has none"
    assert parts["b"].rows == ("r1", "r3", "é")
    assert parts["b"].labels.tolist() == [1, 0, 1]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"no archive"])
def test_a_damaged_file_is_told_in_one_line(tmp_path, content):
    (tmp_path / "scores.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"cannot read .*scores\.npz"):
        load(tmp_path / "scores.npz")


def test_arrays_of_another_form_and_archives_of_another_kind_are_told_in_one_line(tmp_path):
    path, right = tmp_path / "scores.npz", {"test_scores": [1.0, 2.0], "test_labels": [0, 1]}
    vast = io.BytesIO()
    np.lib.format.write_array_header_1_0(vast, {"descr": "<f8", "fortran_order": False, "shape": (10**13,)})
    for wrong in (
        {"test_rows": "r"},
        {"test_sites": [0, 0], "test_names": "a"},
        {"test_scores": np.zeros(2, "f4,i4")},
    ):
        np.savez(path, **{**right, **wrong})
        with pytest.raises(UserError, match=r"cannot read .*scores\.npz"):
            load(path)
    np.savez(path, **right)
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 32  # "patched data", which zipfile does not know
    with zipfile.ZipFile(tmp_path / "vast.npz", "w") as archive:
        archive.writestr("test_scores.npy", vast.getvalue())
    for damaged in (bytes(content), (tmp_path / "vast.npz").read_bytes()):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"cannot read .*scores\.npz"):
            load(path)


def test_labels_and_sites_are_checked(tmp_path):
    with (tmp_path / "s.npz").open("wb") as file:
        np.savez(file, test_scores=[1.0, 2.0], test_labels=[0, 2])
    with pytest.raises(UserError, match="labels are not 0 or 1"):
        load(tmp_path / "s.npz")
    with (tmp_path / "s.npz").open("wb") as file:
        np.savez(file, test_scores=[1.0], test_labels=[0], test_sites=[3], test_names=["a"])
    with pytest.raises(UserError, match="sites have no names"):
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
                found[split].scores, result.model(source.x)[:, 0].numpy(), rtol=1e-5, atol=1e-6
            )
        np.testing.assert_array_equal(found[split].labels, source.y.numpy())
        np.testing.assert_array_equal(found[split].sites, source.sites)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [member["positives"] for member in about["members"]] == [held.positives for held in data.train.holdings()]
    assert about["settings"]["algorithm.name"] == "fedxl2"
    assert about["environment"]["torch"] == torch.__version__

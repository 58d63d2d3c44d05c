"""Several labels of each example, in any form that people write them in."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedxl.data import medmnist, targets
from fedxl.data.examples import Examples
from fedxl.data.inputs import from_arrays
from fedxl.data.participation import weigh
from fedxl.data.splits import Sites
from fedxl.errors import UserError
from fedxl.risks import auroc, several
from fedxl.training.problem import check_labels
from tests.data.test_datasets import places

NAN = float("nan")


@pytest.mark.parametrize(
    ("y", "number", "expected"),
    [
        ([[1, 0], [0, 1]], 2, [[1, 0], [0, 1]]),
        ([[True, False]], 2, [[1, 0]]),
        (torch.tensor([[1.0, NAN], [-1.0, 0.0]]), 2, [[1, -1], [-1, 0]]),
        (np.array([[1, None], [0, 1]], object), 2, [[1, -1], [0, 1]]),
        ([2, 0, -1], 3, [[0, 0, 1], [1, 0, 0], [-1, -1, -1]]),
        ([0, 1], 2, [[1, 0], [0, 1]]),
        ([0, 1, NAN], 1, [[0], [1], [-1]]),
        ([[0], [1]], 1, [[0], [1]]),
    ],
)
def test_forms_of_labels(y, number, expected):
    assert targets.several(y, "client 0", number).tolist() == expected


@pytest.mark.parametrize(
    ("y", "number", "told"),
    [
        ([[1, 0, 1]], 2, r"must be \[n, 2\]"),
        ([[1, 2]], 2, "found 2"),
        ([3], 3, "from 0 to 2, found 3"),
        ([0.5], 3, "found 0.5"),
        ([["a", "b"]], 2, "must be numbers"),
        ([[[1, 0]]], 2, "must be"),
        ([[1, 1], [0, -1]] * 10, 2, "label 1 is -1 or 1 and never 0, .* write 0 for negative, or NaN for unknown"),
    ],
)
def test_mistakes_are_one_line(y, number, told):
    with pytest.raises(UserError, match=told):
        targets.several(y, "client 0", number)


def federation() -> Examples:
    first = torch.tensor([[1, 0, -1], [0, 0, -1], [1, 1, -1]])
    second = torch.tensor([[0, -1, 1], [0, -1, 0]])
    return from_arrays([(torch.zeros(3, 2), first), (torch.zeros(2, 2), second)], labels=3)


def test_sides_and_holdings_count_examples_once():
    data = federation()
    assert [held.tolist() for held in data.side("positive")] == [[0, 2], [3]]
    assert [held.tolist() for held in data.side("negative")] == [[0, 1], [3, 4]]
    counts = [[held.count(side) for side in ("positive", "negative", "all")] for held in data.holdings()]
    assert counts == [[2, 2, 3], [1, 2, 2]]
    assert [held.by_label("positive").tolist() for held in data.holdings()] == [[2, 1, 0], [0, 0, 1]]
    assert [held.by_label("negative").tolist() for held in data.holdings()] == [[1, 2, 0], [2, 0, 1]]


def test_parts_of_each_label_sum_to_one():
    holdings, pairing, sides = federation().holdings(), several(auroc(), 3).pairing, ("positive", "negative")
    some, every = (np.stack([held.by_label(side) for held in holdings]) for side in sides)
    for weighting in ("clients", "samples"):
        share = weigh(*pairing.counts(holdings, sides, False), weighting).shares
        share = pairing.spread(share, holdings, sides, weighting == "samples", False)
        parts = share.part[:, None, None] * share.factors  # [N, 2, L]
        torch.testing.assert_close(parts.sum(0), torch.ones(2, 3, dtype=torch.float64))
        if weighting == "samples":
            torch.testing.assert_close(parts[:, 0], torch.from_numpy(some / some.sum(0)))
            torch.testing.assert_close(parts[:, 1], torch.from_numpy(every / every.sum(0)))


def test_a_label_that_cannot_be_trained_is_one_line():
    risk = several(auroc(), ["a", "b"])
    anyone, both = (
        SimpleNamespace(risk=risk, label_names=("a", "b"), needs_both_sides=needed) for needed in (False, True)
    )
    some, none = np.array([[1, 1], [0, 2]]), np.array([[3, 0], [0, 0]])
    with pytest.raises(UserError, match="S2 for the label 'b'"):
        check_labels(anyone, holders(some, none))
    apart = holders(np.array([[0, 1], [1, 1]]), np.array([[1, 1], [0, 1]]))
    check_labels(anyone, apart)
    with pytest.raises(UserError, match="both classes of the label 'a'"):
        check_labels(both, apart)


def holders(first, second) -> list:
    sides = [dict(zip(auroc().sides, both, strict=True)) for both in zip(first, second, strict=True)]
    return [SimpleNamespace(by_label=each.__getitem__) for each in sides]


def write(path, labels: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    images = {
        f"{part}_images": rng.integers(256, size=(40, 8, 8), dtype=np.uint8) for part in ("train", "val", "test")
    }
    np.savez(path, **images, **{f"{part}_labels": labels for part in ("train", "val", "test")})


def test_all_findings_of_a_set_and_sites_that_know_some(tmp_path):
    labels = np.random.default_rng(1).integers(2, size=(40, 14), dtype=np.uint8)
    write(tmp_path / "chestmnist.npz", labels)
    splits = medmnist(label="all", root=str(tmp_path), sites=Sites(clients=4))
    rows = places(splits.train.x, np.load(tmp_path / "chestmnist.npz")["train_images"])
    assert splits.train.y.tolist() == labels[rows].tolist()
    assert splits.test.y.tolist() == labels.tolist()
    splits = medmnist(label="all", root=str(tmp_path), sites=Sites(clients=4, known=0.5))
    known = [splits.train.y[part] >= 0 for part in splits.train.parts]
    assert all(mine.sum(1).tolist() == [7] * 10 and bool((mine == mine[0]).all()) for mine in known)
    assert torch.stack([mine[0] for mine in known]).sum(0).tolist() == [2] * 14
    for options, told in (({"flipped": 0.1}, "flipped"), ({"known": 0.0}, "known must lie")):
        with pytest.raises(UserError, match=told):
            medmnist(label="all", root=str(tmp_path), sites=Sites(clients=4, **options))
    with pytest.raises(UserError, match="known is for several"):
        medmnist(root=str(tmp_path), sites=Sites(clients=4, known=0.5))


def test_classes_of_a_set_each_against_the_rest(tmp_path):
    labels = np.arange(40, dtype=np.uint8)[:, None] % 3
    write(tmp_path / "bloodmnist.npz", labels)
    splits = medmnist("bloodmnist", "all", str(tmp_path), Sites(clients=2))
    assert splits.test.y.tolist() == np.eye(3, dtype=int)[labels[:, 0]].tolist()

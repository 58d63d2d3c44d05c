"""Draws, shares, and the record of examples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedxl import sampling
from fedxl.data import DATASETS, digits, npz
from fedxl.data.examples import Examples, facts_about
from fedxl.data.inputs import as_examples, from_arrays
from fedxl.data.participation import shares
from fedxl.sampling import Purpose


@pytest.mark.parametrize("size", [1, 3, 64, 5000])
def test_a_side_is_read_in_epochs_from_any_position(size):
    """Each epoch is a permutation, and reading in pieces gives what reading at once gives."""
    whole = sampling.Stream(0, 7).epochs(Purpose.FIRST, 0, 4 * size, size)
    for epoch in whole.reshape(4, size):
        assert sorted(epoch) == list(range(size))
    pieces, position = [], 0
    for count in (1, size, 2 * size + 1):
        count = min(count, 4 * size - position)
        pieces.append(sampling.Stream(0, 7).epochs(Purpose.FIRST, position, count, size))
        position += count
    assert np.array_equal(np.concatenate(pieces), whole[:position])


@pytest.mark.parametrize("size", [4, 1000])
def test_an_epoch_holds_each_example_by_its_weight(size):
    """Whole numbers of times where weights allow it, and otherwise to less than one; from any position, too."""
    weights = np.tile([3.0, 0.25, 0.25, 0.5], size // 4)
    whole = sampling.Stream(0, 7).epochs(Purpose.FIRST, 0, 8 * size, size, weights)
    for epoch in whole.reshape(8, size):
        counts = np.bincount(epoch, minlength=size)
        assert (np.abs(counts - size * weights / weights.sum()) < 1).all()
    assert np.bincount(whole, minlength=size)[::4].tolist() == [24] * (size // 4)
    assert np.array_equal(
        sampling.Stream(0, 7).epochs(Purpose.FIRST, size + 1, size, size, weights), whole[size + 1 :][:size]
    )


def test_streams_of_different_purposes_clients_and_seeds_differ():
    keys = [(0, Purpose.FIRST, 1, 0), (1, Purpose.FIRST, 1, 0), (0, Purpose.SECOND, 1, 0), (0, Purpose.FIRST, 2, 0),
            (0, Purpose.FIRST, 1, 1), (0, Purpose.FIRST, 0, 0)]  # fmt: skip
    draws = {tuple(sampling.generator(*key).integers(10**9, size=4)) for key in keys}
    assert len(draws) == len(keys)


def test_cohorts():
    assert sampling.cohort(0, 3, 5, 0).tolist() == [0, 1, 2, 3, 4]
    some = [sampling.cohort(0, r, 100, 10) for r in range(200)]
    assert all(len(set(members)) == 10 and list(members) == sorted(members) for members in some)
    counts = np.bincount(np.concatenate(some), minlength=100)
    assert counts.min() > 5, "everyone gets a turn"
    assert np.array_equal(some[7], sampling.cohort(0, 7, 100, 10))


def stream(seed: int = 0) -> np.random.Generator:
    return sampling.generator(seed, Purpose.POOL, 1, 1)


def test_the_pool_is_read_without_replacement():
    assert len(set(sampling.pooled(stream(), 40, 50))) == 40
    twice = sampling.pooled(stream(), 100, 50)
    assert (np.bincount(twice, minlength=50) == 2).all(), "exhausted, it is reshuffled"


def test_a_weighted_pool_gives_each_entry_its_share():
    weights = np.array([1.0, 0.0, 2.0, 5.0])
    drawn = sampling.pooled(stream(), 80, weights)
    assert np.bincount(drawn, minlength=4).tolist() == [10, 0, 20, 50]
    few = [sampling.pooled(stream(s), 3, weights) for s in range(2000)]
    share = np.bincount(np.concatenate(few), minlength=4) / 6000
    np.testing.assert_allclose(share, weights / 8, atol=0.02)


def test_shares_of_the_papers_objective():
    """Clients count alike; those that hold a side make up for those that do not."""
    share = shares([5, 7, 0, 3], [9, 0, 4, 4], "clients")
    assert share.model.tolist() == [0.25] * 4
    torch.testing.assert_close(share.mass[:, 0], torch.tensor([1, 1, 0, 1]).double() / 3)
    torch.testing.assert_close(share.mass[:, 1], torch.tensor([1, 0, 1, 1]).double() / 3)


def test_shares_of_the_pooled_objective():
    first, second = [5, 7, 0, 3], [9, 0, 4, 4]
    share = shares(first, second, "samples")
    torch.testing.assert_close(share.mass[:, 0], torch.tensor(first).double() / 15)
    torch.testing.assert_close(share.mass[:, 1], torch.tensor(second).double() / 17)
    torch.testing.assert_close(share.mass, share.model[:, None] * share.factors)
    assert float(share.model.sum()) == pytest.approx(1)


def test_digits_are_as_announced():
    splits = digits(clients=16, one_class=6, ratio=0.1, seed=3)
    labels = splits.train.y[:, 0]
    per_client = [labels[part].sum() for part in splits.train.parts]
    assert sum(count == 0 for count in per_client) >= 6
    assert sorted(np.concatenate(splits.train.parts)) == list(range(len(labels)))
    assert float(labels.sum()) / float((1 - labels).sum()) == pytest.approx(0.1, abs=0.01)
    again, other = digits(seed=3), digits(seed=4)
    assert torch.equal(again.train.x, digits(seed=3, one_class=6).train.x), "three sites in eight"
    assert [len(digits(clients=clients).train.parts) for clients in (1, 2, 4)] == [1, 2, 4]
    assert torch.equal(again.train.x, digits(seed=3).train.x)
    assert not torch.equal(again.validation.x, other.validation.x)
    clean = [digits(seed=seed, noise=0, shift=0) for seed in (3, 4)]
    assert torch.equal(clean[0].test.x, clean[1].test.x), "the same test images whatever the seed"
    train, test = clean[0].train.x.flatten(1).tolist(), clean[1].test.x.flatten(1).tolist()
    assert not set(map(tuple, train)) & set(map(tuple, test))
    assert digits(views=True).train.fetch(torch.tensor([0])).shape == (1, 2, 32)
    assert set(DATASETS) == {
        "digits", "table", "folder", "npz", "letor", "cifar10", "cifar100", "medmnist", "chexpert",
        "ist", "heart", "tcga_brca",
    }  # fmt: skip


def test_npz_gives_back_what_was_saved(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32), np.arange(9) % 2
    client = np.array([2, 0, 1, 2, 0, 1, 2, 0, 1])
    np.savez(tmp_path / "d.npz", x=x, y=y, client=client, x_test=x[:3], y_test=y[:3])
    splits = npz(str(tmp_path / "d.npz"))
    assert [sorted(part) for part in splits.train.parts] == [[1, 4, 7], [2, 5, 8], [0, 3, 6]]
    assert torch.equal(splits.test.x, torch.from_numpy(x[:3]))
    assert splits.validation is None


def test_bytes_stay_bytes_until_fetched():
    images = Examples(torch.tensor([[[0]], [[255]]], dtype=torch.uint8), torch.tensor([[0], [1]]))
    assert images.fetch(torch.tensor([1, 0, 1])).flatten().tolist() == [1.0, 0.0, 1.0]
    features = Examples(torch.tensor([[0], [1]], dtype=torch.uint8), torch.tensor([[0], [1]]))
    assert features.fetch(torch.tensor([1])).tolist() == [[1.0]], "features of bytes are no pixels"


def test_labels_of_minus_one_are_negatives():
    assert as_examples(torch.zeros(3, 1), torch.tensor([-1, 1, -1]), "here").y.tolist() == [[0], [1], [0]]
    assert as_examples(torch.zeros(2, 1), torch.tensor([True, False]), "here").y.tolist() == [[1], [0]]


def test_a_federation_from_arrays_keeps_clients_apart():
    federation = from_arrays([(torch.zeros(2, 3), torch.tensor([0, 1])), (torch.ones(3, 3), torch.tensor([1, 1, 0]))])
    assert [part.tolist() for part in federation.parts] == [[0, 1], [2, 3, 4]]
    assert [side.tolist() for side in federation.side("positive")] == [[1], [2, 3]]
    assert facts_about(federation.holdings(), "samples").positive_share == pytest.approx(3 / 5)
    assert facts_about(federation.holdings(), "clients").positive_share == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert len(federation.pooled().parts) == 1

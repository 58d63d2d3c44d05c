"""Partitions, splits, imbalance, corrupted labels: counted, and where there is theory compared with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedxl import UserError
from fedxl.data import digits
from fedxl.data.examples import BANK, Examples
from fedxl.data.splits import PARTITIONS, Sites, corrupt, hold_back, imbalance, partition

LABELS = (np.arange(600) % 6 == 0).astype(np.int64)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("name", list(PARTITIONS))
@pytest.mark.parametrize("alpha", [0.01, 0.5, 100.0])
@pytest.mark.parametrize("clients", [1, 7, 16, 600])
def test_each_example_is_at_exactly_one_client_and_nobody_has_none(name, alpha, clients):
    for seed in range(5):
        parts = partition(name, LABELS, clients, rng(seed), alpha)
        assert len(parts) == clients
        assert min(map(len, parts)) >= 1
        assert sorted(np.concatenate(parts)) == list(range(len(LABELS)))


@pytest.mark.parametrize("name", list(PARTITIONS))
def test_the_same_stream_gives_the_same_partition(name):
    first, again, other = (partition(name, LABELS, 8, rng(seed), 0.5) for seed in (1, 1, 2))
    assert all(map(np.array_equal, first, again))
    assert not all(map(np.array_equal, first, other))


def test_equal_shards_differ_by_one_at_most():
    sizes = [len(part) for part in partition("equal", LABELS[:599], 16, rng(), 0.5)]
    assert set(sizes) == {37, 38}


def positive_shares(name: str, alpha: float) -> np.ndarray:
    labels = (np.arange(4000) % 2).astype(np.int64)
    return np.array([labels[part].mean() for part in partition(name, labels, 10, rng(), alpha)])


def test_a_small_alpha_skews_labels_and_quantity_does_not():
    assert positive_shares("dirichlet", 0.1).std() > 0.25
    assert positive_shares("dirichlet", 1000.0).std() < 0.05
    assert positive_shares("equal", 0.1).std() < 0.05
    sizes = np.array([len(part) for part in partition("quantity", LABELS, 10, rng(), 0.5)])
    assert sizes.std() > 20, "60 each would be equal"
    mixed = [LABELS[part].mean() for part in partition("quantity", LABELS, 3, rng(), 5.0)]
    np.testing.assert_allclose(mixed, LABELS.mean(), atol=0.06)


@pytest.mark.parametrize("alpha", [0.3, 2.0])
def test_shares_have_the_variance_of_a_dirichlet(alpha):
    """Var = (1/N)(1 - 1/N) / (N alpha + 1), for a class under label skew and for all examples under quantity skew."""
    clients, labels = 5, (np.arange(4000) % 2).astype(np.int64)
    expected = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    by_class = [
        [labels[part].sum() / 2000 for part in partition("dirichlet", labels, clients, rng(seed), alpha)]
        for seed in range(400)
    ]
    by_size = [
        [len(part) / 4000 for part in partition("quantity", labels, clients, rng(seed), alpha)] for seed in range(400)
    ]
    np.testing.assert_allclose(np.var(by_class), expected, rtol=0.1)
    np.testing.assert_allclose(np.var(by_size), expected, rtol=0.1)


def holdings(parts: list[np.ndarray]) -> list[tuple[int, int]]:
    return [(int(LABELS[part].sum()), int((1 - LABELS[part]).sum())) for part in parts]


@pytest.mark.parametrize("count", [0, 2, 6, 8])
def test_one_class_sites_trade_in_pairs_and_the_others_keep_what_they_have(count):
    equal = partition("equal", LABELS, 8, rng(1), 0.5)
    traded = partition("one_class", LABELS, 8, rng(1), 0.5, count)
    assert all(map(np.array_equal, equal[count:], traded[count:])), "0 is equal itself"
    before, after = holdings(equal), holdings(traded)
    for first in range(0, count, 2):
        positives, negatives = (sum(pair) for pair in zip(*before[first : first + 2], strict=True))
        assert after[first : first + 2] == [(positives, 0), (0, negatives)]
        assert set(np.concatenate(equal[first : first + 2])) == set(np.concatenate(traded[first : first + 2]))
    assert sum(0 in held for held in after) == count
    assert sorted(np.concatenate(traded)) == list(range(len(LABELS)))


@pytest.mark.parametrize("count", [3, 18, -2])
def test_a_number_of_one_class_sites_that_cannot_be(count):
    line = f"one_class must be an even number from 0 to the number of clients, 16, got {count}"
    with pytest.raises(UserError, match=line):
        Sites(partition="one_class", one_class=count)
    with pytest.raises(UserError, match=line):
        digits(partition="one_class", one_class=count)


def test_one_class_is_refused_where_it_says_nothing_and_where_there_is_nothing_to_trade():
    with pytest.raises(UserError, match='one_class = 4 is for partition = "one_class", not for "equal"'):
        Sites(one_class=4)
    with pytest.raises(UserError, match="clients 0 and 1 hold one class between them and cannot trade"):
        partition("one_class", np.zeros(8, np.int64), 4, rng(), 0.5, 2)


def test_digits_share_partitions_with_images():
    def held(**options):
        return [tuple(holding[:2]) for holding in digits(seed=3, **options).train.holdings()]

    equal, traded = held(partition="equal"), held(partition="one_class", one_class=4)
    assert held(partition="one_class") == equal
    assert traded[4:] == equal[4:]
    for first in (0, 2):
        positives, negatives = (sum(pair) for pair in zip(*equal[first : first + 2], strict=True))
        assert traded[first : first + 2] == [(positives, 0), (0, negatives)]
    assert max(map(sum, equal)) - min(map(sum, equal)) <= 1
    skewed = held(partition="dirichlet", alpha=0.1)
    assert skewed != held(partition="dirichlet", alpha=0.3)
    assert np.std([p / (p + n) for p, n in skewed]) > 3 * np.std([p / (p + n) for p, n in equal])
    test = [digits(seed=3, **options).test.x for options in ({"partition": "equal"}, {"partition": "dirichlet"})]
    assert torch.equal(*test), "the partition does not move what is held back"
    with pytest.raises(UserError, match="unknown partition 'dirichlett'; did you mean 'dirichlet'"):
        digits(partition="dirichlett")


def test_more_clients_than_examples():
    with pytest.raises(UserError, match="there are 601 clients for only 600 training examples"):
        partition("equal", LABELS, 601, rng(), 0.5)


def test_what_is_held_back_is_apart_and_as_balanced():
    rest, held = hold_back(LABELS, 120, rng())
    assert len(held) == 120
    assert sorted([*rest, *held]) == list(range(600))
    assert LABELS[held].sum() == 20
    nothing = hold_back(LABELS, 0, rng())
    assert (len(nothing[0]), len(nothing[1])) == (600, 0)
    with pytest.raises(UserError, match=r"validation must lie in \[0, 600\), got 600"):
        hold_back(LABELS, 600, rng())


@pytest.mark.parametrize(
    ("ratio", "positives", "negatives"),
    [(0.1, 50, 500), (0.2, 100, 500), (1.0, 100, 100), (2.0, 100, 50), (0, 100, 500)],
)
def test_the_class_there_is_too_much_of_is_thinned_out(ratio, positives, negatives):
    kept = imbalance(np.arange(600), LABELS, ratio, rng())
    assert (LABELS[kept].sum(), (1 - LABELS[kept]).sum()) == (positives, negatives)
    assert len(set(kept)) == len(kept)


def test_the_flipped_share_is_exact_in_both_classes():
    wrong = corrupt(LABELS, 0.2, rng())
    assert (wrong != LABELS)[LABELS == 1].sum() == 20
    assert (wrong != LABELS)[LABELS == 0].sum() == 100
    assert np.array_equal(corrupt(LABELS, 0, rng()), LABELS)
    assert np.array_equal(corrupt(LABELS, 1, rng()), 1 - LABELS)


def photographs() -> Examples:
    return Examples(torch.full((600, 3, 8, 8), 127, dtype=torch.uint8), torch.from_numpy(LABELS)[:, None])


def numbered() -> Examples:
    """Images that can be told apart: the first two bytes are their number."""
    found = photographs()
    found.x[:, 0, 0, 0], found.x[:, 0, 0, 1] = torch.arange(600) // 256, torch.arange(600) % 256
    return found


def numbers(found: Examples) -> torch.Tensor:
    x = found.x[torch.from_numpy(np.concatenate(found.parts))]
    return x[:, 0, 0, 0].long() * 256 + x[:, 0, 0, 1]


def test_a_setting_does_not_move_what_another_draws():
    plain, corrupted, noisy = (
        Sites(**options).share_out(numbered(), None, None).train
        for options in ({}, {"flipped": 0.2}, {"site_noise": 0.04, "crop": 2})
    )
    assert sorted(numbers(plain).tolist()) == list(range(600))
    for other in (corrupted, noisy):
        assert torch.equal(plain.x, other.x), "each site holds the same images"
        assert all(map(np.array_equal, plain.parts, other.parts))
    assert torch.equal(plain.y, noisy.y)
    assert int((plain.y != corrupted.y).sum()) == 120
    assert plain.codes == 1
    elsewhere = Sites(flipped=0.2, partition="dirichlet").share_out(numbered(), None, None).train
    assert not torch.equal(numbers(elsewhere), numbers(corrupted))
    assert torch.equal(corrupted.y, elsewhere.y), "rows stand where they stood"


def test_site_noise_has_the_papers_means_and_deviation():
    train = Sites(site_noise=0.04).share_out(photographs(), None, None).train
    codes = rng().integers(BANK, size=600)
    for site in (0, 8, 15):
        indices = torch.from_numpy(train.parts[site])
        pixels = train.fetch(indices, torch.from_numpy(codes[: len(indices)]))
        seen = 2 * (pixels - 127 / 255)  # as of pixels in [-1, 1]
        assert float(seen.mean()) == pytest.approx(-0.08 + 0.01 * site, abs=0.01)
        assert float(seen.std()) == pytest.approx(0.04, rel=0.05)
    assert torch.equal(train.fetch(torch.tensor([0])), torch.full((1, 3, 8, 8), 127 / 255)), "not in evaluation"
    many = Sites(clients=20, site_noise=0.04).augment().site_means
    assert (many[16], many[17], max(many)) == (0.04, -0.04, 0.04)


def test_only_the_first_sites_may_take_part():
    whole, few = (Sites(site_noise=0.04, present=n).share_out(numbered(), None, None).train for n in (0, 3))
    assert [len(part) for part in few.parts] == [len(part) for part in whole.parts[:3]]
    assert len(few) == sum(len(part) for part in few.parts), "nothing of the others is left"
    for mine, theirs in zip(few.parts, whole.parts, strict=False):
        a, b = torch.from_numpy(mine), torch.from_numpy(theirs)
        assert torch.equal(few.y[a], whole.y[b])
        codes = torch.ones(len(a), dtype=torch.int64)
        assert torch.equal(few.fetch(a, codes), whole.fetch(b, codes)), "the same images, mean and noise"
    with pytest.raises(UserError, match="present must lie between 0"):
        Sites(clients=4, present=5).share_out(photographs(), None, None)


def test_digits_everywhere_are_the_same_images_at_every_site():
    usual, found = digits(clients=3, shift=0.0, noise=0.0), digits(clients=3, shift=0.0, noise=0.0, everywhere=True)
    assert torch.equal(usual.train.fetch(torch.arange(50)), found.train.fetch(torch.arange(50)))
    for before, split in ((usual.validation, found.validation), (usual.test, found.test)):
        assert np.array_equal(split.site, np.repeat(np.arange(3), len(before.y)))
        for site in range(3):
            assert torch.equal(split.x[split.site == site], before.x)
            assert torch.equal(split.y[split.site == site], before.y)

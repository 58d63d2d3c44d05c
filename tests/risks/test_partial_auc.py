"""Partial AUC where single precision would not do, and the normalised two-way form."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fedxl.risks import Entry, partial_auc, two_way_partial_auc

NAN = float("nan")


def entries(a: Tensor, b: Tensor) -> tuple[Entry, Entry]:
    """Scores of positives and of negatives."""
    return Entry(a, ()), Entry(b, torch.zeros_like(b))


def raw_scores(spread: float, seed: int) -> tuple[Tensor, Tensor]:
    """Of positives and of negatives, in single precision."""
    h = spread * torch.rand(200, generator=torch.Generator().manual_seed(seed))
    return h[:50], h[50:]


def exact_couplings(a: Tensor, b: Tensor, lam: float) -> Tensor:
    """|S2| times the softmax of l / lam over the negatives, in double precision."""
    l = torch.relu(1 - (a.double()[:, None] - b.double()[None])) ** 2
    return len(b) * torch.softmax(l / lam, 1)


@pytest.mark.parametrize("spread", [1, 10, 100, 1000, 3333])
@pytest.mark.parametrize("lam", [1.0, 0.1])
def test_couplings_of_raw_scores_sum_to_the_number_of_negatives(lam, spread):
    risk = partial_auc(lam=lam, scores="raw")
    for seed in range(5):
        a, b = raw_scores(spread, seed)
        u = risk.blend(torch.full((50,), NAN), risk.inner(*entries(a, b)), gamma=1.0)
        # S2 in three blocks, as steps see it: no block's own sum could put a wrong u right.
        c = torch.cat([risk.coupling(risk.pairs(*entries(a, part))[0], u) for part in b.split(50)], 1)
        torch.testing.assert_close(c.sum(1), torch.full((50,), 150.0, dtype=c.dtype), rtol=1e-6, atol=0)
        torch.testing.assert_close(c, exact_couplings(a, b, lam), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("lam", [1.0, 0.1])
def test_blended_estimates_of_raw_scores_are_as_precise(lam):
    """Two halves of S2, blended with gamma = 1/2, are the mean over S2; blending that in again changes nothing."""
    risk = partial_auc(lam=lam, scores="raw")
    a, b = raw_scores(3333, seed=0)
    first, second = (risk.inner(*entries(a, half)) for half in (b[:75], b[75:]))
    u = risk.blend(first, second, gamma=0.5)
    for _ in range(30):
        u = risk.blend(u, risk.inner(*entries(a, b)), gamma=0.1)
    c = risk.coupling(risk.pairs(*entries(a, b))[0], u)
    torch.testing.assert_close(c, exact_couplings(a, b, lam), rtol=1e-5, atol=1e-9)


def test_bounded_scores_keep_the_precision_of_the_model():
    a, b = raw_scores(1, seed=0)
    for risk in (partial_auc(), two_way_partial_auc()):
        l, back = risk.pairs(*entries(a, b))
        u = risk.estimate(l)
        assert {l.dtype, u.dtype, risk.pair_weights(l, u).dtype, risk.dtype(a.dtype)} == {torch.float32}
    raw = partial_auc(scores="raw")
    l, back = raw.pairs(*entries(a, b))
    assert l.dtype == raw.inner(*entries(a, b)).dtype == raw.dtype(a.dtype) == torch.float64
    assert {gradient.dtype for gradient in back(raw.pair_weights(l, raw.estimate(l)))} == {torch.float32}


def test_two_way_gradient_is_of_order_one_where_all_scores_are_equal():
    """dl/da is -2 there, and the emphases have mean 1. The plain form is exp(1 / 0.05) / 0.05 times that."""
    sizes = {}
    for normalised in (True, False):
        risk = two_way_partial_auc(lam=0.05, lam_outer=0.05, normalised=normalised)
        a, b = torch.full((8,), 0.5), torch.full((9,), 0.5)
        l, back = risk.pairs(*entries(a, b))
        da, db = back(risk.pair_weights(l, risk.estimate(l)))
        torch.testing.assert_close(da.sum(), -db.sum())
        sizes[normalised] = float(db.sum())
    assert sizes[True] == pytest.approx(2, rel=1e-5)
    assert sizes[False] == pytest.approx(2 * math.exp(20) / 0.05, rel=1e-4)


@pytest.mark.parametrize("lam_outer", [1.0, 0.05])
def test_two_way_gradient_of_large_raw_scores_is_finite(lam_outer):
    """Single precision, also where the sample of u is far off, as it is after a great leap of the scores."""
    risk = two_way_partial_auc(lam=0.05, lam_outer=lam_outer, scores="raw")
    a, b = torch.tensor([-1e4, 1e4, 0.0]), torch.tensor([1e4, -1e4, 3.0, 0.0])
    labels = torch.tensor([1, 1, 1, 0, 0, 0, 0])
    l, back = risk.pairs(*entries(a, b))
    u = risk.estimate(l)
    da, db = back(risk.pair_weights(l, u))
    assert float(da[0]) == pytest.approx(-2e4 - 2e4, rel=1e-3), "the hardest pair holds all of the weight"
    assert da.isfinite().all()
    assert db.isfinite().all()
    assert math.isfinite(risk.value(torch.cat((a, b)), labels))
    for sample in (torch.zeros(3).double(), torch.full((3,), 8e9).double()):
        for estimate in (u, torch.zeros_like(u)):
            assert all(gradient.isfinite().all() for gradient in back(risk.pair_weights(l, estimate, sample=sample)))


def emphases_by_hand(u: list[float], sample: list[float], power: float) -> list[float]:
    """Row i against the sample, in which it stands for entry i."""
    found = []
    for i, own in enumerate(u):
        among = [*sample[:i], own, *sample[i + 1 :]]
        found.append(math.exp(power * own) / (sum(math.exp(power * v) for v in among) / len(among)))
    return found


def test_emphasis_is_taken_against_a_sample():
    risk = two_way_partial_auc(lam=0.5, lam_outer=0.2)
    u, sample = [0.3, 1.2, -0.1], [0.7, 0.2, 2.0]
    both = torch.tensor([u, sample], dtype=torch.float64)
    found = risk.emphasis(both, both[1])
    for row, values in zip(found.tolist(), (u, sample), strict=True):
        assert row == pytest.approx(emphases_by_hand(values, sample, 2.5), rel=1e-12)
    torch.testing.assert_close(found[1], risk.emphasis(both[1]), rtol=0, atol=1e-12)
    assert float(found.max()) <= 3
    # Rows that mean nothing, as at a site without positives, change no other row.
    odd = torch.stack((torch.tensor([NAN, 1e9, -1e9], dtype=torch.float64), both[1]))
    assert torch.equal(risk.emphasis(odd, both[1])[1], found[1])


def test_more_rows_than_the_sample_has():
    risk = two_way_partial_auc(lam=0.5, lam_outer=0.2)
    u, sample = torch.tensor([0.3, 1.2, -0.1]), torch.tensor([0.7, 0.2])
    expected = [*emphases_by_hand([0.3, 1.2], [0.7, 0.2], 2.5), *emphases_by_hand([-0.1], [0.7, 0.2], 2.5)]
    assert risk.emphasis(u, sample).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("lam_outer", [1.0, 0.05])
def test_the_active_and_the_passive_half_pull_alike(lam_outer):
    """Over all draws from S1 an active row has mean emphasis 1, as passive rows have in every draw.

    And example by example both have the same expectation, so that neither half outweighs the other.
    """
    risk = two_way_partial_auc(lam=lam_outer, lam_outer=lam_outer)
    population = torch.tensor([0.1, 0.9, 2.5], dtype=torch.float64) / lam_outer
    active, passive = torch.zeros(3).double(), torch.zeros(3).double()
    draws = list(itertools.product(range(3), repeat=3))
    for i, *others in draws:
        sample = population[others]
        active[i] += risk.emphasis(population[[i]], sample)[0]
        passive.index_add_(0, torch.tensor(others), risk.emphasis(sample) / 2)
    torch.testing.assert_close(active, passive, rtol=0, atol=1e-9)
    assert float(active.sum()) / len(draws) == pytest.approx(1, abs=1e-12)


def test_a_larger_sample_has_less_bias():
    """The expected emphasis of every example, against the exact one."""
    risk = two_way_partial_auc(lam=0.5, lam_outer=0.5)
    generator = torch.Generator().manual_seed(0)
    population = 3 * torch.rand(40, generator=generator, dtype=torch.float64)
    exact = risk.emphasis(population)
    errors = []
    for size in (2, 8, 32):
        draws = torch.randint(40, (4000, size), generator=generator)
        rows = population.expand(4000, 40)[..., None]  # [draws, examples, 1]: each example is a block of one row
        found = risk.emphasis(rows, population[draws].unsqueeze(1)).mean(0).squeeze(-1)
        errors.append(float((found - exact).abs().mean()))
    assert errors[0] > 2 * errors[1] > 4 * errors[2]

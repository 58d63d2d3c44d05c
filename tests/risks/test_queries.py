"""Risks of queries against the textbook formulas in plain loops, autograd of the whole F, and scikit-learn's NDCG."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq, minimize_scalar
from scipy.special import expit
from sklearn.metrics import ndcg_score

from fedxl.errors import UserError
from fedxl.risks import QUERY_RISKS, QueryRisk, listwise, ndcg
from fedxl.risks.queries import ItemConstants, gains, in_queries
from fedxl.risks.top import EPS, TopRisk
from tests.risks.test_risks import PLAIN

SIZES = (7, 1, 12, 4)


def lists(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, grades and queries in a mixed order; the last query has no relevant item."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.repeat_interleave(torch.tensor([30, 4, 17, 8]), torch.tensor(SIZES))
    grades = torch.randint(0, 4, (len(query),), generator=generator)
    grades[query == 4], grades[query == 8] = 2, 0
    order = torch.randperm(len(query), generator=generator)
    h = torch.randn(len(query), generator=generator, dtype=torch.float64)
    return h[order], grades[order], query[order]


def by_query(h, grades, query):
    for name in sorted(set(query.tolist())):
        some = query == name
        pairs = list(zip(h[some].tolist(), grades[some].tolist(), strict=True))
        if any(y for _, y in pairs):
            yield pairs


def plain_threshold(scores, top, tau1, tau2):
    """The minimiser of K-SONG's problem: where its derivative is 0, checked against a minimiser of the function."""
    scores, p = np.array(scores), (min(top, len(scores) - 1) + EPS) / len(scores)

    def objective(x):
        return p * x + tau2 / 2 * x**2 + np.mean(tau1 * np.logaddexp(0, (scores - x) / tau1))

    def derivative(x):
        return p + tau2 * x - np.mean(expit((scores - x) / tau1))

    found = brentq(derivative, scores.min() - 50, scores.max() + 50, xtol=1e-14)
    around = (found - 1, found + 0.7)
    assert minimize_scalar(objective, bracket=around).x == pytest.approx(found, abs=1e-5)
    return found


def plain_ndcg(
    h, grades, query, surrogate="psm", t=1.0, top=0, softness=1.0, form="threshold", tau1=1.0, tau2=1e-4, psi_at=None
):
    """-NDCG with smooth ranks, in plain loops; psi_at: the scores that psi is of, if others."""
    loss, total = PLAIN[surrogate], []
    selecting = by_query(h if psi_at is None else psi_at, grades, query)
    for pairs, of in zip(by_query(h, grades, query), selecting, strict=True):
        best = sorted((2**y - 1 for _, y in pairs), reverse=True)[: top or None]
        ideal = sum(gain / math.log2(place + 2) for place, gain in enumerate(best))
        found = 0.0
        counts = top and form == "threshold" and top < len(pairs)
        limit = plain_threshold([score for score, _ in of], top, tau1, tau2) if counts else -math.inf
        for (own, y), (selected, _) in zip(pairs, of, strict=True):
            rank = 1 - loss(0.0) + sum(loss((own - other) / t) for other, _ in pairs)
            kept = float(expit((selected - limit) / softness))
            if top and form == "rank":
                kept = 1 / (1 + math.exp((rank - top - 0.5) / softness))
            found += (2**y - 1) / ideal * kept / math.log2(1 + rank)
        total.append(-found)
    return sum(total) / len(total)


def plain_listwise(h, grades, query, t=1.0):
    """The cross entropy of the gains and the softmax of the scores."""
    total = []
    for pairs in by_query(h, grades, query):
        whole = sum(2**y - 1 for _, y in pairs)
        partition = sum(math.exp(own / t) for own, _ in pairs)
        total.append(-sum((2**y - 1) / whole * math.log(math.exp(own / t) / partition) for own, y in pairs))
    return sum(total) / len(total)


CASES = [
    ("ndcg", {}, plain_ndcg),
    ("ndcg", {"surrogate": "squared_hinge", "temperature": 0.3}, lambda *a: plain_ndcg(*a, "squared_hinge", 0.3)),
    ("ndcg", {"surrogate": "logistic"}, lambda *a: plain_ndcg(*a, "logistic")),
    (
        "ndcg",
        {"top": 3, "softness": 0.5, "top_form": "rank"},
        lambda *a: plain_ndcg(*a, top=3, softness=0.5, form="rank"),
    ),
    ("ndcg", {"top": 3}, lambda *a: plain_ndcg(*a, top=3)),
    (
        "ndcg",
        {"top": 5, "softness": 0.3, "tau1": 0.4, "tau2": 0.05, "surrogate": "squared_hinge"},
        lambda *a: plain_ndcg(*a, "squared_hinge", top=5, softness=0.3, tau1=0.4, tau2=0.05),
    ),
    ("ndcg", {"top": 3, "top_form": "weight"}, lambda *a: plain_ndcg(*a, top=3)),
    ("listwise", {}, plain_listwise),
    ("listwise", {"temperature": 2.0}, lambda *a: plain_listwise(*a, 2.0)),
]
every_risk = pytest.mark.parametrize(("name", "options", "reference"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])


def test_every_risk_is_tested():
    assert {case[0] for case in CASES} == set(QUERY_RISKS)


@every_risk
def test_value_is_the_textbook_formula(name, options, reference):
    h, grades, query = lists()
    risk = QUERY_RISKS[name](**options)
    assert float(risk.value(h, grades, query)) == pytest.approx(reference(h, grades, query), abs=1e-12)
    none = risk.value(h, torch.zeros_like(grades), query)
    assert torch.isnan(none), "without a relevant item there is no risk to speak of"


@every_risk
def test_weights_of_pairs_give_the_gradient_of_the_risk(name, options, reference):
    """Exact u, all items of a query in a block: the mean over blocks of the pull's gradients is autograd's of F."""
    h, grades, query = lists()
    risk = QUERY_RISKS[name](**options)
    assert isinstance(risk, QueryRisk)
    leaf = h.clone().requires_grad_()
    (expected,) = torch.autograd.grad(risk.value(leaf, grades, query), leaf)
    items, actual = risk.constants(grades, query), torch.zeros_like(h)
    blocks = [members for members in in_queries(query) if bool(grades[members].any())]
    for members in blocks:
        first = members[grades[members] > 0]
        l, back = risk.pairs(h[first][None], h[members][None], torch.zeros(1, len(members)))
        da, db = back(risk.item_weights(l, risk.estimate(l), ItemConstants(*(leaf[first][None] for leaf in items))))
        actual[first] += da[0] / len(blocks)
        actual[members] += db[0] / len(blocks)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_sharp_ranks_give_the_ndcg_of_scikit_learn():
    for seed in range(3):
        h, grades, query = lists(seed)
        expected = [
            ndcg_score(gains(grades[m])[None].numpy(), h[m][None].numpy())
            for m in in_queries(query)
            if bool(grades[m].any()) and len(m) > 1
        ]
        expected.append(1.0)  # of the query with one item, which scikit-learn refuses
        sharp = ndcg(surrogate="psm", temperature=1e-6)
        assert float(sharp.value(h, grades, query)) == pytest.approx(-np.mean(expected), abs=1e-9)


@pytest.mark.parametrize("form", ["rank", "threshold"])
def test_sharp_ranks_of_the_first_places_give_ndcg_at_k(form):
    for seed in range(1, 4):
        h, grades, query = lists(seed)
        members = max(in_queries(query), key=len)
        expected = ndcg_score(gains(grades[members])[None].numpy(), h[members][None].numpy(), k=4)
        softness = {"rank": 1e-3, "threshold": 1e-5}[form]
        sharp = ndcg(surrogate="psm", temperature=1e-6, top=4, softness=softness, top_form=form, tau1=1e-3, tau2=1e-6)
        assert sharp.metric == "ndcg@4"
        found = sharp.value(h[members], grades[members], query[members])
        assert float(found) == pytest.approx(-expected, abs=1e-9)


@pytest.mark.parametrize("form", ["threshold", "weight"])
def test_the_gradient_through_the_threshold_is_that_of_finite_differences(form):
    """The hypergradient: SciPy solves for the threshold anew after every change of a score; a weight stays."""
    h, grades, query = lists(2)
    options = {"top": 3, "softness": 0.4, "tau1": 0.3, "tau2": 0.03}
    leaf = h.clone().requires_grad_()
    (found,) = torch.autograd.grad(ndcg(**options, top_form=form).value(leaf, grades, query), leaf)
    fixed = h if form == "weight" else None
    step, expected = 1e-5, torch.zeros_like(h)
    for at in range(len(h)):
        ends = [
            plain_ndcg(h + sign * step * (torch.arange(len(h)) == at), grades, query, **options, psi_at=fixed)
            for sign in (1, -1)
        ]
        expected[at] = (ends[0] - ends[1]) / (2 * step)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
    by_the_other = ndcg(**options, top_form="weight" if form == "threshold" else "threshold")
    (other,) = torch.autograd.grad(by_the_other.value(leaf, grades, query), leaf)
    assert float((other - expected).abs().max()) > 1e-2, "the two forms differ"


def test_running_thresholds_go_to_the_exact_ones_however_small_a_batch():
    """Blocks of 4 of 40 scores, whose own thresholds lie elsewhere; 400 runs at once, items that come in later."""
    random = torch.Generator().manual_seed(0)
    risk = ndcg(top=8, queries=1, tau1=0.1)
    assert isinstance(risk, TopRisk)
    a, b = (torch.randn(n, generator=random, dtype=torch.float64) for n in (3, 40))
    pairs = risk.losses(a, b, torch.zeros(40, dtype=torch.float64))
    exact = risk.estimate(pairs)
    limit = plain_threshold(b.tolist(), 8, 0.1, 1e-4)
    torch.testing.assert_close(exact[:, 1] + a, torch.full_like(a, limit), rtol=0, atol=1e-9)
    u = torch.full((400, 3, 3), math.nan, dtype=torch.float64)
    size, seen = torch.full((400, 3), 40.0, dtype=torch.float64), []
    for step in range(1500):
        some = torch.randint(40, (400, 4), generator=random)
        u = risk.follow(u, pairs[:, some].transpose(0, 1), size, 0.3 if step < 100 else 0.01)
        if step == 0:
            first = float((u[:, :, 1] + a).mean())
            u[:, 1] = math.nan  # as if it had not been in the batch
        if step >= 1000:
            seen.append(u)
    settled = torch.stack(seen).flatten(0, 1)  # [runs, 3, 3]
    assert abs(first - limit) > 0.05, "thresholds of 4 scores are off on average"
    share = risk.above(b.expand(len(settled), 40), settled[:, 0, 1] + a[0]).mean()
    assert float(share) == pytest.approx((8 + EPS) / 40, abs=1e-3)
    torch.testing.assert_close(settled.mean(0)[:, :2], exact[:, :2], rtol=0, atol=0.01)
    torch.testing.assert_close(settled.mean(0)[:, 2], exact[:, 2], rtol=0.15, atol=0)


def test_a_query_with_no_more_than_k_items_is_selected_whole():
    h, grades, query = lists()
    short, plain = ndcg(top=12), ndcg()
    assert float(short.value(h, grades, query)) == pytest.approx(float(plain.value(h, grades, query)), abs=1e-12)
    one = torch.zeros(1, 1, 1, 3, dtype=torch.float64)
    items = ItemConstants(torch.ones(1, 1), torch.full((1, 1), 12.0))
    u = torch.tensor([[[0.5, 0.3, 1.0]]], dtype=torch.float64)
    assert short.item_weights(one, u, items)[..., 1:].abs().max() == 0, "psi is 1 and moves with nothing"
    larger = ItemConstants(torch.ones(1, 1), torch.full((1, 1), 13.0))
    assert short.item_weights(one, u, larger)[..., 1:].abs().min() > 0


def test_a_stale_curvature_does_not_let_an_item_move_the_threshold_farther_than_itself():
    risk, items = ndcg(top=2, queries=1, tau1=0.1), ItemConstants(torch.ones(1, 1), torch.full((1, 1), 5.0))
    l = risk.losses(torch.zeros(1, 1), torch.tensor([[0.0, 0.1, 9.0]]), torch.zeros(1, 3))
    c = risk.item_weights(l, torch.tensor([[[0.5, 0.0, 1e-9]]]), items)
    _, of_gap, alone = c[0, 0].unbind(-1)
    torch.testing.assert_close(-of_gap / alone, torch.tensor([5.0, 5.0, 5.0 * float(of_gap[2] / of_gap[0])]))
    assert bool(c.isfinite().all())


def test_an_estimate_below_the_first_place_counts_as_the_first_place():
    risk = ndcg(surrogate="squared_hinge")
    assert float(risk.outer(torch.tensor(0.0))) == -1.0
    assert float(risk.slope(torch.tensor(0.0))) == float(risk.slope(torch.tensor(1.0))) > 0


def test_a_stale_estimate_does_not_let_a_pair_outweigh_its_query():
    """With u far too small, c is the size of the query at most: as if one pair held all the mass, and u were g."""
    risk, items = listwise(queries=1), ItemConstants(torch.ones(1, 1), torch.full((1, 1), 5.0))
    l = torch.tensor([[[0.0, 3.0, 900.0]]])
    c = risk.item_weights(l, torch.full((1, 1), -50.0), items) * l.numel()
    torch.testing.assert_close(c, torch.full_like(l, 5.0))


def test_options_that_cannot_be():
    for build, what in (
        (lambda: ndcg(temperature=0.0), "temperature must be positive"),
        (lambda: ndcg(softness=-1.0), "softness must be positive"),
        (lambda: ndcg(top=-1), "top must not be negative"),
        (lambda: ndcg(top=3, tau1=0.0), "tau1 must be positive"),
        (lambda: ndcg(top=3, tau2=-1e-3), "tau2 must be positive"),
        (lambda: ndcg(top=3, top_form="score"), "top_form"),
        (lambda: ndcg(surrogate="hing"), "surrogate"),
        (lambda: listwise(queries=0), "queries must lie between 1"),
        (lambda: listwise(temperature=-1.0), "temperature must be positive"),
    ):
        with pytest.raises(UserError, match=what):
            build()


def test_a_running_threshold_follows_the_level_of_all_scores():
    """Which no risk of pairs holds: a threshold that stayed behind would select all items, or none."""
    risk, none = ndcg(top=2, tau2=1e-9, queries=1), torch.zeros(1, 6, dtype=torch.float64)
    a, b = (torch.randn(1, n, generator=torch.Generator().manual_seed(5), dtype=torch.float64) for n in (2, 6))
    u, size = risk.estimate(risk.losses(a, b, none)), torch.full((1, 2), 30.0, dtype=torch.float64)
    here, there = (risk.follow(u, risk.losses(a + by, b + by, none), size, 0.1) for by in (0.0, 40.0))
    torch.testing.assert_close(there, here, rtol=0, atol=1e-6)
    assert float((here - u).abs().max()) > 1e-2


def test_no_site_may_send_a_curvature_by_which_gradients_of_others_are_no_numbers():
    """Honest ones are tau2 at least."""
    risk = ndcg(top=3, queries=1)
    low, high = risk.inner_range()
    assert 0.99 * risk.tau2 < low[2] <= risk.tau2 < high[2]
    l = risk.losses(torch.tensor([[0.5, 0.1]]).double(), torch.linspace(-1, 1, 8).double()[None], torch.zeros(1, 8))
    far = torch.stack((torch.full((1, 2), 0.5), torch.full((1, 2), 500.0), low[2].expand(1, 2)), -1).double()
    items = ItemConstants(torch.ones(1, 2).double(), torch.full((1, 2), 8.0).double())
    assert risk.item_weights(l, far, items).isfinite().all()

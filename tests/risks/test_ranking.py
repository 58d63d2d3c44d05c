"""Risks of queries against the textbook formulas in plain loops, autograd of the whole F, and scikit-learn's NDCG."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score

from fedxl.algorithms.step import own_pull
from fedxl.errors import UserError
from fedxl.risks import QUERY_RISKS, Entry, XRisk, listwise, ndcg
from fedxl.risks.ranking import Item, Relevant, gains, in_queries
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


def plain_ndcg(h, grades, query, surrogate="psm", t=1.0, top=0, softness=1.0):
    """-NDCG with smooth ranks, in plain loops."""
    loss, total = PLAIN[surrogate], []
    for pairs in by_query(h, grades, query):
        best = sorted((2**y - 1 for _, y in pairs), reverse=True)[: top or None]
        ideal = sum(gain / math.log2(place + 2) for place, gain in enumerate(best))
        found = 0.0
        for own, y in pairs:
            rank = 1 - loss(0.0) + sum(loss((own - other) / t) for other, _ in pairs)
            kept = 1 / (1 + math.exp((rank - top - 0.5) / softness)) if top else 1.0
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
    ("ndcg", {"top": 3}, lambda *a: plain_ndcg(*a, top=3)),
    (
        "ndcg",
        {"top": 5, "softness": 0.3, "surrogate": "squared_hinge"},
        lambda *a: plain_ndcg(*a, "squared_hinge", top=5, softness=0.3),
    ),
    ("listwise", {}, plain_listwise),
    ("listwise", {"temperature": 2.0}, lambda *a: plain_listwise(*a, 2.0)),
]
every_risk = pytest.mark.parametrize(("name", "options", "reference"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])


def test_every_risk_is_tested():
    assert {case[0] for case in CASES} == set(QUERY_RISKS)


@pytest.mark.parametrize("block", [2**19, 10], ids="block={}".format)
@every_risk
def test_value_is_the_textbook_formula(monkeypatch, block, name, options, reference):
    monkeypatch.setattr(XRisk.inner, "__defaults__", (block,))
    h, grades, query = lists()
    risk = QUERY_RISKS[name](**options)
    assert float(risk.value(h, grades, query)) == pytest.approx(reference(h, grades, query), abs=1e-12)
    none = risk.value(h, torch.zeros_like(grades), query)
    assert torch.isnan(none), "without a relevant item there is no risk to speak of"


@every_risk
def test_weights_of_pairs_give_the_gradient_of_the_risk(name, options, reference):
    """Exact u, all items of all queries in one block, in which only those of one query meet: autograd's of F."""
    h, grades, query = lists()
    risk = QUERY_RISKS[name](**options)
    leaf = h.clone().requires_grad_()
    (expected,) = torch.autograd.grad(risk.value(leaf, grades, query), leaf)
    first, one = torch.nonzero(grades > 0)[:, 0], torch.ones_like(h)
    weight, size = risk.pairing.constants(grades, query)
    a = Entry(h[first], Relevant(query[first], weight[first], size[first], one[first]))
    # The mean over relevant items of all queries becomes one over the queries, and over those of each.
    same = query[first, None] == query[first]
    force = weight[first] * len(first) / same.sum(1) / len(query[first].unique())
    unknown = torch.full_like(h[first], math.nan)
    da, db, _ = own_pull(risk, (a, Entry(h, Item(query, one))), unknown, 0.1, force[:, None])
    torch.testing.assert_close(db.index_add(0, first, da), expected, rtol=0, atol=1e-12)


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


def test_sharp_ranks_of_the_first_places_give_ndcg_at_k():
    for seed in range(1, 4):
        h, grades, query = lists(seed)
        members = max(in_queries(query), key=len)
        expected = ndcg_score(gains(grades[members])[None].numpy(), h[members][None].numpy(), k=4)
        sharp = ndcg(surrogate="psm", temperature=1e-6, top=4, softness=1e-3)
        assert sharp.metric == "ndcg@4"
        found = sharp.value(h[members], grades[members], query[members])
        assert float(found) == pytest.approx(-expected, abs=1e-9)


def test_an_estimate_below_the_first_place_counts_as_the_first_place():
    risk = ndcg(surrogate="squared_hinge")
    assert float(risk.outer(torch.tensor(0.0))) == -1.0
    assert float(risk.slope(torch.tensor(0.0))) == float(risk.slope(torch.tensor(1.0))) > 0


def test_options_that_cannot_be():
    for build, what in (
        (lambda: ndcg(temperature=0.0), "temperature must be positive"),
        (lambda: ndcg(softness=-1.0), "softness must be positive"),
        (lambda: ndcg(top=-1), "top must not be negative"),
        (lambda: ndcg(surrogate="hing"), "surrogate"),
        (lambda: listwise(queries=0), "queries must lie between 1"),
        (lambda: listwise(temperature=-1.0), "temperature must be positive"),
    ):
        with pytest.raises(UserError, match=what):
            build()

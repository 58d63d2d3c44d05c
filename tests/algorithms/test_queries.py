"""Pairs within queries that lie at several clients: the clients' parts add up to the gradient of the whole risk."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedxl import FeDXL2, UserError, tree
from fedxl.algorithms.pool import Pool, S2Scores
from fedxl.algorithms.protocol import Items, Share
from fedxl.algorithms.queries import (
    QueryPassive,
    check_uploads,
    empty_pool,
    estimated_within,
    merge_latest,
    own_pull,
    pooled_pull,
    uploads,
)
from fedxl.data.federation import Federation
from fedxl.data.queries import from_queries, item_table, usable_queries
from fedxl.errors import RefusedError
from fedxl.risks import QueryRisk, listwise, ndcg

RISKS = {
    "ndcg": ndcg(),
    "song": ndcg(surrogate="squared_hinge", top=3, top_form="rank"),
    "k_song": ndcg(top=2, tau1=0.5, tau2=0.01, softness=0.5),
    "k_song_weight": ndcg(surrogate="squared_hinge", top=2, top_form="weight"),
    "listwise": listwise(),
}
every_risk = pytest.mark.parametrize("name", list(RISKS))


def scattered(seed: int = 0) -> Federation:
    """Three queries over three clients: all over, at two, and without a relevant item; one client has none either."""
    generator = torch.Generator().manual_seed(seed)
    grades = [([2, 0, 1], [0, 0], [0]), ([1, 0], [3, 0, 0, 1], []), ([0], [0], [0, 0])]
    clients = []
    for client in range(3):
        y = torch.tensor([grade for query in grades for grade in query[client]])
        query = torch.tensor([number for number, query in enumerate(grades) for _ in query[client]])
        clients.append((torch.randn(len(y), 3, generator=generator, dtype=torch.float64), y, 10 + query))
    return from_queries(clients).train


def tiled(values: torch.Tensor, count: int) -> torch.Tensor:
    assert count % len(values) == 0
    return values.repeat(count // len(values))


def gathered(items: Items, at: torch.Tensor) -> Items:
    return tree.map(lambda leaf: leaf[at], items)


@every_risk
def test_parts_of_all_clients_add_up_to_the_gradient_of_the_risk(name):
    """With exact u and passive scores, whole lists on both sides: to 1e-12."""
    federation, base = scattered(), RISKS[name]
    assert isinstance(base, QueryRisk)
    source, items = federation.source, item_table(base, federation, own_lists=False)
    h = torch.randn(len(source.labels), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaf = h.clone().requires_grad_()
    (expected,) = torch.autograd.grad(base.value(leaf, source.labels, source.queries), leaf)
    learned_from = 2  # the third query has no relevant item
    found, size1, size2 = torch.zeros_like(h), 12, 36
    for part, queries in zip(federation.parts, usable_queries(federation, items), strict=True):
        risk = replace(base, queries=len(queries))
        own, theirs = [], []
        for query in queries:
            of = torch.from_numpy(np.flatnonzero(items.query.numpy() == query))
            held = of[torch.isin(of, torch.from_numpy(part))]
            sides = [which[source.labels[which] > 0] for which in (held, of)]
            own.append((tiled(sides[0] if len(sides[0]) else held, size1), tiled(held, size2)))
            theirs.append((tiled(sides[1], size1), tiled(of, size2)))
        (i, j), (k, l) = (map(torch.cat, zip(*side, strict=True)) for side in (own, theirs))
        exact = {}
        for query in queries:
            of = torch.from_numpy(np.flatnonzero(items.query.numpy() == query))
            exact |= dict(zip(of.tolist(), risk.inner(h[of], h[of], torch.zeros(len(of))), strict=True))
        u1, u2 = (torch.stack([exact[int(at)] for at in side]) for side in (i, k))
        one, two = torch.ones(len(k), dtype=torch.float64), torch.ones(len(l), dtype=torch.float64)
        passive = QueryPassive(h[k], u2, torch.stack((items.weight[k], items.size[k]), -1), one, h[l], two)
        force = torch.ones((), dtype=torch.float64)
        mine = gathered(items, torch.cat((i, j)))
        da, db, u = pooled_pull(risk, mine, passive, 1.0, (force, force), h[i], h[j], u1)
        torch.testing.assert_close(u, u1)
        # A client's gradient is a mean over its queries; weighted by their number it is a sum.
        found.index_add_(0, torch.cat((i, j)), torch.cat((da, db)) * len(queries) / learned_from)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@every_risk
def test_lists_of_their_own_give_each_clients_own_gradient(name):
    federation, base = scattered(), RISKS[name]
    assert isinstance(base, QueryRisk)
    source, items = federation.source, item_table(base, federation, own_lists=True)
    h = torch.randn(len(source.labels), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    part = torch.from_numpy(federation.parts[1])
    leaf = h[part].clone().requires_grad_()
    value = base.value(leaf, source.labels[part], source.queries[part])
    (expected,) = torch.autograd.grad(value, leaf)
    queries = usable_queries(federation, items)[1]
    assert queries.tolist() == [11], "of the first query it holds no relevant item, so there is nothing to learn"
    of = part[items.query[part] == 11]
    i, j = tiled(of[source.labels[of] > 0], 4), tiled(of, 8)
    risk, one = replace(base, queries=1), torch.ones((), dtype=torch.float64)
    before = torch.full((len(i), *risk.inner_shape), math.nan, dtype=torch.float64)
    if risk.thresholds:  # the first of which is a quantile of the batch
        before = risk.inner(h[i], h[of], torch.zeros(len(of), dtype=torch.float64))
    da, db, _ = own_pull(risk, gathered(items, torch.cat((i, j))), 0.1, one, h[i], h[j], before)
    found = torch.zeros_like(h).index_add_(0, torch.cat((i, j)), torch.cat((da, db)))
    torch.testing.assert_close(found[part], expected, rtol=0, atol=1e-12)


def test_a_query_that_the_pool_does_not_hold_is_left_out():
    """Nothing is pulled, an unknown u stays unknown, and such an item does not enter the pool."""
    risk = ndcg(queries=2)
    items = Items(torch.tensor([5, 5, 6, 6]), *(torch.ones(4, dtype=torch.float64) for _ in range(4)))
    a, unknown = torch.zeros(2, dtype=torch.float64), torch.full((2,), math.nan, dtype=torch.float64)
    none, some = torch.tensor([0.0, 1.0]).double(), torch.ones(2, dtype=torch.float64)
    passive = QueryPassive(a, a, torch.ones(2, 2, dtype=torch.float64), none, a, none)
    da, db, u = pooled_pull(risk, items, passive, 0.5, (some[0], some[0]), a, a + 0.5, unknown)
    assert da[0] == db[0] == 0
    assert da[1] != 0
    assert db[1] != 0
    assert u.isnan().tolist() == [True, False]
    share = Share(*(torch.tensor(1.0) for _ in range(5)))
    first, second = uploads(a[None], u[None], a[None], tree.map(lambda leaf: leaf[None], items), share)
    assert first.weight.tolist() == [0, 1]
    assert second.weight.tolist() == [1, 1]
    assert bool(first.u.isfinite().all())


def entries(query: list[int], owner: list[int], part: list[float], b: float) -> S2Scores:
    """One client's upload, as rows of it come."""
    scores = torch.full((1, len(query)), b)
    zero, number = torch.zeros(1, len(query)), torch.tensor([query])
    return S2Scores(scores, zero, torch.tensor([part]), zero.long(), torch.tensor([owner]).float(), number)


def test_the_pool_keeps_the_latest_scores_of_each_client_and_query():
    like = torch.zeros(1)
    pool = empty_pool(ndcg(), like).second
    pool = merge_latest(pool, entries([4, 4, 9], [0, 0, 0], [0.5, 0.5, 1.0], 1.0))
    assert pool.weight.tolist() == [0.25, 0.25, 1.0], "a query weighs as its client's part, however often it is read"
    pool = merge_latest(pool, entries([4, 7], [1, 1], [0.5, 0.0], 2.0))
    assert pool.query.tolist() == [4, 4, 9, 4], "what weighs nothing does not enter"
    pool = merge_latest(pool, entries([4], [0], [0.5], 3.0))
    got = sorted(zip(pool.query.tolist(), pool.owner.tolist(), pool.b.tolist(), pool.age.tolist(), strict=True))
    assert got == [(4, 0.0, 3.0, 0), (4, 1.0, 2.0, 1), (9, 0.0, 1.0, 2)]
    unchanged = merge_latest(pool, entries([4], [0], [0.0], 9.0))
    assert unchanged.b.tolist() == pool.b.tolist()


@every_risk
def test_the_servers_first_estimates_are_those_of_the_pooled_scores(name):
    """Entries count by their weight, as they are drawn; an item of a query without any b is left out."""
    risk, like = RISKS[name], torch.zeros(1, dtype=torch.float64)
    empty = empty_pool(risk, like)
    query1, query2 = torch.tensor([3, 8, 3]), torch.tensor([8, 8, 8, 1])
    a, b = torch.tensor([0.3, -0.2, 1.0]).double(), torch.tensor([0.1, 0.4, -1.0, 5.0]).double()
    weight = torch.tensor([0.25, 0.25, 0.5, 1.0]).double()
    u = empty.first.u.expand(3, *risk.inner_shape)
    constants = torch.tensor([1.0, 4.0]).double().expand(3, 2)
    first = empty.first._replace(a=a, u=u, weight=torch.ones(3).double(), query=query1, constants=constants)
    second = empty.second._replace(b=b, y=0 * b, weight=weight, query=query2)
    made = estimated_within(risk, Pool(first, second)).first
    assert made.weight.tolist() == [0, 1, 0]
    expected = risk.inner(a[1:2], torch.tensor([0.1, 0.4, -1.0, -1.0]).double(), torch.zeros(4).double())
    torch.testing.assert_close(made.u[1:2], expected)


def test_uploads_that_no_honest_client_sends_are_refused():
    share = Share(*(torch.tensor(1.0) for _ in range(5)))
    one = torch.ones(2)
    items = Items(torch.tensor([5, 5, 5, 5]), *(torch.ones(4) for _ in range(4)))
    first, second = uploads(one[None], one[None], one[None], tree.map(lambda leaf: leaf[None], items), share)
    for name, side in (("first", first), ("second", second)):
        check_uploads(name, side, 2, share.client)
        for wrong, count, told in (
            (side, 3, "are not 3"),
            (side._replace(weight=side.weight * 2), 2, "weights or ages"),
            (side._replace(age=side.age + 1), 2, "weights or ages"),
            (side._replace(owner=side.owner + 1), 2, "another client"),
        ):
            with pytest.raises(RefusedError, match=told):
                check_uploads(name, wrong, count, share.client)
    with pytest.raises(RefusedError, match="none that an item can have"):
        check_uploads("first", first._replace(constants=first.constants * torch.tensor([9.0, 1.0])), 2, share.client)


def test_settings_that_do_not_go_with_queries():
    for options in ({"pool_rounds": 2}, {"uploads": 3}, {"mix": 0.1}, {"pool_share": 0.5}, {"fresh": True}):
        with pytest.raises(UserError, match="with queries, the pool keeps"):
            FeDXL2(ndcg(), **options)
    with pytest.raises(UserError, match="must be multiples of queries = 4"):
        FeDXL2(ndcg()).reading(6, 8)

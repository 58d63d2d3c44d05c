"""The pool of scores: what it keeps, how much one client fills of it, whose u it holds, and sorted uploads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import vmap

from fedxl import UserError, auroc, average_precision, contrastive, ndcg, partial_auc, tree
from fedxl.algorithms import build
from fedxl.algorithms.checks import check_server
from fedxl.algorithms.pool import S2, Pool, Pooling, Scores, begin, cap, drop_unknown, estimate_u, merge, spread, thin
from fedxl.algorithms.server_rules import next_state
from fedxl.data.inputs import from_arrays
from fedxl.engine.executors import loop, vectorised
from fedxl.models import weights_of
from fedxl.risks.pairing import Entry, Share
from fedxl.risks.ranking import Item, Relevant
from tests.conftest import RAGGED, make_clients
from tests.running import engine_for, play


def entries(values: list[float], weight: float) -> S2:
    """What one client has sent, of which each entry has this weight."""
    b = torch.tensor([values])
    zero = torch.zeros_like(b)
    return S2(Entry(b, zero), torch.full_like(b, weight), zero.long(), zero)


def test_the_pool_keeps_so_many_rounds_and_drops_what_says_nothing():
    empty = tree.map(lambda leaf: leaf[0], entries([0.0], 0.0))
    one = merge(empty, entries([1.0, 2.0], 0.5), rounds=2)
    assert one.entry.score.tolist() == [1, 2], "the placeholder of weight 0 is gone"
    two = merge(one, entries([3.0], 0.5), rounds=2)
    assert two.entry.score.tolist() == [1, 2, 3]
    assert merge(two, entries([4.0], 0.5), rounds=2).entry.score.tolist() == [3, 4]
    assert merge(two, entries([4.0], 0.5), rounds=1).entry.score.tolist() == [4]
    for rounds in (1, 2):
        kept = merge(two, entries([9.0], 0.0), rounds)
        assert kept.entry.score.tolist() == [1, 2, 3], "nothing new: as it was"
        assert kept.age.tolist() == [2, 2, 1], "but a round older"
    last = merge(kept, entries([4.0], 0.5), rounds=2)
    assert last.entry.score.tolist() == [4], "what is too old goes once there is something new"


def test_uploads_are_spread_over_the_steps():
    scores = torch.arange(12.0).reshape(4, 3)
    assert thin(scores, 0).tolist() == list(range(12))
    assert thin(scores, 4).tolist() == [0, 3, 6, 9]
    assert thin(scores, 100).tolist() == list(range(12))


def test_a_large_pool_is_sampled_evenly_for_the_first_estimates():
    assert spread(torch.ones(5), 10).tolist() == [0, 1, 2, 3, 4], "a small pool is taken whole"
    assert spread(torch.ones(100), 4).tolist() == [12, 37, 62, 87]
    assert spread(torch.tensor([0.0, 1.0, 0.0, 3.0]), 4).tolist() == [1, 3, 3, 3]


# How much of a side one client may fill.


def uploads(masses: list[float], count: int = 4) -> Tensor:
    return torch.tensor(masses, dtype=torch.float64)[:, None].expand(-1, count) / count


@pytest.mark.parametrize(
    ("masses", "most"),
    [([6, 2, 1, 1], 0.4), ([6, 3, 2, 1], 0.3), ([9, 1], 0.6), ([5, 5, 1, 1, 1], 0.25), ([7, 1, 1, 0, 1], 0.3)],
)
def test_no_client_fills_more_of_the_pool_than_its_cap(masses, most):
    found = cap(uploads(masses), most).sum(1)
    assert float((found / found.sum()).max()) == pytest.approx(most), "the largest fills as much as it may"
    given = torch.tensor(masses, dtype=torch.float64)
    kept = found < found.max() * (1 - 1e-9)
    assert torch.allclose(found[kept], given[kept]), "who fills less keeps what it had"
    assert (found <= given + 1e-12).all()


def test_caps_that_do_not_bind_or_cannot_hold():
    fair = uploads([1, 1, 1, 1])
    assert cap(fair, 0.25) is fair
    assert cap(uploads([9, 1]), 1.0).sum(1).tolist() == pytest.approx([9, 1])
    few = cap(uploads([9, 3, 0]), 0.2).sum(1)
    assert few.tolist() == pytest.approx([3, 3, 0]), "two clients cannot fill a fifth each: both fill half"
    assert cap(uploads([5, 0]), 0.2).sum(1).tolist() == pytest.approx([5, 0]), "there is nobody else"


def test_a_capped_pool_is_drawn_evenly(network):
    """Client 0 holds nearly all positives, and counts by its samples."""
    federation = from_arrays(make_clients([(60, 10), (2, 10), (2, 10), (2, 10)]))
    for most, expected in ((1.0, 60 / 66), (0.4, 0.4)):
        algorithm = build("fedxl2", partial_auc(lam=1.0), lr=0.1, pool_share=most)
        engine = engine_for(algorithm, network(), federation, vectorised, 3, 4, 4, weighting="samples")
        server = play(algorithm, engine, algorithm.init(weights_of(network())), 0, np.arange(4))
        weight = server.pool.first.weight.view(4, -1).sum(1)
        assert float(weight[0] / weight.sum()) == pytest.approx(expected, rel=1e-6)


# Whose u it holds.


def test_the_servers_own_u_follow_from_the_pooled_scores(network):
    """Whatever clients say of them: against log-mean-exp by hand."""
    federation, pools = from_arrays(make_clients(RAGGED)), {}
    for pool_u in ("server", "clients"):
        algorithm = build("fedxl2", partial_auc(lam=1.0), pool_u=pool_u)
        engine = engine_for(algorithm, network(), federation, loop, 3, 4, 4)
        server = algorithm.init(weights_of(network()))
        for r in range(2):
            updates = engine.run_round(server, r, np.arange(len(RAGGED)))
            lie = updates.scores._replace(u=torch.full_like(updates.scores.u, -0.1))
            server = next_state(algorithm.phase(r), server, updates._replace(scores=lie))
        pools[pool_u] = server.pool
    a, b = (side.entry.score.numpy() for side in pools["server"])
    expected = np.log(np.exp(np.maximum(0, 1 - (a[:, None] - b[None])) ** 2 / 1.0).mean(1))
    np.testing.assert_allclose(pools["server"].first.u.numpy(), expected, rtol=0, atol=1e-12)
    assert pools["clients"].first.u.unique().tolist() == pytest.approx([-0.1])


def test_an_entry_without_u_is_never_drawn():
    risk, like = partial_auc(), torch.zeros(1)
    pool = begin(risk, like)
    u = torch.tensor([0.5, torch.nan, 0.1])
    first = tree.map(lambda leaf: leaf.expand(3), pool.first)._replace(u=u, weight=torch.ones(3))
    found = drop_unknown(risk, pool._replace(first=first)).first
    assert found.weight.tolist() == [1, 0, 1]
    assert bool(found.u.isfinite().all())
    plain = pool._replace(first=first)
    assert drop_unknown(auroc(), plain) is plain, "a linear risk has no u"


def test_no_u_leaves_a_client_if_the_server_computes_them(network):
    """Not even as an order: scores that are the same are told apart by nothing."""
    algorithm = build("fedxl2", partial_auc(), lr=0.1, pool_u="server", order="sorted")
    federation, everyone = from_arrays(make_clients(RAGGED)), np.arange(len(RAGGED))
    engine = engine_for(algorithm, network(), federation, loop, 3, 4, 5)
    server = algorithm.init(weights_of(network()))
    for round in range(3):
        update: Any = engine.run_round(server, round, everyone)
        assert bool(update.scores.u.isnan().all())
        server = next_state(algorithm.phase(round), server, update)
        check_server(algorithm.phase(round), server)
        assert bool(server.pool.first.u.isfinite().all())


def test_cohorts_without_s2_bring_no_unknown_u_into_the_pool(network):
    algorithm = build("fedxl2", partial_auc(), lr=0.1, pool_u="server", one_class="train")
    engine = engine_for(algorithm, network(), from_arrays(make_clients([(6, 0), (0, 6)])), loop, 2, 3, 3)
    server = algorithm.init(weights_of(network()))
    for round in range(2):
        server = play(algorithm, engine, server, round, np.zeros(1, np.int64))
        check_server(algorithm.phase(round), server)
    assert float(server.pool.first.weight.sum()) == 0, "an a without u is of no use"
    for round in (2, 3):  # b first, then a with its u
        server = play(algorithm, engine, server, round, np.arange(2))
        check_server(algorithm.phase(round), server)
    assert len(server.pool.first.u) == 6
    assert bool(server.pool.first.u.isfinite().all())


# Entries of queries.


def of_queries(query: list[int], part: list[float], b: float) -> Entry:
    """Items of one client."""
    return Entry(torch.full((1, len(query)), b), Item(torch.tensor([query]), torch.tensor([part])))


def test_the_pool_keeps_the_latest_scores_of_each_client_and_query():
    risk, pooling, like = ndcg(), Pooling(), torch.zeros(1)
    nothing = Entry(like[None], Relevant(*(leaf[None] for leaf in begin(risk, like).first.entry.target)))

    def merged(pool: Pool, client: int, *items: Any) -> Pool:
        share = Share(*(torch.ones(1) for _ in range(2)), torch.tensor([client]), torch.ones(1, 2), torch.ones(1, 2))
        return pooling.merge(risk, pool, Scores(nothing, like[None], of_queries(*items)), share)

    pool = merged(begin(risk, like), 0, [4, 4, 9], [0.5, 0.5, 1.0], 1.0)
    weights = pool.second.weight.tolist()
    assert weights == [0, 0.25, 0.25, 1.0], "a query weighs as its client's part, however often it is read"
    pool = merged(pool, 1, [4, 7], [0.5, 0.0], 2.0)
    assert pool.second.entry.target.query.tolist() == [-1, 4, 4, 9, 4], "what weighs nothing does not enter"
    pool = merged(pool, 0, [4], [0.5], 3.0)
    side = pool.second
    leaves = (side.entry.target.query, side.owner, side.entry.score, side.age)
    assert sorted(zip(*(leaf.tolist() for leaf in leaves), strict=True))[1:] == [
        (4, 0, 3, 0),
        (4, 1, 2, 1),
        (9, 0, 1, 2),
    ]
    unchanged = merged(pool, 0, [4], [0.0], 9.0)
    assert unchanged.second.entry.score.tolist() == side.entry.score.tolist()


def test_the_servers_first_estimates_of_queries_count_entries_by_weight():
    """As they are drawn. An item of a query without any b is never drawn."""
    risk, like = ndcg(), torch.zeros(1, dtype=torch.float64)
    empty = begin(risk, like)
    a, b = torch.tensor([0.3, -0.2, 1.0]).double(), torch.tensor([0.1, 0.4, -1.0, 5.0]).double()
    one = torch.ones(4).double()
    first = empty.first._replace(
        entry=Entry(a, Relevant(torch.tensor([3, 8, 3]), one[:3], 4 * one[:3], one[:3])),
        u=0 * a, weight=one[:3], age=torch.zeros(3).long(), owner=0 * a,
    )  # fmt: skip
    second = S2(
        Entry(b, Item(torch.tensor([8, 8, 8, 1]), one)), torch.tensor([0.25, 0.25, 0.5, 1.0]).double(), one, one
    )
    made = estimate_u(risk, empty, Pool(first, second)).first
    assert made.weight.tolist() == [0, 1, 0]
    losses = [4 / (1 + np.exp(-0.2 - other)) for other in (0.1, 0.4, -1.0, -1.0)]
    assert float(made.u[1]) == pytest.approx(np.mean(losses))


# The order of uploads.


def with_ties(*shape: int, seed: int = 0) -> Tensor:
    """Few different values, so that later columns decide."""
    return torch.randint(3, shape, generator=torch.Generator().manual_seed(seed)).double() / 2


@pytest.mark.parametrize("shape", [(40,), (40, 1), (40, 3), (40, 2, 2)])
def test_rows_are_sorted_as_python_sorts_tuples(shape):
    first, second = with_ties(*shape), with_ties(40, seed=1).float()
    rows = sorted((*one.flatten().tolist(), float(other)) for one, other in zip(first, second, strict=True))
    found = tree.sort_rows((first, second))
    assert [(*one.flatten().tolist(), float(other)) for one, other in zip(*found, strict=True)] == rows
    assert [tensor.dtype for tensor in found] == [torch.float64, torch.float32]


def test_sorted_rows_do_not_depend_on_their_order_before():
    a, u = with_ties(64, 2), with_ties(64, seed=1)
    u[::5] = torch.nan  # never visited
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    for one, other in zip(tree.sort_rows((a, u)), tree.sort_rows((a[shuffled], u[shuffled])), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_many_clients_at_once_are_sorted_as_one_by_one():
    a, u = with_ties(5, 30, 2), with_ties(5, 30, seed=1)
    stacked = vmap(tree.sort_rows)((a, u))
    for client in range(5):
        assert all(map(torch.equal, (leaf[client] for leaf in stacked), tree.sort_rows((a[client], u[client]))))


def rows_of(*leaves: Tensor) -> list[tuple[list[float], ...]]:
    return [*zip(*(leaf.reshape(len(leaf), -1).tolist() for leaf in leaves), strict=True)]


RISKS = [auroc(), partial_auc(), average_precision(), contrastive(dim=2)]


@pytest.mark.parametrize("count", [0, 7])
@pytest.mark.parametrize("risk", RISKS, ids=lambda risk: risk.name)
def test_an_upload_holds_the_same_pairs_of_score_and_estimate_sorted(risk, count):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(3, 4, *risk.score_shape, generator=generator) for _ in range(2))
    u = torch.rand(3, 4, *risk.inner_shape, generator=generator, dtype=torch.float64)
    trace, drawn = Scores(Entry(a, ()), u, Entry(b, with_ties(3, 4).round())), Pooling(uploads=count)
    before, after = (pooling.upload(trace) for pooling in (drawn, replace(drawn, order="sorted")))
    expected = rows_of(before.a.score, before.u), rows_of(before.b.score, before.b.target)
    found = rows_of(after.a.score, after.u), rows_of(after.b.score, after.b.target)
    for one, other in zip(found, expected, strict=True):
        assert one == sorted(other) != other
        assert len(one) == (count or 12)


@pytest.mark.parametrize(
    ("name", "risk", "options"), [("fedxl1", auroc(), {}), ("fedxl2", partial_auc(), {"fresh": True})]
)
def test_warm_up_and_training_upload_sorted_scores(name, risk, options, network):
    algorithm = build(name, risk, order="sorted", **options)
    engine = engine_for(algorithm, network(), from_arrays(make_clients(RAGGED)), loop, 3, 4, 5)
    server = algorithm.init(weights_of(network()))
    for round in range(3):
        update: Any = engine.run_round(server, round, np.arange(len(RAGGED)))
        for entry in (update.scores.a, update.scores.b):
            assert bool((entry.score.diff(dim=1) >= -1e-9).all()), round  # the last bits of scores count for nothing
        server = next_state(algorithm.phase(round), server, update)


def test_if_each_step_reads_the_whole_pool_the_order_changes_nothing_but_rounding(network):
    """One client, one step per round: the pool is its last batch, and a step is a sum over it."""
    federation, states = from_arrays(make_clients([(9, 9)])), []
    for order in ("drawn", "sorted"):
        algorithm = build("fedxl2", partial_auc(), lr=0.5, order=order)
        engine = engine_for(algorithm, network(), federation, loop, 1, 4, 5)
        server = algorithm.init(weights_of(network()))
        for round in range(6):
            server = play(algorithm, engine, server, round, np.zeros(1, np.int64))
        states.append(tree.pack((server.weights, server.G)))
        ascending = bool((server.pool.first.entry.score.diff() >= 0).all())
        assert ascending == (order == "sorted")
    for name, leaf in states[0].items():
        torch.testing.assert_close(states[1][name], leaf, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "sort"}, "sorted"),
        ({"pool_share": 0.0}, r"pool_share must lie in \(0, 1\], got 0.0"),
        ({"pool_rounds": 0}, "pool_rounds must be at least 1"),
        ({"uploads": -1}, "uploads must not be negative"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(UserError, match=message):
        build("fedxl2", partial_auc(), **options)

"""Clipping and robust merging, in every algorithm, and the limits of the score pool."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedxl import UserError, tree
from fedxl.algorithms import ALGORITHMS, FeDXL2
from fedxl.algorithms.clipping import REMEMBERED, clipped, no_norms, usual_size
from fedxl.algorithms.pool import Pool, S1Scores, S2Scores, capped, check_distance
from fedxl.data.federation import from_arrays
from fedxl.engine.executors import vectorised
from fedxl.errors import RefusedError
from fedxl.models import weights_of
from fedxl.risks import auroc, partial_auc
from fedxl.training.rounds import play_round
from tests.conftest import make_clients
from tests.running import engine_for, play

SIZES = [(6, 9), (5, 5), (4, 8), (7, 7), (5, 9), (6, 6), (4, 4), (8, 5)]
FEDERATED = [name for name, kind in ALGORITHMS.items() if not kind.centralized]


def build(name: str, **options):
    linear = name == "fedxl1"
    return ALGORITHMS[name](auroc() if linear else partial_auc(lam=1.0), lr=0.2, **options)


def after(algorithm, network, spoil=None, rounds: int = 3):
    """The server after a few rounds; spoil: what becomes of the stacked updates before they are merged."""
    federation = from_arrays(make_clients(SIZES))
    engine = engine_for(algorithm, network(), federation, vectorised, 3, 4, 4)
    server, everyone = algorithm.init(weights_of(network())), np.arange(len(SIZES))
    for r in range(algorithm.first_round, rounds + 1):
        updates = engine.run_round(server, r, everyone)
        updates = updates if spoil is None or r == 0 else spoil(server, updates)
        server = algorithm.phase(r).aggregate(server, updates)
    return server


def moved(server, network) -> float:
    old = weights_of(network()).params
    return float(tree.norm(tree.map(torch.sub, server.weights.params, old)))


def far_away(server, updates):
    """Client 0 sends weights a thousand times as far away, and whatever else it can."""
    first = torch.zeros(len(SIZES), dtype=torch.bool)
    first[0] = True

    def beyond(leaf, start):
        return torch.where(first.view(-1, *[1] * (leaf.ndim - 1)), start + 1000 * (leaf - start), leaf)

    params = tree.map(beyond, updates.weights.params, server.weights.params)
    updates = updates._replace(weights=updates.weights._replace(params=params))
    for name in ("G", "change"):
        if getattr(updates, name, None):
            still = tree.map(lambda leaf: torch.zeros_like(leaf[0]), getattr(updates, name))
            updates = updates._replace(**{name: tree.map(beyond, getattr(updates, name), still)})
    return updates


DEFENCES = [{"aggregation": rule} for rule in ("median", "trimmed", "krum")] + [{"clip_change": 1.0}]


@pytest.mark.parametrize("name", FEDERATED)
@pytest.mark.parametrize("defence", DEFENCES, ids=str)
def test_one_liar_moves_the_model_little(network, name, defence):
    honest = moved(after(build(name), network), network)
    assert moved(after(build(name), network, far_away), network) > 20 * honest
    defended = after(build(name, **defence), network, far_away)
    assert moved(defended, network) < 3 * honest
    for part in ("G", "c"):
        if hasattr(defended, part):
            plain = getattr(after(build(name), network), part)
            assert float(tree.norm(getattr(defended, part))) <= 5 * float(tree.norm(plain)) + 1e-12, part


@pytest.mark.parametrize("name", FEDERATED)
def test_a_limit_that_nobody_reaches_changes_no_bit(network, name):
    plain, limited = after(build(name), network), after(build(name, clip_change=1e6), network)
    assert plain.norms == ()
    assert limited.norms.shape[0] == REMEMBERED
    for one, other in zip(tree.leaves(plain), tree.leaves(limited._replace(norms=())), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_clipping_against_plain_numpy():
    rng, past = np.random.default_rng(0), [3.0, 5.0]
    start = {"w": torch.from_numpy(rng.normal(size=(2, 3))), "v": torch.from_numpy(rng.normal(size=4))}
    moves = rng.normal(size=(5, 10)) * np.array([1, 2, 100, 0.1, 3])[:, None]
    factors = np.array([1.0, 2, 1, 1, 1])
    flat = np.concatenate([start["w"].numpy().ravel(), start["v"].numpy()])
    stacked = {
        "w": torch.from_numpy((flat + moves)[:, :6].reshape(5, 2, 3)),
        "v": torch.from_numpy((flat + moves)[:, 6:]),
    }
    norms = no_norms(1, start["w"])
    norms[-2:, 0] = torch.tensor(past)
    found = clipped(
        {"p": stacked}, {"p": start}, torch.ones(5, dtype=torch.bool), torch.from_numpy(factors), norms, 1.5
    )

    relative = np.linalg.norm(moves, axis=1) / factors
    usual = max(np.median(relative), np.median(past))
    lengths = np.minimum(1, 1.5 * usual / relative)
    expected = flat + moves * lengths[:, None]
    assert (lengths < 1).sum() == 2, "the fifth is within the limit"
    got = np.concatenate([found.parts["p"]["w"].numpy().reshape(5, 6), found.parts["p"]["v"].numpy()], 1)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-10)
    assert found.norms[-3:, 0].tolist() == pytest.approx([*past, np.median(relative * lengths)])
    assert torch.equal(found.parts["p"]["w"][3], stacked["w"][3]), "the same bits where nothing is cut"


def test_what_is_usual_with_few_clients():
    past = torch.tensor([0.0, 2.0, 4.0], dtype=torch.float64)
    none = torch.zeros(3, dtype=torch.float64)

    def usual(*sizes, before=past):
        return float(usual_size(torch.tensor(sizes, dtype=torch.float64), before))

    assert usual(1, 1, 1) == 3, "past rounds' median, without the round of which nothing is known"
    assert usual(5, 6, 100) == 6
    assert usual(100) == 3
    assert usual(9, 100) == 9
    assert usual(100, before=none) == 0, "nothing to compare with"
    assert usual(0, 0, 0, 7, 8, 9, before=none) == 8, "who does not move says nothing"


def test_an_infinite_change_counts_for_nothing(network):
    algorithm = build("local_sgd", clip_change=1.0)

    def infinite(server, updates):
        params = tree.map(lambda leaf: leaf.index_fill(0, torch.tensor([0]), float("inf")), updates.weights.params)
        return updates._replace(weights=updates.weights._replace(params=params))

    assert tree.finite(after(algorithm, network, infinite))


def test_clients_are_not_told_what_is_usual(network):
    algorithm = build("fedxl2", clip_change=2.0)
    server = after(algorithm, network)
    assert float(server.norms.max()) > 0
    assert float(algorithm.downlink(server).norms.abs().max()) == 0


def uploads(masses: list[float], entries: int = 4) -> S2Scores:
    weight = torch.tensor(masses, dtype=torch.float64)[:, None].expand(-1, entries) / entries
    scores = torch.zeros_like(weight)
    return S2Scores(scores, scores, weight, scores.long())


@pytest.mark.parametrize(
    ("masses", "most"),
    [([6, 2, 1, 1], 0.4), ([6, 3, 2, 1], 0.3), ([9, 1], 0.6), ([5, 5, 1, 1, 1], 0.25), ([7, 1, 1, 0, 1], 0.3)],
)
def test_no_client_fills_more_of_the_pool_than_its_cap(masses, most):
    found = capped(uploads(masses), most).weight.sum(1)
    assert float((found / found.sum()).max()) == pytest.approx(most), "the largest fills as much as it may"
    given = torch.tensor(masses, dtype=torch.float64)
    kept = found < found.max() * (1 - 1e-9)
    assert torch.allclose(found[kept], given[kept]), "who fills less keeps what it had"
    assert (found <= given + 1e-12).all()


def test_caps_that_do_not_bind_or_cannot_hold():
    fair = uploads([1, 1, 1, 1])
    assert capped(fair, 0.25) is fair
    assert capped(uploads([9, 1]), 1.0).weight.sum(1).tolist() == pytest.approx([9, 1])
    few = capped(uploads([9, 3, 0]), 0.2).weight.sum(1)
    assert few.tolist() == pytest.approx([3, 3, 0]), "two clients cannot fill a fifth each: both fill half"
    assert capped(uploads([5, 0]), 0.2).weight.sum(1).tolist() == pytest.approx([5, 0]), "there is nobody else"


def test_a_capped_pool_is_drawn_evenly(network):
    """Client 0 holds nearly all positives, and counts by its samples."""
    federation = from_arrays(make_clients([(60, 10), (2, 10), (2, 10), (2, 10)]))
    for cap, expected in ((1.0, 60 / 66), (0.4, 0.4)):
        algorithm = FeDXL2(partial_auc(lam=1.0), lr=0.1, pool_share=cap)
        engine = engine_for(algorithm, network(), federation, vectorised, 3, 4, 4, weighting="samples")
        server = play(algorithm, engine, algorithm.init(weights_of(network())), 0, np.arange(4))
        weight = server.pool.first.weight.view(4, -1).sum(1)
        assert float(weight[0] / weight.sum()) == pytest.approx(expected, rel=1e-6)


def pool_of(a: torch.Tensor, b: torch.Tensor) -> Pool:
    one, age = torch.ones(len(a)), torch.zeros(len(a), dtype=torch.int64)
    return Pool(S1Scores(a, torch.zeros_like(a), one, age), S2Scores(b, torch.zeros_like(b), one, age))


def test_raw_scores_far_from_the_pool_are_refused():
    rng = torch.Generator().manual_seed(0)
    scores = 50 + 30 * torch.randn(2, 64, generator=rng)
    pool = pool_of(*scores)
    middle = torch.cat([*scores]).median()
    spread = (torch.cat([*scores]) - middle).abs().median()
    raw, new = auroc(), torch.full((8,), 50.0)
    check_distance(raw, pool, pool_of(new, new.index_fill(0, torch.tensor([3]), float(middle + 99 * spread))))
    beyond = new.index_fill(0, torch.tensor([3]), float(middle - 101 * spread))
    with pytest.raises(RefusedError, match=r"its scores \(second\) lie more than 100 times the pool's spread"):
        check_distance(raw, pool, pool_of(new, beyond))
    check_distance(raw, pool_of(new, new), pool_of(new, new + 999))  # all alike: ten margins are the least spread
    with pytest.raises(RefusedError, match="first"):
        check_distance(raw, pool_of(new, new), pool_of(new - 1001, new))
    check_distance(raw, pool_of(new[:1], new[:1]), pool_of(new, 1e3 * new))  # as a client sees the pool
    check_distance(partial_auc(scores="sigmoid"), pool, pool_of(new, 1e9 * new))  # for others to refuse


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "mode"}, "unknown aggregation 'mode'"),
        ({"hostile": 0.5}, r"hostile must lie in \[0, 0.5\), got 0.5"),
        ({"clip_change": 0.5}, "clip_change must be at least 1, or 0 for no clipping, got 0.5"),
        ({"pool_share": 0.0}, r"pool_share must lie in \(0, 1\], got 0.0"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(UserError, match=message):
        FeDXL2(partial_auc(), **options)


def test_play_round_uses_the_rule(network):
    """The loop over rounds needs to know nothing of it."""
    algorithm = build("local_sgd", aggregation="median")
    engine = engine_for(algorithm, network(), from_arrays(make_clients(SIZES)), vectorised, 3, 4, 4)
    server, updates = play_round(algorithm, engine, algorithm.init(weights_of(network())), 1, np.arange(len(SIZES)))
    for name, leaf in updates.weights.params.items():
        np.testing.assert_allclose(server.weights.params[name].numpy(), np.median(leaf.numpy(), 0), atol=1e-12)


def test_the_servers_own_u_follow_from_the_pooled_scores(network):
    """Whatever clients say of them: against log-mean-exp by hand."""
    algorithm = build("fedxl2", pool_u="server")

    def lie(server, updates):
        return updates._replace(first=updates.first._replace(u=torch.full_like(updates.first.u, -0.1)))

    pool = after(algorithm, network, lie).pool
    a, b = pool.first.a.numpy(), pool.second.b.numpy()
    expected = np.log(np.exp(np.maximum(0, 1 - (a[:, None] - b[None])) ** 2 / 1.0).mean(1))
    np.testing.assert_allclose(pool.first.u.numpy(), expected, rtol=0, atol=1e-12)
    assert float(after(build("fedxl2"), network, lie).pool.first.u.max()) == pytest.approx(-0.1)

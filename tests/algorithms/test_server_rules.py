"""What the server does to updates: clipping, robust means, whole numbers, momentum and Adam, for every algorithm.

Means against plain transcriptions of their papers, and against Flower's if that is installed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as nnf

from fedxl import UserError, fit, tree
from fedxl.algorithms import ALGORITHMS, Algorithm, build
from fedxl.algorithms.protocol import Assignment, Batch, NoTrace
from fedxl.algorithms.server_rules import (
    REMEMBERED,
    Clip,
    Krum,
    TrimmedMean,
    average,
    begin,
    close_together,
    next_state,
    server_rules,
    usual_size,
)
from fedxl.data.inputs import from_arrays
from fedxl.engine.executors import vectorised
from fedxl.models import Score, Weights, weights_of
from fedxl.risks import auroc, partial_auc
from fedxl.risks.pairing import Share
from fedxl.training.rounds import play_round
from tests.conftest import make_clients
from tests.running import engine_for

SIZES = [(6, 9), (5, 5), (4, 8), (7, 7), (5, 9), (6, 6), (4, 4), (8, 5)]
FEDERATED = [name for name, kind in ALGORITHMS.items() if not kind.centralized]


class OwnServer(NamedTuple):
    weights: Weights
    step: Tensor
    rules: Any = ()


class OwnUpdate(NamedTuple):
    weights: Weights
    share: Share
    steps: Tensor


class LeastSquares(Algorithm):
    """An algorithm of a user: each client descends the squared distance of its scores from its labels."""

    def init(self, weights: Weights) -> OwnServer:
        return OwnServer(weights, torch.zeros((), dtype=torch.int64))

    def init_client(self, server: OwnServer, num_rows: int) -> Any:
        return ()

    def start(self, server: OwnServer, client: Any, share: Share) -> Any:
        return server.weights, server.step

    def step(self, score: Score, server: OwnServer, work: Any, batch: Batch) -> tuple[Any, NoTrace]:
        (weights, step), of = work, batch.examples

        def loss(params: dict[str, Tensor]) -> Tensor:
            return nnf.mse_loss(score(weights._replace(params=params), of.x)[0], of.y)

        gradient = torch.func.grad(loss)(weights.params)
        params = tree.map(lambda w, g: w - self.lr * g, weights.params, gradient)
        return (weights._replace(params=params), step + 1), NoTrace()

    def finish(self, server: OwnServer, share: Share, work: Any, trace: NoTrace) -> tuple[Any, OwnUpdate]:
        return (), OwnUpdate(work[0], share, work[1] - server.step)

    def update_like(self, server: OwnServer, assignment: Assignment) -> OwnUpdate:
        return OwnUpdate(server.weights, assignment.share, server.step)

    def aggregate(self, server: OwnServer, mean: dict[str, Any], updates: OwnUpdate) -> OwnServer:
        return OwnServer(mean["weights"], server.step + updates.steps.max())


def flat(params: dict[str, Tensor], rows: int = 0) -> np.ndarray:
    """All parameters as one vector, or as one for each of so many clients."""
    shape = (rows, -1) if rows else (-1,)
    return np.concatenate([leaf.numpy().reshape(shape) for leaf in params.values()], -1)


def yin_trimmed(vectors: np.ndarray, beta: float) -> np.ndarray:
    """Definition 2 of Yin et al.: each coordinate's mean without its largest and smallest beta fraction."""
    m, d = vectors.shape
    gone = round(beta * m)
    return np.array([sum(sorted(vectors[:, k])[gone : m - gone]) / (m - 2 * gone) for k in range(d)])


def blanchard_chosen(vectors: np.ndarray, f: int, m: int) -> list[int]:
    """Section 4 of Blanchard et al.: s(i) sums the squared distances to the n - f - 2 closest; the m lowest win."""
    n, scores = len(vectors), []
    for i in range(n):
        distances = sorted(float(((vectors[i] - vectors[j]) ** 2).sum()) for j in range(n) if j != i)
        scores.append(sum(distances[: n - f - 2]))
    return sorted(sorted(range(n), key=lambda i: scores[i])[:m])


class ByHand:
    """The rules applied by hand to the vectors of a round: rows [C, d] around the server's vector [d]."""

    def __init__(self) -> None:
        self.past: list[float] = []
        self.weights = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        self.optimiser: torch.optim.Optimizer | None = None

    def clip(self, rows: np.ndarray, old: np.ndarray, limit: float) -> np.ndarray:
        norms = np.linalg.norm(rows - old, axis=1)
        usual = max(np.median(norms), np.median(self.past) if self.past else 0)
        scale = np.minimum(1, limit * usual / norms)
        self.past.append(float(np.median(norms * scale)))
        return old + scale[:, None] * (rows - old)

    def whole(self, rows: np.ndarray, old: np.ndarray, fraction: int) -> np.ndarray:
        codes = np.rint((rows - old) / len(rows) * 2.0**fraction)
        return old + codes.sum(0) / 2.0**fraction

    def step(self, kind: str, mean: np.ndarray, old: np.ndarray) -> np.ndarray:
        if self.optimiser is None:
            self.weights = torch.tensor(old, requires_grad=True)
            adam = torch.optim.Adam([self.weights], lr=0.01, betas=(0.9, 0.99), eps=1e-3)
            momentum = torch.optim.SGD([self.weights], lr=1.0, momentum=0.9)
            self.optimiser = adam if kind == "adam" else momentum
        self.weights.grad = torch.from_numpy(old - mean)
        self.optimiser.step()
        return self.weights.detach().numpy().copy()


def krum_mean(rows: np.ndarray) -> np.ndarray:
    return rows[blanchard_chosen(rows, 2, 6)].mean(0)


OWN_RULES: dict[str, tuple[dict[str, Any], Callable[[ByHand, np.ndarray, np.ndarray], np.ndarray]]] = {
    "mean": ({}, lambda by, rows, old: rows.mean(0)),
    "clip": ({"clip_change": 1.0}, lambda by, rows, old: by.clip(rows, old, 1.0).mean(0)),
    "trimmed": ({"aggregation": "trimmed"}, lambda by, rows, old: yin_trimmed(rows, 0.25)),
    "krum": ({"aggregation": "krum"}, lambda by, rows, old: krum_mean(rows)),
    "whole numbers": ({"fixed_point": 32}, lambda by, rows, old: by.whole(rows, old, 24)),
    "momentum": ({"server_update": "momentum"}, lambda by, rows, old: by.step("momentum", rows.mean(0), old)),
    "adam": ({"server_update": "adam"}, lambda by, rows, old: by.step("adam", rows.mean(0), old)),
    "clip, krum, adam": (
        {"clip_change": 1.0, "aggregation": "krum", "server_update": "adam"},
        lambda by, rows, old: by.step("adam", krum_mean(by.clip(rows, old, 1.0)), old),
    ),
}


@pytest.mark.parametrize("rule", OWN_RULES)
def test_an_algorithm_of_a_user_gets_every_rule(network, rule):
    """It has seven functions and calls nothing; the same round after round as by hand."""
    options, expected = OWN_RULES[rule]
    algorithm, by_hand = LeastSquares(auroc(), lr=0.05, server=server_rules(**options)), ByHand()
    engine = engine_for(algorithm, network(), from_arrays(make_clients(SIZES)), vectorised, 3, 4, 4)
    server, plain = begin(algorithm, weights_of(network())), 0.0
    for r in range(1, 5):
        old = flat(server.weights.params)
        server, updates = play_round(algorithm, engine, server, r, np.arange(len(SIZES)))
        rows, found = flat(updates.weights.params, len(SIZES)), flat(server.weights.params)
        np.testing.assert_allclose(found, expected(by_hand, rows, old), rtol=0, atol=1e-12)
        plain = max(plain, np.abs(found - rows.mean(0)).max())
    assert (plain > 1e-9) == (rule != "mean"), "the rule does something"


def test_an_algorithm_of_a_user_trains_with_rules(network):
    algorithm = LeastSquares(
        auroc(), lr=0.05, server=server_rules(aggregation="trimmed", clip_change=2.0, server_update="momentum")
    )
    result = fit(network(), make_clients(SIZES), algorithm, rounds=3, local_steps=3, batch_size=4, executor="vmap")
    assert not torch.equal(result.server.weights.params["0.weight"], weights_of(network()).params["0.weight"].float())
    assert int(result.server.step) == 9


# Rules of one round, by themselves.

RULES: dict[str, tuple[Any, ...]] = {"mean": (), "trimmed": (TrimmedMean(0.25),), "krum": (Krum(0.25),)}


def shares_of(model: Any, factors: Any = None) -> Share:
    model = torch.as_tensor(model, dtype=torch.float64)
    two = torch.ones(len(model), 2, dtype=torch.float64)
    return Share(model, model, torch.arange(len(model)), two, two if factors is None else two * factors[:, None])


def merged(
    rules: tuple[Any, ...], stacked: dict[str, Tensor], shares: Any, before: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The parameters after a round with these stacked ones."""
    algorithm = LeastSquares(auroc(), server=rules)
    updates = OwnUpdate(Weights(stacked, {}), shares_of(shares), torch.ones(len(shares), dtype=torch.int64))
    return next_state(algorithm, begin(algorithm, Weights(before, {})), updates).weights.params


def clients(count: int, seed: int = 0) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    return {
        name: torch.from_numpy(rng.normal(size=(count, *shape))) for name, shape in {"w": (3, 2), "b": ()}.items()
    }


def result(rule: str, stacked: dict[str, Tensor], shares: Any) -> np.ndarray:
    zeros = tree.map(lambda leaf: torch.zeros_like(leaf[0]), stacked)
    return flat(merged(RULES[rule], stacked, shares, zeros))


@pytest.mark.parametrize("count", [4, 8, 16])
def test_the_trimmed_mean_is_the_published_one_if_all_count_the_same(count):
    stacked = clients(count)
    found = result("trimmed", stacked, np.full(count, 0.2))
    np.testing.assert_allclose(found, yin_trimmed(flat(stacked, count), 0.25), rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [7, 8, 16])
def test_krum_chooses_whom_the_paper_chooses(count):
    for seed in range(5):
        stacked, f = clients(count, seed), count // 4
        kept = torch.nonzero(close_together(stacked, torch.full((count,), 0.1), 0.25))[:, 0].tolist()
        assert kept == blanchard_chosen(flat(stacked, count), f, count - f)


def test_flower_finds_the_same():
    reference = pytest.importorskip("flwr.server.strategy.aggregate", reason="needs fedxl[flower]")
    stacked = clients(12)
    each = [([row["w"].numpy(), row["b"].numpy()], 1) for row in tree.unstack(stacked, 12)]
    theirs = {
        "trimmed": reference.aggregate_trimmed_avg(each, 0.25),
        "krum": reference.aggregate_krum(each, 3, 9),
    }
    for rule, expected in theirs.items():
        joined = np.concatenate([np.ravel(leaf) for leaf in expected])
        np.testing.assert_allclose(result(rule, stacked, np.ones(12)), joined, rtol=0, atol=1e-12)


def test_a_client_that_counts_three_times_is_three_clients():
    """Whole shares against the trimmed mean of clients that occur so often."""
    stacked, times = clients(5), [1, 3, 2, 1, 1]
    repeated = tree.map(lambda leaf: leaf.repeat_interleave(torch.tensor(times), 0), stacked)
    one, other = result("trimmed", stacked, np.array(times) / 8), result("trimmed", repeated, np.full(8, 1 / 8))
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", ["trimmed", "krum"])
def test_a_quarter_of_clients_cannot_move_the_result_beyond_the_others(rule):
    for seed, (lie, count) in enumerate(itertools.product([1e6, -1e30, float("inf")], [8, 16])):
        stacked = clients(count, seed)
        honest = flat(stacked, count)[count // 4 :]
        spoilt = tree.map(lambda leaf, n=count, v=lie: leaf.index_fill(0, torch.arange(n // 4), v), stacked)
        found = result(rule, spoilt, np.full(count, 1 / count))
        assert (found >= honest.min(0)).all()
        assert (found <= honest.max(0)).all()


@pytest.mark.parametrize("rule", list(RULES))
def test_a_client_that_does_not_count_is_as_if_absent(rule):
    stacked, shares = clients(9), np.full(9, 0.1)
    shares[4] = 0
    others = tree.map(lambda leaf: torch.cat((leaf[:4], leaf[5:])), stacked)
    np.testing.assert_allclose(
        result(rule, stacked, shares), result(rule, others, np.full(8, 0.1)), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("rule", list(RULES))
def test_small_rounds_counters_and_types(rule):
    for count in (1, 2, 3):
        stacked = clients(count)
        found = result(rule, stacked, np.ones(count))
        assert (found >= flat(stacked, count).min(0) - 1e-12).all()
        assert (found <= flat(stacked, count).max(0) + 1e-12).all()
    counters = {"n": torch.tensor([[3], [4], [4], [5]]), "w": torch.ones(4, 2, dtype=torch.float32)}
    before = {"n": torch.tensor([7]), "w": torch.full((2,), 9.0)}
    found = merged(RULES[rule], counters, np.full(4, 0.25), before)
    assert found["n"].tolist() == [4]
    assert found["n"].dtype == torch.int64
    assert found["w"].dtype == torch.float32
    nobody = merged(RULES[rule], counters, np.zeros(4), before)
    assert nobody["n"].tolist() == [7]
    assert nobody["w"].tolist() == [9, 9]


def test_the_mean_of_counters_is_rounded():
    stacked = {"mean": torch.tensor([[1.0], [3.0]]), "count": torch.tensor([4, 7])}
    found = average(stacked, torch.tensor([1.0, 3.0]), {"mean": torch.zeros(1), "count": torch.tensor(0)})
    assert found["mean"].tolist() == [2.5]
    assert int(found["count"]) == 6


class Grown(LeastSquares):
    """Gradients of clients are multiplied, as their shares say."""

    def growth(self, share: Share) -> Tensor:
        return share.factors[:, 0]


def test_clipping_against_plain_numpy():
    rng, past = np.random.default_rng(0), [3.0, 5.0]
    start = {"w": torch.from_numpy(rng.normal(size=(2, 3))), "v": torch.from_numpy(rng.normal(size=4))}
    moves = rng.normal(size=(5, 10)) * np.array([1, 2, 100, 0.1, 3])[:, None]
    factors = np.array([1.0, 2, 0.5, 1, 1])  # below 1, a client is not given less
    old = flat(start)
    stacked = {
        "w": torch.from_numpy((old + moves)[:, :6].reshape(5, 2, 3)),
        "v": torch.from_numpy((old + moves)[:, 6:]),
    }
    rule = Clip(1.5)
    algorithm = Grown(auroc(), server=(rule,))
    server = begin(algorithm, Weights(start, {}))
    state = server.rules[0].clone()
    state[-2:, 0] = torch.tensor(past)
    share = shares_of(np.full(5, 0.2), torch.from_numpy(factors))
    updates = OwnUpdate(Weights(stacked, {}), share, torch.ones(5))
    after, found, _ = rule(state, algorithm, server, updates, share.model)

    relative = np.linalg.norm(moves, axis=1) / np.maximum(factors, 1)
    usual = max(np.median(relative), np.median(past))
    lengths = np.minimum(1, 1.5 * usual / relative)
    assert (lengths < 1).sum() == 2, "the fifth is within the limit"
    np.testing.assert_allclose(flat(found.weights.params, 5), old + moves * lengths[:, None], rtol=0, atol=1e-10)
    assert after[-3:, 0].tolist() == pytest.approx([*past, np.median(relative * lengths)])
    assert torch.equal(found.weights.params["w"][3], stacked["w"][3]), "the same bits if nothing is cut"


def test_statistics_are_clipped_apart_from_parameters_and_counters_are_left_alone():
    def weights(moved: list[float]) -> Weights:
        each = torch.tensor(moved, dtype=torch.float64)[:, None]
        params = torch.ones(len(moved), 1, dtype=torch.float64)
        return Weights({"w": params}, {"mean": each, "count": torch.full((len(moved),), 10**6)})

    algorithm = LeastSquares(auroc(), server=(Clip(1.0),))
    zero = tree.map(lambda leaf: torch.zeros_like(leaf[0]), weights([0.0]))
    updates = OwnUpdate(weights([1.0, 2.0, 1e9]), shares_of(np.ones(3) / 3), torch.ones(3))
    found = next_state(algorithm, begin(algorithm, zero), updates).weights
    assert found.params["w"].tolist() == [1]
    assert found.buffers["mean"].tolist() == pytest.approx([(1 + 2 + 2) / 3])
    assert int(found.buffers["count"]) == 10**6


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
    assert usual(0, 0, 0, 7, 8, 9, before=none) == 8, "clients that do not move say nothing"


# Rules in the algorithms of this package.


def named(name: str, **options: Any) -> Algorithm:
    return build(name, auroc() if name == "fedxl1" else partial_auc(lam=1.0), lr=0.2, **options)


def after(algorithm: Algorithm, network, spoil=None, rounds: int = 3) -> Any:
    """The server after a few rounds; spoil: what becomes of the stacked updates before they are merged."""
    federation = from_arrays(make_clients(SIZES))
    engine = engine_for(algorithm, network(), federation, vectorised, 3, 4, 4)
    server, everyone = begin(algorithm, weights_of(network())), np.arange(len(SIZES))
    for r in range(algorithm.first_round, rounds + 1):
        updates = engine.run_round(server, r, everyone)
        updates = updates if spoil is None or r == 0 else spoil(server, updates)
        server = next_state(algorithm.phase(r), server, updates)
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


DEFENCES = [{"aggregation": "trimmed"}, {"aggregation": "krum"}, {"clip_change": 1.0}]


@pytest.mark.parametrize("name", FEDERATED)
@pytest.mark.parametrize("defence", DEFENCES, ids=str)
def test_one_liar_moves_the_model_little(network, name, defence):
    honest = moved(after(named(name), network), network)
    assert moved(after(named(name), network, far_away), network) > 20 * honest
    defended = after(named(name, **defence), network, far_away)
    assert moved(defended, network) < 3 * honest
    for part in ("G", "c"):
        if hasattr(defended, part):
            plain = getattr(after(named(name), network), part)
            assert float(tree.norm(getattr(defended, part))) <= 5 * float(tree.norm(plain)) + 1e-12, part


@pytest.mark.parametrize("name", FEDERATED)
def test_a_limit_that_nobody_reaches_changes_no_bit(network, name):
    plain, limited = after(named(name), network), after(named(name, clip_change=1e6), network)
    assert plain.rules == ()
    assert limited.rules[0].shape[0] == REMEMBERED
    for one, other in zip(tree.leaves(plain), tree.leaves(limited._replace(rules=())), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_an_infinite_change_counts_for_nothing(network):
    def infinite(server, updates):
        params = tree.map(lambda leaf: leaf.index_fill(0, torch.tensor([0]), float("inf")), updates.weights.params)
        return updates._replace(weights=updates.weights._replace(params=params))

    assert tree.finite(after(named("local_sgd", clip_change=1.0), network, infinite).weights)


def test_clients_are_not_told_what_is_usual(network):
    algorithm = named("fedxl2", clip_change=2.0)
    server = after(algorithm, network)
    assert float(server.rules[0].max()) > 0
    assert algorithm.downlink(server).rules == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "mode"}, "'algorithm.aggregation' must be one of 'mean', 'trimmed', 'krum', not 'mode'"),
        ({"hostile": 0.5}, r"hostile must lie in \[0, 0.5\), got 0.5"),
        ({"clip_change": 0.5}, "clip_change must be at least 1, or 0 for no clipping, got 0.5"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(UserError, match=message):
        build("fedxl2", partial_auc(), **options)

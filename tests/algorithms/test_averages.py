"""Robust averages against plain transcriptions of their papers, and against Flower's where that is installed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from fedxl import tree
from fedxl.algorithms.averages import average, average_counted, central, median, trimmed

RULES = {
    "mean": average,
    "median": median,
    "trimmed": lambda *given: trimmed(*given, cut=0.25),
    "krum": lambda stacked, shares, otherwise: average_counted(stacked, central(stacked, shares, 0.25), otherwise),
}


def clients(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return {
        name: torch.from_numpy(rng.normal(size=(count, *shape))) for name, shape in {"w": (3, 2), "b": ()}.items()
    }


def flat(stacked: dict[str, torch.Tensor]) -> np.ndarray:
    return np.concatenate([leaf.numpy().reshape(len(leaf), -1) for leaf in stacked.values()], 1)


def zeros(stacked):
    return tree.map(lambda leaf: torch.zeros_like(leaf[0]), stacked)


def result(rule: str, stacked, shares) -> np.ndarray:
    found = RULES[rule](stacked, torch.as_tensor(shares, dtype=torch.float64), zeros(stacked))
    return np.concatenate([leaf.numpy().ravel() for leaf in found.values()])


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


@pytest.mark.parametrize("count", [4, 8, 16, 5, 7])
def test_median_is_numpys_where_all_count_the_same(count):
    stacked = clients(count)
    np.testing.assert_allclose(result("median", stacked, np.full(count, 1 / count)), np.median(flat(stacked), 0))
    as_float32 = torch.full((count,), 1 / count, dtype=torch.float32)
    np.testing.assert_allclose(result("median", stacked, as_float32), np.median(flat(stacked), 0))


@pytest.mark.parametrize("count", [4, 8, 16])
def test_trimmed_mean_is_the_published_one_where_all_count_the_same(count):
    stacked = clients(count)
    found = result("trimmed", stacked, np.full(count, 0.2))
    np.testing.assert_allclose(found, yin_trimmed(flat(stacked), 0.25), rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [7, 8, 16])
def test_krum_chooses_whom_the_paper_chooses(count):
    for seed in range(5):
        stacked, f = clients(count, seed), count // 4
        kept = torch.nonzero(central(stacked, torch.full((count,), 0.1), 0.25))[:, 0].tolist()
        assert kept == blanchard_chosen(flat(stacked), f, count - f)


def test_flower_finds_the_same():
    reference = pytest.importorskip("flwr.server.strategy.aggregate", reason="needs fedxl[flower]")
    stacked = clients(12)
    each = [([row["w"].numpy(), row["b"].numpy()], 1) for row in tree.unstack(stacked, 12)]
    theirs = {
        "median": reference.aggregate_median(each),
        "trimmed": reference.aggregate_trimmed_avg(each, 0.25),
        "krum": reference.aggregate_krum(each, 3, 9),
    }
    for rule, expected in theirs.items():
        joined = np.concatenate([np.ravel(leaf) for leaf in expected])
        np.testing.assert_allclose(result(rule, stacked, np.ones(12)), joined, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", ["median", "trimmed"])
def test_a_client_that_counts_three_times_is_three_clients(rule):
    """Whole shares against the rule on clients that occur so often."""
    stacked, times = clients(5), [1, 3, 2, 1, 1]
    repeated = tree.map(lambda leaf: leaf.repeat_interleave(torch.tensor(times), 0), stacked)
    np.testing.assert_allclose(
        result(rule, stacked, np.array(times) / 8), result(rule, repeated, np.full(8, 1 / 8)), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("rule", ["median", "trimmed", "krum"])
def test_a_quarter_of_clients_cannot_move_the_result_beyond_the_others(rule):
    for seed, (lie, count) in enumerate(itertools.product([1e6, -1e30, float("inf")], [8, 16])):
        stacked = clients(count, seed)
        honest = flat(stacked)[count // 4 :]
        spoilt = tree.map(lambda leaf, n=count, v=lie: leaf.index_fill(0, torch.arange(n // 4), v), stacked)
        found = result(rule, spoilt, np.full(count, 1 / count))
        assert (found >= honest.min(0)).all()
        assert (found <= honest.max(0)).all()


@pytest.mark.parametrize("rule", list(RULES))
def test_who_does_not_count_is_as_if_absent(rule):
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
        assert (found >= flat(stacked).min(0) - 1e-12).all()
        assert (found <= flat(stacked).max(0) + 1e-12).all()
    counters = {"n": torch.tensor([[3], [4], [4], [5]]), "w": torch.ones(4, 2, dtype=torch.float32)}
    shares = torch.full((4,), 0.25)
    found = RULES[rule](counters, shares, zeros(counters))
    assert found["n"].tolist() == [4]
    assert found["w"].dtype == torch.float32
    nobody = RULES[rule](counters, torch.zeros(4), {"n": torch.tensor([7]), "w": torch.full((2,), 9.0)})
    assert nobody["n"].tolist() == [7]
    assert nobody["w"].tolist() == [9, 9]

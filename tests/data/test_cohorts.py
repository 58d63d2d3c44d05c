"""Cohorts by size: every client counts by its part of the population on average, by enumeration of all cohorts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from fedxl import sampling, tree
from fedxl.algorithms import CODASCA, LocalSGD, build
from fedxl.data.inputs import from_arrays
from fedxl.data.participation import shares, weigh
from fedxl.engine.executors import vectorised
from fedxl.models import weights_of
from fedxl.risks import partial_auc
from tests.conftest import RAGGED, make_clients
from tests.running import engine_for, play

Cohorts = dict[tuple[int, ...], float]
FIRST, SECOND = ([size[side] for size in RAGGED] for side in (0, 1))
CASES = {
    "two of six": (FIRST, SECOND, 2),
    "three of six, one of them always": (FIRST, SECOND, 3),
    "five of six, most of them always": (FIRST, SECOND, 5),
    "one of six": (FIRST, SECOND, 1),
    "one that holds almost all": ([900, 1, 2, 3], [99, 0, 4, 5], 2),
    "two that become certain one after the other": ([50, 30, 5, 5, 5], [0, 0, 2, 2, 1], 3),
    "all alike": ([5] * 5, [3] * 5, 2),
}


def probabilities(chances: np.ndarray) -> Cohorts:
    """The exact probability of each cohort: every order alike, and within one the cohort changes at a few starts."""
    found: Cohorts = {}
    orders = list(itertools.permutations(range(len(chances))))
    for order in map(np.array, orders):
        cuts = np.unique(np.concatenate(([0.0, 1.0], np.cumsum(chances[order]) % 1)))
        for low, high in itertools.pairwise(cuts):
            members = tuple(sampling.systematic(chances, order, (low + high) / 2).tolist())
            found[members] = found.get(members, 0.0) + (high - low) / len(orders)
    return found


@pytest.mark.parametrize("case", list(CASES))
def test_every_client_counts_by_its_part_on_average(case):
    first, second, size = CASES[case]
    share, chances = weigh(first, second, "samples", size)
    assert chances is not None
    cohorts = probabilities(chances)
    assert sum(cohorts.values()) == pytest.approx(1, abs=1e-12)
    parts = (np.array(first) + np.array(second)) / (sum(first) + sum(second))
    expected, often, pooled = np.zeros(len(first)), np.zeros(len(first)), np.zeros((2, len(first)))
    for members, probability in cohorts.items():
        index = list(members)
        weights = share.model.numpy()[index]
        assert len(index) == len(set(index)) == size or probability < 1e-12
        assert weights.sum() == pytest.approx(1, abs=1e-12) or probability < 1e-12
        expected[index] += probability * weights
        often[index] += probability
        pooled[:, index] += probability * share.mass.numpy()[index].T
    np.testing.assert_allclose(expected, parts, rtol=0, atol=1e-12)
    np.testing.assert_allclose(often, chances, rtol=0, atol=1e-12)
    # What clients add to the pool, before its draws divide by the sum of the cohort.
    np.testing.assert_allclose(pooled[0], np.array(first) / sum(first), rtol=0, atol=1e-12)
    np.testing.assert_allclose(pooled[1], np.array(second) / sum(second), rtol=0, atol=1e-12)


def test_clients_that_hold_too_much_are_always_there():
    share, chances = weigh([50, 30, 5, 5, 5], [0, 0, 2, 2, 1], "samples", 3)
    assert chances is not None
    assert chances[:2].tolist() == [1, 1]
    assert chances[2:].sum() == pytest.approx(1)
    assert share.model[:2].tolist() == [0.5, 0.3]
    torch.testing.assert_close(share.model[2:], torch.full((3,), 0.2).double())


def test_clients_without_a_part_are_never_drawn():
    chances = sampling.inclusion(np.array([0.5, 0.3, 0.2, 0.0, 0.0]), 4)
    assert chances.tolist() == [1, 1, 1, 0, 0]
    assert sampling.cohort(0, 1, 5, 4, chances).tolist() == [0, 1, 2]


def test_cohorts_are_drawn_with_these_chances():
    _, chances = weigh(FIRST, SECOND, "samples", 2)
    drawn = [sampling.cohort(7, r, 6, 2, chances) for r in range(4000)]
    assert all(len(set(members)) == 2 and list(members) == sorted(members) for members in drawn)
    often = np.bincount(np.concatenate(drawn), minlength=6) / 4000
    assert (np.abs(often - chances) < 5 * np.sqrt(chances * (1 - chances) / 4000)).all()
    often_found = {pair for pair, probability in probabilities(chances).items() if probability > 0.01}
    assert often_found <= {tuple(members.tolist()) for members in drawn}, "the order is drawn anew each time"
    assert np.array_equal(drawn[5], sampling.cohort(7, 5, 6, 2, chances))


@pytest.mark.parametrize(("weighting", "cohort"), [("clients", 3), ("clients", 0), ("samples", 0), ("samples", 6)])
def test_all_else_is_as_it_was(weighting, cohort):
    found, chances = weigh(FIRST, SECOND, weighting, cohort)
    assert chances is None
    before = shares(FIRST, SECOND, weighting)
    assert all(map(torch.equal, tree.leaves(found), tree.leaves(before)))
    assert torch.equal(found.model, found.part)
    rng = sampling.generator(3, sampling.Purpose.COHORT, 0, 9)
    assert sampling.cohort(3, 9, 6, 2).tolist() == sorted(rng.choice(6, 2, replace=False))


@pytest.mark.parametrize(
    "algorithm",
    [build("fedxl2", partial_auc(), lr=0.3, level="free"), LocalSGD(lr=0.3), CODASCA(lr=0.3)],
    ids=["fedxl2", "local_sgd", "codasca"],
)
@pytest.mark.parametrize("cohort", [2, 3], ids=["nobody is certain", "one is certain"])
def test_the_average_step_is_that_of_all_clients(algorithm, cohort, network):
    """The same state, every cohort, weighted by its probability: the model moves as if all had taken part."""
    federation = from_arrays(make_clients(RAGGED))

    def engine(size: int):
        return engine_for(algorithm, network(), federation, vectorised, 2, 3, 4, weighting="samples", cohort=size)

    everyone = engine(0)
    bound, start = everyone.algorithm, everyone.algorithm.init(weights_of(network()))
    if bound.first_round == 0:
        start = play(bound, everyone, start, 0, np.arange(6))
    full = play(bound, engine(0), start, 1, np.arange(6)).weights.params
    mean = tree.map(torch.zeros_like, full)
    for members, probability in probabilities(engine(cohort).chances).items():
        after = play(bound, engine(cohort), start, 1, np.array(members)).weights.params
        mean = tree.map(lambda total, new, p=probability: total + p * new, mean, after)
    for name, expected in full.items():
        torch.testing.assert_close(mean[name], expected, rtol=0, atol=1e-12, msg=name)
        assert (expected - start.weights.params[name]).abs().max() > 1e-4


def test_control_variates_stay_the_mean_of_the_population(network):
    """c moves by the parts of those who took part, however often they do."""
    algorithm = CODASCA(lr=0.3)
    options = {"weighting": "samples", "cohort": 3, "seed": 2}
    engine = engine_for(algorithm, network(), from_arrays(make_clients(RAGGED)), vectorised, 2, 3, 4, **options)
    server = engine.algorithm.init(weights_of(network()))
    for r in range(1, 6):
        server = play(engine.algorithm, engine, server, r, sampling.cohort(2, r, 6, 3, engine.chances))
    parts = [sum(size) / sum(map(sum, RAGGED)) for size in RAGGED]
    states = engine.population.states
    for name, mean in server.c.params.items():
        expected = sum(parts[int(client)] * state.c.params[name] for client, state in states.items())
        torch.testing.assert_close(mean, expected, rtol=0, atol=1e-12)


def test_pooled_scores_are_a_ratio_estimate_as_documented():
    """docs/maths.md has these numbers: draws divide by what a cohort holds of a side, which differs."""
    share, chances = weigh(FIRST, SECOND, "samples", 2)
    errors = []
    for counts, mass in zip((FIRST, SECOND), share.mass.numpy().T, strict=True):
        expected = np.zeros(6)
        for members, probability in probabilities(chances).items():
            index = list(members)
            expected[index] += probability * mass[index] / mass[index].sum()
        wanted = np.array(counts) / sum(counts)
        held = wanted > 0
        errors.append([round(100 * error) for error in sorted(expected[held] / wanted[held] - 1)])
    assert (errors[0][0], errors[0][-1]) == (-53, 78)
    assert (errors[1][0], errors[1][-1]) == (-10, 16)

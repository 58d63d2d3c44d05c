"""Sorted uploads: the same multiset of scores as drawn ones, in an order that tells nothing of the draws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.func import vmap

from fedxl import FeDXL1, FeDXL2, UserError, auroc, average_precision, contrastive, partial_auc, tree
from fedxl.algorithms.compositional import ScoreTrace
from fedxl.algorithms.ordering import sort_rows
from fedxl.algorithms.pool import S1Scores, S2Scores
from fedxl.algorithms.protocol import Share
from fedxl.data.federation import from_arrays
from fedxl.engine.executors import loop
from fedxl.models import weights_of
from tests.conftest import RAGGED, make_clients
from tests.running import engine_for, play


def with_ties(*shape: int, seed: int = 0) -> torch.Tensor:
    """Few different values, so that later columns decide."""
    return torch.randint(3, shape, generator=torch.Generator().manual_seed(seed)).double() / 2


@pytest.mark.parametrize("shape", [(40,), (40, 1), (40, 3), (40, 2, 2)])
def test_rows_are_sorted_as_python_sorts_tuples(shape):
    first, second = with_ties(*shape), with_ties(40, seed=1).float()
    rows = sorted((*one.flatten().tolist(), float(other)) for one, other in zip(first, second, strict=True))
    found = sort_rows(first, second)
    assert [(*one.flatten().tolist(), float(other)) for one, other in zip(*found, strict=True)] == rows
    assert [tensor.dtype for tensor in found] == [torch.float64, torch.float32]


def test_what_comes_out_does_not_depend_on_the_order_of_what_goes_in():
    a, u = with_ties(64, 2), with_ties(64, seed=1)
    u[::5] = torch.nan  # never visited
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    for one, other in zip(sort_rows(a, u), sort_rows(a[shuffled], u[shuffled]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_many_clients_at_once_are_sorted_as_one_by_one():
    a, u = with_ties(5, 30, 2), with_ties(5, 30, seed=1)
    stacked = vmap(sort_rows)(a, u)
    for client in range(5):
        assert all(map(torch.equal, (leaf[client] for leaf in stacked), sort_rows(a[client], u[client])))


def matrices(side: S1Scores | S2Scores) -> list[torch.Tensor]:
    """Scores, and what belongs to them, [n, columns]."""
    return [leaf.reshape(len(leaf), -1) for leaf in side[:2]]


RISKS = [auroc(), partial_auc(), average_precision(), contrastive(dim=2)]


@pytest.mark.parametrize("uploads", [0, 7])
@pytest.mark.parametrize("risk", RISKS, ids=lambda risk: risk.name)
def test_an_upload_holds_the_same_pairs_of_score_and_estimate_sorted(risk, uploads):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(3, 4, *risk.score_shape, generator=generator) for _ in range(2))
    u = torch.rand(3, 4, *risk.inner_shape, generator=generator, dtype=torch.float64)
    trace = ScoreTrace(a, u, b, with_ties(3, 4).round())
    drawn, one = FeDXL2(risk, uploads=uploads), torch.ones(())
    share = Share(one, one, one, one, one)
    before, after = (it.upload(trace, share, one, one) for it in (drawn, replace(drawn, order="sorted")))
    for old, new in zip(before, after, strict=True):
        expected, found = ([*zip(*(leaf.tolist() for leaf in matrices(side)), strict=True)] for side in (old, new))
        assert found == sorted(expected) != expected
        assert all(map(torch.equal, new[2:4], old[2:4])), "weights and ages are the same for all"


@pytest.mark.parametrize(
    "algorithm", [FeDXL1(auroc(), order="sorted"), FeDXL2(partial_auc(), order="sorted", fresh=True)]
)
def test_warm_up_and_training_upload_sorted_scores(algorithm, network):
    federation = from_arrays(make_clients(RAGGED))
    engine = engine_for(algorithm, network(), federation, loop, 3, 4, 5)
    server = algorithm.init(weights_of(network()))
    everyone = np.arange(len(RAGGED))
    for round in range(3):
        update = engine.run_round(server, round, everyone)
        for scores in (update.first.a, update.second.b):
            assert bool((scores.diff(dim=1) >= 0).all()), round
        server = algorithm.phase(round).aggregate(server, update)


def test_no_u_leaves_a_client_where_the_server_computes_them(network):
    """Not even as an order: scores that are the same are told apart by nothing."""
    algorithm = FeDXL2(partial_auc(), lr=0.1, pool_u="server", order="sorted")
    federation, everyone = from_arrays(make_clients(RAGGED)), np.arange(len(RAGGED))
    engine = engine_for(algorithm, network(), federation, loop, 3, 4, 5)
    server = algorithm.init(weights_of(network()))
    for round in range(3):
        update = engine.run_round(server, round, everyone)
        assert bool(update.first.u.isnan().all())
        server = algorithm.phase(round).aggregate(server, update)
        algorithm.phase(round).check_server(server)
        assert bool(server.pool.first.u.isfinite().all())


def test_cohorts_without_s2_bring_no_unknown_u_into_the_pool(network):
    algorithm = FeDXL2(partial_auc(), lr=0.1, pool_u="server", one_class="train")
    engine = engine_for(algorithm, network(), from_arrays(make_clients([(6, 0), (0, 6)])), loop, 2, 3, 3)
    server = algorithm.init(weights_of(network()))
    for round in range(2):
        server = play(algorithm, engine, server, round, np.zeros(1, np.int64))
        algorithm.phase(round).check_server(server)
    assert float(server.pool.first.weight.sum()) == 0, "an a without u is of no use"
    for round in (2, 3):  # b first, then a with its u
        server = play(algorithm, engine, server, round, np.arange(2))
        algorithm.phase(round).check_server(server)
    assert len(server.pool.first.u) == 6
    assert bool(server.pool.first.u.isfinite().all())


def test_where_each_step_reads_the_whole_pool_the_order_changes_nothing_but_rounding(network):
    """One client, one step a round: the pool is its last batch, and a step is a sum over it."""
    federation, states = from_arrays(make_clients([(9, 9)])), []
    for order in ("drawn", "sorted"):
        algorithm = FeDXL2(partial_auc(), lr=0.5, order=order)
        engine = engine_for(algorithm, network(), federation, loop, 1, 4, 5)
        server = algorithm.init(weights_of(network()))
        for round in range(6):
            server = play(algorithm, engine, server, round, np.zeros(1, np.int64))
        states.append(tree.pack((server.weights, server.G)))
        drawn = server.pool.first.a.diff()
        assert bool((drawn >= 0).all()) == (order == "sorted")
    for name, leaf in states[0].items():
        torch.testing.assert_close(states[1][name], leaf, rtol=0, atol=1e-12)


def test_an_order_that_there_is_not():
    with pytest.raises(UserError, match="unknown order 'sort'; did you mean 'sorted'"):
        FeDXL2(partial_auc(), order="sort")  # type: ignore[arg-type]

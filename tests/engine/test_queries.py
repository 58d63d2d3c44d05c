"""Queries in the simulator: executors agree, draws keep to their queries, the averaged step is right on average."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedxl
from fedxl import UserError, tree
from fedxl.algorithms import FeDXL2, LocalSGD, build
from fedxl.algorithms.pool import S1, S2, Pool
from fedxl.algorithms.step import ClientEstimates
from fedxl.data.examples import Examples
from fedxl.data.inputs import from_queries
from fedxl.engine.drawing import host_weights
from fedxl.engine.executors import loop, vectorised
from fedxl.models import weights_of
from fedxl.risks import auroc, listwise, ndcg
from fedxl.risks.pairing import Entry, PoolWeights
from fedxl.risks.ranking import Item, Relevant
from tests.conftest import EXECUTORS, make_clients
from tests.queries import scattered
from tests.running import engine_for, play


def linear() -> nn.Module:
    model = nn.Linear(3, 1, bias=False).double()
    model.weight.data = torch.tensor([[0.5, -0.3, 0.2]]).double()
    return model


def holders(federation: Examples) -> np.ndarray:
    """The client of each example."""
    found = np.empty(len(federation), np.int64)
    for client, part in enumerate(federation.parts):
        found[part] = client
    return found


FEW = ("loop", "vmap")
CASES = [
    ("fedxl2", ndcg(queries=2), "samples", tuple(EXECUTORS)),
    ("fedxl2", listwise(queries=2), "clients", FEW),
    ("fedxl2", ndcg(queries=2, top=2), "samples", tuple(EXECUTORS)),
    ("local_pair", ndcg(queries=2), "clients", FEW),
    ("local_pair", ndcg(queries=2, top=1), "clients", FEW),
    ("sox", listwise(queries=2), "samples", FEW),
]


@pytest.mark.parametrize(("name", "risk", "weighting", "executors"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_executors_agree(name, risk, weighting, executors):
    states = []
    for executor in map(EXECUTORS.get, executors):
        algorithm = build(name, risk, lr=0.1)
        federation = scattered().pooled() if algorithm.centralized else scattered()
        engine = engine_for(algorithm, linear(), federation, executor(), 3, 4, 6, seed=1, weighting=weighting)
        server = algorithm.init(weights_of(linear()))
        for round in range(algorithm.first_round, 4):
            server = play(algorithm, engine, server, round, np.arange(len(federation.parts)))
        states.append(tree.pack({"server": server, "population": engine.population}))
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        for key, expected in states[0].items():
            torch.testing.assert_close(state[key], expected, rtol=0, atol=1e-9, equal_nan=True, msg=key)
    moved = states[0]["server.weights.params.weight"] - linear().weight.data
    assert 1e-3 < moved.norm() < 10


def test_steps_read_items_of_their_queries_and_passive_scores_of_the_same():
    federation, steps = scattered(), 4
    engine = engine_for(FeDXL2(ndcg(queries=2)), linear(), federation, loop, steps, 4, 6)
    y, group, holder = federation.y[:, 0].numpy(), federation.group.numpy(), holders(federation)
    weights = np.array([0.0, 0.5, 0.5, 1.0]), np.array([0.0, 1.0, 1.0])  # the first entry of a pool is a placeholder
    pool = PoolWeights(*weights, groups=(np.array([-1, 10, 10, 10]), np.array([-1, 11, 10])))
    times = np.zeros(4, int)
    for visit in range(6):
        for client in range(3):
            draws = engine.drawing.draw(client, visit + 1, visit, pool)
            again = engine.drawing.draw(client, visit + 1, visit, pool)
            assert all(map(np.array_equal, draws, again)), "a pure function of the seed and where it is"
            assert (holder[draws.examples] == client).all()
            first, second = (side.reshape(steps, 2, -1) for side in np.split(draws.examples, [4], axis=1))
            query = group[first[:, :, :1]]
            assert (group[first] == query).all()
            assert (group[second] == query).all()
            assert not (query == 12).any(), "nothing can be learned from it"
            rows = draws.rows.reshape(steps, 2, -1)
            stands_in = y[first] == 0
            held = engine.drawing.held[client].first
            assert (stands_in == (rows == len(held))).all()
            assert (held[rows[~stands_in]] == first[~stands_in]).all()
            entries1, entries2 = draws.lag1.reshape(steps, 2, -1), draws.lag2.reshape(steps, 2, -1)
            assert (entries1[query[:, :, 0] == 11] == 0).all(), "the pool holds no relevant item of it"
            assert (entries2 == np.where(query == 11, 1, 2)).all()
            times += np.bincount(entries1[query[:, :, 0] == 10].ravel(), minlength=4)
    assert times[0] == 0
    assert abs(times[3] - times[1] - times[2]) <= 0.1 * times.sum(), "in proportion to the weights"


def test_what_stands_in_for_a_query_that_the_pool_lacks_meets_nobody():
    """Cohorts of one client, so that the pool holds some queries late, and relevant items later still."""
    federation, algorithm = scattered(), FeDXL2(ndcg(queries=2))
    engine = engine_for(algorithm, linear(), federation, loop, 4, 4, 6)
    algorithm = engine.algorithm
    server = algorithm.init(weights_of(linear()))
    lacking = 0
    for round, cohort in enumerate(([2], [0], [1], [0])):
        if round:
            pool = host_weights(algorithm.pool_weights(server))
            for client in range(3):
                draws = engine.drawing.draw(client, round, 0, pool)
                lags = torch.from_numpy(draws.lag1), torch.from_numpy(draws.lag2)
                passive = algorithm.passive(server, *lags)
                read = federation.group[torch.from_numpy(draws.examples)]  # [K, B1 + B2]
                for own, met in ((read[:, :4], passive.a.target.query), (read[:, 4:], passive.b.target.query)):
                    stands_in = met != own
                    met_here = (met.unsqueeze(-1) == read.unsqueeze(-2)).any(-1)
                    assert not (stands_in & met_here).any()
                    lacking += int(stands_in.sum())
        server = play(algorithm, engine, server, round, np.array(cohort))
    assert lacking > 0


@pytest.mark.parametrize("risk", [ndcg(queries=2), ndcg(queries=2, top=2), listwise(queries=2)], ids=str)
def test_the_averaged_step_is_the_gradient_on_average(risk):
    """Exact u and an exact pool; the mean over many rounds' draws against autograd of F."""
    federation, rounds = scattered(), 150
    algorithm = build("fedxl2", risk, lr=1.0, beta=1.0, gamma=1e-12, one_class="train", level="free")
    engine = engine_for(algorithm, linear(), federation, vectorised, 1, 2, 4, weighting="samples")
    y, items = federation.y[:, 0], engine.items
    model = linear()
    h = model(federation.x).squeeze(-1)
    (exact,) = torch.autograd.grad(risk.value(h, y, federation.group), model.weight)
    h = h.detach()
    first = Entry(h, Relevant(items.query, items.weight, items.size, items.part1))
    second = Entry(h, Item(items.query, items.part2))
    u, relevant = risk.inner(first, second), y > 0
    known = (torch.ones_like(h), torch.zeros_like(items.query), torch.from_numpy(holders(federation)).double())
    pool = Pool(tree.map(lambda leaf: leaf[relevant], S1(first, u, *known)), S2(second, *known))
    start = algorithm.init(weights_of(linear()))
    server = start._replace(pool=pool)
    for client, held in enumerate(engine.drawing.held):
        unknown = u.new_full((1,), float("nan"))
        engine.store.put({client: ClientEstimates(torch.cat((u[held.first], unknown)), {})})
    steps = torch.stack(
        [
            start.weights.params["weight"] - play(algorithm, engine, server, r, np.arange(3)).weights.params["weight"]
            for r in range(1, rounds + 1)
        ]
    )
    error = steps.std(0) / rounds**0.5
    assert bool(((steps.mean(0) - exact).abs() < 4 * error).all())
    assert bool((exact.abs() > 4 * error).any()), "the gradient is told from 0"


def clients(count: int = 3):
    """Ten queries of eight items, every query at all clients; the first feature says what is relevant."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(80, 3, generator=generator)
    grades = torch.bucketize(x[:, 0].contiguous(), torch.tensor([0.5, 1.2]))
    query, at = torch.arange(80) // 8, torch.arange(80) % count
    return [(x[at == client], grades[at == client], query[at == client]) for client in range(count)], (
        x,
        grades,
        query,
    )


@pytest.mark.parametrize("risk", [ndcg(queries=2), ndcg(queries=2, top=3), listwise(queries=2)], ids=str)
def test_fit_ranks_items_of_queries_across_clients(risk, tmp_path):
    held, whole = clients()
    settings = {"rounds": 6, "local_steps": 4, "batch_size": (8, 8), "eval_every": 2, "checkpoint_every": 3}
    splits = from_queries(held, validation=whole, test=whole)
    result = fedxl.fit(linear(), splits, FeDXL2(risk, lr=1.0), **settings, out=tmp_path / "run")
    before = fedxl.fit(linear(), splits, FeDXL2(risk, lr=1e-9), **settings).metrics["validation"]
    after = result.metrics["validation"]
    assert after["ndcg@5"] > before["ndcg@5"] + 0.05
    assert after["risk"] < before["risk"]
    assert after == result.metrics["test"]
    settings["rounds"] = 8
    whole_run = fedxl.fit(linear(), splits, FeDXL2(risk, lr=1.0), **settings)
    resumed = fedxl.fit(linear(), splits, FeDXL2(risk, lr=1.0), **settings, out=tmp_path / "run", resume=True)
    assert torch.equal(*(one.model.weight for one in (whole_run, resumed)))


def test_a_pointwise_reference_learns_grades():
    held, whole = clients()
    algorithm = LocalSGD(ndcg(), lr=0.05, loss="squared")
    result = fedxl.fit(linear(), from_queries(held, validation=whole), algorithm, rounds=4, local_steps=8)
    assert result.metrics["validation"]["ndcg@5"] > 0.95


def test_what_does_not_go_together_is_one_line():
    held, whole = clients()
    ranked, plain = from_queries(held), make_clients([(4, 4), (4, 4)], dim=3)
    x, grades, query = whole
    for attempt, told in (
        (lambda: fedxl.fit(linear(), plain, FeDXL2(ndcg())), "ranks items within queries, and the data name none"),
        (lambda: fedxl.fit(linear(), ranked, FeDXL2(auroc())), "use a risk of queries"),
        (lambda: fedxl.fit(linear(), ranked, FeDXL2(ndcg()), validation=(x, grades > 0)), "data name none"),
        (lambda: fedxl.fit(linear(), ranked, LocalSGD(ndcg())), "does not rank items within queries"),
        (lambda: fedxl.fit(linear(), ranked, FeDXL2(ndcg()), batch_size=6), "multiples of queries = 4"),
        (lambda: LocalSGD(loss="absolute"), "must be one of 'cross_entropy', 'squared'"),
        (lambda: from_queries([]), "at least one client"),
        (lambda: from_queries([(x, grades)]), "must be a triple"),
        (lambda: from_queries([(x, grades - 1, query)]), "grades lie between 0 and 30"),
        (lambda: from_queries([(x, grades, query + 0.5)]), "must be whole numbers"),
        (lambda: from_queries([(x, grades, query[1:])]), "80 examples but 79 queries"),
        (lambda: from_queries([(x, grades, query), (x[:, 1:], grades, query)]), "different shapes"),
    ):
        with pytest.raises(UserError, match=told):
            attempt()

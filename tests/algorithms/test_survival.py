"""Time to event across clients: the averaged step is that of the pooled partial likelihood, by enumeration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedxl import FeDXL1, LocalPair, UserError, concordance, cox, fit, from_times
from fedxl.algorithms import build
from fedxl.algorithms.pool import Pool, estimate_u
from fedxl.data.examples import Examples
from fedxl.engine.executors import loop
from fedxl.models import weights_of
from fedxl.risks import XRisk, auroc
from fedxl.risks.timetable import timetable
from tests.algorithms.rounds import after_rounds, assert_agree
from tests.algorithms.test_labels import one_of_each
from tests.conftest import EXECUTORS
from tests.running import engine_for, play

# Times and events of three clients: ties within and across clients, censoring at the time of an event, a client
# without an event.
HELD = [([1, 2, 2, 5], [1, 1, 0, 0]), ([2, 2, 3, 4, 4, 6], [1, 1, 0, 0, 1, 0]), ([2, 3, 7], [0, 0, 0])]
READ = 30, 156  # multiples of what any client holds, and of what all do: 2, 3 and 5 events, 4, 6, 3 and 13 patients
RISKS = {
    "cox": cox(),
    "breslow": cox(ties="breslow"),
    "binned": cox(time_bins=3),
    "stratified": cox(stratified=True),
    "concordance": concordance(),
    "stratified concordance": concordance(stratified=True),
}


def clients(seed: int = 0) -> Examples:
    rng = np.random.default_rng(seed)
    return from_times([(rng.normal(size=(len(time), 3)), time, event) for time, event in HELD]).train


def linear() -> nn.Module:
    model = nn.Linear(3, 1, bias=False).double()
    model.weight.data = torch.tensor([[0.5, -0.3, 0.2]]).double()
    return model


def objective(risk: XRisk, model: nn.Module, data: Examples) -> Tensor:
    """Pooled; stratified: of the clients, by how many events, or pairs, each has."""
    h, y, time = model(data.x).squeeze(-1), data.y[:, 0], data.time
    if risk.pairing.time_bins:
        table = timetable([held.times for held in data.holdings()], True, risk.pairing.time_bins)
        assert 1 < len(table.at) <= risk.pairing.time_bins
        return mean_weights(h, y > 0, torch.from_numpy(table.at[table.number(time.numpy())]))
    if not risk.pairing.stratified:
        return risk.value(h, y, time=time)
    parts = [torch.from_numpy(part) for part in data.parts]
    each = [
        (risk.value(h[part], y[part], time=data.time[part]), int(y[part].sum())) for part in parts if y[part].any()
    ]
    return sum(value * count for value, count in each) / sum(count for _, count in each)


def mean_weights(h: Tensor, event: Tensor, time: Tensor) -> Tensor:
    """Of d events in one bin each sees each with the mean of Efron's weights 1 - k / d, by its definition."""
    total = h.new_zeros(())
    for t in time[event].unique():
        tied, d = (time == t) & event, int(((time == t) & event).sum())
        weight = 1 - tied * sum(k / d for k in range(d)) / d
        total = total + d * (weight * h.exp())[time >= t].sum().log() - h[tied].sum()
    return total / event.sum()


@pytest.mark.parametrize("name", RISKS)
def test_the_averaged_step_is_the_exact_gradient_step(name):
    """Every client reads all that it holds, each as often; draws hold entries of the pool as their weights say."""
    risk, model, everyone, data = RISKS[name], linear(), np.arange(3), clients()
    algorithm = build("fedxl2", risk, lr=1.0, beta=1.0, gamma=1.0)
    sizes = READ if not risk.pairing.stratified else (6, 12)
    engine = engine_for(algorithm, model, data, loop, 1, *sizes, weighting="samples")
    algorithm = engine.algorithm
    server = play(algorithm, engine, algorithm.init(weights_of(model)), 0, everyone)
    server = with_all_once(algorithm.risk, server)
    after = play(algorithm, engine, server, 1, everyone)
    (exact,) = torch.autograd.grad(objective(risk, model, data), model.weight)
    step = server.weights.params["weight"] - after.weights.params["weight"]
    torch.testing.assert_close(step, exact, rtol=0, atol=1e-12)
    assert exact.norm() > 0.1


@pytest.mark.parametrize("decimals", [0, 3], ids=["tied", "untied"])
@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_a_converged_linear_model_is_that_of_the_pooled_patients(ties, decimals):
    """Three clients, one of which has no event, against scikit-survival on all of their patients."""
    theirs = pytest.importorskip("sksurv.linear_model").CoxPHSurvivalAnalysis(ties=ties, tol=1e-12)
    rng = np.random.default_rng(3)
    x = rng.normal(size=(36, 3))
    time = (rng.exponential(9 * np.exp(-0.7 * x[:, 0])) + 1).round(decimals)
    event = np.arange(36) % 12 < np.array([6, 6, 0]).repeat(12)
    data = from_times([(x[part], time[part], event[part]) for part in np.arange(36).reshape(3, 12)]).train
    risk, model = cox(ties=ties, max_share=1e6), linear()
    algorithm = build("fedxl2", risk, lr=0.5, beta=1.0, gamma=1.0)
    engine = engine_for(algorithm, model, data, loop, 1, 12, 36, weighting="samples")
    algorithm = engine.algorithm
    server = play(algorithm, engine, algorithm.init(weights_of(model)), 0, np.arange(3))
    for round in range(1, 150):
        server = play(algorithm, engine, with_all_once(algorithm.risk, server), round, np.arange(3))
    outcome = np.array(list(zip(event, time, strict=True)), dtype=[("event", bool), ("time", float)])
    expected = torch.from_numpy(theirs.fit(x, outcome).coef_)
    torch.testing.assert_close(server.weights.params["weight"][0], expected, rtol=0, atol=1e-6)


def with_all_once(risk: XRisk, server: Any) -> Any:
    """The server's state with a pool that holds each example once, with the weight of all of its entries."""
    pool = server.pool
    scores = [torch.stack((side.entry.score, side.entry.target.time.double()), -1) for side in pool]
    first, second = (one_of_each(side, own) for side, own in zip(pool, scores, strict=True))
    return server._replace(pool=estimate_u(risk, pool, Pool(first, second)))


@pytest.mark.parametrize("name", ["local_pair", "sox"])
@pytest.mark.parametrize("risk", [cox(), cox(ties="breslow"), concordance()], ids=str)
def test_own_pairs_give_the_gradient_of_each_clients_own_risk(name, risk):
    """Of Local Pair: averaged as the server averages; SOX is the pooled objective."""
    model, data = linear(), clients()
    algorithm = build(name, risk, lr=1.0, beta=1.0, gamma=1.0)
    data = data.pooled() if algorithm.centralized else data.take(np.concatenate(data.parts[:2]))
    sizes = (5, 13) if algorithm.centralized else (6, 12)
    engine = engine_for(algorithm, model, data, loop, 1, *sizes, weighting="samples")
    algorithm = engine.algorithm
    server = algorithm.init(weights_of(model))
    after = play(algorithm, engine, server, 1, np.arange(len(data.parts)))
    h, y = model(data.x).squeeze(-1), data.y[:, 0]
    parts = [torch.from_numpy(part) for part in data.parts]
    of = [
        (risk.value(h[part], y[part], time=data.time[part]), int(engine.shares.model[at] * 1e9))
        for at, part in enumerate(parts)
    ]
    whole = sum(value * weight for value, weight in of) / sum(weight for _, weight in of)
    (exact,) = torch.autograd.grad(whole, model.weight)
    step = server.weights.params["weight"] - after.weights.params["weight"]
    torch.testing.assert_close(step, exact, rtol=0, atol=1e-8)


CASES = [
    ("fedxl2", RISKS["cox"], {}, tuple(EXECUTORS)),
    ("fedxl2", RISKS["stratified"], {"pool_rounds": 2}, ("loop", "vmap")),
    ("fedxl2", RISKS["binned"], {"order": "sorted", "uploads": 3, "pool_u": "server"}, ("loop", "vmap")),
    ("fedxl2", RISKS["cox"], {"fresh": True}, ("loop", "vmap")),
    ("fedxl1", RISKS["concordance"], {}, tuple(EXECUTORS)),
    ("local_pair", RISKS["cox"], {}, tuple(EXECUTORS)),
    ("sox", RISKS["concordance"], {}, ("loop", "vmap")),
]


@pytest.mark.parametrize(("name", "risk", "options", "executors"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_executors_agree(name, risk, options, executors):
    states = [after_rounds(build(name, risk, lr=0.1, **options), linear(), clients(), each) for each in executors]
    assert_agree(*states)
    moved = states[0]["server.weights.params.weight"] - linear().weight.data
    assert 1e-3 < moved.norm() < 10


@pytest.mark.parametrize("lr", [0.01, 0.1, 1.0, 10.0])
def test_no_learning_rate_ends_with_weights_that_are_not_numbers(lr):
    """Steps of any size over several rounds; nothing bounds scores, but what a pair may count is bounded."""
    found = after_rounds(build("fedxl2", cox(), lr=lr), linear(), clients(), rounds=20)
    weight = found["server.weights.params.weight"]
    assert bool(weight.isfinite().all())
    assert float(weight.norm()) < 100 * (1 + lr * 20 * 3), "not more than steps of a bounded length"


def test_who_cannot_learn_from_times_says_so():
    splits = from_times([(np.ones((2, 3)), [1, 2], [1, 0])] * 2)
    model = nn.Linear(3, 1)
    for algorithm, line in (
        (LocalPair(auroc(), lr=0.1), "the data have times of events; use a risk of time to event"),
        (build("local_sgd", cox(), lr=0.1), "LocalSGD does not learn from times"),
        (build("codasca", cox(), lr=0.1), "CODASCA does not learn from times"),
    ):
        with pytest.raises(UserError, match=line):
            fit(model, splits, algorithm, rounds=1)
    with pytest.raises(UserError, match="compares times of events, and the data have none"):
        fit(model, [(np.ones((2, 3)), [0, 1])] * 2, FeDXL1(concordance(), lr=0.1), rounds=1)
    with pytest.raises(UserError, match="1 of 2 times are negative or not finite"):
        from_times([(np.ones((2, 3)), [1, float("nan")], [1, 0])])

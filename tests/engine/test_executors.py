"""Every algorithm on every executor: the loop over clients and the vectorised program must agree."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedxl import UserError, fit, sampling, tree
from fedxl.algorithms import ALGORITHMS, FeDXL2, build
from fedxl.data.inputs import from_arrays
from fedxl.engine.executors import choose, vectorised
from fedxl.models import TwoViews, cnn, mlp, weights_of
from fedxl.risks import RISKS, auroc, average_precision, contrastive, partial_auc, two_way_partial_auc
from fedxl.training.settings import Hooks
from tests.conftest import EXECUTORS, RAGGED, make_clients
from tests.running import engine_for, play

LINEAR_ONLY = {"fedxl1", "sgd"}


def final_state(name: str, options: dict[str, Any], risk, model, clients, executor: str, **engine: Any) -> dict:
    """Server and population after several rounds, by name."""
    federation = from_arrays(clients)
    algorithm = build(name, risk, **options)
    federation = federation.pooled() if algorithm.centralized else federation
    cohort = engine.get("cohort", 0)
    simulator = engine_for(algorithm, model, federation, EXECUTORS[executor](), 3, 4, 5, seed=1, **engine)
    algorithm = simulator.algorithm
    server = algorithm.init(weights_of(model))
    for r in range(algorithm.first_round, 6):
        members = sampling.cohort(1, r, len(federation.parts), cohort, simulator.chances)
        server = play(algorithm, simulator, server, r, members)
    return tree.pack({"server": server, "population": simulator.population})


def assert_agree(first: dict, *others: dict, tolerance: float = 1e-9) -> None:
    for other in others:
        assert first.keys() == other.keys()
        for key in first:
            torch.testing.assert_close(other[key], first[key], rtol=0, atol=tolerance, equal_nan=True, msg=key)


SETTINGS = {
    "all clients": {},
    "cohort of 3": {"cohort": 3},
    "groups of 2": {"clients_at_once": 2},
    "groups of 4, the last one short": {"clients_at_once": 4},
    "weighted by samples": {"weighting": "samples", "cohort": 4},
}
# Those of which graphs are compared, too. Each is traced anew, which takes its time.
GRAPHS = ("all clients", "groups of 4, the last one short")


@pytest.mark.parametrize("setting", list(SETTINGS))
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_executors_agree(name, setting, network):
    risk = auroc() if name in LINEAR_ONLY else partial_auc()
    options = {"lr": 0.1, "milestones": (4, 9), "weight_decay": 1e-3}
    states = [
        final_state(name, options, risk, network(), make_clients(RAGGED), executor, **SETTINGS[setting])
        for executor in EXECUTORS
        if setting in GRAPHS or "graph" not in executor
    ]
    assert_agree(*states)
    params = {key: value for key, value in states[0].items() if key.startswith("server.weights.params")}
    start = tree.pack(weights_of(network()).params)
    assert any(
        (value - start[key.removeprefix("server.weights.params.")]).abs().max() > 1e-4
        for key, value in params.items()
    )
    assert all(torch.isfinite(value).all() for value in params.values())


@pytest.mark.parametrize("risk", [name for name in RISKS if name != "contrastive"])
def test_every_scalar_risk_agrees(risk, network):
    states = [
        final_state("fedxl2", {"lr": 0.05}, RISKS[risk](), network(), make_clients(RAGGED), executor)
        for executor in EXECUTORS
    ]
    assert_agree(*states)


@pytest.mark.parametrize("name", ["local_pair", "sox"])
def test_a_normalised_risk_agrees_without_a_pool(name, network):
    states = [
        final_state(name, {"lr": 0.05}, two_way_partial_auc(0.2, 0.2), network(), make_clients(RAGGED), executor)
        for executor in EXECUTORS
    ]
    assert_agree(*states)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("risk", [partial_auc, two_way_partial_auc])
def test_raw_scores_of_a_single_precision_model_agree(risk, fresh, network):
    """Estimates are float64 there, weights and scores float32."""
    options, clients = {"lr": 0.01, "fresh": fresh}, make_clients(RAGGED)
    states = [
        final_state("fedxl2", options, risk(scores="raw"), network().float(), clients, executor, dtype="float32")
        for executor in EXECUTORS
    ]
    assert_agree(*states, tolerance=1e-3)
    types = {key.rpartition(".")[2]: value.dtype for key, value in states[0].items()}
    assert types["u"] == torch.float64
    assert types["score"] == types["weight"] == torch.float32


@pytest.mark.parametrize("order", ["drawn", "sorted"])
def test_vector_scores_agree(order, network):
    """The contrastive risk: embeddings are pooled, labels play no part."""
    clients = [(torch.stack((x, x.flip(1)), 1), y) for x, y in make_clients(RAGGED)]
    states = [
        final_state(
            "fedxl2", {"lr": 0.05, "order": order}, contrastive(dim=3), TwoViews(network(3)), clients, executor
        )
        for executor in EXECUTORS
    ]
    assert_agree(*states)
    assert states[0]["server.pool.first.entry.score"].shape[1:] == (6,)


POOLS = {
    "fresh points": {"fresh": True},
    "two rounds kept, sorted": {"pool_rounds": 2, "order": "sorted"},
    "few uploads": {"uploads": math.ceil(3 / 6)},
    "everything": {"fresh": True, "pool_rounds": 2, "uploads": 2, "order": "sorted"},
}


@pytest.mark.parametrize("pool", list(POOLS))
@pytest.mark.parametrize("risk", [partial_auc(), average_precision()], ids=["pauc", "ap"])
def test_pool_options_agree(pool, risk, network):
    states = [
        final_state("fedxl2", {"lr": 0.1, **POOLS[pool]}, risk, network(), make_clients(RAGGED), executor, cohort=4)
        for executor in EXECUTORS
    ]
    assert_agree(*states)


@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_batch_norm_agrees(name, buffers):
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)).double()
    risk = auroc() if name in LINEAR_ONLY else partial_auc()
    states = [
        final_state(name, {"lr": 0.05, "buffers": buffers}, risk, model, make_clients(RAGGED), executor, cohort=4)
        for executor in EXECUTORS
    ]
    assert_agree(*states)
    moved = states[0]["server.weights.buffers.1.running_mean"]
    assert moved.abs().max() > 1e-3, "the statistics must have been updated"
    assert any("states.0.buffers" in key for key in states[0]) == (buffers == "local")


def test_convolutions_agree():
    clients = [(x[:, :4].reshape(-1, 1, 2, 2), y) for x, y in make_clients([(4, 6), (3, 5), (2, 9)])]
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = cnn((1, 2, 2), channels=2).double()
    states = [final_state("fedxl2", {"lr": 0.05}, partial_auc(), model, clients, executor) for executor in EXECUTORS]
    assert_agree(*states)


def test_thousands_of_clients_in_one_program():
    """3,000 ragged clients at once: the executor's padding and the pool hold."""
    rng = np.random.default_rng(0)
    clients = make_clients([(int(p), int(n)) for p, n in rng.integers(1, 6, (3000, 2))])
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = mlp((5,), hidden=(4,)).double()
    states = [final_state("fedxl2", {"lr": 0.05, "uploads": 1}, partial_auc(), model, clients, "vmap", cohort=2000)]
    assert len([key for key in states[0] if key.endswith(".u") and "states" in key]) > 2900  # who was ever drawn
    assert torch.isfinite(states[0]["server.weights.params.1.weight"]).all()
    assert len(states[0]["server.pool.second.entry.score"]) == 2000


def test_dropout_is_reproducible(network):
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    for executor in EXECUTORS:
        before = torch.random.get_rng_state()
        once, again = (
            final_state("fedxl2", {"lr": 0.1}, partial_auc(), model, make_clients(RAGGED), executor) for _ in range(2)
        )
        assert_agree(once, again, tolerance=0)
        assert torch.equal(before, torch.random.get_rng_state()), "the caller's random stream must be left alone"


class Branches(nn.Module):
    """A model that looks at its numbers, which no vectorised program can."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


def test_auto_chooses_by_model_and_device():
    cpu = torch.device("cpu")
    assert choose(mlp((5,)), cpu, 16)[0] == "vmap"
    assert choose(mlp((5,)), cpu, 1)[0] == "loop"
    assert choose(nn.Sequential(nn.Dropout(0.5), mlp((5,))), cpu, 16)[0] == "vmap"
    assert choose(cnn((1, 8, 8)), cpu, 16)[0] == "loop"
    assert choose(cnn((1, 8, 8)), torch.device("cuda"), 16)[0] == "graph"


class Recurrent(nn.Module):
    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.head = layer(1, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.layer(x.unsqueeze(-1))[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(1, 4), nn.Linear(4, 1)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.head(self.layer(self.first(x.unsqueeze(-1))).mean(1))


@pytest.mark.parametrize(
    "make",
    [lambda: Recurrent(nn.LSTM), lambda: Recurrent(nn.GRU), Attention, Branches],
    ids=["lstm", "gru", "att", "if"],
)
@pytest.mark.parametrize("name", ["fedxl2", "local_pair"])
def test_auto_runs_every_model_and_says_where_it_runs_client_by_client(name, make):
    """Rounds that torch cannot vectorise run as with `loop`, and come to the same.

    Torch's own words on what vmap does one by one are not for users; here warnings are errors.
    """
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = make()
    clients = [(x.float(), y) for x, y in make_clients([(4, 4)] * 2)]
    settings: dict[str, Any] = {"rounds": 2, "local_steps": 2, "batch_size": 2, "device": "cpu"}
    algorithm, lines = build(name, auroc(), lr=0.1), list[str]()
    found = fit(model, clients, algorithm, executor="auto", hooks=Hooks(say=lines.append), **settings)
    alone = fit(model, clients, algorithm, executor="loop", hooks=Hooks(say=lines.append), **settings)
    for key, value in alone.weights.params.items():
        torch.testing.assert_close(found.weights.params[key], value, rtol=0, atol=1e-5)
    refused = [line for line in lines if line.startswith("executor: loop for rounds that need it, because the model")]
    assert len(refused) == (isinstance(model, Branches) or (isinstance(model, Recurrent) and name == "fedxl2"))


def test_a_private_run_of_a_model_without_gradients_by_example_ends_in_one_line():
    clients = [(x.float(), y) for x, y in make_clients([(4, 4)] * 2)]
    private = {"level": "free", "pool_u": "server", "dp_clip": 0.1, "dp_noise": 5.0, "dp_score_noise": 2.0}
    algorithm = build("fedxl2", auroc(scores="sigmoid"), lr=0.1, **private)
    norms = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 1))
    for model in (Recurrent(nn.LSTM), norms):
        with pytest.raises(UserError, match="dp_clip needs each example's own gradient, and torch cannot vectorise"):
            fit(model, clients, algorithm, rounds=1, local_steps=2, batch_size=2, device="cpu")


def test_a_model_that_cannot_be_vectorised_is_one_line_where_vmap_was_asked_for():
    settings = {"rounds": 1, "local_steps": 1, "batch_size": 2, "device": "cpu", "executor": "vmap"}
    clients = [(x.float(), y) for x, y in make_clients([(4, 4)] * 2)]
    norms = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    cases = [(Branches(), {}), (norms, {"precision": "bf16"})]  # of which torch has no gradient on CPUs
    for model, more in cases:
        with pytest.raises(
            UserError, match=r"the model cannot be vectorised: .*; leave executor = 'vmap' out"
        ) as told:
            fit(model, clients, FeDXL2(auroc()), **settings, **more)
        assert "file" not in str(told.value), "what torch asks of its developers"


def test_a_first_client_with_one_example_is_no_reason_against_vmap():
    x, y = make_clients([(4, 4)])[0]
    clients = [(x[:1].float(), y[:1]), (x.float(), y)]
    norms = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    settings = {"rounds": 1, "local_steps": 1, "batch_size": 2, "device": "cpu", "executor": "vmap"}
    assert fit(norms, clients, FeDXL2(auroc()), **settings).best_round == 1


def test_a_whole_gradient_from_one_class_clients(network):
    """Three sites, one without negatives, one without positives: the averaged step is the exact gradient step.

    All hold the same examples, so that a batch of all of them against the pool is the whole population.
    """
    x, y = make_clients([(4, 4)])[0]
    clients = [(x, y), (x[y == 1], y[y == 1]), (x[y == 0], y[y == 0])]
    for risk in (auroc(), partial_auc()):
        model = network()
        federation = from_arrays(clients)
        algorithm = build("fedxl2", risk, lr=1.0, beta=1.0, gamma=1.0, uploads=0, level="free")
        engine = engine_for(algorithm, model, federation, vectorised, 1, 4, 4)
        server = algorithm.init(weights_of(model))
        everyone = np.arange(3)
        server = play(algorithm, engine, server, 0, everyone)
        assert len(server.pool.first.u) == len(server.pool.second.weight) == 8
        # Two copies of each score are in the pool; keep one, so that a draw of 4 takes each example once.
        server = server._replace(pool=tree.map(lambda leaf: leaf[:4], server.pool))
        after = play(algorithm, engine, server, 1, everyone)

        leaves = {name: p.clone().requires_grad_() for name, p in weights_of(model).params.items()}
        h = torch.func.functional_call(model, leaves, (x,)).squeeze(-1)
        exact = torch.autograd.grad(risk.value(h, y), list(leaves.values()))
        for (name, before), gradient in zip(server.weights.params.items(), exact, strict=True):
            torch.testing.assert_close(before - after.weights.params[name], gradient, rtol=0, atol=1e-12)

"""Local steps: momentum and Adam, at clients and at the server, against torch.optim; and the rate's schedule."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as nnf

from fedxl import UserError, tree, wire
from fedxl.algorithms import build
from fedxl.algorithms.descent import Adam, Descent, Moments
from fedxl.algorithms.server_rules import begin
from fedxl.data.inputs import from_arrays
from fedxl.engine.executors import vectorised
from fedxl.models import weights_of
from fedxl.risks import auroc, partial_auc
from tests.algorithms.rounds import after_rounds, assert_agree
from tests.algorithms.test_algorithms import BATCH, K, batches_of
from tests.conftest import RAGGED, make_clients
from tests.running import engine_for, play

OPTIMISERS = {
    "momentum": lambda params, lr, decay: torch.optim.SGD(params, lr=lr, momentum=0.8, weight_decay=decay),
    "adam": lambda params, lr, decay: torch.optim.Adam(
        params, lr=lr, betas=(0.8, 0.95), eps=1e-4, weight_decay=decay
    ),
}
LOCAL = {"momentum": 0.8, "adam_decay": 0.95, "adam_epsilon": 1e-4}
SERVER = {f"server_{name}": value for name, value in LOCAL.items()}


@pytest.mark.parametrize(("local", "at_server"), [("momentum", "adam"), ("adam", "momentum")])
def test_local_steps_and_server_updates_are_those_of_torch(network, local, at_server):
    """Local optimisers begin anew in every round, the server's goes on; with weight decay and a milestone."""
    federation = from_arrays(make_clients(RAGGED))
    algorithm = build(
        "local_sgd", auroc(), lr=0.05, weight_decay=0.01, milestones=[4], decay=0.5, descent=local, **LOCAL,
        server_update=at_server, server_lr=0.3, **SERVER,
    )  # fmt: skip
    engine = engine_for(algorithm, network(), federation, vectorised, K, BATCH, BATCH)
    server = begin(algorithm, weights_of(network()))
    reference = network()
    updates = OPTIMISERS[at_server](reference.parameters(), 0.3, 0.0)
    for r in (1, 2, 3):
        ends = []
        for client in range(len(RAGGED)):
            model = copy.deepcopy(reference)
            optimiser = OPTIMISERS[local](model.parameters(), 0.05, 0.01)
            for k, (x, y) in enumerate(batches_of(engine, client, r)):
                optimiser.param_groups[0]["lr"] = 0.05 if (r - 1) * K + k < 4 else 0.025
                optimiser.zero_grad()
                nnf.binary_cross_entropy_with_logits(model(x).squeeze(-1), y.double()).backward()
                optimiser.step()
            ends.append(list(model.parameters()))
        for i, p in enumerate(reference.parameters()):
            p.grad = p.detach() - torch.stack([end[i].detach() for end in ends]).mean(0)
        updates.step()
        server = play(algorithm, engine, server, r, np.arange(len(RAGGED)))
        for name, p in reference.named_parameters():
            torch.testing.assert_close(server.weights.params[name], p.data, rtol=0, atol=1e-12)


def test_adam_in_single_precision_begins_right():
    """The first step is the sign of the gradient, to rounding, however close nu is to 1."""
    adam = Adam(mu=0.9, nu=0.99999, epsilon=1e-12)
    gradient = {"w": torch.tensor([1e-3, -5.0])}
    direction, _ = adam.direction(adam.init(gradient, torch.tensor(0)), gradient)
    torch.testing.assert_close(direction["w"], torch.tensor([1.0, -1.0]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["fedxl2", "local_pair", "local_sgd"])
@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_executors_agree(name, kind, network):
    options = {"lr": 0.02, "weight_decay": 1e-3}
    plain = build(name, partial_auc(), **options)
    algorithm = build(name, partial_auc(), **options, descent=kind, server_update=kind)
    model, federation = network(), from_arrays(make_clients(RAGGED))
    executors = ("loop", "vmap", "graph vectorised")
    states = [after_rounds(algorithm, model, federation, executor, cohort=4) for executor in executors]
    assert_agree(*states)
    remembered = "server.rules.0." + ("first." if kind == "adam" else "")
    assert float(states[0][f"{remembered}0.weight"].abs().max()) > 0
    both = (states[0], after_rounds(plain, model, federation, cohort=4))
    moved = [state["server.weights.params.0.weight"] for state in both]
    assert (moved[0] - moved[1]).abs().max() > 1e-4


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_moments_stay_at_the_server_and_survive_a_checkpoint(network, kind):
    algorithm = build("fedxl2", partial_auc(), lr=0.1, server_update=kind)
    engine = engine_for(algorithm, network(), from_arrays(make_clients(RAGGED)), vectorised, K, BATCH, BATCH)
    server = start = begin(algorithm, weights_of(network()))
    for r in range(3):
        server = play(algorithm, engine, server, r, np.arange(len(RAGGED)))
    if kind == "adam":
        assert int(server.rules[0].number) == 2, "the warm-up round is no update"
    sent = algorithm.downlink(server)
    assert sent.rules == ()
    assert wire.restore(algorithm.downlink(start), wire.flatten(sent)).step == server.step
    restored = tree.unpack(start, tree.pack(server))
    assert isinstance(restored.rules[0], Moments if kind == "adam" else dict)
    again = [play(algorithm, copy.deepcopy(engine), state, 3, np.arange(len(RAGGED))) for state in (server, restored)]
    assert torch.equal(again[0].weights.params["0.weight"], again[1].weights.params["0.weight"])


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_where_nobody_counts_nothing_moves(network, kind):
    algorithm = build("local_pair", partial_auc(), lr=0.1, server_update=kind)
    federation = from_arrays(make_clients([(4, 6), (7, 0), (0, 9)]))
    engine = engine_for(algorithm, network(), federation, vectorised, K, BATCH, BATCH)
    server = play(algorithm, engine, begin(algorithm, weights_of(network())), 1, np.arange(3))
    after = play(algorithm, engine, server, 2, np.array([1, 2]))
    assert tree.norm(server.rules) > 0
    assert int(after.step) > int(server.step)
    for one, other in zip(tree.leaves(server._replace(step=())), tree.leaves(after._replace(step=())), strict=True):
        assert torch.equal(one, other)


def test_how_far_a_kept_gradient_moves_the_model():
    """`distance` against the steps themselves: G decays, momentum carries it on."""
    step = torch.tensor(0)
    for kind, held in itertools.product(("sgd", "momentum"), (False, True)):
        descent = Descent(descent=kind, momentum=0.7)
        w, G = {"w": torch.zeros(1).double()}, {"w": torch.ones(1).double()}
        moments = descent.optimiser.init(w, step)
        for _ in range(5):
            left = tree.map(lambda g: 0.8 * g, G)
            w, moments = descent.move(w, left, 0.3, step, moments)
            G = G if held else left
        assert float(descent.distance(0.3, 0.2, 5, step, 0.2 * held)) == pytest.approx(-float(w["w"]), rel=1e-12)


def test_the_rate_decays_at_its_milestones():
    descent = Descent(milestones=(5, 10), decay=0.1)
    rates = [float(descent.rate(1.0, torch.tensor(step), torch.float64)) for step in (0, 4, 5, 9, 10, 50)]
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01], rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"descent": "adma"}, "adam"),
        ({"server_update": "median"}, "mean"),
        ({"momentum": 1.0}, "momentum must lie in"),
        ({"server_adam_epsilon": 0.0}, "server_adam_epsilon must be positive"),
        ({"server_lr": 0.5}, "server_update"),
        ({"milestones": [4, 4]}, "milestones must be positive and ascending"),
    ],
)
def test_mistakes_are_one_line(options, message):
    with pytest.raises(UserError, match=message):
        build("fedxl2", partial_auc(), **options)


def test_codasca_keeps_its_own_rule():
    with pytest.raises(UserError, match="its own rule"):
        build("codasca", auroc(), descent="adam")

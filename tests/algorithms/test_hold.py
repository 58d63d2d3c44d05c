"""A G that is held through the round: against the formula on whole data sets, and what it leaves as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedxl.algorithms import build
from fedxl.algorithms.server_rules import next_state
from fedxl.data.inputs import from_arrays
from fedxl.engine.executors import loop
from fedxl.models import weights_of
from fedxl.risks import partial_auc
from tests.algorithms.rounds import after_rounds, assert_agree
from tests.conftest import make_clients
from tests.running import engine_for, play

CLIENTS = [(5, 4), (5, 4), (5, 4)]
LAM = 0.7
RISK = partial_auc(scores="sigmoid", lam=LAM)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(5, 1).double()


def test_rounds_are_those_of_the_formula():
    """Batches hold all examples of a client, and u follows at once: each g is the gradient of its own objective."""
    lr, hold, steps, rounds = 0.3, 0.2, 4, 3
    clients, model = make_clients(CLIENTS), network()
    algorithm = build("local_pair", RISK, lr=lr, gamma=1.0, hold=hold, guard=False)
    engine = engine_for(algorithm, model, from_arrays(clients), loop, steps, 5, 4)
    server = algorithm.init(weights_of(model))
    for round in range(1, rounds + 1):
        server = play(algorithm, engine, server, round, np.arange(3))

    def gradient(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        w = w.clone().requires_grad_()
        h = torch.sigmoid(x @ w[:-1] + w[-1])
        loss = (1 - (h[y == 1][:, None] - h[y == 0])).clamp(min=0).square()  # the squared hinge
        return torch.autograd.grad((LAM * torch.log(torch.exp(loss / LAM).mean(1))).mean(), w)[0]

    start = weights_of(network()).params
    w, G = torch.cat((start["weight"][0], start["bias"])), torch.zeros(6, dtype=torch.float64)
    for _ in range(rounds):
        ends, directions = [], []
        for x, y in clients:
            own = w
            for _ in range(steps):
                directions.append((1 - hold) * G + hold * gradient(own, x, y))
                own = own - lr * directions[-1]
            ends.append(own)
        w, G = torch.stack(ends).mean(0), torch.stack(directions).mean(0)
    found, moving = server.weights.params, server.G
    torch.testing.assert_close(torch.cat((found["weight"][0], found["bias"])), w, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat((moving["weight"][0], moving["bias"])), G, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["fedxl2", "local_pair"])
def test_with_one_step_per_round_nothing_changes(name):
    data, model = from_arrays(make_clients(CLIENTS)), network()
    found = [
        after_rounds(build(name, RISK, lr=0.2, beta=0.3, hold=hold), model, data, "loop", 3, sizes=(1, 4, 4))
        for hold in (0.0, 0.3)
    ]
    assert_agree(*found, tolerance=1e-14)


def test_what_a_client_sends_is_its_mean_direction_and_its_model_has_moved_by_as_much():
    model, steps = network(), 5
    algorithm = build("fedxl2", partial_auc(), lr=0.5, one_class="train")
    engine = engine_for(algorithm, model, from_arrays(make_clients([(6, 3), (5, 0)])), loop, steps, 4, 4)
    server = algorithm.init(weights_of(model))
    for round in range(2):
        server = play(algorithm, engine, server, round, np.arange(2))
    updates = engine.run_round(server, 2, np.arange(2))
    for name, sent in updates.G.items():
        moved = server.weights.params[name] - updates.weights.params[name]
        torch.testing.assert_close(sent, moved / (0.5 * steps), rtol=0, atol=1e-13)
    ahead = algorithm.position(server, updates)[1]
    assert next_state(algorithm, server, updates).G.keys() == ahead.keys()

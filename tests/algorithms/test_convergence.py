"""Convergence as the theorems say, on a small nonconvex problem whose exact gradient is at hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedxl.algorithms import build
from fedxl.data.examples import Examples
from fedxl.data.inputs import from_arrays
from fedxl.engine.executors import vectorised
from fedxl.models import weights_of
from fedxl.risks import XRisk, partial_auc
from tests.conftest import make_clients
from tests.running import engine_for, play

EXAMPLES = 32  # of each class, over all clients


def problem(num_clients: int) -> tuple[nn.Module, Examples]:
    """A tanh network and overlapping classes; the same examples whatever the number of clients."""
    x, y = make_clients([(EXAMPLES, EXAMPLES)], seed=4)[0]
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    split = [torch.cat([order[y[order] == label][i::num_clients] for label in (1, 0)]) for i in range(num_clients)]
    with torch.random.fork_rng([]):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return model, from_arrays([(0.4 * x[part], y[part]) for part in split])


def squared_norms(risk: XRisk, clients: int, rounds: int, steps: int, seed: int, **options) -> Tensor:
    """|grad F|^2 at the averaged model after each round, F over all examples of all clients."""
    model, federation = problem(clients)
    algorithm = build("fedxl2", risk, level="free", **options)
    engine = engine_for(algorithm, model, federation, vectorised, steps, 1, 1, seed=seed)
    server = algorithm.init(weights_of(model))
    x, y = federation.x, federation.y[:, 0]
    everyone = torch.arange(clients).numpy()

    def objective(params):
        return risk.value(torch.func.functional_call(model, params, (x,)).squeeze(-1), y)

    norms = []
    for r in range(rounds + 1):
        server = play(algorithm, engine, server, r, everyone)
        gradient = torch.func.grad(objective)(server.weights.params)
        norms.append(sum(g.square().sum() for g in gradient.values()))
    return torch.stack(norms)


def test_the_average_squared_gradient_falls_with_the_number_of_rounds():
    """Theorem 2: rates of order R^(-2/3), K of order R^(1/3), and the average falls like R^(-2/3).

    tests/studies/test_rates.py fits the slopes, on a linear model, which is cheaper.
    """
    risk, averages = partial_auc(lam=2.0, scores="sigmoid"), []
    for rounds in (8, 64, 343):
        steps, rate = round(rounds ** (1 / 3)), rounds ** (2 / 3)
        rates = {"lr": 20 / rate, "beta": min(1, 4 / rate), "gamma": min(1, 4 / rate)}
        runs = [squared_norms(risk, 4, rounds, steps, seed, **rates) for seed in range(2)]
        averages.append(float(torch.stack(runs)[:, 1:].mean()))
    print(f"average |grad F|^2 for R = 8, 64, 343: {averages}")
    assert averages[0] > 1.3 * averages[1] > 1.3 * 1.3 * averages[2]

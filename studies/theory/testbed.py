"""Small problems whose exact gradient is at hand, and runs of algorithms on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedxl import sampling
from fedxl.algorithms.protocol import Algorithm
from fedxl.data.examples import Examples, facts_about
from fedxl.engine.executors import loop, vectorised
from fedxl.engine.simulator import Simulator
from fedxl.models import Weights, weights_of
from fedxl.risks import OneLabel, XRisk
from fedxl.risks.pairing import Held
from fedxl.sampling import Indices, Purpose, Stream
from fedxl.training.problem import assemble
from fedxl.training.rounds import play_round
from fedxl.training.settings import Settings
from fedxl.training.simulation import simulator

EXAMPLES = 64  # of each class, over all clients
FEATURES = 4
SEED = 4  # of the examples: they are the problem, and the same in every run
START = (-1.0, 1.0, 1.0, 1.0)  # far from the minimum: most pairs are the wrong way round
NEWTON_STEPS, STATIONARY = 50, 1e-20


class WithReplacement(OneLabel):
    """A client's examples drawn with replacement, as the theorems assume. Elsewhere fedxl reads in epochs.

    The noise of a whole epoch cancels, so epochs would make the floor lower than the theorems say.
    """

    def draw(
        self, stream: Stream, held: Held, visits: int, steps: int, sizes: tuple[int, int], fresh: bool = False
    ) -> tuple[Indices, Indices]:
        both = zip((Purpose.FIRST, Purpose.SECOND), (held.first, held.second), sizes, strict=True)
        rows, others = (
            stream.generator(purpose, visits).integers(len(side), size=(steps, size)) for purpose, side, size in both
        )
        return rows, np.concatenate((held.first[rows], held.second[others]), axis=1)


@dataclass(frozen=True, eq=False)
class Testbed:
    """A network, a risk and clients; F is the risk of all examples, each client counts the same."""

    model: nn.Module
    risk: XRisk
    data: Examples
    x: Tensor  # [n, d] each example once
    y: Tensor  # [n]

    @cached_property
    def gradient(self) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
        """The exact gradient of F, over all pairs."""

        def objective(params: dict[str, Tensor]) -> Tensor:
            scores = torch.func.functional_call(self.model, params, (self.x,)).squeeze(-1)
            return self.risk.value(scores, self.y)

        return torch.func.grad(objective)

    def squared_norm(self, weights: Weights) -> float:
        """|grad F(w)|^2."""
        return float(_flat(self.gradient(weights.params)).square().sum())

    def stationary(self) -> Weights:
        """A minimum, by Newton's method with exact derivatives: for a linear score, from zero."""
        weights = weights_of(self.model)
        ((name, start),) = weights.params.items()
        w = torch.zeros_like(start).flatten()

        def slope(w: Tensor) -> Tensor:
            return _flat(self.gradient({name: w.view_as(start)}))

        for _ in range(NEWTON_STEPS):
            g = slope(w)
            hessian = torch.func.jacrev(slope)(w)
            if float(g.square().sum()) < STATIONARY:
                assert float(torch.linalg.eigvalsh(hessian).min()) > 0.01, "a flat or unstable stationary point"
                return weights._replace(params={name: w.view_as(start)})
            w = w - torch.linalg.solve(hessian, g)
        raise AssertionError("Newton's method found no stationary point")


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def linear(risk: XRisk, num_clients: int, differ: bool = False) -> Testbed:
    """A linear score on overlapping classes.

    Clients alike: each holds all examples, so that F and the noise of a client do not depend on their number.
    Clients that differ: the examples are dealt out along a feature that does not tell the classes apart.
    """
    x, y = _overlapping()
    model = nn.Linear(FEATURES, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([START]))
    everything = np.arange(len(y))
    parts = [everything] * num_clients
    if differ:
        ordered = np.argsort(x[:, -1].numpy(), kind="stable")
        sides = [np.array_split(ordered[y.numpy()[ordered] == label], num_clients) for label in (1, 0)]
        parts = [np.concatenate(both) for both in zip(*sides, strict=True)]
    return Testbed(model, risk, Examples(x, y[:, None]).share_out(parts), x, y)


def _overlapping() -> tuple[Tensor, Tensor]:
    """Two Gaussian clouds; the first half positive."""
    random = torch.Generator().manual_seed(SEED)
    x = torch.randn(2 * EXAMPLES, FEATURES, generator=random, dtype=torch.float64)
    y = (torch.arange(2 * EXAMPLES) < EXAMPLES).long()
    x[:, 0] += 0.5 * (2 * y - 1)
    return x, y


def squared_norms(
    bed: Testbed,
    algorithm: Algorithm,
    *,
    rounds: int,
    local_steps: int,
    seed: int,
    start: Weights | None = None,
    cohort: int = 0,
    batch: int = 8,
    batch2: int = 0,
) -> Tensor:
    """|grad F|^2 at the averaged model, [rounds + 1]: at the start, and after each round.

    start: initial weights; None: the testbed's own. cohort: clients of a round; 0: all. batch2: of S2; 0: as of S1.
    """
    engine = _engine(bed, algorithm, local_steps, (batch, batch2 or batch), seed, cohort)
    server: Any = algorithm.init(start or weights_of(bed.model))
    num_clients, norms = len(bed.data.parts), []
    for round in range(rounds + 1):
        members = sampling.cohort(seed, round, num_clients, cohort)
        if round >= algorithm.first_round:
            server, _ = play_round(algorithm, engine, server, round, members)
        norms.append(bed.squared_norm(server.weights))  # the warm-up, round 0, changes no weights
    return torch.tensor(norms, dtype=torch.float64)


def _engine(
    bed: Testbed, algorithm: Algorithm, local_steps: int, batch: tuple[int, int], seed: int, cohort: int
) -> Simulator:
    run = Settings(
        device="cpu", dtype="float64", seed=seed, local_steps=local_steps, batch1=batch[0], batch2=batch[1]
    )
    algorithm = replace(algorithm, risk=replace(algorithm.risk, pairing=WithReplacement()))
    problem = assemble(bed.model, algorithm, run, facts_about(bed.data.holdings(), run.weighting))
    together = (cohort or len(bed.data.parts)) > 1
    return simulator(problem, bed.data, vectorised if together else loop)

"""What hostile clients do, in a simulation: between a client's round and the server's merging, or to its labels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms.checks import inner_range
from fedxl.algorithms.pool import Scores
from fedxl.algorithms.protocol import ClientUpdate, ServerState
from fedxl.data.examples import Examples
from fedxl.risks import XRisk
from fedxl.sampling import Indices
from fedxl.training.rounds import Engine

FLIPPED = -5.0  # times what a client would send
SCALED = 10.0

Attack = Callable[[XRisk, ServerState, Any, Tensor], Any]  # updates stacked, and [C]: who is hostile


def sign_flip(risk: XRisk, server: Any, updates: Any, hostile: Tensor) -> Any:
    """The change of the weights, and G, the other way round and five times as long."""
    params = tree.map(
        lambda leaf, start: _where(hostile, start + FLIPPED * (leaf - start), leaf),
        updates.weights.params,
        server.weights.params,
    )
    updates = updates._replace(weights=updates.weights._replace(params=params))
    return _with_G(updates, hostile, FLIPPED)


def scaled_G(risk: XRisk, server: Any, updates: Any, hostile: Tensor) -> Any:
    """G, ten times as long and the other way round: all clients begin the next round with the mean of all G."""
    return _with_G(updates, hostile, -SCALED)


def poisoned_scores(risk: XRisk, server: Any, updates: Any, hostile: Tensor) -> Any:
    """The scores that pull hardest at others: S1 scored lowest and S2 highest, u as small as scores in range give.

    The smaller the u of a passive example, the more its pairs weigh.
    """
    low, high = risk.score_range[:2]
    least, _ = inner_range(risk)
    (a, u, b) = updates.scores
    lies = Scores(
        a._replace(score=_where(hostile, torch.full_like(a.score, low), a.score)),
        _where(hostile, torch.full_like(u, float(least)), u),
        b._replace(score=_where(hostile, torch.full_like(b.score, high), b.score)),
    )
    return updates._replace(scores=lies)


def honest(risk: XRisk, server: Any, updates: Any, hostile: Tensor) -> Any:
    """Updates as they are: the lie is in the data."""
    return updates


LABEL_FLIP = "label flip"
ATTACKS: Mapping[str, Attack] = {
    "sign flip": sign_flip,
    "scaled G": scaled_G,
    "poisoned scores": poisoned_scores,
    LABEL_FLIP: honest,
}


class Attacked:
    """An engine some clients of which send something else than what they came to."""

    def __init__(self, engine: Engine, attack: Attack, risk: XRisk, hostile: Collection[int]) -> None:
        self.engine, self.attack, self.risk, self.hostile = engine, attack, risk, frozenset(hostile)

    @property
    def sums(self) -> bool:
        return self.engine.sums

    def run_round(self, server: ServerState, round: int, cohort: Indices) -> ClientUpdate:
        updates = self.engine.run_round(server, round, cohort)
        rows = torch.tensor([int(client) in self.hostile for client in cohort], device=server.step.device)
        sent: ClientUpdate = self.attack(self.risk, server, updates, rows)
        return sent

    def remarks(self) -> dict[str, Any]:
        return self.engine.remarks()

    @property
    def population(self) -> Any:
        return self.engine.population

    def restore(self, server: ServerState, tensors: dict[str, Tensor]) -> None:
        self.engine.restore(server, tensors)


def with_flipped_labels(data: Examples, clients: Sequence[int]) -> Examples:
    """The same data, in which these clients take positives for negatives and the other way round."""
    y = data.y.clone()
    rows = torch.as_tensor(np.concatenate([data.parts[client] for client in clients]))
    y[rows] = 1 - y[rows]
    return replace(data, y=y)


def _with_G(updates: Any, hostile: Tensor, times: float) -> Any:
    return updates._replace(G=tree.map(lambda leaf: _where(hostile, times * leaf, leaf), updates.G))


def _where(hostile: Tensor, lie: Tensor, leaf: Tensor) -> Tensor:
    return torch.where(hostile.view(-1, *[1] * (leaf.ndim - 1)), lie, leaf)

"""FedProx (Li et al., MLSys 2020): local steps are drawn back to the model that the round began with.

A client descends its own objective plus mu / 2 |w - w bar|^2. With plain SGD that is its usual step from w, and a
step of -eta mu (w - w bar) besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedxl import tree
from fedxl.algorithms.local_pair import LocalPair
from fedxl.algorithms.local_sgd import LocalSGD
from fedxl.algorithms.protocol import Algorithm


@dataclass(frozen=True, kw_only=True, eq=False)
class Proximal(Algorithm):
    """Mixed in before an algorithm whose steps are those of plain SGD."""

    mu: float = 0.1

    def step(self, score: Any, server: Any, work: Any, batch: Any) -> tuple[Any, Any]:
        after, trace = super().step(score, server, work, batch)
        rate = self.lr * self.mu
        begun = after.weights.params, work.weights.params, server.weights.params
        params = tree.map(lambda new, old, start: new - rate * (old - start), *begun)
        return after._replace(weights=after.weights._replace(params=params)), trace


@dataclass(frozen=True, kw_only=True, eq=False)
class FedProx(Proximal, LocalSGD):
    """FedProx on the cross entropy."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PairProx(Proximal, LocalPair):
    """The same on pairs within each client."""

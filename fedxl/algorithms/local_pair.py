"""Local Pair: each client optimises the X-risk over pairs of its own examples alone, and models are averaged.

The baseline of the paper's section 4, FeDXL without the pool: the passive side is the client's own mini-batch, still
active. On a federation of one client this is mini-batch SGD (linear f) and SOX (Wang and Yang, ICML 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms.compositional import Client, Compositional, Work
from fedxl.algorithms.protocol import Batch, Share, average
from fedxl.errors import require
from fedxl.models import Weights


class Server(NamedTuple):
    weights: Weights
    G: dict[str, Tensor]
    step: Tensor


class Nothing(NamedTuple):
    """No score leaves the client."""


class Update(NamedTuple):
    weights: Weights
    G: dict[str, Tensor]
    share: Share
    steps: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalPair(Compositional):
    """Pairs within a client only; a client with one class has no pair and is left out of the average."""

    def init(self, weights: Weights) -> Server:
        device = next(iter(weights.params.values())).device
        G = tree.map(torch.zeros_like, weights.params)
        return Server(weights, G, torch.zeros((), dtype=torch.int64, device=device))

    def start(self, server: Server, client: Client, share: Share) -> Work:
        both = (share.first > 0) & (share.second > 0)
        return self.begin(server, client, both.to(share.first.dtype).expand(2))

    def step(self, server: Server, work: Work, batch: Batch) -> tuple[Work, Nothing]:
        work, _ = self.advance(work, batch)
        return work, Nothing()

    def pull(
        self, passive: Any, factors: Tensor, a: Tensor, b: Tensor, y: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        l, back = self.risk.pairs(a, b, y)
        u = before if self.risk.linear else self.risk.blend(before, self.risk.estimate(l), self.gamma)
        da, db = back(self.risk.weights(l, u) * factors[0])
        return da, db, u

    def finish(self, server: Server, share: Share, work: Work, trace: Nothing) -> tuple[Client, Update]:
        client = Client(work.u, self.own_buffers(work.weights.buffers))
        share = share._replace(model=share.model * work.factors[0])
        return client, Update(work.weights, work.G, share, work.step - server.step)

    def aggregate(self, server: Server, updates: Update) -> Server:
        shares = updates.share.model
        weights, G = average((updates.weights, updates.G), shares, (server.weights, server.G))
        return Server(weights, G, server.step + updates.steps.max())


@dataclass(frozen=True, kw_only=True, eq=False)
class CentralizedSGD(LocalPair):
    """Mini-batch SGD on the pooled data, for linear f: Local Pair with one client and beta = 1."""

    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.risk.linear, "sgd is for risks with a linear outer function (auroc); use sox")


@dataclass(frozen=True, kw_only=True, eq=False)
class SOX(LocalPair):
    """SOX on the pooled data: Local Pair with one client."""

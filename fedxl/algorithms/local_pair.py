"""Local Pair: each client optimises the X-risk over pairs of its own examples alone, and models are averaged.

The baseline of the paper's section 4, FeDXL without the pool: both sides of a pair come from the client's own
mini-batch, and both carry gradient. On a federation of one client this is mini-batch SGD (linear f) and SOX (Wang and
Yang, ICML 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedxl.algorithms.gradient import Exact
from fedxl.algorithms.level import Level
from fedxl.algorithms.protocol import Assignment, Batch, NoTrace
from fedxl.algorithms.step import ClientEstimates, PairDescent, PairWork, own_pull
from fedxl.errors import require
from fedxl.models import Score, Weights
from fedxl.risks.pairing import Share


class LocalPairServer(NamedTuple):
    weights: Weights
    G: dict[str, Tensor]
    step: Tensor
    rules: Any = ()


class LocalPairUpdate(NamedTuple):
    weights: Weights
    G: dict[str, Tensor]
    share: Share
    steps: Tensor


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LocalPair(PairDescent):
    """An X-risk over pairs within each client, models averaged.

    A client with one class has no pair and is left out of the average.
    """

    local_pairs: ClassVar[bool] = True

    def init(self, weights: Weights) -> LocalPairServer:
        step = torch.zeros((), dtype=torch.int64, device=next(iter(weights.params.values())).device)
        return LocalPairServer(weights, self.init_G(weights.params), step)

    def start(self, server: LocalPairServer, client: ClientEstimates, share: Share) -> PairWork:
        held = (share.factors > 0).to(share.model.dtype) * share.holds_both
        return self.begin(server, client, share, held)

    def step(self, score: Score, server: LocalPairServer, work: PairWork, batch: Batch) -> tuple[PairWork, NoTrace]:
        rows = batch.examples.rows
        (a, b), back, buffers = self.active(score, work, batch, Exact())
        force = self.risk.pairing.forces(work.factors, (a, b), a)[0]
        da, db, u = own_pull(self.risk, (a, b), work.u[rows], self.gamma, force)
        after = self.descend(work, back(da, db), buffers)
        return after if self.risk.linear else after._replace(u=work.u.index_put((rows,), u)), NoTrace()

    def finish(
        self, server: LocalPairServer, share: Share, work: PairWork, trace: NoTrace
    ) -> tuple[ClientEstimates, LocalPairUpdate]:
        client = ClientEstimates(work.u, self.own_buffers(work.weights.buffers))
        return client, LocalPairUpdate(work.weights, self.own_G(server, work), share, work.step - server.step)

    def update_like(self, server: LocalPairServer, assignment: Assignment) -> LocalPairUpdate:
        return LocalPairUpdate(server.weights, server.G, assignment.share, server.step)

    def counts(self, share: Share) -> Tensor:
        return share.model * share.holds_both

    def aggregate(self, server: LocalPairServer, mean: dict[str, Any], updates: LocalPairUpdate) -> LocalPairServer:
        return LocalPairServer(mean["weights"], mean["G"], server.step + updates.steps.max())


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CentralizedSGD(LocalPair):
    """Centralised mini-batch SGD for linear outer functions: Local Pair with one client and beta = 1."""

    centralized: ClassVar[bool] = True
    local_pairs: ClassVar[bool] = False

    beta: float = 1.0
    level: Level = Level("free")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.risk.linear, "sgd is for risks with a linear outer function (auroc); use sox")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SOX(LocalPair):
    """Centralised SOX for any outer function: Local Pair with one client."""

    centralized: ClassVar[bool] = True
    local_pairs: ClassVar[bool] = False

    level: Level = Level("free")

"""Local Pair: each client optimises the X-risk over pairs of its own examples alone, and models are averaged.

The baseline of the paper's section 4, FeDXL without the pool: the passive side is the client's own mini-batch, still
active. On a federation of one client this is mini-batch SGD (linear f) and SOX (Wang and Yang, ICML 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedxl import tree
from fedxl.algorithm import PoolWeights, Share
from fedxl.algorithms.fedxl import Client, FeDXL2, Server, Trace, Update, Work
from fedxl.algorithms.pool import Firsts, Pool, Seconds
from fedxl.errors import require


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalPair(FeDXL2):
    """Pairs within a client only; a client with one class has no pair and is left out of the average."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.fresh and not self.uploads and self.pool_rounds == 1,
            "this algorithm has no pool: leave out fresh, uploads and pool_rounds",
        )

    @property
    def prelude(self) -> None:
        return None

    def pool_weights(self, server: Server) -> PoolWeights | None:
        return None

    def passive(self, server: Server, lag1: Tensor, lag2: Tensor) -> tuple[()]:
        return ()

    def factors(self, server: Server, share: Share) -> Tensor:
        both = (share.first > 0) & (share.second > 0)
        return both.to(share.first.dtype).expand(2)

    def pull(
        self, passive: Any, factors: Tensor, a: Tensor, b: Tensor, y: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        l, back = self.risk.pairs(a, b, y)
        u = before if self.risk.linear else self.risk.blend(before, self.risk.estimate(l), self.gamma)
        da, db = back(self.risk.weights(l, u) * factors[0])
        return da, db, u

    def finish(self, server: Server, share: Share, work: Work, trace: Trace) -> tuple[Client, Update]:
        return super().finish(server, share._replace(model=share.model * work.factors[0]), work, trace)

    def upload(self, trace: Trace, mass1: Tensor, mass2: Tensor) -> tuple[Firsts, Seconds]:
        return super().upload(tree.map(lambda scores: scores[:0], trace), mass1, mass2)

    def merge(self, pool: Pool, updates: Update) -> Pool:
        return pool


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

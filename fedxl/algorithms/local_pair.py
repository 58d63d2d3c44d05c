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

from fedxl.algorithms import labels
from fedxl.algorithms.compositional import ClientEstimates, Compositional, PairWork
from fedxl.algorithms.estimators import Earlier
from fedxl.algorithms.optimisers import Moments
from fedxl.algorithms.protocol import Assignment, Batch, NoTrace, Share
from fedxl.algorithms.queries import own_pull
from fedxl.algorithms.worst_site import tilted
from fedxl.errors import require
from fedxl.models import Score, Weights


class LocalPairServer(NamedTuple):
    weights: Weights
    G: dict[str, Tensor]
    step: Tensor
    norms: Tensor | tuple[()] = ()  # usual norms of clients' changes, where they are clipped
    moments: Moments | tuple[()] = ()  # of the server's momentum or Adam


class LocalPairUpdate(NamedTuple):
    weights: Weights
    G: dict[str, Tensor]
    share: Share
    steps: Tensor
    risk: Tensor | tuple[()] = ()  # its own, where that counts


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalPair(Compositional[LocalPairServer, LocalPairUpdate]):
    """An X-risk over pairs within each client, models averaged.

    A client with one class has no pair and is left out of the average.
    """

    local_pairs: ClassVar[bool] = True

    def init(self, weights: Weights) -> LocalPairServer:
        step = torch.zeros((), dtype=torch.int64, device=next(iter(weights.params.values())).device)
        return self.with_moments(self.with_norms(LocalPairServer(weights, self.init_G(weights.params), step)))

    def start(self, server: LocalPairServer, client: ClientEstimates, share: Share) -> PairWork:
        both = (share.first > 0) & (share.second > 0)
        return self.begin(server, client, share, both.to(share.first.dtype).expand(2))

    def step(self, score: Score, server: LocalPairServer, work: PairWork, batch: Batch) -> tuple[PairWork, NoTrace]:
        work, _ = self.advance(score, work, batch)
        return work, NoTrace()

    def pull(
        self, passive: Any, work: PairWork, a: Tensor, b: Tensor, y: Tensor, before: Tensor,
        earlier: Earlier | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        l, back = self.risk.pairs(a, b, y)
        past = None if earlier is None else (self.risk.losses(earlier.a, earlier.b, y)[None], earlier.theta)
        u = before if self.risk.linear else self.followed(work, before, l[None], past)
        # All of the client's own f say where its share begins. A batch's few would say it with a bias.
        threshold = self.risk.share_threshold(work.u) if self.risk.counts_share else None
        weights = self.risk.weights(l, u, threshold=threshold) * work.factors[0]
        if isinstance(work.labels, Tensor):
            row = labels.own_pairs(self.risk, work.labels, a)
            weights = weights * row.reshape(*row.shape, *[1] * (l.ndim - row.ndim))
        da, db = back(weights)
        return da, db, u

    def pull_queries(
        self, batch: Batch, work: PairWork, a: Tensor, b: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return own_pull(self.risk, batch.items, self.gamma, work.factors[0], a, b, before)

    def finish(
        self, server: LocalPairServer, share: Share, work: PairWork, trace: NoTrace
    ) -> tuple[ClientEstimates, LocalPairUpdate]:
        share = share._replace(model=share.model * work.factors[0])
        steps = work.step - server.step
        return self.remembered(work), LocalPairUpdate(work.weights, work.G, share, steps, self.reported(work))

    def update_like(self, server: LocalPairServer, assignment: Assignment) -> LocalPairUpdate:
        risk = torch.zeros_like(assignment.share.model) if self.worst_site else ()
        return LocalPairUpdate(server.weights, server.G, assignment.share, server.step, risk)

    def trained(self, share: Share) -> Tensor:
        return share.model * ((share.first > 0) & (share.second > 0))

    def aggregate(self, server: LocalPairServer, updates: LocalPairUpdate) -> LocalPairServer:
        updates, norms = self.clipped(server, updates, updates.share.model)
        shares = self.chosen(server, updates, updates.share.model)
        if isinstance(updates.risk, Tensor):
            shares = tilted(shares, updates.risk, self.worst_site)
        weights, G = self.merged((updates.weights, updates.G), shares, (server.weights, server.G))
        weights, moments = self.improved(server, weights, shares)
        return LocalPairServer(weights, G, server.step + updates.steps.max(), norms, moments)


@dataclass(frozen=True, kw_only=True, eq=False)
class CentralizedSGD(LocalPair):
    """Centralised mini-batch SGD for linear outer functions: Local Pair with one client and beta = 1."""

    centralized: ClassVar[bool] = True
    local_pairs: ClassVar[bool] = False

    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.risk.linear, "sgd is for risks with a linear outer function (auroc); use sox")


@dataclass(frozen=True, kw_only=True, eq=False)
class SOX(LocalPair):
    """Centralised SOX for any outer function: Local Pair with one client."""

    centralized: ClassVar[bool] = True
    local_pairs: ClassVar[bool] = False

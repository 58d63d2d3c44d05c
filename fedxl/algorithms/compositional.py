"""What FeDXL and Local Pair have in common: a step with running inner estimates u and a moving-average gradient G.

    u_i <- (1 - gamma) u_i + gamma g_i
    G   <- (1 - beta) G + beta (gradient of the pull)
    w   <- w - eta G

They differ in whom a client's examples are paired with, which is `pull`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms.protocol import WEIGHTS, Assignment, Batch, Descent, Reading
from fedxl.errors import require
from fedxl.models import Weights
from fedxl.risks import XRisk

WEIGHTS_AND_G = "change of weights and G"


class Client(NamedTuple):
    u: Tensor  # [n1, *m] running inner estimates; NaN: never visited
    buffers: dict[str, Tensor]  # its own, where buffers stay local


class Work(NamedTuple):
    weights: Weights
    G: dict[str, Tensor]
    u: Tensor
    step: Tensor
    factors: Tensor  # [2] of the gradients by S1 and by S2: 0 where there is nothing to pair


class Trace(NamedTuple):
    """The scores of a step, with the estimates that belong to them."""

    a: Tensor  # [B1, *d]
    u: Tensor  # [B1, *m]
    b: Tensor  # [B2, *d]
    y: Tensor  # [B2]


def sides(h: Tensor, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [B1 + B2, *d] as those of S1 and those of S2, and S2's labels."""
    size1 = rows.shape[0]
    return h[:size1], h[size1:], y[size1:]


@dataclass(frozen=True, kw_only=True, eq=False)
class Compositional(Descent):
    """Descent on an X-risk by pairs of scores."""

    risk: XRisk
    beta: float = 0.1  # weight of the new gradient in G
    gamma: float = 0.1  # weight of the new inner estimate in u

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.beta <= 1, f"beta must lie in (0, 1], got {self.beta}")
        require(0 < self.gamma <= 1, f"gamma must lie in (0, 1], got {self.gamma}")

    def reading(self, batch1: int, batch2: int) -> Reading:
        return Reading(*self.risk.sides, batch1, batch2)

    def init_client(self, server: Any, num_rows: int) -> Client:
        like: Tensor = next(iter(server.G.values()))
        u = like.new_full((max(1, num_rows), *self.risk.inner_shape), float("nan"))
        return Client(u, self.own_buffers(server.weights.buffers))

    def check_update(self, server: Any, update: Any, asked: Assignment) -> dict[str, Tensor]:
        """Weights and G have one size: how far both move the model until the end of the next round.

        The norm of G by itself says little. It is that of the last steps, and where most sites have nothing left to
        learn from their last batches, an honest G may be 100 times the median.
        """
        sizes = super().check_update(server, update, asked)
        kept = 1 - self.beta
        steps = sum(kept**step for step in range(1, asked.steps + 1))  # for which G goes on, as it fades
        ahead = self.rate(server.step, torch.float64) * steps * tree.norm(update.G)
        return sizes | {WEIGHTS_AND_G: sizes.pop(WEIGHTS) + ahead}

    def begin(self, server: Any, client: Client, factors: Tensor) -> Work:
        weights = server.weights._replace(buffers=client.buffers or server.weights.buffers)
        return Work(weights, server.G, client.u, server.step, factors)

    def pull(
        self, passive: Any, factors: Tensor, a: Tensor, b: Tensor, y: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients by the scores a of S1 and b of S2, and the updated u of the former."""
        raise NotImplementedError

    def advance(self, work: Work, batch: Batch) -> tuple[Work, Trace]:
        """One step: score, pull, estimate, descend."""
        before = work.u[batch.rows]

        def scores(params: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            h, buffers = self.score(work.weights._replace(params=params), batch.x)
            return self.risk.link(h), buffers

        scored: Any = torch.func.vjp(scores, work.weights.params, has_aux=True)
        h, back, buffers = scored
        a, b, y = sides(h, batch.y, batch.rows)
        da, db, new = self.pull(batch.passive, work.factors, a, b, y, before)
        (gradient,) = back(torch.cat((da, db)))
        G = tree.map(lambda old, new: torch.lerp(old, new, self.beta), work.G, gradient)
        params = self.descend(work.weights.params, G, work.step)
        u = work.u if self.risk.linear else self.remember(work, batch.rows, before, new)
        work = work._replace(weights=Weights(params, buffers), G=G, u=u, step=work.step + 1)
        return work, Trace(a, new, b, y)

    def remember(self, work: Work, rows: Tensor, before: Tensor, new: Tensor) -> Tensor:
        """u with the batch's new estimates, unless they are of stand-ins: no S1 here, or nothing to pair it with."""
        return work.u.index_put((rows,), torch.where(work.factors[0] > 0, new, before))

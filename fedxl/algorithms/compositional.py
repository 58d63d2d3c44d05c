"""What FeDXL and Local Pair have in common: a step with running inner estimates u and a moving-average gradient G.

    u_i <- (1 - gamma) u_i + gamma g_i
    G   <- (1 - beta) G + beta (gradient of the pull)
    w   <- w - eta G

They differ in what a client's examples are paired with: `pull`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms.descent import WEIGHTS, Descent
from fedxl.algorithms.protocol import Assignment, Batch, ClientUpdate, Health, Reading, ServerState
from fedxl.errors import require
from fedxl.models import Score, Weights
from fedxl.risks.saturation import saturated_outputs

WEIGHTS_AND_G = "change of weights and G"


class ClientEstimates(NamedTuple):
    """What a client remembers of its examples."""

    u: Tensor  # [n1, *m] running inner estimates; NaN: never visited
    buffers: dict[str, Tensor]  # its own, where buffers stay local


class PairWork(NamedTuple):
    """What moves from step to step."""

    weights: Weights
    G: dict[str, Tensor]
    u: Tensor
    step: Tensor
    factors: Tensor  # [2] what the gradients by S1 and by S2 are multiplied by: 0 where there is nothing to pair


class ScoreTrace(NamedTuple):
    """The scores of a step, with the estimates that belong to them."""

    a: Tensor  # [B1, *d]
    u: Tensor  # [B1, *m]
    b: Tensor  # [B2, *d]
    y: Tensor  # [B2]


def sides(h: Tensor, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [B1 + B2, *d] as those of S1 and those of S2, and S2's labels."""
    size1 = rows.shape[0]
    return h[:size1], h[size1:], y[size1:]


class StateWithG(ServerState, Protocol):
    @property
    def G(self) -> dict[str, Tensor]: ...


class UpdateWithG(ClientUpdate, Protocol):
    @property
    def G(self) -> dict[str, Tensor]: ...


S = TypeVar("S", bound=StateWithG)
U = TypeVar("U", bound=UpdateWithG)


@dataclass(frozen=True, kw_only=True, eq=False)
class Compositional(Descent[S, ClientEstimates, U]):
    """Descent on an X-risk by pairs of scores."""

    may_be_nan: ClassVar[tuple[str, ...]] = ("u",)  # u of an example never visited, and all u of a linear risk

    beta: float = 0.1  # weight of the new gradient in G
    gamma: float = 0.1  # weight of the new inner estimate in u

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.beta <= 1, f"beta must lie in (0, 1], got {self.beta}")
        require(0 < self.gamma <= 1, f"gamma must lie in (0, 1], got {self.gamma}")

    def reading(self, batch1: int, batch2: int) -> Reading:
        return Reading(*self.risk.sides, batch1, batch2)

    @property
    def keeps_G(self) -> bool:
        """With beta = 1, G is the gradient of the last step: nothing needs to be kept or sent."""
        return self.beta < 1

    def init_G(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        return tree.map(torch.zeros_like, params) if self.keeps_G else {}

    def init_client(self, server: S, num_rows: int) -> ClientEstimates:
        like: Tensor = next(iter(server.weights.params.values()))
        shape, dtype = (max(1, num_rows), *self.risk.inner_shape), self.risk.dtype(like.dtype)
        u = like.new_full(shape, float("nan"), dtype=dtype)
        return ClientEstimates(u, self.own_buffers(server.weights.buffers))

    def check_update(self, server: S, update: U, assignment: Assignment) -> dict[str, Tensor]:
        """Weights and G have one size: how far both move the model until the end of the next round.

        The norm of G by itself says little, because it depends on the last batches alone. If most sites have nothing
        left to learn from theirs, an honest G may be 100 times the median.
        """
        sizes = super().check_update(server, update, assignment)
        kept = 1 - self.beta
        steps = sum(kept**step for step in range(1, assignment.steps + 1))  # weighted by what is left of G
        ahead = self.rate(server.step, torch.float64) * steps * tree.norm(update.G)
        return sizes | {WEIGHTS_AND_G: sizes.pop(WEIGHTS) + ahead}

    def health(self, server: S, h: Tensor | None, labels: Tensor | None) -> Health:
        """The scores that are optimised are the linked ones."""
        return Health() if h is None or labels is None else Health(saturated_outputs(self.risk, h, labels))

    def begin(self, server: S, client: ClientEstimates, factors: Tensor) -> PairWork:
        weights = server.weights._replace(buffers=client.buffers or server.weights.buffers)
        return PairWork(weights, server.G, client.u, server.step, factors)

    def pull(
        self, passive: Any, factors: Tensor, a: Tensor, b: Tensor, y: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients by the scores a of S1 and b of S2, and the updated u of the former."""
        raise NotImplementedError

    def advance(self, score: Score, work: PairWork, batch: Batch) -> tuple[PairWork, ScoreTrace]:
        """One step: score, pull, estimate, descend."""
        before = work.u[batch.rows]

        def scores(params: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            h, buffers = score(work.weights._replace(params=params), batch.x)
            return self.risk.link(h), buffers

        scored: Any = torch.func.vjp(scores, work.weights.params, has_aux=True)
        h, back, buffers = scored
        a, b, y = sides(h, batch.y, batch.rows)
        da, db, new = self.pull(batch.passive, work.factors, a, b, y, before)
        (gradient,) = back(torch.cat((da, db)))
        G = self.blended(work.G, gradient)
        params = self.descend(work.weights.params, G, work.step)
        u = work.u if self.risk.linear else self.remember(work, batch.rows, before, new)
        after = work._replace(weights=Weights(params, buffers), u=u, step=work.step + 1)
        return after._replace(G=G) if self.keeps_G else after, ScoreTrace(a, new, b, y)

    def blended(self, G: dict[str, Tensor], gradient: dict[str, Tensor]) -> dict[str, Tensor]:
        """(1 - beta) G + beta gradient."""
        if not self.keeps_G:
            return gradient
        return tree.map(lambda old, new: torch.lerp(old, new, self.beta), G, gradient)

    def remember(self, work: PairWork, rows: Tensor, before: Tensor, new: Tensor) -> Tensor:
        """u with the batch's new estimates; as it was if there is no S1 here, or nothing to pair it with."""
        return work.u.index_put((rows,), torch.where(work.factors[0] > 0, new, before))

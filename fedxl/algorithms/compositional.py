"""What FeDXL and Local Pair have in common: a step with running inner estimates u and a moving-average gradient G.

    u_i <- (1 - gamma) u_i + gamma g_i
    G   <- (1 - beta) G + beta (gradient of the pull)
    w   <- w - eta G

They differ in what a client's examples are paired with: `pull`. What keeps the level of scores is in `level.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, get_args

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms.descent import WEIGHTS, Descent
from fedxl.algorithms.level import Level, balanced, guarded
from fedxl.algorithms.protocol import Assignment, Batch, ClientUpdate, Health, Items, Reading, ServerState, Share
from fedxl.errors import require, unknown
from fedxl.models import Score, Weights
from fedxl.risks import belongs
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
    both: Tensor  # whether the client holds S1 and S2, as 1 or 0
    moved: Tensor  # how far a client with one class has moved its scores in this round


class ScoreTrace(NamedTuple):
    """The scores of a step, with the estimates that belong to them."""

    a: Tensor  # [B1, *d]
    u: Tensor  # [B1, *m]
    b: Tensor  # [B2, *d]
    y: Tensor  # [B2]
    items: Items | tuple[()] = ()  # [B1 + B2], if pairs lie within queries


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
    level: Level = "free"  # what steps may do to the level of all scores: free, bounded, even or balanced

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.beta <= 1, f"beta must lie in (0, 1], got {self.beta}")
        require(0 < self.gamma <= 1, f"gamma must lie in (0, 1], got {self.gamma}")
        if self.level not in get_args(Level):
            raise unknown("level", self.level, get_args(Level))

    def reading(self, batch1: int, batch2: int) -> Reading:
        queries = self.risk.queries
        if queries:
            told = f"batch1 = {batch1} and batch2 = {batch2} must be multiples of queries = {queries} in [risk]"
            require(batch1 % queries == batch2 % queries == 0, f"{told}: a step reads as many items of each query")
        return Reading(*self.risk.sides, batch1, batch2, queries=queries)

    @property
    def keeps_G(self) -> bool:
        """With beta = 1, G is the gradient of the last step: nothing needs to be kept or sent."""
        return self.beta < 1

    def init_G(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        return tree.map(torch.zeros_like, params) if self.keeps_G else {}

    def init_client(self, server: S, num_rows: int) -> ClientEstimates:
        like: Tensor = next(iter(server.weights.params.values()))
        # One row more for items that stand in where a client holds no relevant ones of a query.
        rows = num_rows + 1 if self.risk.queries else max(1, num_rows)
        shape, dtype = (rows, *self.risk.inner_shape), self.risk.dtype(like.dtype)
        u = like.new_full(shape, float("nan"), dtype=dtype)
        return ClientEstimates(u, self.own_buffers(server.weights.buffers))

    def check_update(self, server: S, update: U, assignment: Assignment) -> dict[str, Tensor]:
        """Weights and G have one size: how far both move the model until the end of the next round.

        The norm of G by itself says little, because it depends on the last batches alone. If most sites have nothing
        left to learn from theirs, an honest G may be 100 times the median.
        """
        sizes = super().check_update(server, update, assignment)
        ahead = self.ahead(server, assignment.steps) * tree.norm(update.G)
        return sizes | {WEIGHTS_AND_G: sizes.pop(WEIGHTS) + ahead}

    def ahead(self, server: S, steps: int) -> Tensor | float:
        """How far a G of length 1 moves the model in the next round."""
        kept = 1 - self.beta
        left = sum(kept**step for step in range(1, steps + 1))  # what is left of G, step by step
        return self.rate(server.step, torch.float64) * left

    def changing(self, state: Any) -> dict[str, Any]:
        return super().changing(state) | {"G": state.G}

    def with_parts(self, updates: Any, parts: dict[str, Any]) -> Any:
        return super().with_parts(updates, parts)._replace(G=parts["G"])

    def measured(self, server: Any, updates: Any) -> Any:
        """Weights, and how far G moves them in the next round."""
        ahead = self.ahead(server, int(updates.steps.max()))
        return updates.weights.params, tree.map(lambda leaf: leaf.double() * ahead, updates.G)

    def health(self, server: S, h: Tensor | None, labels: Tensor | None) -> Health:
        """The scores that are optimised are the linked ones. Guarded ones never saturate, but may all be alike."""
        if self.guards:
            return super().health(server, h, labels)
        return Health() if h is None or labels is None else Health(saturated_outputs(self.risk, h, labels))

    def begin(self, server: S, client: ClientEstimates, share: Share, factors: Tensor) -> PairWork:
        weights = server.weights._replace(buffers=client.buffers or server.weights.buffers)
        both = ((share.first > 0) & (share.second > 0)).to(factors.dtype)
        return PairWork(weights, server.G, client.u, server.step, factors, both, torch.zeros_like(both))

    def pull(
        self, passive: Any, work: PairWork, a: Tensor, b: Tensor, y: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients by the scores a of S1 and b of S2, and the updated u of the former."""
        raise NotImplementedError

    def pull_queries(
        self, batch: Batch, work: PairWork, a: Tensor, b: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same for pairs within queries."""
        raise NotImplementedError

    def advance(self, score: Score, work: PairWork, batch: Batch) -> tuple[PairWork, ScoreTrace]:
        """One step: score, pull, estimate, descend."""
        before, size1 = work.u[batch.rows], batch.rows.shape[0]

        def outputs(params: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            return score(work.weights._replace(params=params), batch.x)

        scored: Any = torch.func.vjp(outputs, work.weights.params, has_aux=True)
        h, back, buffers = scored
        linked: Any = torch.func.vjp(lambda h: self.linked(h, size1, work.both), h)
        paired, back_to_h = linked
        a, b, y = sides(paired, batch.y, batch.rows)
        if self.risk.queries:
            da, db, new = self.pull_queries(batch, work, a, b, before)
        else:
            da, db, new = self.pull(batch.passive, work, a, b, y, before)
        (d,) = back_to_h(torch.cat((da, db)))
        d = self.conserved(d, size1, work)
        (gradient,) = back(d)
        G = self.blended(work.G, gradient)
        pace, moved = self.paced(G, gradient, d, work)
        params = self.descend(work.weights.params, G, work.step, pace)
        u = work.u if self.risk.linear else self.remember(work, batch.rows, before, new)
        after = work._replace(weights=Weights(params, buffers), u=u, step=work.step + 1, moved=moved)
        return after._replace(G=G) if self.keeps_G else after, ScoreTrace(a, new, b, y, batch.items)

    def linked(self, h: Tensor, size1: int, both: Tensor) -> Tensor:
        """What is paired: outputs [B1 + B2, *d], guarded where the link is bounded, through the link.

        Not at a client with one class: the level and the spread of one class are what it has learned.
        """
        return self.risk.link(torch.where(both > 0, guarded(h, h[:size1], h[size1:]), h) if self.guards else h)

    def shown(self, h: Tensor, labels: Tensor) -> Tensor:
        """Outputs of examples with these labels, as the risk sees them before its link."""
        if not self.guards:
            return h
        first, second = (belongs(labels, side) for side in self.risk.sides)
        return guarded(h, h[first], h[second])

    @property
    def guards(self) -> bool:
        """Whether there is anything to guard: an unbounded link never saturates, and vectors have no level."""
        return self.level != "free" and self.risk.score_range.bounded and not self.risk.score_shape

    def conserved(self, d: Tensor, size1: int, work: PairWork) -> Tensor:
        """The gradients by the outputs, without what would move the level of a client with both classes."""
        if self.level != "balanced" or self.risk.score_shape:
            return d
        return torch.where(work.both > 0, balanced(d, size1), d)

    def paced(
        self, G: dict[str, Tensor], gradient: dict[str, Tensor], d: Tensor, work: PairWork
    ) -> tuple[Tensor | None, Tensor]:
        """By how much this client shortens its step (None: not), and how far its level has moved then."""
        return None, work.moved

    def blended(self, G: dict[str, Tensor], gradient: dict[str, Tensor]) -> dict[str, Tensor]:
        """(1 - beta) G + beta gradient."""
        if not self.keeps_G:
            return gradient
        return tree.map(lambda old, new: torch.lerp(old, new, self.beta), G, gradient)

    def remember(self, work: PairWork, rows: Tensor, before: Tensor, new: Tensor) -> Tensor:
        """u with the batch's new estimates; as it was if there is no S1 here, or nothing to pair it with."""
        return work.u.index_put((rows,), torch.where(work.factors[0] > 0, new, before))

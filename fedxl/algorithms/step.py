"""What a step of FeDXL and one of Local Pair share: scores of both sides, the pull on them, and the descent along G.

    u_i <- (1 - gamma) u_i + gamma g_i
    G   <- (1 - beta) G + beta (gradient of the pull)
    w   <- w - eta G

They differ in what a client's examples meet: scores of the pool (`pull`), or each other (`own_pull`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms.gradient import Exact
from fedxl.algorithms.level import Level
from fedxl.algorithms.pool import Scores
from fedxl.algorithms.protocol import Algorithm, Batch, Reading
from fedxl.errors import require
from fedxl.models import Score, Weights
from fedxl.risks.pairing import Entry, Masks, Minibatch, Share
from fedxl.risks.xrisk import XRisk

P = TypeVar("P", bound="PairDescent")
Pulled = tuple[Tensor, Tensor, Tensor]  # the gradients by the scores a and b, and the updated u


def pull(risk: XRisk, mine: tuple[Entry, Entry], pooled: Scores, u: Tensor, gamma: float, forces: Tensor) -> Pulled:
    """Updates u; returns G1's part by the active a, G2's by the active b, and u.

    All pairs are one block [2, B1, B2]: (active a, passive b) above (passive a, active b). So a step takes as many
    entries from the pool as it reads examples. forces: [2, B1 or 1, B2 or 1] how much pairs count.
    """
    a, b = tree.stack([mine[0], pooled.a]), tree.stack([pooled.b, mine[1]])
    l, back = risk.pairs(a, b)
    meets = risk.pairing.meets(a, b, risk.sides[1])
    new = u if risk.linear else risk.update_u(u, l[0], None if meets is None else meets[0], gamma)
    da, db = back(risk.pair_weights(l, torch.stack((new, pooled.u)), meets, pooled.u, forces))
    return da[0], db[1], u if risk.linear else _known(new, u, forces[0])


def own_pull(risk: XRisk, mine: tuple[Entry, Entry], u: Tensor, gamma: float, force: Tensor) -> Pulled:
    """The same for a client's own pairs, both sides active. force: [B1 or 1, B2 or 1]."""
    l, back = risk.pairs(*mine)
    meets = risk.pairing.meets(*mine, risk.sides[1])
    new = u if risk.linear else risk.update_u(u, l, meets, gamma)
    da, db = back(risk.pair_weights(l, new, meets, None, force))
    return da, db, u if risk.linear else _known(new, u, force)


def _known(new: Tensor, u: Tensor, force: Tensor) -> Tensor:
    """New estimates of a batch; a row that does not count here, because it stands in for another, keeps its own."""
    counts = force.amax(-1) > 0
    return torch.where(counts.reshape(*counts.shape, *[1] * (u.ndim - counts.ndim)), new, u)


class ClientEstimates(NamedTuple):
    """What a client remembers of its examples."""

    u: Tensor  # [n1, *m] running inner estimates; NaN if never visited
    buffers: dict[str, Tensor]  # its own, if buffers stay local


class PairWork(NamedTuple):
    """What moves from step to step."""

    weights: Weights
    G: dict[str, Tensor]
    u: Tensor  # [n1, *m]
    step: Tensor
    factors: Tensor  # [2, *t] what gradients from S1 and S2 are multiplied by: 0 if there is nothing to pair
    both: Tensor  # [*t] whether the client holds S1 and S2, as 1 or 0
    trains: Tensor  # [*t] whether its gradients count, as 1 or 0
    moments: Any  # of the local optimiser
    total: dict[str, Tensor]  # if G is held, the sum of this round's directions; else {}

    @property
    def pace(self) -> Tensor:
        """The factor of a step: 0 if the client trains on no label, else 1."""
        return self.trains.amax() if self.trains.ndim else self.trains


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PairDescent(Algorithm):
    """Descent on an X-risk by pairs of scores."""

    averaged: ClassVar[tuple[str, ...]] = ("weights", "G")
    may_be_nan: ClassVar[tuple[str, ...]] = ("u",)  # of an example never visited, and all u of a linear risk

    beta: float = 0.1  # weight of the new gradient in G, if that is not held
    gamma: float = 0.1  # weight of the new inner estimate in u; 1: nothing is remembered (BSGD)
    level: Level = Level()  # the paper: "free"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.beta <= 1, f"beta must lie in (0, 1], got {self.beta}")
        require(0 < self.gamma <= 1, f"gamma must lie in (0, 1], got {self.gamma}")

    @property
    def hold(self) -> float:
        """The weight of a new gradient beside the server's G, which is held through the round; 0: it is not."""
        return self.level.hold if self.beta < 1 and self.level.kept(self.risk) else 0.0

    def with_network(self: P, normed_scores: bool) -> P:
        """Normed scores have a level and a spread already: neither guard nor held G has helped them."""
        return replace(self, level=replace(self.level, guard=False, hold=0.0)) if normed_scores else self

    @property
    def guards_level(self) -> bool:  # type: ignore[override]
        return self.level.guards(self.risk)

    def reading(self, batch1: int, batch2: int) -> Reading:
        self.risk.pairing.check_sizes(batch1, batch2)
        return Reading(*self.risk.sides, batch1, batch2, pairing=self.risk.pairing)

    def init_G(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """With beta = 1, G is the gradient of the last step: nothing needs to be kept or sent."""
        return tree.map(torch.zeros_like, params) if self.beta < 1 else {}

    def init_client(self, server: Any, num_rows: int) -> ClientEstimates:
        like: Tensor = next(iter(server.weights.params.values()))
        shape, dtype = (max(1, num_rows), *self.risk.inner_shape), self.risk.dtype(like.dtype)
        u = like.new_full(shape, float("nan"), dtype=dtype)
        return ClientEstimates(u, self.own_buffers(server.weights.buffers))

    def trains_on(self, share: Share) -> Tensor:
        """On which labels a client with this share trains, [*t] as 1 or 0."""
        return torch.ones_like(share.both, dtype=share.model.dtype)

    def begin(self, server: Any, client: ClientEstimates, share: Share, factors: Tensor) -> PairWork:
        weights = server.weights._replace(buffers=client.buffers or server.weights.buffers)
        moments = self.descent.optimiser.init(weights.params, server.step)
        both = share.both.to(factors.dtype)
        total = tree.map(torch.zeros_like, server.G) if self.hold else {}
        trains = self.trains_on(share)
        return PairWork(weights, server.G, client.u, server.step, factors, both, trains, moments, total)

    def active(
        self, score: Score, work: PairWork, batch: Batch, gradient: Exact
    ) -> tuple[tuple[Entry, Entry], Callable[[Tensor, Tensor], dict[str, Tensor]], dict[str, Tensor]]:
        """The batch's entries of S1 and S2, how gradients by their scores become one by the weights, and buffers."""
        of = batch.examples
        h, to_weights, buffers = gradient.outputs(score, work.weights, of.x, batch.noise)
        members = self.members(of)

        def linked(h: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Any, Any]]:
            a, b = self.entries(h, of, work.both, members)
            return (a.score, b.score), (a.target, b.target)

        found: Any = torch.func.vjp(linked, h, has_aux=True)
        scores, to_outputs, targets = found

        def back(da: Tensor, db: Tensor) -> dict[str, Tensor]:
            (d,) = to_outputs((da, db))
            return to_weights(d * work.trains)[0]

        return (Entry(scores[0], targets[0]), Entry(scores[1], targets[1])), back, buffers

    def entries(self, h: Tensor, of: Minibatch, both: Tensor, members: Any) -> tuple[Entry, Entry]:
        """Outputs [B1 + B2, *d] as what is paired: guarded if the level asks for it, and through the link."""
        return self.risk.pairing.entries(self.risk.link(self.level.guard_outputs(self.risk, h, members, both)), of)

    def members(self, of: Minibatch) -> Any:
        return self.risk.pairing.members(of, self.risk.sides)

    def descend(self, work: PairWork, gradient: dict[str, Tensor], buffers: dict[str, Tensor]) -> PairWork:
        """G <- (1 - beta) G + beta gradient, and a step along it. If G is held, the next step begins so, too."""
        G = gradient
        if self.beta < 1:
            G = tree.map(lambda old, new: torch.lerp(old, new, self.hold or self.beta), work.G, gradient)
        params, moments = self.descent.move(work.weights.params, G, self.lr, work.step, work.moments, work.pace)
        after = work._replace(weights=Weights(params, buffers), step=work.step + 1, moments=moments)
        if self.beta == 1:
            return after
        return after._replace(total=tree.map(torch.add, work.total, G)) if self.hold else after._replace(G=G)

    def own_G(self, server: Any, work: PairWork) -> dict[str, Tensor]:
        """The G that a client sends: its last one or, if G is held, the mean of its directions."""
        steps = (work.step - server.step).clamp(min=1)
        return tree.map(lambda total: total / steps, work.total) if self.hold else work.G

    def position(self, server: Any, updates: Any) -> tuple[Any, ...]:
        """Weights, and how far G moves them in the next round."""
        ahead = self.descent.distance(self.lr, self.beta, int(updates.steps.max()), server.step, self.hold)
        return updates.weights.params, tree.map(lambda leaf: leaf.double() * ahead, updates.G)

    def optimised_scores(self, h: Tensor, y: Tensor) -> Tensor:
        members = Masks(*(self.risk.pairing.of_side(y, side) for side in self.risk.sides))
        return self.level.guard_outputs(self.risk, h, members, members.first.any(0) & members.second.any(0))

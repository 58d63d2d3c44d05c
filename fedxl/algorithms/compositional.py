"""What FeDXL and Local Pair have in common: a step with running inner estimates u and a moving-average gradient G.

    u_i <- (1 - gamma) u_i + gamma g_i            or another estimator: `estimators.py`
    G   <- (1 - beta) G + beta (gradient of the pull)
    w   <- w - eta G

They differ in what a client's examples are paired with: `pull`. What keeps the level of scores is in `level.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, cast, get_args

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms import labels
from fedxl.algorithms.descent import WEIGHTS, Descent
from fedxl.algorithms.estimators import Earlier, Estimating, Estimator, Past, corrected
from fedxl.algorithms.level import Guard, Level, balanced, guarded
from fedxl.algorithms.merging import stretched
from fedxl.algorithms.optimisers import Moments
from fedxl.algorithms.protocol import (
    Assignment,
    Batch,
    ClientUpdate,
    Health,
    Items,
    Reading,
    ServerState,
    Share,
)
from fedxl.algorithms.worst_site import blended, check_reported, risk_of
from fedxl.errors import require, unknown
from fedxl.models import Score, Weights
from fedxl.risks import belongs
from fedxl.risks.saturation import saturated_outputs

WEIGHTS_AND_G = "change of weights and G"


class ClientEstimates(NamedTuple):
    """What a client remembers of its examples."""

    u: Tensor  # [n1, *m] running inner estimates; NaN: never visited
    buffers: dict[str, Tensor]  # its own, where buffers stay local
    risk: Tensor | tuple[()] = ()  # running estimate of its own risk, where that counts; NaN: not known
    rows: Tensor | tuple[()] = ()  # n1, where the estimator needs it


class PairWork(NamedTuple):
    """What moves from step to step."""

    weights: Weights
    G: dict[str, Tensor]
    u: Tensor
    step: Tensor
    factors: Tensor  # [2] what the gradients by S1 and by S2 are multiplied by: 0 where there is nothing to pair
    both: Tensor  # whether the client holds S1 and S2, as 1 or 0
    moved: Tensor  # how far a client with one class has moved its scores in this round
    risk: Tensor | tuple[()] = ()  # as in ClientEstimates
    moments: Moments | tuple[()] = ()  # of local momentum or Adam
    past: Past | tuple[()] = ()  # what the estimator remembers
    labels: Tensor | tuple[()] = ()  # [2, L] of several labels: the factors for each of them
    threshold: Tensor | tuple[()] = ()  # of f over S1, where a share of it counts and the server knows it


class ScoreTrace(NamedTuple):
    """The scores of a step, with the estimates that belong to them."""

    a: Tensor  # [B1, *d]
    u: Tensor  # [B1, *m]
    b: Tensor  # [B2, *d]
    y: Tensor  # [B2]
    items: Items | tuple[()] = ()  # [B1 + B2], if pairs lie within queries


def sides(h: Tensor, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [B1 + B2, *d] as those of S1 and those of S2, and S2's labels; of several labels S1 is couples."""
    size1 = rows.shape[0]
    return h[:size1] if y.ndim == 1 else labels.chosen(h[:size1], rows), h[size1:], y[size1:]


class StateWithG(ServerState, Protocol):
    @property
    def G(self) -> dict[str, Tensor]: ...


class UpdateWithG(ClientUpdate, Protocol):
    @property
    def G(self) -> dict[str, Tensor]: ...


S = TypeVar("S", bound=StateWithG)
U = TypeVar("U", bound=UpdateWithG)
C = TypeVar("C", bound="Compositional[Any, Any]")


@dataclass(frozen=True, kw_only=True, eq=False)
class Compositional(Estimating, Descent[S, ClientEstimates, U]):
    """Descent on an X-risk by pairs of scores."""

    summed: ClassVar[tuple[str, ...]] = ("weights", "G")
    # u of an example never visited, and all u of a linear risk; the threshold of f where no f is known
    may_be_nan: ClassVar[tuple[str, ...]] = ("u", "threshold")

    beta: float = 0.1  # weight of the new gradient in G
    gamma: float = 0.1  # weight of the new inner estimate in u; 1: nothing is remembered (BSGD)
    estimator: Estimator = "average"  # of u: the moving average, or msvr, which scores batches by two models
    correction: float = 0.0  # theta, the weight of msvr's correction; 0: as in its paper
    level: Level = "free"  # what steps may do to the level of all scores: free, bounded, even or balanced
    guard: Guard = "auto"  # whether such levels guard outputs: on, off; auto: on unless the network norms its scores
    worst_site: float = 0.0  # lambda of the worst-site objective: the smaller, the more the worst counts; 0: off

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.beta <= 1, f"beta must lie in (0, 1], got {self.beta}")
        self.check_estimator(self.risk)
        if self.level not in get_args(Level):
            raise unknown("level", self.level, get_args(Level))
        if self.guard not in get_args(Guard):
            raise unknown("guard", self.guard, get_args(Guard))
        self._check_together()

    def _check_together(self) -> None:
        """One line for settings that do not go together."""
        if self.risk.labels:
            require(self.level != "balanced", 'level = "balanced" is for one label; with several use "even"')
            plain = self.estimator == "average" and not self.worst_site
            require(plain, "msvr and worst_site are for one label, not for several")
        if self.risk.queries:
            plain = self.estimator == "average" and not self.worst_site
            require(plain, "msvr and worst_site are not for risks of queries")
        require(
            not (self.worst_site and self.fixed_point),
            "worst_site weighs each client's change by its own risk, and fixed_point knows their sum alone",
        )
        if self.worst_site:
            two_way = self.risk.thresholds and self.risk.emphasises
            require(not two_way, "worst_site needs a risk that is a mean over S1, which that of cvar_tpauc is not")
            told = "clip_change would cut what the worst site is given by worst_site; set clip_change = 0"
            require(not self.clip_change, told)
        on = self.guard == "on" and self.level == "free"
        require(not on, "guard = 'on' needs a level that guards: set level = 'bounded', 'even' or 'balanced'")
        still = self.level == "balanced" and self.descent == "adam"
        require(
            not still, "adam's steps move the level that level = 'balanced' keeps; use 'even', or descent = 'sgd'"
        )
        require(self.worst_site >= 0, f"worst_site must not be negative (0: off), got {self.worst_site}")
        require(not (self.worst_site and self.centralized), "worst_site needs sites; here all data are in one place")

    def with_network(self: C, normed_scores: bool) -> C:
        """Normed scores have a level and a spread already, and the guard would only hold back what they learn."""
        return replace(self, guard="off") if self.guard == "auto" and normed_scores else self

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
        count = num_rows + 1 if self.risk.queries else max(1, num_rows)
        shape, dtype = (count, *self.risk.inner_shape), self.risk.dtype(like.dtype)
        u = like.new_full(shape, float("nan"), dtype=dtype)
        risk = like.new_full((), float("nan")) if self.worst_site else ()
        rows = like.new_full((), num_rows) if self.corrects else ()
        return ClientEstimates(u, self.own_buffers(server.weights.buffers), risk, rows)

    def check_update(self, server: S, update: U, assignment: Assignment) -> dict[str, Tensor]:
        """Weights and G have one size: how far both move the model until the end of the next round.

        The norm of G by itself says little, because it depends on the last batches alone. If most sites have nothing
        left to learn from theirs, an honest G may be 100 times the median.
        """
        sizes = super().check_update(server, update, assignment)
        if self.worst_site:
            check_reported(self.risk, cast(Any, update).risk)
        # Adam's steps do not depend on the length of G.
        reach = 0.0 if self.descent == "adam" else self.ahead(server, assignment.steps)
        ahead = reach * tree.norm(update.G)
        return sizes | {WEIGHTS_AND_G: sizes.pop(WEIGHTS) + ahead}

    def ahead(self, server: S, steps: int) -> Tensor | float:
        """How far a G of length 1 moves the model in the next round, by SGD or momentum.

        Adam moves it as far whatever the length. There, this compares the lengths of G all the same.
        """
        kept, speed, left = 1 - self.beta, 0.0, 0.0
        for step in range(1, steps + 1):
            speed = kept**step + (self.momentum * speed if self.descent == "momentum" else 0.0)
            left += speed  # what is left of G, step by step
        return self.rate(server.step, torch.float64) * left

    def changing(self, state: Any) -> dict[str, Any]:
        return super().changing(state) | {"G": state.G}

    def with_parts(self, updates: Any, parts: dict[str, Any]) -> Any:
        return super().with_parts(updates, parts)._replace(G=parts["G"])

    def measured(self, server: Any, updates: Any) -> Any:
        """Weights, and how far G moves them in the next round."""
        ahead = self.ahead(server, int(updates.steps.max()))
        return updates.weights.params, tree.map(lambda leaf: leaf.double() * ahead, updates.G)

    def scaled(self, before: Any, after: Any, by: float) -> Any:
        """G moves with the weights: both are then on average what all clients together come to."""
        return super().scaled(before, after, by)._replace(G=stretched(before.G, after.G, by))

    def health(self, server: S, h: Tensor | None, labels: Tensor | None) -> Health:
        """The scores that are optimised are the linked ones. Guarded ones never saturate, but may all be alike."""
        if self.guards:
            return super().health(server, h, labels)
        return Health() if h is None or labels is None else Health(saturated_outputs(self.risk, h, labels))

    def begin(self, server: S, client: ClientEstimates, share: Share, factors: Tensor) -> PairWork:
        weights = server.weights._replace(buffers=client.buffers or server.weights.buffers)
        both = ((share.first > 0) & (share.second > 0)).to(factors.dtype)
        still = torch.zeros_like(both)
        moments = self.begin_moments(weights.params, server.step)
        past = Past(weights.params, client.rows) if isinstance(client.rows, Tensor) else ()
        return PairWork(
            weights, server.G, client.u, server.step, factors, both, still, client.risk, moments, past,
            share.labels,
        )  # fmt: skip

    def pull(
        self, passive: Any, work: PairWork, a: Tensor, b: Tensor, y: Tensor, before: Tensor,
        earlier: Earlier | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The gradients by the scores a of S1 and b of S2, and the updated u of the former.

        earlier: the scores of the same batch one step before, where the estimator needs them.
        """
        raise NotImplementedError

    def followed(self, work: PairWork, before: Tensor, l: Tensor, past: tuple[Tensor, Tensor] | None) -> Tensor:
        """The updated u of a batch, from the pairs l [n, B1, B2, *m] of its examples of S1; n: kinds of pairs.

        past: the same pairs one step before, and theta, where the estimator needs them.
        """
        risk = self.risk
        if risk.thresholds:
            return self.mixed(work, [risk.renew(before, each, self.gamma) for each in l])
        g = self.mixed(work, [risk.estimate(each) for each in l])
        u = risk.blend(before, g, self.gamma)
        if past is None:
            return u
        l_past, theta = past
        g_past = self.mixed(work, [risk.estimate(each) for each in l_past])
        moved = corrected(risk, u, g, g_past, theta)
        return torch.where(before.isnan(), g, risk.within(moved, before, torch.cat(tuple(l), 1)))

    def mixed(self, work: PairWork, each: list[Tensor]) -> Tensor:
        """Estimates from several kinds of pairs as one."""
        return each[0]

    def rescored(self, score: Score, work: PairWork, batch: Batch) -> Earlier | None:
        """The batch by the weights one step before, where the estimator needs it."""
        if not isinstance(work.past, Past):
            return None
        h, _ = score(work.weights._replace(params=work.past.params), batch.x)
        size1 = batch.rows.shape[0]
        a, b, _ = sides(self.linked(h, batch.y, batch.rows, work), batch.y, batch.rows)
        return Earlier(a, b, self.theta(work.past.rows, size1))

    def pull_queries(
        self, batch: Batch, work: PairWork, a: Tensor, b: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same for pairs within queries."""
        raise NotImplementedError

    def advance(self, score: Score, work: PairWork, batch: Batch) -> tuple[PairWork, ScoreTrace]:
        """One step: score, pull, estimate, descend."""
        before, size1 = work.u[batch.rows], batch.rows.shape[0]
        h, back, buffers = self.outputs(score, work, batch)
        linked: Any = torch.func.vjp(lambda h: self.linked(h, batch.y, batch.rows, work), h)
        paired, back_to_h = linked
        a, b, y = sides(paired, batch.y, batch.rows)
        if self.risk.queries:
            da, db, new = self.pull_queries(batch, work, a, b, before)
        else:
            da, db, new = self.pull(batch.passive, work, a, b, y, before, self.rescored(score, work, batch))
        if self.risk.labels:
            da = labels.unchosen(da, batch.rows, self.risk.labels)
        (d,) = back_to_h(torch.cat((da, db)))
        d = self.conserved(d, size1, work)
        (gradient,) = back(d)
        G = self.blended(work.G, gradient)
        pace, moved = self.paced(G, gradient, d, work)
        params, moments = self.advanced(work.weights.params, G, work.step, work.moments, pace)
        u = work.u if self.risk.linear else self.remember(work, batch.rows, before, new)
        after = work._replace(weights=Weights(params, buffers), u=u, step=work.step + 1, moved=moved, moments=moments)
        if self.worst_site:
            after = after._replace(risk=self.watched(work, new, a, *self.others(batch.passive, b, y)))
        if isinstance(work.past, Past):
            # A copy: no leaf of the new work is another leaf of the old.
            after = after._replace(past=work.past._replace(params=tree.map(torch.clone, work.weights.params)))
        return after._replace(G=G) if self.keeps_G else after, ScoreTrace(a, new, b, y, batch.items)

    def outputs(self, score: Score, work: PairWork, batch: Batch) -> Any:
        """The batch's outputs, how gradients by them become one by the weights, and the buffers afterwards."""

        def outputs(params: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            return score(work.weights._replace(params=params), batch.x)

        return torch.func.vjp(outputs, work.weights.params, has_aux=True)

    def others(self, passive: Any, b: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The scores of S2, with their labels, that this client's S1 is compared with."""
        return b, y

    def watched(self, work: PairWork, u: Tensor, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        """The running estimate of the client's own risk after a step."""
        assert isinstance(work.risk, Tensor)
        now = blended(work.risk, risk_of(self.risk, u, a, b, y), self.gamma)
        return torch.where(work.factors[0] > 0, now, work.risk)

    def remembered(self, work: PairWork) -> ClientEstimates:
        """What a client keeps until its next round."""
        rows = work.past.rows if isinstance(work.past, Past) else ()
        return ClientEstimates(work.u, self.own_buffers(work.weights.buffers), work.risk, rows)

    def reported(self, work: PairWork) -> Tensor | tuple[()]:
        """A client's own risk, as it is sent; 0 where there is none."""
        return torch.nan_to_num(work.risk) if isinstance(work.risk, Tensor) else ()

    def linked(self, h: Tensor, y: Tensor, rows: Tensor, work: PairWork) -> Tensor:
        """What is paired: outputs [B1 + B2, *d], guarded where the link is bounded, through the link.

        Not at a client with one class: the level and the spread of one class are what it has learned.
        """
        if not self.guards:
            return self.risk.link(h)
        if isinstance(work.labels, Tensor):
            both = labels.held_both(work.labels)
            return self.risk.link(labels.guarded(h, *labels.members(self.risk, y, rows), both))
        size1 = rows.shape[0]
        return self.risk.link(torch.where(work.both > 0, guarded(h, h[:size1], h[size1:]), h))

    def shown(self, h: Tensor, y: Tensor) -> Tensor:
        """Outputs of examples with these labels, as the risk sees them before its link."""
        if not self.guards:
            return h
        if self.risk.labels:
            first, second = (labels.of_side(self.risk, y, side) for side in (0, 1))
            return labels.guarded(h, first, second, first.any(0) & second.any(0))
        first, second = (belongs(y, side) for side in self.risk.sides)
        return guarded(h, h[first], h[second])

    @property
    def guards(self) -> bool:
        """Whether there is anything to guard: an unbounded link never saturates, and vectors have no level."""
        wanted = self.level != "free" and self.guard != "off"
        scores = bool(self.risk.labels) or not self.risk.score_shape
        return wanted and self.risk.score_range.bounded and scores

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

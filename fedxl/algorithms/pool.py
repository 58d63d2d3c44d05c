"""The pool: the merged scores H1, U and H2 of the last rounds, from which clients take the passive side."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms.protocol import PoolWeights
from fedxl.errors import RefusedError
from fedxl.risks import XRisk
from fedxl.risks.saturation import saturated

S = TypeVar("S", "S1Scores", "S2Scores")
ENOUGH = 8  # scores of a side that say where the pool lies
FARTHEST = 100.0  # times the pool's spread, from its median: how far a raw score may lie
# What a smaller spread of raw scores counts as: ten margins of the surrogates. In honest runs at high learning rates
# the farthest score was at 15 times this, and at 840 times the pool's own spread.
LEAST_SPREAD = 10.0
PATIENCE = 10  # rounds by which the scores of a side may be older than the pool keeps any


class S1Scores(NamedTuple):
    """Pooled examples of S1. A score and its inner estimate belong together, so they are drawn by one index."""

    a: Tensor  # [P1, *d]; of several labels [P1, 2]: the score of one label, and the label
    u: Tensor  # [P1, *m]
    weight: Tensor  # [P1] how likely to be drawn; 0: never, the entry is a placeholder
    age: Tensor  # [P1] rounds since it was uploaded
    owner: Tensor | tuple[()] = ()  # [P1] the client that uploaded it, where that matters
    query: Tensor | tuple[()] = ()  # [P1] of an item, if pairs lie within queries
    constants: Tensor | tuple[()] = ()  # [P1, 2] weight and size of such an item


class S2Scores(NamedTuple):
    """Pooled examples of S2."""

    b: Tensor  # [P2, *d]
    y: Tensor  # [P2], of several labels [P2, L]
    weight: Tensor  # [P2]
    age: Tensor  # [P2]
    owner: Tensor | tuple[()] = ()  # [P2]
    query: Tensor | tuple[()] = ()  # [P2]


class Passive(NamedTuple):
    """What one step takes from the pool."""

    a: Tensor  # [B1, *d]
    u: Tensor  # [B1, *m]
    b: Tensor  # [B2, *d]
    y: Tensor  # [B2]


class Pool(NamedTuple):
    first: S1Scores
    second: S2Scores

    def take(self, lag1: Tensor, lag2: Tensor) -> Passive:
        return Passive(self.first.a[lag1], self.first.u[lag1], self.second.b[lag2], self.second.y[lag2])

    def emptied(self) -> Pool:
        """Without its scores: one entry a side, whose weight says whether the side had any."""

        def side(scores: S) -> S:
            one = tree.map(lambda leaf: leaf.new_zeros(1, *leaf.shape[1:]), scores)
            return one._replace(weight=(scores.weight.sum(0, keepdim=True) > 0).to(scores.weight.dtype))

        return Pool(side(self.first), side(self.second))

    def weights(self) -> PoolWeights:
        first, second = self.first.owner, self.second.owner
        owners = (first, second) if isinstance(first, Tensor) and isinstance(second, Tensor) else None
        query1, query2 = self.first.query, self.second.query
        queries = (query1, query2) if isinstance(query1, Tensor) and isinstance(query2, Tensor) else None
        return PoolWeights(self.first.weight, self.second.weight, owners, queries)

    def ready(self) -> tuple[Tensor, Tensor]:
        """Whether there is anything to take on either side, as 0 or 1."""
        return tuple((side.weight.sum() > 0).to(side.weight.dtype) for side in self)  # type: ignore[return-value]

    def saturated(self, risk: XRisk) -> bool:
        """Whether the latest scores of both sides have collapsed."""
        (first, second), (new1, new2) = self, ((side.weight > 0) & (side.age == side.age.min()) for side in self)
        return saturated(risk, first.a[new1], second.b[new2], second.y[new2])

    def stale(self, rounds: int) -> tuple[int, int]:
        """How many rounds ago each side was last refreshed; 0 if that is not long, for a pool of so many rounds."""
        first, second = (int(side.age.min()) for side in self)
        limit = rounds - 1 + PATIENCE
        return first if first > limit else 0, second if second > limit else 0


def empty(risk: XRisk, like: Tensor, owned: bool = False) -> Pool:
    """One placeholder of weight 0 a side, so that an index always has an entry."""
    nothing, age = like.new_zeros(1), torch.zeros(1, dtype=torch.int64, device=like.device)
    a, b = like.new_zeros(1, *risk.first_shape), like.new_zeros(1, *risk.score_shape)
    y = like.new_zeros(1, *risk.label_shape)
    u = like.new_zeros(1, *risk.inner_shape, dtype=risk.dtype(like.dtype))
    owner = nothing if owned else ()
    return Pool(S1Scores(a, u, nothing, age, owner), S2Scores(b, y, nothing, age, owner))


def merge(kept: S, uploads: S, rounds: int) -> S:
    """The last `rounds` rounds' entries of one side; those that there are, a round older, if no client uploaded any.

    `uploads` holds one row a client; entries of weight 0 come from clients without examples of this side.
    """
    fresh = tree.map(lambda leaf: leaf.flatten(0, 1), uploads)
    said = fresh.weight > 0
    if not bool(said.all()):
        fresh = tree.map(lambda leaf: leaf[said], fresh)
    older = kept._replace(age=kept.age + 1)
    if not len(fresh.weight):
        return older
    if rounds == 1:
        return tree.map(torch.clone, fresh)  # uploads may lie in memory that an executor uses again
    recent = (older.age < rounds) & (older.weight > 0)
    return tree.concat([tree.map(lambda leaf: leaf[recent], older), fresh])


def capped(uploads: S, most: float) -> S:
    """Uploads [C, n], the weights of which are lowered so that no client fills more than `most` of the side.

    Where fewer than 1 / most clients hold the side, all of them fill the same share.
    """
    mass = uploads.weight.double().sum(1)  # [C]
    if most >= 1 or not bool((mass > most * mass.sum()).any()):
        return uploads
    scale = (_level(mass, most) / mass.clamp(min=torch.finfo(mass.dtype).tiny)).clamp(max=1)
    return uploads._replace(weight=uploads.weight * scale.to(uploads.weight.dtype)[:, None])


def _level(mass: Tensor, most: float) -> Tensor:
    """To which level masses are lowered if the largest may be `most` of what is left.

    If the k largest are lowered to t, then t = most * (k t + the rest).
    """
    present = mass[mass > 0].sort(descending=True).values
    rest = present.sum()
    for k in range(1, len(present) + 1):
        rest = rest - present[k - 1]
        if k * most >= 1 or k == len(present):
            break
        level = most * rest / (1 - k * most)
        if bool(level >= present[k]):
            return level
    return present[-1]


def spread(weight: Tensor, count: int) -> Tensor:
    """At most `count` indices, evenly spread over the entries by their weight."""
    count = min(count, len(weight))
    edges = torch.cumsum(weight.double(), 0)
    points = (torch.arange(count, device=weight.device, dtype=torch.float64) + 0.5) / count * edges[-1]
    return torch.searchsorted(edges, points).clamp(max=len(weight) - 1)


def thin(scores: Tensor, count: int) -> Tensor:
    """`count` of the round's scores [K, B, ...] (0: all), spread evenly over its steps, as one row [count, ...]."""
    flat = scores.flatten(0, 1)
    total = flat.shape[0]
    if not 0 < count < total:
        return flat
    return flat[torch.arange(count, device=flat.device) * total // count]


def check_upload(name: str, side: S1Scores | S2Scores, count: int, mass: Tensor | None, client: Tensor) -> None:
    """RefusedError unless there are `count` new scores of this client, all of one weight, together at most `mass`.

    mass: None where weights are checked elsewhere.
    """
    if {len(leaf) for leaf in tree.leaves(side)} != {count}:
        raise RefusedError(f"its scores ({name}) and what belongs to them are not {count}")
    even = mass is None or bool((side.weight == side.weight[0]).all())
    within = mass is None or 0 <= float(side.weight[0]) * count <= float(mass) * (1 + 1e-5)
    if not (even and within) or bool((side.age != 0).any()):
        raise RefusedError(f"the weights or ages of its scores ({name}) are none that it was given")
    if isinstance(side.owner, Tensor) and not bool((side.owner == client).all()):
        raise RefusedError(f"its scores ({name}) are marked as those of another client")


def check_values(risk: XRisk, pool: Pool, with_u: bool) -> None:
    """RefusedError unless the link can give these scores, labels are 0 or 1, and such scores can have these u."""
    low, high = risk.score_range[:2]
    for name, scores in (("first", risk.bare(pool.first.a)), ("second", pool.second.b)):
        if not risk.score_range.holds(scores):
            raise RefusedError(f"its scores ({name}) are not all within [{low:g}, {high:g}], as this risk's are")
    y = pool.second.y
    if not bool(((y == 0) | (y == 1) | ((y == -1) & (risk.labels > 0))).all()):
        raise RefusedError("its labels (second) are not all 0 or 1")
    u = pool.first.u[pool.first.weight > 0]  # the others are placeholders
    if not with_u or not len(u):
        return
    if not bool(u.isfinite().all()):
        raise RefusedError("its inner estimates hold NaN or infinity")
    least, most = risk.inner_range()
    if not bool(((u >= least) & (u <= most)).all()):
        raise RefusedError("its inner estimates u are beyond what pairs of scores in range can give")


def check_distance(risk: XRisk, pool: Pool, uploads: Pool) -> None:
    """RefusedError for a raw score that lies far from the pool's. A bounded link bounds scores by itself.

    The spread is the median distance from the median, which less than half of the pool cannot move far. A client
    does not know the pool, and cannot check this.
    """
    sides = _counted(risk, pool)
    if risk.score_range.bounded or min(map(len, sides)) < ENOUGH:
        return
    known = torch.cat([scores.flatten() for scores in sides]).double()
    level = known.median()
    reach = FARTHEST * (known - level).abs().median().clamp(min=LEAST_SPREAD)
    for name, scores in zip(("first", "second"), _counted(risk, uploads), strict=True):
        if bool(((scores - level).abs() > reach).any()):
            raise RefusedError(
                f"its scores ({name}) lie more than {FARTHEST:g} times the pool's spread from its median"
            )


def largest_score(risk: XRisk, pool: Pool) -> Tensor:
    """The largest absolute value of the scores with a weight above 0."""
    each = torch.cat([scores.flatten() for scores in _counted(risk, pool)]).abs().double()
    return each.max() if len(each) else each.new_zeros(())


def _counted(risk: XRisk, pool: Pool) -> tuple[Tensor, Tensor]:
    """The scores of S1 and of S2 with a weight above 0."""
    return risk.bare(pool.first.a)[pool.first.weight > 0], pool.second.b[pool.second.weight > 0]

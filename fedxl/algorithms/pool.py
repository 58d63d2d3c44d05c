"""The pool: the merged scores H1, U and H2 of the last rounds, from which clients take the passive side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedxl import tree
from fedxl.errors import require
from fedxl.options import require_types
from fedxl.risks.pairing import Entry, PoolWeights, Share
from fedxl.risks.xrisk import XRisk

S = TypeVar("S", "S1", "S2")
Order = Literal["drawn", "sorted"]
PoolU = Literal["clients", "server"]
# u that the server computes are estimated against so many pooled b. All pairs of a large pool would take too long.
MOST_COMPARED = 1024


class Scores(NamedTuple):
    """Scores of S1 with the inner estimates that belong to them, and scores of S2: of a step, a round or the pool."""

    a: Entry  # [B1]
    u: Tensor  # [B1, *m]
    b: Entry  # [B2]


class S1(NamedTuple):
    """Pooled examples of S1. A score and its inner estimate belong together, so they are drawn by one index."""

    entry: Entry  # [P1]
    u: Tensor  # [P1, *m]
    weight: Tensor  # [P1] how likely to be drawn; 0: never, the entry is a placeholder
    age: Tensor  # [P1] rounds since it was uploaded
    owner: Tensor  # [P1] the client that uploaded it


class S2(NamedTuple):
    """Pooled examples of S2."""

    entry: Entry  # [P2]
    weight: Tensor  # [P2]
    age: Tensor  # [P2]
    owner: Tensor  # [P2]


class Pool(NamedTuple):
    first: S1
    second: S2

    def take(self, lag1: Tensor, lag2: Tensor) -> Scores:
        a = tree.map(lambda leaf: leaf[lag1], self.first.entry)
        return Scores(a, self.first.u[lag1], tree.map(lambda leaf: leaf[lag2], self.second.entry))

    def empty(self) -> Pool:
        """Without its scores: one entry per side, whose weight says whether the side had any."""

        def side(scores: S) -> S:
            one = tree.map(lambda leaf: leaf.new_zeros(1, *leaf.shape[1:]), scores)
            return one._replace(weight=(scores.weight.sum(0, keepdim=True) > 0).to(scores.weight.dtype))

        return Pool(side(self.first), side(self.second))

    def ready(self) -> Tensor:
        """Whether there is something to meet for S1 (a pooled b) and for S2 (a pooled a), as 1 or 0: [2]."""
        return torch.stack([(side.weight.sum() > 0).to(side.weight.dtype) for side in (self.second, self.first)])


def begin(risk: XRisk, like: Tensor) -> Pool:
    """One placeholder of weight 0 per side, so that an index always has an entry."""
    nothing, age = like.new_zeros(1), torch.zeros(1, dtype=torch.int64, device=like.device)
    d = () if risk.pairing.labels else risk.score_shape
    a = Entry(like.new_zeros(1, *d), risk.pairing.pool_target(True, like))
    b = Entry(like.new_zeros(1, *risk.score_shape), risk.pairing.pool_target(False, like))
    u = like.new_zeros(1, *risk.inner_shape, dtype=risk.dtype(like.dtype))
    return Pool(S1(a, u, nothing, age, nothing), S2(b, nothing, age, nothing))


@dataclass(frozen=True)
class Pooling:
    """What is remembered of the other side of pairs."""

    pool_rounds: int = 1  # rounds of which the pool keeps the scores; with queries it keeps the latest of each
    uploads: int = 0  # scores that a client uploads for each side in a round; 0: all K * B of them
    pool_u: PoolU = "clients"  # u of pooled scores: the clients' running estimates, or the server's own (server)
    pool_share: float = 1.0  # the share of a side of the pool that one client may fill; 1: all
    order: Order = "drawn"  # of uploaded scores: drawn, from which the server knows the examples; or sorted
    fresh: bool = False  # pool scores of fresh examples (the paper's z-hat, an extra forward pass), not of the batch

    def __post_init__(self) -> None:
        require_types(type(self), vars(self))
        require(self.pool_rounds >= 1, f"pool_rounds must be at least 1, got {self.pool_rounds}")
        require(self.uploads >= 0, f"uploads must not be negative (0: all), got {self.uploads}")
        require(0 < self.pool_share <= 1, f"pool_share must lie in (0, 1], got {self.pool_share}")

    def count(self, total: int) -> int:
        """How many of a round's scores of a side a client uploads."""
        return self.uploads if 0 < self.uploads < total else total

    def upload(self, scores: Scores) -> Scores:
        """What a client sends of a round's scores [K, B, ...]: spread evenly over its steps, in the wanted order."""
        a, u, b = tree.map(lambda leaf: thin(leaf, self.uploads), scores)
        if self.pool_u == "server":
            u = torch.full_like(u, torch.nan)  # which the server does not use, so it need not know them
        if self.order == "sorted":
            (a, u), b = tree.sort_rows((a, u)), tree.sort_rows(b)
        return Scores(a, u, b)

    def merge(self, risk: XRisk, pool: Pool, sent: Scores, share: Share) -> Pool:
        """The pool with what clients have sent, one row per client [C, n]."""
        first, second = (self._weigh(risk, entry, side, share) for side, entry in enumerate((sent.a, sent.b)))
        fresh1 = S1(first.entry, sent.u, first.weight, first.age, first.owner)
        rounds, pairing = self.pool_rounds, risk.pairing
        new1 = merge(pool.first, fresh1, rounds, pairing.group(pool.first.entry), pairing.group(sent.a))
        return Pool(new1, merge(pool.second, second, rounds, pairing.group(pool.second.entry), pairing.group(sent.b)))

    def _weigh(self, risk: XRisk, entry: Entry, side: int, share: Share) -> S2:
        weight = cap(risk.pairing.entry_weights(entry, side, share), self.pool_share)
        owner = share.client[:, None].expand_as(weight)
        return S2(entry, weight, torch.zeros_like(weight, dtype=torch.int64), owner)


def merge(kept: S, sent: S, rounds: int, groups: Tensor | None = None, sent_groups: Tensor | None = None) -> S:
    """The last `rounds` rounds' entries of one side; the old ones, a round older, if no client has sent any.

    `sent` holds one row per client; entries of weight 0 come from clients without examples of this side. If only
    entries of one group meet, the pool keeps every client's latest entries of each group instead.
    """
    fresh = tree.map(lambda leaf: leaf.flatten(0, 1), sent)
    counted = fresh.weight > 0
    if not bool(counted.all()):
        fresh = tree.map(lambda leaf: leaf[counted], fresh)
    older = kept._replace(age=kept.age + 1)
    if not len(fresh.weight):
        return older
    if groups is not None and sent_groups is not None:
        return _latest(older, groups, fresh, sent_groups.flatten(0, 1)[counted])
    if rounds == 1:
        return tree.map(torch.clone, fresh)  # uploads may lie in memory that an executor uses again
    recent = (older.age < rounds) & (older.weight > 0)
    return tree.concat([tree.map(lambda leaf: leaf[recent], older), fresh])


def _latest(older: S, groups: Tensor, fresh: S, fresh_groups: Tensor) -> S:
    """Of each client and group the latest entries. Together they weigh as much as one, however many there are."""
    keys = [torch.stack((side.owner.long(), of), -1) for side, of in ((older, groups), (fresh, fresh_groups))]
    _, number, counts = torch.unique(torch.cat(keys), dim=0, return_inverse=True, return_counts=True)
    before, now = number.split([len(older.weight), len(fresh.weight)])
    counts = torch.bincount(now, minlength=len(counts))
    fresh = fresh._replace(weight=fresh.weight / counts[now].to(fresh.weight.dtype))
    stays = ~torch.isin(before, now) & (older.weight > 0)
    stays[0] = True  # the placeholder of no group, which draws take if a group has no entry
    return tree.concat([tree.map(lambda leaf: leaf[stays], older), fresh])


def cap(weight: Tensor, most: float) -> Tensor:
    """Weights [C, n], lowered so that no client fills more than `most` of the side.

    If fewer than 1 / most clients hold the side, all of them fill the same share.
    """
    mass = weight.double().sum(1)  # [C]
    if most >= 1 or not bool((mass > most * mass.sum()).any()):
        return weight
    scale = (_cap_level(mass, most) / mass.clamp(min=torch.finfo(mass.dtype).tiny)).clamp(max=1)
    return weight * scale.to(weight.dtype)[:, None]


def _cap_level(mass: Tensor, most: float) -> Tensor:
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


def estimate_u(risk: XRisk, before: Pool, pool: Pool) -> Pool:
    """The pool with u that follow from its own scores.

    Without any b there are none, and an a without its u cannot be used: then S1 stays as it was before.
    """
    if risk.linear:
        return pool
    first, second = pool
    if not bool(second.weight.sum() > 0):
        return Pool(before.first, second)
    groups = risk.pairing.group(first.entry)
    if groups is None:
        some = tree.map(lambda leaf: leaf[spread(second.weight, MOST_COMPARED)], second.entry)
        u = risk.inner(first.entry, some)
        return drop_unknown(risk, Pool(first._replace(u=u), second))
    u, theirs = torch.full_like(first.u, torch.nan), risk.pairing.group(second.entry)
    assert theirs is not None
    for group in groups.unique():
        rows, columns = groups == group, (theirs == group) & (second.weight > 0)
        a = tree.map(lambda leaf, at=rows: leaf[at], first.entry)
        b = tree.map(lambda leaf, at=columns: leaf[at], second.entry)
        if bool(columns.any()):
            meets = risk.pairing.meets(a, b, risk.sides[1])
            assert meets is not None
            u[rows] = risk.estimate(risk.losses(a, b), second.weight[columns] * meets).to(u.dtype)
    return drop_unknown(risk, Pool(first._replace(u=u), second))


def drop_unknown(risk: XRisk, pool: Pool) -> Pool:
    """The pool, in which examples of S1 that met nobody yet, so that they have no u, are never drawn."""
    if risk.linear:
        return pool
    u, weight = pool.first.u, pool.first.weight
    unknown_u = u.isnan().reshape(len(u), -1).any(1)
    first = pool.first._replace(u=torch.where(u.isnan(), 0.0, u), weight=torch.where(unknown_u, 0.0, weight))
    return pool._replace(first=first)


def pool_weights(risk: XRisk, pool: Pool) -> PoolWeights:
    groups = [risk.pairing.group(side.entry) for side in pool]
    return PoolWeights(pool.first.weight, pool.second.weight, None if groups[0] is None else tuple(groups))


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

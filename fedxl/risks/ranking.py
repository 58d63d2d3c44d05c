"""Risks of queries: items are ranked within their query, and items of different queries never meet.

    F(w) = mean_q mean_{i in S1_q} weight_i f(s_i),    s_i = sum_{j in S_q} l(h_i, h_j)

S_q holds the items of query q and S1_q the relevant ones (grade y > 0). The running estimate u_i is that of s_i, the
mean of |S_q| l (SONG: Qiu et al., Large-scale Stochastic Optimization of NDCG Surrogates for Deep Learning with
Provable Convergence, ICML 2022). Weight and size are constants of an item:

    weight_i = |S1_q| gain_i / ideal_q,   gain_i = 2^y_i - 1,   size_q = |S_q|

so that the inner mean over S1_q is the sum of gain_i / ideal_q f(s_i): every query counts the same. If clients share
a query, a client's part of its gradient is

    part1 * (active a, passive b)  +  part2 * (passive a, active b)

where part1 and part2 are its parts of the query's relevant items and of all its items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedxl.errors import require
from fedxl.risks.pairing import (
    Column,
    Entry,
    Held,
    Holder,
    Minibatch,
    Pairing,
    PairLoss,
    PoolWeights,
    Share,
    Side,
    Sides,
)
from fedxl.risks.scores import kink, named, surrogate_named
from fedxl.risks.whole import by_gaps
from fedxl.risks.xrisk import XRisk, gap, identity
from fedxl.sampling import Floats, Indices, Purpose, Stream, pooled

MOST_QUERIES = 2**16  # of a step
HIGHEST_GRADE = 30  # 2^y must stay a number of moderate size


class Items(NamedTuple):
    """What is known of each example."""

    query: Tensor  # [n] the number of its query, the same at all clients
    weight: Tensor  # [n] of its f, 0 if it is not relevant
    size: Tensor  # [n] items of its query
    part1: Tensor  # [n] which part of its query's relevant items is at its client
    part2: Tensor  # [n] which part of its query's items is at its client


class Relevant(NamedTuple):
    """The target of an entry of S1."""

    query: Tensor
    weight: Tensor
    size: Tensor
    part: Tensor


class Item(NamedTuple):
    """The target of an entry of S2."""

    query: Tensor
    part: Tensor


@dataclass(frozen=True)
class Queries(Pairing):
    """Items meet those of their own query."""

    ranked: ClassVar[bool] = True
    why_not_at_sites: ClassVar[str] = (
        "scores of one query meet in simulations alone, since version 0.4: it gained nothing at real sites; "
        "use local_pair, which ranks each site's own lists"
    )
    probed_targets: ClassVar[tuple[float, ...]] = ()  # the size of a query has no bound

    per_step: int  # queries that a step reads
    ideal: Callable[[Tensor], Tensor]  # what divides gains: a function of a query's, from the largest down

    def check_sizes(self, batch1: int, batch2: int) -> None:
        require(
            batch1 % self.per_step == batch2 % self.per_step == 0,
            f"batch1 = {batch1} and batch2 = {batch2} must be multiples of queries = {self.per_step} in [risk]: "
            "a step reads as many items of each query",
        )

    def entries(self, h: Tensor, of: Minibatch) -> tuple[Entry, Entry]:
        size1, items = of.rows.shape[0], of.items
        first = Relevant(*(leaf[:size1] for leaf in (items.query, items.weight, items.size, items.part1)))
        return Entry(h[:size1], first), Entry(h[size1:], Item(items.query[size1:], items.part2[size1:]))

    def losses(self, pair: PairLoss, a: Entry, b: Entry) -> Tensor:
        """`pair` gets the size of the query, [.., B1, 1], in place of labels."""
        return pair(a.score, b.score, a.target.size.unsqueeze(-1))

    def meets(self, a: Entry, b: Entry, side: Side) -> Tensor | None:
        same: Tensor = a.target.query.unsqueeze(-1) == b.target.query.unsqueeze(-2)
        return same.to(b.score.dtype)

    def forces(self, factors: Tensor, mine: tuple[Entry, Entry], pooled_a: Entry) -> Tensor:
        (a, b), other = mine, pooled_a.target
        first = (factors[0] * a.target.weight * a.target.part).unsqueeze(-1)
        second = (factors[1] * other.weight).unsqueeze(-1) * b.target.part
        return torch.stack((first.expand_as(second), second))

    def entry_weights(self, entry: Entry, side: int, share: Share) -> Tensor:
        known: Tensor = entry.target.part
        return known if side == 1 else torch.where(entry.target.weight > 0, known, 0.0)

    def group(self, entry: Entry) -> Tensor | None:
        found: Tensor = entry.target.query
        return found

    def pool_target(self, first: bool, like: Tensor) -> Any:
        nobody, zero = torch.full((1,), -1, dtype=torch.int64, device=like.device), like.new_zeros(1)
        return Relevant(nobody, zero, zero, zero) if first else Item(nobody, zero)

    def check_entries(self, first: Entry, second: Entry) -> str:
        return ""  # clients that rank together are simulated, and trusted

    def items(self, y: Tensor, groups: Column, time: Column, held: Sequence[Indices], local: bool, first: int) -> Any:
        """Items [n] of every example. Examples that nobody holds have parts of 0.

        local: a query's items at one client are then a list of their own.
        """
        assert groups is not None
        grades, query = y.cpu(), groups.cpu()
        holder = np.full(len(grades), -1, np.int64)
        for client, part in enumerate(held):
            holder[part] = client
        some = torch.from_numpy(holder >= 0)
        # Numbered anew: a query of one client, or of all.
        mine = torch.unique(torch.stack((query, torch.from_numpy(holder)), -1), dim=0, return_inverse=True)[1]
        lists = mine if local else torch.unique(query, return_inverse=True)[1]
        weight, size = self.constants(torch.where(some, grades, 0), torch.where(some, lists, -1))
        relevant = (grades > 0) & some
        ours1, whole1 = (_counts(keys, relevant) for keys in (mine, lists))
        ours2, whole2 = (_counts(keys, some) for keys in (mine, lists))
        part1 = torch.where(some, ours1 / whole1.clamp(min=1), 0.0)
        # A list without any relevant item has no gradient.
        part2 = torch.where((whole1 > 0) & some, ours2 / whole2.clamp(min=1), 0.0)
        return Items(query, weight, size, part1, part2)

    def constants(self, grades: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Weight and size of all items of all queries."""
        weight, size = (torch.zeros(len(grades), dtype=torch.float64, device=grades.device) for _ in range(2))
        for members in in_queries(query):
            gain = gains(grades[members])
            size[members] = float(len(members))
            if bool((gain > 0).any()):
                weight[members] = (gain > 0).sum() * gain / self.ideal(gain.sort(descending=True).values)
        return weight, size

    def example_groups(self, items: Items) -> Indices | None:
        found: Indices = items.query.cpu().numpy()
        return found

    def hold(self, part: Indices, first: Indices, second: Indices, labels: Tensor, items: Any, side: Side) -> Any:
        """For each query of a client that it can learn from its relevant items and all its items; and rows of S1."""
        query, part2 = items.query.cpu().numpy(), items.part2.cpu().numpy()
        row = np.full(len(query), len(first), np.int64)  # those that stand in for relevant items share one more row
        row[first] = np.arange(len(first))
        order = part[np.argsort(query[part], kind="stable")]
        each = np.split(order, np.flatnonzero(np.diff(query[order])) + 1)
        # A client that can learn from none of its queries reads them all the same; they count for nothing.
        chosen = [members for members in each if part2[members[0]] > 0] or each
        return [(members[row[members] < len(first)], members) for members in chosen], row

    def num_rows(self, held: Held) -> int:
        return len(held.first) + 1

    def draw(
        self, stream: Stream, held: Held, visits: int, steps: int, sizes: tuple[int, int], fresh: bool = False
    ) -> tuple[Indices, Indices]:
        """Queries are read in epochs of permutations, their items at random, as many of each query."""
        lists, row = held.more
        count = steps * self.per_step
        purpose = Purpose.FRESH_ITEMS if fresh else Purpose.ITEMS
        read = stream.epochs(Purpose.QUERIES, visits * count, count, len(lists))
        rng = stream.generator(purpose, visits)
        blocks = [lists[at] for at in read]
        # If a client holds no relevant item of a query, another one of the query stands in, and counts for nothing.
        firsts = [relevant if len(relevant) else members for relevant, members in blocks]
        seconds = [members for _, members in blocks]
        examples = [
            np.concatenate([_some(rng, each, size // self.per_step) for each in side]).reshape(steps, -1)
            for side, size in zip((firsts, seconds), sizes, strict=True)
        ]
        return row[examples[0]], np.concatenate(examples, axis=1)

    def draw_pool(
        self, rng: np.random.Generator, pool: PoolWeights, steps: int, sizes: tuple[int, int], groups: Any
    ) -> tuple[Indices, Indices]:
        """Entries of the queries that the client reads, in proportion to their weights.

        A query without an entry gets the pool's first one, a placeholder of no query, which meets nobody.
        """
        blocks = groups.reshape(steps * self.per_step, -1)[:, 0]
        found = []
        for weights, of, size in zip(pool[:2], pool.groups, sizes, strict=True):
            weights = np.ones(weights) if isinstance(weights, int) else weights
            order = np.argsort(of, kind="stable")
            starts, ends = (np.searchsorted(of[order], blocks, side=side) for side in ("left", "right"))
            each = [
                _entries(rng, order[start:end], weights, size // self.per_step)
                for start, end in zip(starts, ends, strict=True)
            ]
            found.append(np.concatenate(each).reshape(steps, size))
        return found[0], found[1]

    def counts(self, holders: Sequence[Holder], sides: Sides, local: bool) -> tuple[list[int], list[int]]:
        """A client counts by its queries: S1 only if it holds a relevant item."""
        if local:
            own = [len(holder.queries(relevant=True)) for holder in holders]
            return own, own
        usable = self._usable(holders)
        second = [len(np.intersect1d(holder.queries(relevant=False), usable)) for holder in holders]
        some = [len(holder.queries(relevant=True)) > 0 for holder in holders]
        return [count if any_ else 0 for count, any_ in zip(second, some, strict=True)], second

    def _usable(self, holders: Sequence[Holder]) -> Indices:
        """The queries of which somebody holds a relevant item."""
        found: Indices = np.unique(np.concatenate([holder.queries(relevant=True) for holder in holders]))
        return found

    def spread(self, share: Share, holders: Sequence[Holder], sides: Sides, by_samples: bool, local: bool) -> Share:
        """Factors times the number of clients that hold a query, on average.

        So the average over all clients is the gradient of the whole risk (docs/maths.md), not a fraction of it.
        """
        if local:
            return share
        second = self.counts(holders, sides, local)[1]
        return share._replace(factors=share.factors * (sum(second) / max(1, len(self._usable(holders)))))

    def value(self, risk: XRisk, h: Tensor, labels: Tensor, groups: Column = None, time: Column = None) -> Tensor:
        """The mean over queries with a relevant item; NaN if there is none."""
        assert groups is not None, "a risk of queries needs the query of each item"
        each, part = [], torch.ones_like(h)  # parts play no role in the whole objective
        weight, size = (leaf.to(h.dtype) for leaf in self.constants(labels, groups))
        whole = Relevant(groups, weight, size, part)
        for members in in_queries(groups):
            first = members[labels[members] > 0]
            if len(first):
                mine = Relevant(*(leaf[first] for leaf in whole))
                u = risk.whole(risk, Entry(h[first], mine), Entry(h[members], Item(groups[members], part[members])))
                each.append((mine.weight * risk.outer(u)).mean())
        return torch.stack(each).mean() if each else h.new_tensor(float("nan"))


def gains(grades: Tensor) -> Tensor:
    """2^y - 1."""
    return torch.exp2(grades.double()) - 1


def in_queries(query: Tensor) -> tuple[Tensor, ...]:
    """The positions of each query's items."""
    _, counts = torch.unique(query, return_counts=True)
    members: tuple[Tensor, ...] = query.argsort(stable=True).split(counts.tolist())
    return members


def _counts(keys: Tensor, which: Tensor) -> Tensor:
    """For every example, how many of its key there are among some."""
    return torch.bincount(keys, weights=which.double(), minlength=int(keys.max()) + 1)[keys]


def _some(rng: np.random.Generator, items: Indices, count: int) -> Indices:
    """`count` of them at random. Counts differ by at most one."""
    return items[pooled(rng, count, len(items))]


def _entries(rng: np.random.Generator, entries: Indices, weights: Floats, count: int) -> Indices:
    """`count` entries in proportion to their weights; the pool's first if there are none."""
    some = weights[entries]
    if not some.any():
        return np.zeros(count, np.int64)
    return entries[pooled(rng, count, len(some) if some.min() == some.max() else some)]


def ideal_dcg(top: int = 0) -> Callable[[Tensor], Tensor]:
    """The largest DCG that a ranking can have, of the first `top` places alone if that is not 0."""

    def ideal(gain: Tensor) -> Tensor:
        places = torch.arange(2, len(gain) + 2, dtype=gain.dtype, device=gain.device)
        discounted = gain / places.log2()
        return discounted[:top].sum() if top else discounted.sum()

    return ideal


def _queries(count: int, ideal: Callable[[Tensor], Tensor]) -> Queries:
    require(0 < count <= MOST_QUERIES, f"queries must lie between 1 and {MOST_QUERIES}, got {count}")
    return Queries(count, ideal)


@named
def ndcg(
    surrogate: str = "psm", temperature: float = 1.0, top: int = 0, softness: float = 1.0, queries: int = 4
) -> XRisk:
    """Negative NDCG: each relevant item against all items of its query (SONG: Qiu et al., ICML 2022).

    F = - mean_q sum_{i in S1_q} gain_i / ideal_q psi_i / log2(1 + r_i),
    r_i = 1 - l(0) + sum_{j in S_q} l((h_i - h_j) / t).

    r_i is a smooth rank: with the surrogate psm it tends to the rank of i as the temperature t tends to 0, and F to
    -NDCG. SONG has squared_hinge. A step reads items of so many `queries`. With `top` = k only the first k places
    count: ideal_q is that of k places, and psi_i, which is 1 otherwise, is sigmoid((k + 1/2 - r_i) / softness).
    """
    for name, value in (("temperature", temperature), ("softness", softness)):
        require(value > 0, f"{name} must be positive, got {value}")
    require(top >= 0, f"top must not be negative (0: all places), got {top}")
    loss = surrogate_named(surrogate, 1.0)
    own = float(loss(torch.zeros((), dtype=torch.float64)))  # the item against itself

    def rank(s: Tensor) -> Tensor:
        return (s + (1 - own)).clamp(min=1)  # an estimate from a few pairs may lack the item itself

    def discount(s: Tensor) -> Tensor:
        return -1 / torch.log2(1 + rank(s))

    def slope(s: Tensor) -> Tensor:
        return discount(s).square() / ((1 + rank(s)) * math.log(2))

    def inside(s: Tensor) -> Tensor:
        return torch.sigmoid((top + 0.5 - rank(s)) / softness)

    def top_slope(s: Tensor) -> Tensor:
        return inside(s) * slope(s) - inside(s) * (1 - inside(s)) / softness * discount(s)

    return XRisk(
        pair=lambda a, b, size: size * loss(gap(a, b) / temperature),
        whole=by_gaps(temperature * kink(surrogate, 1.0)),
        outer=(lambda s: inside(s) * discount(s)) if top else discount,
        slope=top_slope if top else slope,
        sides=("positive", "all"),
        metric=f"ndcg@{top}" if top else "ndcg@10",
        pairing=_queries(queries, ideal_dcg(top)),
    )


@named
def listwise(temperature: float = 1.0, queries: int = 4) -> XRisk:
    """Listwise cross entropy: the softmax of a query's scores against its gains (Cao et al., ICML 2007).

    F = - mean_q sum_{i in S1_q} p_i log( exp(h_i / t) / sum_{j in S_q} exp(h_j / t) ),  p_i = gain_i / sum of gains.
    As an X-risk: the inner estimate is log sum_j exp((h_j - h_i) / t), which is log mean_j exp(... + log |S_q|).
    """
    require(temperature > 0, f"temperature must be positive, got {temperature}")
    return XRisk(
        pair=lambda a, b, size: size.log() - gap(a, b) / temperature,
        whole=by_gaps(),
        outer=identity,
        slope=1.0,
        lam=1.0,
        sides=("positive", "all"),
        metric="ndcg@10",
        pairing=_queries(queries, torch.sum),
    )

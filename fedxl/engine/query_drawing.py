"""Draws where pairs lie within queries: a step reads some of its client's queries, and of each as many items."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedxl import sampling
from fedxl.algorithms.protocol import Items, Reading
from fedxl.data.queries import queries_of
from fedxl.engine.drawing import Drawing, PoolDraws, Schedule
from fedxl.engine.group import Draws
from fedxl.sampling import Indices, Purpose


@dataclass
class QueryDrawing(Drawing):
    """Queries are read in epochs of permutations, their items at random; passive scores are of the same query."""

    items: Items | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.items is not None
        own = queries_of(self.federation.source)
        assert own is not None
        self.query, self.part = own.cpu().numpy(), self.items.part2.numpy()
        # Where an example stands among its client's examples of S1.
        self.row = np.full(len(self.query), -1, np.int64)
        for side in self.first:
            self.row[side] = np.arange(len(side))
        self.lists = [self._lists(client) for client in range(len(self.federation.parts))]

    def _lists(self, client: int) -> list[tuple[Indices, Indices]]:
        """For each query of a client its relevant items and all its items, as indices into the source."""
        held = self.federation.parts[client]
        order = held[np.argsort(self.query[held], kind="stable")]
        ends = np.flatnonzero(np.diff(self.query[order])) + 1
        each = np.split(order, ends)
        # A client that can learn from none of its queries reads them all the same, with factors of 0.
        chosen = [items for items in each if self.part[items[0]] > 0] or each
        return [(items[self.row[items] >= 0], items) for items in chosen]

    def draw(self, client: int, round: int, visits: int, pool: PoolDraws | None) -> Draws[Indices]:
        key = (client, round, visits)
        draws = self._ahead.own.pop(key, None) or self._own(*key)
        if pool is None:
            return draws
        assert self.items is not None
        begins = draws.examples[:, : self.reading.size1].reshape(len(draws.examples) * self.reading.queries, -1)[:, 0]
        blocks, number = self.items.query.numpy()[begins], self.first_number + client
        lag1, lag2 = lags_of(self.schedule, self.reading, blocks, number, round, pool, self.secrets.pool)
        return draws._replace(lag1=lag1, lag2=lag2)

    def _own(self, client: int, round: int, visits: int) -> Draws[Indices]:
        steps, (_, _, size1, size2, _, queries) = self.schedule.local_steps, self.reading
        number, lists, seed = self.first_number + client, self.lists[client], self.seed(client)
        read = queries_read(self.schedule, self.reading, seed, number, visits, len(lists))
        rng = sampling.generator(seed, Purpose.ITEMS, number, visits)
        blocks = [lists[at] for at in read]
        # Where a client holds no relevant item of a query, another one of the query stands in, with factor 0.
        first = [_some(rng, relevant if len(relevant) else items, size1 // queries) for relevant, items in blocks]
        second = [_some(rng, items, size2 // queries) for _, items in blocks]
        own, others = (np.concatenate(side).reshape(steps, -1) for side in (first, second))
        rows = np.where(self.row[own] >= 0, self.row[own], len(self.first[client]))
        examples = np.concatenate((own, others), axis=1)
        codes = self.federation.source.codes
        augment = sampling.generator(seed, Purpose.AUGMENT, number, round) if codes > 1 else None
        none = rows[:, :0]
        return Draws(examples, sampling.codes(augment, examples.shape, codes), rows, none, none, none, none, none)


def queries_read(schedule: Schedule, reading: Reading, seed: int, number: int, visits: int, many: int) -> Indices:
    """Which of its queries, `many` of them, a client reads in a round, step after step: [K * Q]."""
    count = schedule.local_steps * reading.queries
    return sampling.epochs(seed, Purpose.QUERIES, number, visits * count, count, many)


def lags_of(
    schedule: Schedule, reading: Reading, blocks: Indices, number: int, round: int, pool: PoolDraws, secret: int = 0
) -> tuple[Indices, Indices]:
    """Entries of the pool for each block that a client reads, of its query [K * Q]; -1 where the pool has none.

    secret: a seed in place of the run's; 0: the run's.
    """
    rng = sampling.generator(secret or schedule.seed, Purpose.POOL, number, round)
    assert pool.queries is not None
    found = []
    for weights, of, size in (
        (pool.first, pool.queries[0], reading.size1),
        (pool.second, pool.queries[1], reading.size2),
    ):
        assert not isinstance(weights, int)
        order = np.argsort(of, kind="stable")
        starts, ends = (np.searchsorted(of[order], blocks, side=side) for side in ("left", "right"))
        each = [
            _entries(rng, order[start:end], weights, size // reading.queries)
            for start, end in zip(starts, ends, strict=True)
        ]
        found.append(np.concatenate(each).reshape(schedule.local_steps, size))
    return found[0], found[1]


def _some(rng: np.random.Generator, items: Indices, count: int) -> Indices:
    """`count` of them, each as often as the others, to one."""
    return items[sampling.pooled(rng, count, len(items))]


def _entries(rng: np.random.Generator, entries: Indices, weights: sampling.Floats, count: int) -> Indices:
    """`count` entries in proportion to their weights."""
    some = weights[entries]
    if not some.any():
        return np.full(count, -1, np.int64)
    return entries[sampling.pooled(rng, count, len(some) if some.min() == some.max() else some)]

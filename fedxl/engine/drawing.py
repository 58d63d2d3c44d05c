"""What each client reads in a round: its own examples, and entries of the score pool.

All of it follows from the run's seed, or from secret ones in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedxl import sampling
from fedxl.algorithms.protocol import PoolWeights, Reading
from fedxl.data.federation import Federation
from fedxl.engine.group import Draws
from fedxl.errors import require
from fedxl.sampling import Floats, Indices, Purpose


class Schedule(NamedTuple):
    """How much a client reads in a round."""

    local_steps: int
    batch1: int  # examples of S1 a step
    batch2: int  # examples of S2
    seed: int = 0


class Secrets(NamedTuple):
    """Seeds in place of the run's, which everybody knows. Who knows a seed can work out what was drawn from it."""

    own: Mapping[int, int] = {}  # by client: of its own examples; absent: the run's seed
    pool: int = 0  # of the entries of the pool that clients read; 0: the run's seed
    noise: Mapping[int, int] = {}  # by client: of the noise that it adds; absent: the run's seed


NO_SECRETS = Secrets()


class PoolDraws(NamedTuple):
    """The pool as `sampling.pooled` takes it: a size where all entries weigh the same, their weights otherwise."""

    first: npt.NDArray[np.float64] | int
    second: npt.NDArray[np.float64] | int
    owners: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None = None  # whose each entry is
    queries: tuple[Indices, Indices] | None = None  # of each entry, if pairs lie within queries

    @classmethod
    def of(cls, pool: PoolWeights) -> PoolDraws:
        def array(leaf: Tensor) -> npt.NDArray[np.float64]:
            host: npt.NDArray[np.float64] = leaf.double().cpu().numpy()
            return host

        def side(weights: Tensor) -> npt.NDArray[np.float64] | int:
            host = array(weights)
            # One entry of weight 0 stands for an empty pool: draw it, it counts for nothing.
            return len(host) if float(np.ptp(host)) <= 1e-12 * float(host.max()) else host

        if pool.queries is not None:
            first, second = (queries.cpu().numpy() for queries in pool.queries)
            return cls(array(pool.first), array(pool.second), queries=(first, second))
        if pool.owners is None:
            return cls(side(pool.first), side(pool.second))
        first, second = map(array, pool.owners)
        return cls(array(pool.first), array(pool.second), (first, second))

    def of_others(self, number: int) -> PoolDraws:
        """The pool as this client may draw from it: where entries have owners, not its own, unless all are."""
        if self.owners is None:
            return self

        def side(weights: npt.NDArray[np.float64], owner: npt.NDArray[np.float64]) -> npt.NDArray[np.float64] | int:
            others = np.where(owner == number, 0.0, weights)
            kept = others if others.any() else weights
            return kept if kept.any() else len(kept)

        assert not isinstance(self.first, int)
        assert not isinstance(self.second, int)
        return PoolDraws(side(self.first, self.owners[0]), side(self.second, self.owners[1]))

    @property
    def even(self) -> bool:
        """Whether all entries of either side weigh the same."""
        return isinstance(self.first, int) and isinstance(self.second, int)


def draw_lags(
    schedule: Schedule, reading: Reading, number: int, round: int, pool: PoolDraws, secret: int = 0
) -> tuple[Indices, Indices]:
    """Which entries of the pool a client's steps read, S1's [K, B1] and S2's [K, B2].

    secret: a seed in place of the run's; 0: the run's.
    """
    rng, steps = sampling.generator(secret or schedule.seed, Purpose.POOL, number, round), schedule.local_steps
    pool = pool.of_others(number)
    first = sampling.pooled(rng, steps * reading.size1, pool.first).reshape(steps, reading.size1)
    return first, sampling.pooled(rng, steps * reading.size2, pool.second).reshape(steps, reading.size2)


class _Ahead(NamedTuple):
    """What was drawn for the next round while this one was running."""

    own: dict[tuple[int, int, int], Draws[Indices]]  # by client, round and how often the client took part
    pool: PoolDraws | None  # the pool that these draws assume
    lags: dict[tuple[int, int], tuple[Indices, Indices]]  # by client and round


@dataclass
class Drawing:
    """Draws for the clients of a federation."""

    federation: Federation
    reading: Reading
    schedule: Schedule
    first_number: int = 0  # of the first client: draws are those of its number, wherever it runs
    secrets: Secrets = NO_SECRETS

    def __post_init__(self) -> None:
        self.first = self.federation.side(self.reading.first)
        self.second = self.federation.side(self.reading.second)
        self.weights = self._weights()
        self.labels = self.federation.labels
        told = "examples with several labels take turns by label, and weights would not count; leave them out"
        require(self.weights is None or not self.labels, told)
        self.couples = self.federation.by_label(self.first, self.reading.first) if self.labels else []
        self._ahead = _Ahead({}, None, {})

    def draw(self, client: int, round: int, visits: int, pool: PoolDraws | None) -> Draws[Indices]:
        """All of a client's draws for a round."""
        key = (client, round, visits)
        draws = self._ahead.own.pop(key, None) or self._own(*key)
        if pool is None:
            return draws
        ahead = self._ahead.lags.get((client, round)) if pool.even and self._ahead.pool == pool else None
        lag1, lag2 = ahead or self._lags(client, round, pool)
        return draws._replace(lag1=lag1, lag2=lag2)

    def draw_ahead(self, round: int, visits: dict[int, int], pool: PoolDraws | None) -> None:
        """Draw for the next round while a GPU still works on this one, so that it need not wait for the host.

        visits: the clients of the next round, and how often each took part before. The next pool is not known yet. If
        all entries weigh the same, draws depend on its size alone, which mostly stays the same.
        """
        keys = [(client, round, count) for client, count in visits.items()]
        own = {key: self._own(*key) for key in keys}
        likely = pool if pool is not None and pool.even else None
        lags = {(client, round): self._lags(client, round, likely) for client in visits} if likely else {}
        self._ahead = _Ahead(own, likely, lags)

    def _weights(self) -> Floats | None:
        """Weights of examples, of mean 1 in each class of each client: they do not say how classes are mixed."""
        weights = self.federation.weights()
        if weights is None or self.federation.labels:
            return weights
        for part in (*self.federation.side("positive"), *self.federation.side("negative")):
            weights[part] /= weights[part].mean() if len(part) else 1.0
        return weights

    def num_rows(self, client: int) -> int:
        """How many rows of S1 a client has: its examples, or couples of an example and a label."""
        return len(self.first[client]) * max(1, self.labels)

    def _lags(self, client: int, round: int, pool: PoolDraws) -> tuple[Indices, Indices]:
        number = self.first_number + client
        return draw_lags(self.schedule, self.reading, number, round, pool, self.secrets.pool)

    def seed(self, client: int) -> int:
        """Of what this client draws for itself."""
        return self.secrets.own.get(self.first_number + client, self.schedule.seed)

    def _own(self, client: int, round: int, visits: int) -> Draws[Indices]:
        """Which of its own examples a client reads. A side without examples is filled with the other side's.

        Such stand-ins have factor 0 in the gradient. But BatchNorm sees them, so they must be real examples.
        """
        (_, _, size1, size2, fresh, _), codes = self.reading, self.federation.source.codes
        number = self.first_number + client
        rng = sampling.generator(self.seed(client), Purpose.AUGMENT, number, round) if codes > 1 else None
        rows = self._read_first(client, visits, Purpose.FIRST, size1)
        second = self._read(client, visits, Purpose.SECOND, size2, self.second[client])
        examples = self._locate(client, rows, second)
        drawn, none = sampling.codes(rng, examples.shape, codes), rows[:, :0]
        draws = Draws(examples, drawn, rows, none, none, none, none, none)
        if not fresh:
            return draws
        rows = self._read_first(client, visits, Purpose.FRESH_FIRST, size1)
        second = self._read(client, visits, Purpose.FRESH_SECOND, size2, self.second[client])
        examples = self._locate(client, rows, second)
        drawn = sampling.codes(rng, examples.shape, codes)
        return draws._replace(fresh=examples, fresh_codes=drawn, fresh_rows=rows)

    def _read_first(self, client: int, visits: int, purpose: Purpose, size: int) -> Indices:
        """Rows of S1; of several labels couples, and each label that the client holds has its turn."""
        if not self.labels or not len(self.first[client]):
            return self._read(client, visits, purpose, size, self.first[client])
        steps, number = self.schedule.local_steps, self.first_number + client
        purposes = (Purpose.LABELS if purpose == Purpose.FIRST else Purpose.FRESH_LABELS, purpose)
        count, members = steps * size, self.couples[client]
        drawn = sampling.couples(self.seed(client), purposes, number, visits * count, count, members, self.labels)
        return drawn.reshape(steps, size)

    def _read(self, client: int, visits: int, purpose: Purpose, size: int, side: Indices) -> Indices:
        """Rows of one side, epoch after epoch, from where the client's last visit ended."""
        steps, number = self.schedule.local_steps, self.first_number + client
        count = steps * size
        if not count or not len(side):
            return np.zeros((steps, size), np.int64)
        begin = visits * count
        weights = None if self.weights is None else self.weights[side]
        drawn = sampling.epochs(self.seed(client), purpose, number, begin, count, len(side), weights)
        return drawn.reshape(steps, size)

    def _locate(self, client: int, first: Indices, second: Indices) -> Indices:
        """Where rows of both sides lie in the source."""
        held = self.federation.parts[client]
        first = first // max(1, self.labels)
        sides = ((self.first[client], first), (self.second[client], second))
        located = [side[rows] if len(side) else np.resize(held, rows.shape) for side, rows in sides if rows.size]
        return np.concatenate(located, axis=1) if len(located) > 1 else located[0]

"""What is drawn for a client's round, by the run's seed or secret ones: its examples, entries of the pool, noise."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedxl import sampling, tree
from fedxl.algorithms.private import UNITS
from fedxl.algorithms.protocol import Reading
from fedxl.data.examples import Examples
from fedxl.engine.executors import Draws
from fedxl.errors import require
from fedxl.risks.pairing import Held, PoolWeights
from fedxl.sampling import Indices, Purpose, Stream


class Schedule(NamedTuple):
    """How much a client reads in a round."""

    local_steps: int
    batch1: int  # examples of S1 per step
    batch2: int  # examples of S2
    seed: int = 0


class Secrets(NamedTuple):
    """Seeds in place of the run's, which everybody knows. Who knows a seed can work out what was drawn from it."""

    own: Mapping[int, int] = {}  # by client: of its own examples; absent: the run's seed
    pool: int = 0  # of the entries of the pool that clients read; 0: the run's seed
    noise: Mapping[int, int] = {}  # by client: of the noise that it adds; absent: the run's seed


NO_SECRETS = Secrets()


def host_weights(pool: PoolWeights) -> PoolWeights:
    """The pool's weights as pairings draw by them: a size if all entries of a side weigh the same."""

    def side(weights: Tensor) -> Any:
        host = weights.double().cpu().numpy()
        # One entry of weight 0 stands for an empty pool: draw it, it counts for nothing.
        return len(host) if float(np.ptp(host)) <= 1e-12 * float(host.max()) else host

    groups = None if pool.groups is None else tuple(of.cpu().numpy() for of in pool.groups)
    return PoolWeights(side(pool.first), side(pool.second), groups)


def draw_lags(
    schedule: Schedule, reading: Reading, number: int, round: int, pool: PoolWeights, secret: int = 0,
    groups: Indices | None = None,
) -> tuple[Indices, Indices]:  # fmt: skip
    """Which entries of the pool a client's steps read, S1's [K, B1] and S2's [K, B2].

    secret: a seed in place of the run's; 0: the run's. groups: as in the pairing's `draw_pool`.
    """
    rng = sampling.generator(secret or schedule.seed, Purpose.POOL, number, round)
    return reading.pairing.draw_pool(rng, pool, schedule.local_steps, (reading.size1, reading.size2), groups)


class _Ahead(NamedTuple):
    """What was drawn for the next round while this one was running."""

    own: dict[tuple[int, int, int], Draws[Indices]]  # by client, round and how often the client took part
    pool: PoolWeights | None  # the pool that these draws assume
    lags: dict[tuple[int, int], tuple[Indices, Indices]]  # by client and round


@dataclass
class Drawing:
    """Draws for the clients that hold these examples."""

    data: Examples
    reading: Reading
    schedule: Schedule
    items: Any = ()  # what the pairing knows of examples besides their labels, [n]
    first_number: int = 0  # of the first client: draws are those of its number, wherever it runs
    secrets: Secrets = NO_SECRETS

    def __post_init__(self) -> None:
        self.weighted = self.data.weight is not None
        plain = not self.weighted or not self.reading.pairing.labels
        why = "examples with several labels take turns by label, and weights would not count"
        require(plain, f"{why}; leave them out")
        self.held = self._held()
        self.groups = self.reading.pairing.example_groups(self.items)
        self._ahead = _Ahead({}, None, {})

    def _held(self) -> list[Held]:
        """What each client holds. Weights have mean 1 in each class of each client: they do not mix classes."""
        data, reading = self.data, self.reading
        weights = None if data.weight is None else data.weight.cpu().double().numpy().copy()
        labels = reading.pairing.targets(data.y).cpu()
        if weights is not None:
            for part in (*data.side("positive"), *data.side("negative")):
                weights[part] /= weights[part].mean() if len(part) else 1.0
        found, sides = [], (data.side(reading.first), data.side(reading.second))
        for part, first, second in zip(data.parts, *sides, strict=True):
            more = reading.pairing.hold(part, first, second, labels, self.items, reading.first)
            each = None if weights is None else (weights[first], weights[second])
            found.append(Held(first, second, part, each, more))
        return found

    def draw(self, client: int, round: int, visits: int, pool: PoolWeights | None) -> Draws[Indices]:
        """All of a client's draws for a round."""
        key = (client, round, visits)
        draws = self._ahead.own.pop(key, None) or self._own(*key)
        if pool is None:
            return draws
        same = _even(pool) and self._ahead.pool == pool
        ahead = self._ahead.lags.get((client, round)) if same else None
        lag1, lag2 = ahead or self._lags(client, round, pool, draws.examples)
        return draws._replace(lag1=lag1, lag2=lag2)

    def draw_ahead(self, round: int, visits: dict[int, int], pool: PoolWeights | None) -> None:
        """Draw for the next round while a GPU still works on this one, so that it need not wait for the host.

        visits: the clients of the next round, and how often each took part before. If all entries of the pool weigh
        the same, draws depend on its size alone, which mostly stays the same.
        """
        keys = [(client, round, count) for client, count in visits.items()]
        own = {key: self._own(*key) for key in keys}
        likely = pool if pool is not None and _even(pool) else None
        lags = {key[:2]: self._lags(*key[:2], likely, own[key].examples) for key in keys} if likely else {}
        self._ahead = _Ahead(own, likely, lags)

    def num_rows(self, client: int) -> int:
        """How many u a client keeps."""
        return self.reading.pairing.num_rows(self.held[client])

    def seed(self, client: int) -> int:
        """Of what this client draws for itself."""
        return self.secrets.own.get(self.first_number + client, self.schedule.seed)

    def _lags(self, client: int, round: int, pool: PoolWeights, examples: Indices) -> tuple[Indices, Indices]:
        groups = None if self.groups is None else self.groups[examples[:, : self.reading.size1]]
        number = self.first_number + client
        return draw_lags(self.schedule, self.reading, number, round, pool, self.secrets.pool, groups)

    def _own(self, client: int, round: int, visits: int) -> Draws[Indices]:
        """Which of its own examples a client reads, and how each is augmented."""
        stream = Stream(self.seed(client), self.first_number + client)
        codes = self.data.codes
        rng = stream.generator(Purpose.AUGMENT, round) if codes > 1 else None
        sizes, steps = (self.reading.size1, self.reading.size2), self.schedule.local_steps
        found = []
        for fresh in (False, True) if self.reading.fresh else (False,):
            rows, examples = self.reading.pairing.draw(stream, self.held[client], visits, steps, sizes, fresh)
            shape = examples.shape  # a code below `codes` selects the augmentation of each example
            found += [examples, np.zeros(shape, np.int64) if rng is None else rng.integers(codes, size=shape), rows]
        examples, drawn, rows, *more = found
        none = rows[:, :0]
        return Draws(examples, drawn, rows, none, none, *(more or (none, none, none)))


def _even(pool: PoolWeights) -> bool:
    """Whether draws depend on the pool's size alone: all entries of either side weigh the same."""
    return isinstance(pool.first, int) and isinstance(pool.second, int) and pool.groups is None


MOST = 2**30  # numbers of noise that a group of clients draws in a round: 4 GiB in single precision
PIECE = 2**20  # of which so many are drawn at a time, which takes about 130 bytes for each


def draw_noise(like: Any, seeds: Sequence[int], numbers: Sequence[int], round: int, steps: int) -> Any:
    """The noise that private algorithms add to what leaves a client, for all steps of a round, [C, K, ...].

    like: of one step; seeds: of each client.
    """
    leaves = tree.leaves(like)
    if not leaves:
        return like
    sizes = [leaf.numel() for leaf in leaves]
    what = f"noise for {len(seeds)} clients, {steps} steps and {sum(sizes):,} numbers is too much for a round"
    require(len(seeds) * steps * sum(sizes) <= MOST, f"{what}; lower clients_at_once or local_steps")
    found = [leaf.new_empty(len(seeds), steps, *leaf.shape) for leaf in leaves]  # single precision holds them exactly
    for at, client in enumerate(zip(seeds, numbers, strict=True)):
        for step in range(steps):
            drawn = torch.from_numpy(discrete_normals(*client, round, step, sum(sizes))).split(sizes)
            for noise, piece, leaf in zip(found, drawn, leaves, strict=True):
                noise[at, step] = piece.reshape(leaf.shape)
    return tree.rebuild(like, found)


DOMAIN = "fedxl whole numbers of noise for privacy"  # streams of this key serve nothing else
# P(V >= v) for v = 9, 8, ..., 1 of V with probabilities in proportion to exp(-v^2 / 2), in units of 2^-64.
_weights = [math.exp(-(v**2) / 2) for v in range(10)]
TAILS = np.array([int(2**64 * (sum(_weights[v:]) / sum(_weights))) for v in range(9, 0, -1)], np.uint64)


def discrete_normals(seed: int, client: int, round: int, step: int, count: int) -> Indices:
    """`count` independent draws of a discrete Gaussian for one step of a client.

    P(k) is in proportion to exp(-k^2 / (2 UNITS^2)). V whole standard deviations and a part u of one are proposed,
    and taken with probability exp(-u (2 V + u) / 2) (Karney. Sampling Exactly from the Normal Distribution. 2016).
    Each decision compares 63 or 64 random bits, so that even rare numbers have their probability
    (docs/differential-privacy.md).

    >>> discrete_normals(7, client=0, round=1, step=0, count=3).tolist() == discrete_normals(7, 0, 1, 0, 3).tolist()
    True
    """
    found = np.empty(count, np.int64)
    for start in range(0, count, PIECE):
        of = (seed, client, round, step), (start // PIECE,) if start else ()
        found[start : start + PIECE] = _normals(*of, min(PIECE, count - start))
    return found


def _normals(stream: tuple[int, ...], piece: tuple[int, ...], count: int) -> Indices:
    found, left, attempt = [np.empty(0, np.int64)], count, 0
    while left > 0:
        key, proposals = ",".join(map(str, (DOMAIN, *stream, attempt, *piece))), left + left // 2 + 16
        bits = hashlib.shake_256(key.encode()).digest(20 * proposals)
        first, second = np.frombuffer(bits, "<u8", 2 * proposals).reshape(2, proposals)
        third = np.frombuffer(bits, "<u4", proposals, 16 * proposals)
        whole = len(TAILS) - np.searchsorted(TAILS, first, side="right")
        part, negative = (third % UNITS).astype(np.int64), third >= 2**31
        u = part / UNITS
        taken = second >> 1 < (np.exp(-u * (2 * whole + u) / 2) * 2.0**63).astype(np.uint64)
        size = whole * UNITS + part
        taken &= ~negative | (size > 0)  # or 0 would come twice as often as it should
        found.append(np.where(negative, -size, size)[taken][:left])
        left, attempt = left - len(found[-1]), attempt + 1
    return np.concatenate(found)

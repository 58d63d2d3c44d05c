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
from fedxl.algorithms.protocol import Reading
from fedxl.data.examples import Examples
from fedxl.engine.executors import Draws
from fedxl.errors import require
from fedxl.risks.pairing import Held, PoolWeights
from fedxl.sampling import Floats, Indices, Purpose, Stream


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


MOST = 2**32  # numbers of noise that a group of clients draws in a round: 16 GB in single precision


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
    clients = zip(seeds, numbers, strict=True)
    drawn = [[normals(*client, round, step, sum(sizes)) for step in range(steps)] for client in clients]
    flat = np.array(drawn)  # [C, K, all leaves]
    pieces = torch.from_numpy(flat).to(leaves[0].device).split(sizes, dim=-1)
    each = zip(pieces, leaves, strict=True)
    return tree.rebuild(like, (piece.to(leaf.dtype).reshape(*flat.shape[:2], *leaf.shape) for piece, leaf in each))


DOMAIN = "fedxl noise for privacy"  # streams of this key serve nothing else


def normals(seed: int, client: int, round: int, step: int, count: int) -> Floats:
    """`count` independent draws of N(0, 1) for one step of a client.

    >>> normals(7, client=0, round=1, step=0, count=3).round(3).tolist() == normals(7, 0, 1, 0, 3).round(3).tolist()
    True
    """
    pairs = -(-count // 2)
    key = ",".join(map(str, (DOMAIN, seed, client, round, step)))
    bits = np.frombuffer(hashlib.shake_256(key.encode()).digest(16 * pairs), "<u8")
    uniform = ((bits >> np.uint64(11)) + 0.5) * 2.0**-53  # never 0, whose logarithm is infinite
    length, angle = np.sqrt(-2 * np.log(uniform[:pairs])), 2 * math.pi * uniform[pairs:]
    return np.concatenate((length * np.cos(angle), length * np.sin(angle)))[:count]

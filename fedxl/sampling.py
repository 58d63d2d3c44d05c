"""Every random choice is a pure function of (seed, purpose, client, position): all engines draw the same numbers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# A client with few examples reads many epochs in one round. Epochs are drawn in blocks of about this many indices.
BLOCK = 512
# Streams of several labels begin so many blocks apart.
BLOCKS = 2**40
# A probability so near to 1 counts as 1: rounding must not let one client cover two points of `systematic`.
CERTAIN = 1e-9
# Seeds from here up are secret.
SECRET = 2**127


class Purpose(IntEnum):
    """What a stream is for. It is part of the stream's key, so that streams never overlap. Never reuse a number."""

    COHORT = 1
    FIRST = 2  # the order in which a client reads S1
    SECOND = 3  # ... and S2
    FRESH_FIRST = 4  # the z-hat of Algorithm 2
    FRESH_SECOND = 5
    POOL = 6  # which (a, u) of the score pool a client reads, then which b
    LAYERS = 7  # dropout and the like, inside the model
    WEIGHTS = 8  # initial weights
    DATA = 9  # splits, partitions and site shifts
    AUGMENT = 10  # crops, flips and noise of a client's examples in a round
    NOISE = 11  # the bank from which noise is read
    LABELS = 30  # of several labels: for which one each row of S1 is read
    FRESH_LABELS = 31
    QUERIES = 20  # the order in which a client reads its queries
    ITEMS = 21  # which items of its queries a client reads in a round
    FRESH_ITEMS = 22


def generator(seed: int, purpose: Purpose, client: int = 0, position: int = 0) -> np.random.Generator:
    """The stream of one purpose. Its key has a fixed length, because SeedSequence treats [1] and [1, 0] as equal."""
    key = [int(part) for part in (seed, purpose, client, position)]
    if seed >= SECRET:
        # From a stream's state one can calculate back to its key, but not through a hash. So whoever might work out
        # one stream of a secret seed does not know the others.
        key = [int.from_bytes(hashlib.sha256(repr(key).encode()).digest(), "big")]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


def torch_seed(seed: int, purpose: Purpose, client: int = 0, position: int = 0) -> int:
    return int(generator(seed, purpose, client, position).integers(2**62))


def cohort(seed: int, round: int, num_clients: int, size: int, chances: Floats | None = None) -> Indices:
    """The clients of a round, ascending; all if `size` is 0 or at least their number. chances: from `inclusion`."""
    if size <= 0 or size >= num_clients:
        return np.arange(num_clients)
    rng = generator(seed, Purpose.COHORT, 0, round)
    if chances is None:
        return np.sort(rng.choice(num_clients, size, replace=False))
    return systematic(chances, rng.permutation(num_clients), rng.random())


def inclusion(parts: Floats, size: int) -> Floats:
    """The probability of each client to be in a cohort of `size`, in proportion to its part of the whole.

    A client whose probability would be 1 or more is in every cohort, and the others share the other places. If fewer
    than `size` clients have a part at all, cohorts consist of these.
    """
    chances = np.zeros(len(parts))
    some = parts > 0
    while some.any():
        places = size - int(chances.sum())
        scaled = places * parts / parts[some].sum()
        certain = some & (scaled >= 1 - CERTAIN)
        if not certain.any():
            chances[some] = scaled[some]
            break
        chances[certain] = 1.0
        some &= ~certain
    return chances


def systematic(chances: Floats, order: Indices, start: float) -> Indices:
    """Clients drawn with these probabilities: lay them in this order on a line, each as long as its probability.

    Whoever covers one of the points start, start + 1, ... is drawn. `start` is uniform in [0, 1).
    """
    certain, rest = np.flatnonzero(chances == 1), order[(chances[order] > 0) & (chances[order] < 1)]
    count = round(float(chances[rest].sum()))
    if not count:
        return certain
    edges = np.cumsum(chances[rest])
    edges *= count / edges[-1]
    places = np.searchsorted(edges, start + np.arange(count), side="right")
    return np.sort(np.concatenate((certain, rest[np.minimum(places, len(rest) - 1)])))


def _block(seed: int, purpose: Purpose, client: int, block: int, per_block: int, size: int) -> Indices:
    """`per_block` epochs, one after another."""
    epochs = np.tile(np.arange(size), (per_block, 1))
    ordered: Indices = generator(seed, purpose, client, block).permuted(epochs, axis=1).ravel()
    ordered.setflags(write=False)
    return ordered


# Small clients read one block over many rounds. The cache takes less than 32 MB.
_remembered = lru_cache(maxsize=8192)(_block)


@dataclass(frozen=True)
class Stream:
    """The draws of one client from one seed."""

    seed: int
    client: int

    def generator(self, purpose: Purpose, position: int) -> np.random.Generator:
        return generator(self.seed, purpose, self.client, position)

    def epochs(
        self, purpose: Purpose, position: int, count: int, size: int, weights: Floats | None = None, label: int = 0
    ) -> Indices:
        """`count` indices below `size`, from `position` of a stream of epochs. Each epoch is a new permutation.

        With weights, an epoch holds each index in proportion to its weight, to less than one, in a new order. label:
        of several labels, which have a stream each.
        """
        per_block = max(1, BLOCK // size)
        block, offset = divmod(position, per_block * size)
        block += label * BLOCKS
        parts: list[Indices] = []
        shuffle = _remembered if size <= BLOCK else _block
        while count > 0:
            if weights is None:
                ordered = shuffle(self.seed, purpose, self.client, block, per_block, size)
            else:
                rng = self.generator(purpose, block)
                ordered = np.concatenate([pooled(rng, size, weights) for _ in range(per_block)])
            parts.append(ordered[offset : offset + count])
            count -= len(parts[-1])
            block, offset = block + 1, 0
        return np.concatenate(parts)


def pooled(rng: np.random.Generator, count: int, weights: Floats | int) -> Indices:
    """The entries of a score pool that a client meets in a round: a shuffle, repeated in a new order when exhausted.

    `weights` is the number of entries, or an array with one weight per entry. With weights, an entry is drawn in
    proportion to its weight (systematic resampling: its count differs from its share by less than one).
    """
    if isinstance(weights, int):
        if count <= weights:
            return rng.choice(weights, count, replace=False)
        repeats = -(-count // weights)
        return rng.permuted(np.tile(np.arange(weights), (repeats, 1)), axis=1).ravel()[:count]
    edges = np.cumsum(weights) / weights.sum()
    points = (rng.random() + np.arange(count)) / count
    return rng.permutation(np.minimum(np.searchsorted(edges, points, side="right"), len(weights) - 1))

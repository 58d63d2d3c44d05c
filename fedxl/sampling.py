"""Every random choice, as a pure function of (seed, purpose, client, position): nothing to save, nothing to restore.

`client` is the partition's number, never an engine's node id, so that all engines draw the same.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

# A client with a handful of examples reads many epochs in one round; they are drawn in blocks of about this many.
BLOCK = 512


class Purpose(IntEnum):
    """What a stream is for; part of its key, so that streams never meet. Numbers are never reused."""

    COHORT = 1
    FIRST = 2  # the order in which a client reads S1
    SECOND = 3  # ... and S2
    FRESH_FIRST = 4  # the z-hat of Algorithm 2
    FRESH_SECOND = 5
    POOL = 6  # which pooled (a, u) a client takes, then which b
    LAYERS = 7  # dropout and the like, inside the model
    WEIGHTS = 8  # initial weights
    DATA = 9  # splits, partitions and site shifts
    AUGMENT = 10  # crops, flips and noise of a client's examples in a round
    NOISE = 11  # the bank that noise is read from


def generator(seed: int, purpose: Purpose, client: int = 0, position: int = 0) -> np.random.Generator:
    """The stream of one purpose. Keys have a fixed length: SeedSequence reads [1] and [1, 0] as the same."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, purpose, client, position])))


def torch_seed(seed: int, purpose: Purpose, client: int = 0, position: int = 0) -> int:
    return int(generator(seed, purpose, client, position).integers(2**62))


def cohort(seed: int, round: int, num_clients: int, size: int) -> Indices:
    """The clients of a round, in ascending order; all of them if `size` is 0 or no less than their number."""
    if size <= 0 or size >= num_clients:
        return np.arange(num_clients)
    return np.sort(generator(seed, Purpose.COHORT, 0, round).choice(num_clients, size, replace=False))


def epochs(seed: int, purpose: Purpose, client: int, position: int, count: int, size: int) -> Indices:
    """`count` indices below `size` from `position` on, in a stream of epochs, each a fresh permutation."""
    per_block = max(1, BLOCK // size)
    block, offset = divmod(position, per_block * size)
    parts: list[Indices] = []
    shuffle = _remembered if size <= BLOCK else _block
    while count > 0:
        ordered = shuffle(seed, purpose, client, block, per_block, size)
        parts.append(ordered[offset : offset + count])
        count -= len(parts[-1])
        block, offset = block + 1, 0
    return np.concatenate(parts)


def _block(seed: int, purpose: Purpose, client: int, block: int, per_block: int, size: int) -> Indices:
    """So many epochs, one after another."""
    epochs = np.tile(np.arange(size), (per_block, 1))
    ordered: Indices = generator(seed, purpose, client, block).permuted(epochs, axis=1).ravel()
    ordered.setflags(write=False)
    return ordered


# Small clients read one block in many rounds; what is remembered of them stays below 32 MB.
_remembered = lru_cache(maxsize=8192)(_block)


def codes(rng: np.random.Generator | None, shape: tuple[int, ...], count: int) -> Indices:
    """Codes below `count`, by which examples are augmented; without a generator all are 0."""
    return np.zeros(shape, np.int64) if rng is None else rng.integers(count, size=shape)


def pooled(rng: np.random.Generator, count: int, weights: npt.NDArray[np.float64] | int) -> Indices:
    """Which entries of a pool a client takes in a round: shuffled, without replacement, reshuffled when exhausted.

    `weights` is the number of entries, or one weight each; then an entry comes up in proportion to its weight
    (systematic resampling: no entry is more than one copy away from its share).
    """
    if isinstance(weights, int):
        if count <= weights:
            return rng.choice(weights, count, replace=False)
        repeats = -(-count // weights)
        return rng.permuted(np.tile(np.arange(weights), (repeats, 1)), axis=1).ravel()[:count]
    edges = np.cumsum(weights) / weights.sum()
    points = (rng.random() + np.arange(count)) / count
    return rng.permutation(np.minimum(np.searchsorted(edges, points, side="right"), len(weights) - 1))

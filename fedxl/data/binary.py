"""Makes an imbalanced binary task of a labelled set: split, subsample, flip labels. Pure functions of a generator."""

from __future__ import annotations

import numpy as np

from fedxl.errors import require
from fedxl.sampling import Indices


def hold_back(labels: Indices, count: int, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """(training, `count` validation examples), both with the same share of positives, in ascending order."""
    require(0 <= count < len(labels), f"validation must lie in [0, {len(labels)}), got {count}")
    positives, negatives = (rng.permutation(np.flatnonzero(labels == label)) for label in (1, 0))
    of_positives = round(count * len(positives) / len(labels))
    held = np.concatenate([positives[:of_positives], negatives[: count - of_positives]])
    rest = np.concatenate([positives[of_positives:], negatives[count - of_positives :]])
    return np.sort(rest), np.sort(held)


def imbalance(indices: Indices, labels: Indices, ratio: float, rng: np.random.Generator) -> Indices:
    """As many of `indices` as `ratio` positives per negative allow; 0: all. In ascending order.

    >>> labels = np.array([1, 1, 1, 1, 0, 0, 0, 0])
    >>> kept = imbalance(np.arange(8), labels, 0.25, np.random.default_rng(0))
    >>> labels[kept].tolist()
    [1, 0, 0, 0, 0]
    """
    require(ratio >= 0, f"ratio must not be negative, got {ratio}")
    if ratio == 0:
        return indices
    positives, negatives = (rng.permutation(indices[labels[indices] == label]) for label in (1, 0))
    few = at_most(len(positives), ratio * len(negatives))
    many = at_most(len(negatives), few / ratio)
    return np.sort(np.concatenate([positives[:few], negatives[:many]]))


def at_most(count: int, wanted: float) -> int:
    """How many of `count` to keep if `wanted` are wanted: at least one, if there is one.

    >>> at_most(10, 3.6), at_most(10, 0.2), at_most(10, float("inf")), at_most(0, 3.0)
    (4, 1, 10, 0)
    """
    return min(count, max(1, round(min(count, wanted))))


def corrupt(labels: Indices, share: float, rng: np.random.Generator) -> Indices:
    """The labels, with this share of the positives and of the negatives flipped.

    >>> corrupt(np.array([1, 1, 0, 0, 0, 0]), 0.5, np.random.default_rng(0)).sum()
    np.int64(3)
    """
    flipped = labels.copy()
    for label in (0, 1):
        members = np.flatnonzero(labels == label)
        flipped[rng.choice(members, round(share * len(members)), replace=False)] = 1 - label
    return flipped

"""Placement values: where each example stands among those of the other class. DeLong's variance is their spread.

E. DeLong, D. DeLong, D. Clarke-Pearson, "Comparing the areas under two or more correlated receiver operating
characteristic curves: a nonparametric approach", Biometrics 44, 1988; in O(n log n) after X. Sun, W. Xu, "Fast
implementation of DeLong's algorithm", IEEE Signal Processing Letters 21, 2014.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

Floats = npt.NDArray[np.float64]


class Placements(NamedTuple):
    """The share of the other class that is ranked right against each example; ties count one half."""

    positives: Floats  # [m], the share of negatives below each positive
    negatives: Floats  # [n], the share of positives above each negative

    @property
    def auroc(self) -> float:
        return float(self.positives.mean())


def placements(scores: npt.ArrayLike, labels: npt.ArrayLike) -> Placements:
    """Needs both classes and finite scores."""
    values, positive = np.asarray(scores, np.float64), np.asarray(labels) > 0
    high, low = values[positive], values[~positive]
    ranks = rankdata(np.concatenate([high, low]))  # midranks among all; less those within a class: among the other
    below = ranks[: len(high)] - rankdata(high)
    above = len(high) - (ranks[len(high) :] - rankdata(low))
    return Placements(below / len(low), above / len(high))


def covariance(*models: Placements) -> Floats:
    """DeLong's covariance of the AUROCs of models that scored the same examples; needs two of each class."""
    first = np.cov(np.stack([each.positives for each in models]))  # S10
    second = np.cov(np.stack([each.negatives for each in models]))  # S01
    m, n = len(models[0].positives), len(models[0].negatives)
    return np.atleast_2d(first / m + second / n)


def satterthwaite(parts: npt.ArrayLike, freedoms: npt.ArrayLike) -> float:
    """Degrees of freedom of a sum of independent variances, each known with as many of its own."""
    each, free = np.asarray(parts, np.float64), np.asarray(freedoms, np.float64)
    return float(each.sum() ** 2 / (each**2 / free).sum())

"""AUROC's variance by DeLong, and where AUROC may lie.

Placement values say where each example stands among those of the other class; DeLong's variance is their spread
(E. DeLong, D. DeLong, D. Clarke-Pearson, Biometrics 44, 1988; in O(n log n) after X. Sun, W. Xu, IEEE Signal
Processing Letters 21, 2014). The interval is Wilson's, with as many trials as that variance says the pairs are worth.

A share p of N trials has variance p (1 - p) / N. Wilson's interval holds all t that are compatible with p,
|p - t| <= z sqrt(t (1 - t) / N): the variance is that of the tested value, not of the one that was found. For AUROC

    N = 1 / (r10 / m + r01 / n),    r = S / (A (1 - A)),

with DeLong's variances S10 and S01 of the placements of m positives and n negatives; r = 1 if each example is ranked
all right or all wrong, and 1/3 if placements are uniform.

Near 1 a few examples that are ranked low decide, and a set that happens to hold none of them looks more certain than
it is. So a model has a say as well: `model_ratio(t)`, the variance by which R. Newcombe's method 5 tests t
("Confidence intervals for an effect size measure based on the Mann-Whitney statistic", part 2, Statistics in Medicine
25, 2006). It counts as one error. Errors that were seen are worth e = (sum d)^2 / sum d^2 with d = 1 - placement, and
a variance of e values has e - 1 degrees of freedom, so that r counts e - 1 times. A perfect ranking, and one with a
single wrong pair, leave all to the model. For the upper end d is the placement: what was ranked right. With many
examples the interval tends to DeLong's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit
from scipy.stats import rankdata

from fedxl.evaluation.scores import Floats

STEPS = 100  # at most; 15 were enough for every set that was tried: each leaves less than a fifth of the error
NEAR = 1e-13
LEAST = 1e-12  # AUROC below which the upper end alone says something


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


def auroc_ends(placed: Placements, level: float) -> tuple[float, float]:
    """Both ends of the interval of AUROC; needs two examples of each class, and scores that are not all the same.

    Swapping the classes and negating the scores changes nothing; negating the scores turns the interval round.
    """
    mirrored = Placements(1 - placed.positives, 1 - placed.negatives)
    return _low(placed, level), 1 - _low(mirrored, level)


def model_ratio(area: float) -> float:
    """r of Hanley and McNeil's exponential model (Radiology 143, 1982), the mean of r10 and r01.

    These are (1 - A) / (2 - A) and A / (1 + A). Which class has which depends on the sign of the scores, so that
    their mean stands for both, as in Newcombe's method 5: from 1/3 at AUROC 1/2 to 1/4 at 0 and 1.

    >>> model_ratio(0.5), model_ratio(1.0)
    (0.3333333333333333, 0.25)
    """
    return ((1 - area) / (2 - area) + area / (1 + area)) / 2


def _low(placed: Placements, level: float) -> float:
    """The least t that is compatible: the model's ratio at t gives N, and N gives t, until both agree."""
    area, sizes = placed.auroc, np.array([len(side) for side in placed])
    found = np.array([_relative(side, area) for side in placed])  # [2, 2]: r and how often it counts
    ratios, counts = found.T
    low = area
    for _ in range(STEPS):
        each = (counts * ratios + model_ratio(low)) / (counts + 1) / sizes
        free = satterthwaite(each, sizes)  # one less for the mean, one more for the model
        # Sets whose AUROC is high by chance also have a low variance, and need Student's t. Those below the truth
        # have a high one, which makes up for it: below 1/2 the degrees of freedom grow, and t becomes normal.
        reach = float(stdtrit(free / min(1.0, 2 * max(area, LEAST)), (1 + level) / 2))
        before, low = low, wilson_low(area, float(1 / each.sum()), reach)
        if abs(low - before) < NEAR:
            break
    return low


def _relative(side: Floats, area: float) -> tuple[float, float]:
    """The variance of placements over its largest possible value, and how often it counts."""
    if not 0 < area < 1:
        return 0.0, 0.0
    lacking = 1 - side
    errors = float(lacking.sum() ** 2 / (lacking**2).sum())
    return float(np.var(side, ddof=1)) / (area * (1 - area)), max(0.0, errors - 1)


def wilson_low(share: float, trials: float, reach: float) -> float:
    over = reach**2 / trials
    root = reach * math.sqrt(share * (1 - share) / trials + over / (4 * trials))
    return (share + over / 2 - root) / (1 + over)

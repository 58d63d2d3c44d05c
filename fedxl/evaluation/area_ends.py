"""Where AUROC may lie: Wilson's interval, with as many trials as DeLong's variance says the pairs are worth.

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

from fedxl.evaluation.placements import Placements, satterthwaite

Floats = npt.NDArray[np.float64]
STEPS = 100  # at most; 15 were enough for every set that was tried: each leaves less than a fifth of the error
NEAR = 1e-13
LEAST = 1e-12  # AUROC below which the upper end alone says something


def area_ends(placed: Placements, level: float) -> tuple[float, float]:
    """Both ends of the interval of AUROC; needs two examples of each class, and scores that are not all the same.

    Swapping the classes and negating the scores changes nothing; negating the scores turns the interval round.
    """
    mirrored = Placements(1 - placed.positives, 1 - placed.negatives)
    return _low(placed, level), 1 - _low(mirrored, level)


class Ends(NamedTuple):
    """A value and the ends of its interval."""

    value: float
    low: float
    high: float


def difference_ends(first: Ends, second: Ends, spread: Floats) -> tuple[float, float]:
    """The interval of first - second, from both intervals and DeLong's covariance of the two, [2, 2].

    The difference is low if the first is low or the second high. Of independent values these distances add as squares
    (G. Zou, A. Donner, "Construction of confidence limits about effect measures: a general approach", Statistics in
    Medicine 27, 2008). What the models share makes both smaller, by as much as it does for DeLong's variance: two
    models that hardly differ have a narrow interval, however uncertain each of them is.
    """
    apart, each = spread[0, 0] + spread[1, 1] - 2 * spread[0, 1], spread[0, 0] + spread[1, 1]
    share = math.sqrt(max(0.0, float(apart / each))) if each > 0 else 1.0
    down = math.hypot(first.value - first.low, second.high - second.value)
    up = math.hypot(first.high - first.value, second.value - second.low)
    gap = first.value - second.value
    return gap - share * down, gap + share * up


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
    lacking = 1 - side
    if not 0 < area < 1:
        return 0.0, 0.0
    errors = float(lacking.sum() ** 2 / (lacking**2).sum())
    return float(np.var(side, ddof=1)) / (area * (1 - area)), max(0.0, errors - 1)


def wilson_low(share: float, trials: float, reach: float) -> float:
    over = reach**2 / trials
    root = reach * math.sqrt(share * (1 - share) / trials + over / (4 * trials))
    return (share + over / 2 - root) / (1 + over)

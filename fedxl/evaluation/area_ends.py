"""Where AUROC may lie: Wilson's interval, with as many trials as DeLong's variance says the pairs are worth.

A share p of N trials has variance p (1 - p) / N. Wilson's interval holds all t that are compatible with p,
|p - t| <= z sqrt(t (1 - t) / N): the variance is that of the tested value, not of the one that was found. For AUROC

    N = 1 / (r10 / m + r01 / n),    r = S / (A (1 - A)),

with DeLong's variances S10 and S01 of the placements of m positives and n negatives; r = 1 if each example is ranked
all right or all wrong, and 1/3 if placements are uniform. R. Newcombe, "Confidence intervals for an effect size
measure based on the Mann-Whitney statistic", part 2, Statistics in Medicine 25, 2006, inverts such a test with a
model's variance.

Near 1 a few examples that are ranked low decide, and a set that happens to hold none of them looks more certain than
it is. So r counts as often as errors were seen, (sum d)^2 / sum d^2 with d = 1 - placement, and `PRIOR` counts once.
For the upper end d is the placement: what was ranked right. With many examples the interval tends to DeLong's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import t

from fedxl.evaluation.placements import Placements, satterthwaite

Floats = npt.NDArray[np.float64]
PRIOR = 1 / 3  # r of uniform placements, which a score without information has


def area_ends(placed: Placements, level: float) -> tuple[float, float]:
    """Both ends of the interval of AUROC; needs an AUROC between 0 and 1, and scores that are not all the same.

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


def _low(placed: Placements, level: float) -> float:
    area, sizes = placed.auroc, np.array([len(side) for side in placed])
    each = np.array([_relative(side, area) for side in placed]) / sizes
    free = satterthwaite(each, sizes - 1)
    # Sets whose AUROC is high by chance also have a low variance, and need Student's t. Those below the truth have a
    # high one, which makes up for it: below 1/2 the degrees of freedom grow, and t becomes normal.
    reach = float(t.ppf((1 + level) / 2, free / min(1.0, 2 * area)))
    return _wilson_low(area, float(1 / each.sum()), reach)


def _relative(side: Floats, area: float) -> float:
    """The variance of placements over its largest possible value; `PRIOR` counts as much as one error."""
    lacking = 1 - side
    errors = float(lacking.sum() ** 2 / (lacking**2).sum())
    found = float(np.var(side, ddof=1)) / (area * (1 - area))
    return (errors * found + PRIOR) / (errors + 1)


def _wilson_low(share: float, trials: float, reach: float) -> float:
    over = reach**2 / trials
    root = reach * math.sqrt(share * (1 - share) / trials + over / (4 * trials))
    return (share + over / 2 - root) / (1 + over)

"""Intervals of the partial AUC and of average precision.

Both test each possible value t, as Wilson's interval of a share does, and hold all t that are compatible with the
value found. Both take a variance from the examples and one from a model, because few examples say little about their
own variance. The model is binormal: negatives N(0, 1) and positives N(mu, 1), with the mu that gives the tested t.
No bootstrap of few positives among many negatives covers as it should: its draws repeat the few that decide.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri, stdtrit

from fedxl import metrics
from fedxl.evaluation.delong import satterthwaite
from fedxl.evaluation.scores import Floats, Ints

FAR = 8.0  # standard deviations, beyond which nobody is


def normal(end: float = FAR) -> tuple[Floats, Floats]:
    """Points of the normal distribution up to an end, and the weights of a mean over them."""
    points = np.linspace(-FAR, end, 401)
    weights = np.exp(-(points**2) / 2)
    weights[-1] /= 2
    return points, weights / weights.sum()


class Groups(NamedTuple):
    """Examples by distinct score, from the highest down; arrays may have more axes in front."""

    positives: Floats  # how many positives have this score
    negatives: Floats


def groups(scores: Floats, labels: Ints) -> Groups:
    false, true = metrics.counts(scores, labels)
    return Groups(np.diff(true), np.diff(false))


def errors(lacking: Floats, weights: Floats) -> Floats:
    """How many equal errors these are worth, less one: (sum d)^2 / sum d^2 - 1, and 0 if there are none."""
    whole, squares = (weights * lacking).sum(-1) ** 2, (weights * lacking**2).sum(-1)
    return np.asarray(np.maximum(np.divide(whole, squares, out=np.ones_like(whole), where=squares > 0) - 1, 0.0))


def variance(values: Floats, weights: Floats, size: int) -> Floats:
    """Of the mean of `size` values; those that `weights` leave out are 0."""
    mean = (weights * values).sum(-1) / size
    return np.asarray(np.maximum((weights * values**2).sum(-1) / size - mean**2, 0.0) / (size - 1))


# Partial AUC

AS_ERRORS = 2.0  # as many errors as the model counts for


def partial_auc_ends(scores: Floats, labels: Ints, limit: float, level: float) -> tuple[float, float]:
    """Between which values the partial AUC lies, on McClish's scale; needs two of each class.

    The area up to a false positive rate L, over L, is the share p of pairs that are ranked right, among positives and
    the top share L of the negatives. Its variance is that of two means (as DeLong's for the whole area): of

        d = max(L - f, 0) / L         over m positives; f is the share of negatives above,
        e = max(S(L) - S, 0) / L      over n negatives; S is the share of positives above, S(L) that at rate L.

    The interval holds all t with |p - t| <= z sqrt(t (1 - t) (r10 / m + r01 / n)), which is Wilson's form. Here
    r = var / (p (1 - p)), averaged with that of the binormal model at t, which counts as two errors; z is Student's.
    At L = 1 this is `delong.auroc_ends`, but for the model.
    """
    value = metrics.partial_auc(scores, labels, limit)
    found = groups(scores, labels)
    if len(found.positives) == 1:  # all scores are the same
        return math.nan, math.nan
    sizes = np.array([each.sum() for each in found])
    (f0, f1), (s0, s1) = ((np.cumsum(each) / each.sum() - [each / each.sum(), 0 * each]) for each in found[::-1])
    width = np.clip(limit - f0, 0.0, f1 - f0)  # of each group within the limit; tied examples are half right
    inside = np.divide(width, f1 - f0, out=(f0 < limit) * 1.0, where=f1 > f0)
    mean = s0 + (s1 - s0) * inside / 2
    right = (np.maximum(limit - f1, 0) + width * inside / 2) / limit, inside * mean / limit
    wrong = 1 - right[0], inside * (1 - mean) / limit
    at_limit = float(np.interp(limit, np.append(0, f1), np.append(0, s1))) if limit < 1 else 1.0
    share = min(1.0, float((found.positives * right[0]).sum() / sizes[0]))
    moved = right[0], inside * (at_limit - mean) / limit
    each = np.array([variance(one, of, int(size)) for one, of, size in zip(moved, found, sizes, strict=True)])
    ends = []
    for start, lacking in ((share, wrong), (1 - share, right)):
        counts = np.array([errors(*pair) for pair in zip(lacking, found, strict=True)])
        ends.append(_low(start, each, counts, sizes, level, _ratios(limit, mirrored=lacking is right)))
    low, high = (float(metrics.mcclish(end * limit, limit)) for end in (ends[0], 1 - ends[1]))
    return min(low, value), max(high, value)


def _low(
    share: float, each: Floats, counts: Floats, sizes: Floats, level: float, model: tuple[Floats, Floats]
) -> float:
    """The least t that is compatible with this share."""
    if share <= 0:
        return 0.0
    ratios = each * sizes / (share * (1 - share)) if share < 1 else 0 * each
    tested, modelled = model

    def lacks(t: float) -> float:
        said = np.array([np.interp(t, tested, side) for side in modelled])
        parts = (counts * ratios + AS_ERRORS * said) / (counts + AS_ERRORS) / sizes
        free = satterthwaite(parts, sizes - 1 + AS_ERRORS) / min(1.0, 2 * share)  # `delong._low` says why
        return share - t - float(stdtrit(free, (1 + level) / 2)) * math.sqrt(t * (1 - t) * parts.sum())

    return float(brentq(lacks, 0.0, share * (1 - 1e-12), xtol=1e-12))


@cache
def _ratios(limit: float, *, mirrored: bool) -> tuple[Floats, Floats]:
    """The binormal model's shares t, ascending, and r10 and r01 of each."""
    mu = np.linspace(-5, 8, 131)[:, None]
    (noise, weights), (within, share) = normal(), normal(min(float(ndtri(limit)), FAR))
    right = np.maximum(limit - ndtr(-mu - noise), 0) / limit
    moved = (ndtr(mu + within[-1]) - ndtr(mu + within)) / limit
    t = right @ weights
    first = (right - t[:, None]) ** 2 @ weights
    second = limit * (moved**2 @ share) - (limit * (moved @ share)) ** 2
    ratios = np.stack([first, second]) / (t * (1 - t))
    return (1 - t[::-1], ratios[:, ::-1]) if mirrored else (t, ratios)


# Average precision

DRAWS = 2000  # of the model at each value that is tested
TESTED = 17  # values
MOST = 100  # positives in a draw; with more, T's distribution changes little
AS_ERROR = 1.0
REACH = 8.0  # standard errors of mu to both sides, beyond which no value is tested


class Precision(NamedTuple):
    """Average precision, the variance of its mean over positives and over negatives, and errors for both ends."""

    value: Floats
    variances: Floats  # [2, ...]
    errors: Floats  # [2, ...], of the lower end and of the upper


def precision(found: Groups, prevalence: float, sizes: tuple[int, int]) -> Precision:
    """With recall r and false positive rate f at each score, precision is P = c r / (c r + (1 - c) f).

    Average precision is the mean of P over positives. A positive moves it by its own P and by dP/dr of all at or
    below it; a negative by dP/df of all at or below it. The variance is that of these (the infinitesimal jackknife).
    """
    (m, n), (hits, misses), c = sizes, found, prevalence
    r, f = np.cumsum(hits, -1) / m, np.cumsum(misses, -1) / n
    both = c * r + (1 - c) * f
    each = c * r / both
    slope = hits / m * c * (1 - c) / both**2
    below_r, below_f = (np.cumsum((slope * other)[..., ::-1], -1)[..., ::-1] for other in (f, r))
    value = np.round((hits * each).sum(-1) / m, 12)
    variances = np.stack([variance(each + below_r, hits, m), variance(below_f, misses, n)])
    return Precision(value, variances, np.stack([errors(1 - each, hits), errors(each, hits)]))


def average_precision_ends(
    scores: Floats, labels: Ints, level: float, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float]:
    """Between which values average precision lies; needs two of each class.

    A test-inversion bootstrap (J. Carpenter, Journal of the Royal Statistical Society B 61, 1999; B. Hansen's "grid
    bootstrap", Review of Economics and Statistics 81, 1999). It holds all t for which

        T = (g(a) - g(t)) / s,    g(x) = arcsin(sqrt(x)),    s^2 = (e V + W(a)) / ((e + 1) 4 a (1 - a)),

    is among the middle 95 % of what the binormal model with average precision t gives, with as many positives and
    negatives; a is the value found. V is the variance that the examples say. W(a) is what the model expects where a
    was found, and counts as one error; e is the number of errors less one. So the model decides how skewed T is, and
    little else.
    A perfect ranking's interval begins where the model gives one in 2.5 % of sets.
    """
    found = groups(scores, labels)
    m, n = sizes = int(found.positives.sum()), int(found.negatives.sum())
    prevalence = m / (m + n)
    seen = precision(found, prevalence, sizes)
    value = metrics.average_precision(scores, labels)
    if len(found.positives) == 1:  # all scores are the same
        return math.nan, math.nan
    if value == 1:
        return _perfect_low(prevalence, sizes, level), value
    fewer = min(m, MOST), max(min(n, MOST), round(n * min(1.0, MOST / m)))  # examples in a draw
    most = 1 - (1 - prevalence) / (4 * fewer[0])  # where a perfect ranking is likely
    mu, t = _tested(min(value, most), prevalence, REACH * math.sqrt(1 / m + 1 / n))
    rng = np.random.default_rng(seed)
    drawn = [precision(_draw(rng, each, fewer, draws), prevalence, fewer) for each in mu]
    varied = np.array([each.value.min() < 1 and each.variances.any() for each in drawn])  # not all draws are perfect
    t, drawn = t[varied], [each for each, kept in zip(drawn, varied, strict=True) if kept]
    means = np.maximum.accumulate([each.value.mean() for each in drawn])
    parts = np.array([each.variances.mean(-1) for each in drawn]).T

    def studentised(one: Precision, end: int, of: tuple[int, int], t: float | Floats) -> Floats:
        scale = np.divide(fewer, of)[:, None]  # to the variances of so many examples
        model = np.interp(one.value, means, (parts * scale).sum(0) / (means * (1 - means)))
        spread = one.value * (1 - one.value)
        own = np.divide(one.variances.sum(0), spread, out=np.zeros_like(spread), where=spread > 0)
        s = np.sqrt((one.errors[end] * own + AS_ERROR * model) / (one.errors[end] + AS_ERROR)) / 2
        return np.asarray((np.arcsin(np.sqrt(one.value)) - np.arcsin(np.sqrt(t))) / s)

    # What sets T's quantiles apart from the normal distribution's shrinks with the root of the number of examples.
    shrunk, z = math.sqrt(max(np.divide(fewer, sizes))), float(ndtri((1 + level) / 2))
    over = []
    for end, sign in enumerate((1, -1)):
        each = [sign * studentised(one, end, fewer, at) for one, at in zip(drawn, t, strict=True)]
        bounds = np.quantile(each, (1 + level) / 2, axis=1)
        over.append(z + shrunk * (bounds - z) - sign * studentised(seen, end, sizes, t))
    angles = np.arcsin(np.sqrt(t))
    low = math.sin(_crossing(angles, over[0])) ** 2
    high = math.cos(_crossing(math.pi / 2 - angles[::-1], over[1][::-1])) ** 2
    return min(low, value), max(high, value)


def _modelled(mu: Floats, prevalence: float) -> Floats:
    """The model's average precision."""
    noise, weights = normal()
    recall, rate = ndtr(-noise), ndtr(-mu[:, None] - noise)
    each = prevalence * recall / (prevalence * recall + (1 - prevalence) * rate)
    return np.asarray(np.minimum(each @ weights, 1.0))


def _perfect_low(prevalence: float, sizes: tuple[int, int], level: float) -> float:
    """The average precision of the model that ranks all examples right in 2.5 % of sets."""
    m, n = sizes
    steps = np.linspace(-FAR, FAR, 4001)
    highest = np.diff(ndtr(steps) ** n)  # the chance of each step to hold the highest negative
    middle = (steps[1:] + steps[:-1]) / 2
    mu = brentq(lambda mu: highest @ ndtr(mu - middle) ** m - (1 - level) / 2, -20, 20)
    return float(_modelled(np.array([mu]), prevalence)[0])


def _tested(value: float, prevalence: float, reach: float) -> tuple[Floats, Floats]:
    """Distances mu of the classes about the one that gives this value, and the model's average precision at each."""
    fine = np.linspace(-6, 10, 801)
    middle = float(np.interp(value, _modelled(fine, prevalence), fine))
    mu = np.linspace(middle - reach, middle + reach, TESTED)
    return mu, _modelled(mu, prevalence)


def _draw(rng: np.random.Generator, mu: float, sizes: tuple[int, int], draws: int) -> Groups:
    """Draws of the model: how many negatives stand between one positive and the next."""
    m, n = sizes
    rates = np.sort(ndtr(-mu - rng.normal(size=(draws, m))), axis=1)
    before = np.concatenate([np.zeros((draws, 1)), rates[:, :-1]], axis=1)
    odds = np.clip((rates - before) / np.maximum(1 - before, 1e-300), 0, 1)
    left, between = np.full(draws, n), np.empty((draws, m))
    for place in range(m):
        between[:, place] = rng.binomial(left, odds[:, place])
        left = left - between[:, place].astype(np.int64)
    return Groups(np.ones((draws, m)), between)


def _crossing(x: Floats, over: Floats) -> float:
    """The least x at which `over` is not negative, by a straight line from the last where it is; 0 if none is."""
    inside = over >= 0
    first = int(np.argmax(inside))
    if inside[0] or not inside[first]:
        return 0.0 if inside[0] else float(x[-1])
    share = over[first] / (over[first] - over[first - 1])
    return float(x[first] - share * (x[first] - x[first - 1]))

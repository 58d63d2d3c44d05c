"""How often 95 % intervals cover the truth, on simulated sets: python benchmarks/coverage.py --sets 2000 --draws 500

Scores have one of the shapes of `SHAPES`, so that every metric's true value is known: scores of negatives are N(0, 1)
and of positives N(mu, 1) unless `--shape` says otherwise. The result is a table in Markdown for each kind of
interval, in percent; cells outside of 93 to 97 % are bold, with the share of intervals that lie above and below the
truth. `--only delong` and the like computes one kind.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr, ndtri, stdtrit
from scipy.stats import norm

from fedxl import metrics
from fedxl.evaluation.compare import delong_difference, metric_difference
from fedxl.evaluation.intervals import bootstrap, delong
from fedxl.evaluation.label_means import means
from fedxl.evaluation.labelled import LabelScores
from fedxl.evaluation.operating import at_specificity, at_threshold
from fedxl.evaluation.placements import covariance, placements

LIMIT = 0.3  # of the partial AUC
TOGETHER = 0.5  # correlation of two models' noise
ALIKE = 0.95  # of models that hardly differ
SPECIFICITY = 0.9
GOAL = (0.93, 0.97)
LEVELS = 100_000  # of the noise, from which true values are computed
RATINGS = (-0.5, 0.5, 1.5, 2.5)  # between five ratings
HIDDEN = 5.0  # how far positives that are not hidden lie above


class Shape(NamedTuple):
    """Scores as functions of standard normal noise, so that those of two models correlate in every shape."""

    positives: Callable[[np.ndarray, float], np.ndarray]  # noise and how far the classes are apart
    negatives: Callable[[np.ndarray], np.ndarray]
    least: float  # the distance of AUROC 1/2
    most: float
    told: str


def _hidden(noise: np.ndarray, apart: float) -> np.ndarray:
    """A share exp(-apart) of the positives has the scores of negatives."""
    share = math.exp(-apart)
    below, level = ndtr(noise) < share, ndtr(noise)
    within = np.where(below, level / share, (level - share) / max(1 - share, 1e-12))
    return np.asarray(ndtri(np.clip(within, 1e-15, 1 - 1e-15)) + np.where(below, 0.0, HIDDEN))


def _laplace(noise: np.ndarray) -> np.ndarray:
    return np.where(noise < 0, math.log(2) + log_ndtr(noise), -math.log(2) - log_ndtr(-noise))


SHAPES = {
    "normal": Shape(lambda z, d: z + d, lambda z: z, 0.0, 20.0, "N(0, 1) and N(mu, 1)"),
    "unequal": Shape(lambda z, d: 2 * z + d, lambda z: z, 0.0, 20.0, "N(0, 1) and N(mu, 4)"),
    "exponential": Shape(
        lambda z, d: -math.exp(d) * log_ndtr(-z), lambda z: -log_ndtr(-z), 0.0, 20.0, "exponential, of two scales"
    ),
    "hidden": Shape(_hidden, lambda z: z, 1e-9, 20.0, "N(0, 1); some positives as well, the others N(5, 1)"),
    "narrow": Shape(lambda z, d: z / 2 + d, lambda z: z, 0.0, 20.0, "N(0, 1) and N(mu, 1/4)"),
    "t3": Shape(
        lambda z, d: stdtrit(3, ndtr(z)) + d, lambda z: stdtrit(3, ndtr(z)), 0.0, 60.0, "t with 3 degrees, shifted"
    ),
    "ratings": Shape(
        lambda z, d: np.digitize(z + d, RATINGS) + 0.0, lambda z: np.digitize(z, RATINGS) + 0.0, 0.0, 9.0,
        "N(0, 1) and N(mu, 1) in five ratings",
    ),
    "laplace": Shape(lambda z, d: _laplace(z) + d, _laplace, 0.0, 60.0, "Laplace, shifted"),
}  # fmt: skip


class Case(NamedTuple):
    kind: str
    positives: int
    negatives: int
    auroc: float
    other: float = math.nan  # AUROC of the second model
    shape: str = "normal"

    @property
    def labels(self) -> np.ndarray:
        return np.repeat([1, 0], [self.positives, self.negatives])

    @property
    def prevalence(self) -> float:
        return self.positives / (self.positives + self.negatives)


def everybody(shape: str, apart: float, prevalence: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """Scores and labels of a population: the noise at evenly spaced levels."""
    count = round(LEVELS * prevalence)
    high, low = (ndtri((np.arange(size) + 0.5) / size) for size in (count, LEVELS - count))
    found = SHAPES[shape]
    return np.concatenate([found.positives(high, apart), found.negatives(low)]), np.repeat([1, 0], [count, len(low)])


@cache
def distance(shape: str, auroc: float) -> float:
    """How far apart the classes must be."""
    if shape == "normal":
        return math.sqrt(2) * float(norm.ppf(auroc))
    found = SHAPES[shape]
    apart = brentq(lambda d: metrics.auroc(*everybody(shape, d)) - auroc, found.least, found.most, xtol=1e-7)
    return float(apart)


@cache
def true_partial_auc(shape: str, auroc: float) -> float:
    return metrics.partial_auc(*everybody(shape, distance(shape, auroc)), LIMIT)


@cache
def true_average_precision(shape: str, auroc: float, prevalence: float) -> float:
    return metrics.average_precision(*everybody(shape, distance(shape, auroc), prevalence))


@cache
def ranked_positives(shape: str, auroc: float) -> np.ndarray:
    found, labels = everybody(shape, distance(shape, auroc))
    return np.sort(found[labels > 0])


def scored(case: Case, noise: np.ndarray, auroc: float) -> np.ndarray:
    shape, apart = SHAPES[case.shape], distance(case.shape, auroc)
    return np.where(case.labels > 0, shape.positives(noise, apart), shape.negatives(noise))


def scores(case: Case, rng: np.random.Generator) -> np.ndarray:
    return scored(case, rng.normal(size=len(case.labels)), case.auroc)


def two_scores(case: Case, rng: np.random.Generator, together: float = TOGETHER) -> tuple[np.ndarray, np.ndarray]:
    shared = rng.normal(size=len(case.labels))
    own = rng.normal(size=(2, len(case.labels)))
    noise = math.sqrt(together) * shared + math.sqrt(1 - together) * own
    return scored(case, noise[0], case.auroc), scored(case, noise[1], case.other)


class Found(NamedTuple):
    low: float
    high: float
    truth: float


def _delong(case: Case, rng: np.random.Generator, draws: int) -> Found:
    found = delong(scores(case, rng), case.labels)
    return Found(found.low, found.high, case.auroc)


def _plain(case: Case, rng: np.random.Generator, draws: int) -> Found:
    """The textbook's interval with DeLong's variance, for comparison: symmetric, with a normal distribution."""
    placed = placements(scores(case, rng), case.labels)
    reach = float(norm.ppf(0.975)) * math.sqrt(covariance(placed)[0, 0])
    return Found(placed.auroc - reach, placed.auroc + reach, case.auroc)


def _bootstrap(name: str, truth: Callable[[Case, float], float]) -> Callable[[Case, np.random.Generator, int], Found]:
    def one(case: Case, rng: np.random.Generator, draws: int) -> Found:
        found = bootstrap(name, scores(case, rng), case.labels, draws=draws, seed=int(rng.integers(2**31)))
        return Found(found.low, found.high, truth(case, case.auroc))

    return one


def _delong_difference(together: float) -> Callable[[Case, np.random.Generator, int], Found]:
    def one(case: Case, rng: np.random.Generator, draws: int) -> Found:
        found = delong_difference(*two_scores(case, rng, together), case.labels)
        return Found(found.low, found.high, case.auroc - case.other)

    return one


def _metric_difference(
    name: str, truth: Callable[[Case, float], float]
) -> Callable[[Case, np.random.Generator, int], Found]:
    def one(case: Case, rng: np.random.Generator, draws: int) -> Found:
        first, second = two_scores(case, rng)
        found = metric_difference(name, first, second, case.labels, seed=int(rng.integers(2**31)))
        return Found(found.low, found.high, truth(case, case.auroc) - truth(case, case.other))

    return one


def _sensitivity(case: Case, rng: np.random.Generator, draws: int) -> Found:
    """At a threshold that other data chose: the truth is this threshold's sensitivity."""
    threshold = at_specificity(scores(case, rng), case.labels, SPECIFICITY).threshold
    found = at_threshold(scores(case, rng), case.labels, threshold).sensitivity
    above = ranked_positives(case.shape, case.auroc)
    return Found(found.low, found.high, 1 - float(np.searchsorted(above, threshold)) / len(above))


def _mean(
    name: str, labels: int, truth: Callable[[Case, float], float]
) -> Callable[[Case, np.random.Generator, int], Found]:
    """Of so many labels, each of which an example has by chance; noise of one example correlates by `TOGETHER`."""

    def one(case: Case, rng: np.random.Generator, draws: int) -> Found:
        size, shape, apart = len(case.labels), SHAPES[case.shape], distance(case.shape, case.auroc)
        classes = (rng.random((size, labels)) < case.prevalence).astype(np.int64)
        shared, own = rng.normal(size=(size, 1)), rng.normal(size=(size, labels))
        noise = math.sqrt(TOGETHER) * shared + math.sqrt(1 - TOGETHER) * own
        scored = np.where(classes > 0, shape.positives(noise, apart), shape.negatives(noise))
        found = means([name], LabelScores(scored, classes, tuple(map(str, range(labels)))))[name]
        return Found(found.low, found.high, truth(case, case.auroc))

    return one


def _auroc(case: Case, auroc: float) -> float:
    return auroc


def _partial(case: Case, auroc: float) -> float:
    return true_partial_auc(case.shape, auroc)


def _precision(case: Case, auroc: float) -> float:
    return true_average_precision(case.shape, auroc, case.prevalence)


KINDS: dict[str, Callable[[Case, np.random.Generator, int], Found]] = {
    "delong": _delong,
    "difference": _delong_difference(TOGETHER),
    "sensitivity": _sensitivity,
    "pauc": _bootstrap(f"pauc@{LIMIT}", _partial),
    "ap": _bootstrap("ap", _precision),
    "pauc difference": _metric_difference(f"pauc@{LIMIT}", _partial),
    "plain": _plain,
    "ap difference": _metric_difference("ap", _precision),
    "difference alike": _delong_difference(ALIKE),
    "auroc of 3": _mean("auroc", 3, _auroc),
    "auroc of 14": _mean("auroc", 14, _auroc),
    "pauc of 3": _mean(f"pauc@{LIMIT}", 3, _partial),
    "pauc of 14": _mean(f"pauc@{LIMIT}", 14, _partial),
    "ap of 3": _mean("ap", 3, _precision),
    "ap of 14": _mean("ap", 14, _precision),
}
SHOWN = {
    "delong": "AUROC, DeLong, Wilson's form",
    "difference": "difference of AUROC, DeLong, both intervals joined",
    "difference alike": f"difference of AUROC of models that hardly differ: their noise has correlation {ALIKE}",
    "sensitivity": f"sensitivity at a threshold for specificity {SPECIFICITY}, Wilson",
    "pauc": f"partial AUC to {LIMIT}, BCa",
    "ap": "average precision, BCa, corrected for few positives",
    "plain": "for comparison: AUROC, DeLong's variance, plain and symmetric",
    "pauc difference": f"difference of partial AUC to {LIMIT}, jackknife",
    "ap difference": "difference of average precision, jackknife",
    "auroc of 3": "mean AUROC of 3 labels",
    "auroc of 14": "mean AUROC of 14 labels",
    "pauc of 3": f"mean partial AUC to {LIMIT} of 3 labels",
    "pauc of 14": f"mean partial AUC to {LIMIT} of 14 labels",
    "ap of 3": "mean average precision of 3 labels",
    "ap of 14": "mean average precision of 14 labels",
}


SIZES = ((20, 80), (100, 100), (50, 450))  # positives and negatives
RARE = ((5, 95), (10, 190), (20, 380))  # 5 % positives, on average over sets
AREAS: tuple[tuple[float, ...], ...] = ((0.7,), (0.85,), (0.95,))
TWO: tuple[tuple[float, ...], ...] = ((0.8, 0.8), (0.85, 0.8), (0.95, 0.9))
GRID: dict[str, tuple[tuple[tuple[int, int], ...], tuple[tuple[float, ...], ...]]] = {
    "delong": (((20, 20), (10, 190), *SIZES, (200, 1800)), ((0.7,), (0.8,), (0.9,), (0.95,), (0.99,))),
    "difference": (SIZES, TWO),
    "sensitivity": (SIZES, AREAS),
    "pauc": (((20, 80), (100, 100), (40, 260)), AREAS),
    "ap": (((20, 80), (100, 100), (40, 260)), AREAS),
    "pauc difference": (((100, 100),), TWO[:2]),
    "ap difference": (((20, 80), (100, 100)), TWO),
    "difference alike": (SIZES, TWO),
    "plain": (SIZES, ((0.7,), (0.8,), (0.9,), (0.95,), (0.99,))),
} | {kind: (RARE, ((0.7,), (0.8,), (0.9,), (0.95,))) for kind in KINDS if " of " in kind}


def coverage(case: Case, sets: int, draws: int, seed: int) -> tuple[float, float, float]:
    """The share of intervals that hold the truth, that lie above it, and that lie below it."""
    rng = np.random.default_rng(
        [seed, list(KINDS).index(case.kind), *case[1:3], int(1000 * case.auroc)]
    )  # all shapes
    found = np.array([KINDS[case.kind](case, rng, draws) for _ in range(sets)])
    low, high, truth = found.T
    above, below = float((low > truth).mean()), float((high < truth).mean())
    return float(((low <= truth) & (truth <= high)).mean()), above, below  # an interval of NaN covers nothing


def cell(shares: tuple[float, float, float]) -> str:
    covers, above, below = (100 * share for share in shares)
    inside = GOAL[0] <= shares[0] <= GOAL[1]
    return f"{covers:.1f}" if inside else f"**{covers:.1f}** ({above:.1f} above, {below:.1f} below)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=2000)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(KINDS), action="append")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="normal")
    options = parser.parse_args()
    begin = time.process_time()
    for kind in options.only or KINDS:
        sizes, areas = GRID[kind]
        columns = [" and ".join(f"{area:g}" for area in each) for each in areas]
        shape = "" if options.shape == "normal" else f"; {SHAPES[options.shape].told}"
        print(f"\n**{SHOWN[kind]}{shape}**\n")
        print(f"| positives, negatives | AUROC {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
        for size in sizes:
            cases = [Case(kind, *size, *each)._replace(shape=options.shape) for each in areas]
            found = (coverage(case, options.sets, options.draws, options.seed) for case in cases)
            print(f"| {size[0]}, {size[1]} | {' | '.join(map(cell, found))} |", flush=True)
    print(f"{time.process_time() - begin:.0f} s of one core", file=sys.stderr)


if __name__ == "__main__":
    main()

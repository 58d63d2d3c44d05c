"""How often 95 % intervals cover the truth, on simulated sets: python benchmarks/coverage.py --sets 2000 --draws 500

Scores of negatives are N(0, 1), of positives N(mu, 1), so that every metric's true value is known. The result is a
table in Markdown for each kind of interval, in percent; cells outside of 93 to 97 % are bold, with the share of
intervals that lie above and below the truth. `--only delong` and the like computes one kind.
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
from scipy.integrate import quad
from scipy.stats import norm

from fedxl.evaluation.compare import bootstrap_difference, delong_difference
from fedxl.evaluation.intervals import bootstrap, delong
from fedxl.evaluation.operating import at_specificity, at_threshold
from fedxl.evaluation.placements import covariance, placements

LIMIT = 0.3  # of the partial AUC
TOGETHER = 0.5  # correlation of two models' scores
SPECIFICITY = 0.9
GOAL = (0.93, 0.97)


class Case(NamedTuple):
    kind: str
    positives: int
    negatives: int
    auroc: float
    other: float = math.nan  # AUROC of the second model

    @property
    def labels(self) -> np.ndarray:
        return np.repeat([1, 0], [self.positives, self.negatives])

    @property
    def prevalence(self) -> float:
        return self.positives / (self.positives + self.negatives)


def shift(auroc: float) -> float:
    """mu: AUROC = Phi(mu / sqrt 2)."""
    return math.sqrt(2) * float(norm.ppf(auroc))


@cache
def true_partial_auc(auroc: float, limit: float = LIMIT) -> float:
    """The area under Phi(mu + Phi^-1(f)) up to `limit`, on McClish's scale."""
    area = quad(lambda f: norm.cdf(shift(auroc) + norm.ppf(f)), 0, limit, epsabs=1e-10)[0]
    chance = limit**2 / 2
    return 0.5 * (1 + (area - chance) / (limit - chance))


@cache
def true_average_precision(auroc: float, prevalence: float) -> float:
    """The mean precision over recalls, for endless data of this prevalence."""

    def precision(recall: float) -> float:
        false = float(norm.cdf(norm.ppf(recall) - shift(auroc)))
        return prevalence * recall / (prevalence * recall + (1 - prevalence) * false)

    return float(quad(precision, 0, 1, epsabs=1e-10)[0])


def scores(case: Case, rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=len(case.labels)) + shift(case.auroc) * case.labels


def two_scores(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    shared = rng.normal(size=len(case.labels))
    own = rng.normal(size=(2, len(case.labels)))
    noise = math.sqrt(TOGETHER) * shared + math.sqrt(1 - TOGETHER) * own
    return noise[0] + shift(case.auroc) * case.labels, noise[1] + shift(case.other) * case.labels


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


def _bootstrap(name: str, truth: Callable[[Case], float]) -> Callable[[Case, np.random.Generator, int], Found]:
    def one(case: Case, rng: np.random.Generator, draws: int) -> Found:
        found = bootstrap(name, scores(case, rng), case.labels, draws=draws, seed=int(rng.integers(2**31)))
        return Found(found.low, found.high, truth(case))

    return one


def _delong_difference(case: Case, rng: np.random.Generator, draws: int) -> Found:
    found = delong_difference(*two_scores(case, rng), case.labels)
    return Found(found.low, found.high, case.auroc - case.other)


def _bootstrap_difference(case: Case, rng: np.random.Generator, draws: int) -> Found:
    first, second = two_scores(case, rng)
    seed = int(rng.integers(2**31))
    found = bootstrap_difference(f"pauc@{LIMIT}", first, second, case.labels, draws=draws, seed=seed)
    return Found(found.low, found.high, true_partial_auc(case.auroc) - true_partial_auc(case.other))


def _sensitivity(case: Case, rng: np.random.Generator, draws: int) -> Found:
    """At a threshold that other data chose: the truth is this threshold's sensitivity."""
    threshold = at_specificity(scores(case, rng), case.labels, SPECIFICITY).threshold
    found = at_threshold(scores(case, rng), case.labels, threshold).sensitivity
    return Found(found.low, found.high, float(norm.sf(threshold - shift(case.auroc))))


KINDS: dict[str, Callable[[Case, np.random.Generator, int], Found]] = {
    "delong": _delong,
    "difference": _delong_difference,
    "sensitivity": _sensitivity,
    "pauc": _bootstrap(f"pauc@{LIMIT}", lambda case: true_partial_auc(case.auroc)),
    "ap": _bootstrap("ap", lambda case: true_average_precision(case.auroc, case.prevalence)),
    "pauc difference": _bootstrap_difference,
    "plain": _plain,
}
SHOWN = {
    "delong": "AUROC, DeLong",
    "difference": "difference of AUROC, DeLong",
    "sensitivity": f"sensitivity at a threshold for specificity {SPECIFICITY}, Wilson",
    "pauc": f"partial AUC to {LIMIT}, BCa",
    "ap": "average precision, BCa",
    "plain": "for comparison: AUROC, DeLong's variance, plain and symmetric",
    "pauc difference": f"difference of partial AUC to {LIMIT}, BCa",
}


SIZES = ((20, 80), (100, 100), (50, 450))  # positives and negatives
AREAS: tuple[tuple[float, ...], ...] = ((0.7,), (0.85,), (0.95,))
TWO: tuple[tuple[float, ...], ...] = ((0.8, 0.8), (0.85, 0.8), (0.95, 0.9))
GRID: dict[str, tuple[tuple[tuple[int, int], ...], tuple[tuple[float, ...], ...]]] = {
    "delong": (((20, 20), (10, 190), *SIZES, (200, 1800)), ((0.7,), (0.8,), (0.9,), (0.95,), (0.99,))),
    "difference": (SIZES, TWO),
    "sensitivity": (SIZES, AREAS),
    "pauc": (((20, 80), (100, 100), (40, 260)), AREAS),
    "ap": (((20, 80), (100, 100), (40, 260)), AREAS),
    "pauc difference": (((100, 100),), TWO[:2]),
    "plain": (SIZES, ((0.7,), (0.8,), (0.9,), (0.95,), (0.99,))),
}


def coverage(case: Case, sets: int, draws: int, seed: int) -> tuple[float, float, float]:
    """The share of intervals that hold the truth, that lie above it, and that lie below it."""
    rng = np.random.default_rng([seed, list(KINDS).index(case.kind), *case[1:3], int(1000 * case.auroc)])
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
    options = parser.parse_args()
    begin = time.process_time()
    for kind in options.only or KINDS:
        sizes, areas = GRID[kind]
        columns = [" and ".join(f"{area:g}" for area in each) for each in areas]
        print(f"\n**{SHOWN[kind]}**\n")
        print(f"| positives, negatives | AUROC {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
        for size in sizes:
            found = (coverage(Case(kind, *size, *each), options.sets, options.draws, options.seed) for each in areas)
            print(f"| {size[0]}, {size[1]} | {' | '.join(map(cell, found))} |", flush=True)
    print(f"{time.process_time() - begin:.0f} s of one core", file=sys.stderr)


if __name__ == "__main__":
    main()

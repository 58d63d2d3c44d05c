"""How often 95 % intervals cover the truth, on simulated sets.

Scores have one of the shapes of `SHAPES`, so that every metric's true value is known: scores of negatives are N(0, 1)
and of positives N(mu, 1) unless another shape is asked for. The result is a table for each kind of interval, in
percent; cells outside of 93 to 97 % are bold, with the share of intervals that lie above and below the truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Annotated, NamedTuple

import numpy as np
import typer
from scipy.optimize import brentq
from scipy.special import expit, log_ndtr, logit, ndtr, ndtri, stdtrit
from scipy.stats import norm

from fedxl import metrics
from fedxl.errors import require, unknown
from fedxl.evaluation.compare import delong_difference, metric_difference
from fedxl.evaluation.delong import covariance, placements
from fedxl.evaluation.intervals import delong, interval, means
from fedxl.evaluation.operating import at_specificity, at_threshold
from fedxl.evaluation.scores import Scores
from fedxl.reporting.text import as_markdown
from fedxl.sampling import Floats, Indices
from studies import coverage_survival
from studies.coverage_survival import Found
from studies.harness import Harness, Outcome, Planned, Row, group
from studies.options import OUT, Folder, Jobs, check, finish

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

    positives: Callable[[Floats, float], Floats]  # noise and how far the classes are apart
    negatives: Callable[[Floats], Floats]
    least: float  # the distance of AUROC 1/2
    most: float
    described: str


def _hidden(noise: Floats, apart: float) -> Floats:
    """A share exp(-apart) of the positives has the scores of negatives."""
    share = math.exp(-apart)
    below, level = ndtr(noise) < share, ndtr(noise)
    within = np.where(below, level / share, (level - share) / max(1 - share, 1e-12))
    return np.asarray(ndtri(np.clip(within, 1e-15, 1 - 1e-15)) + np.where(below, 0.0, HIDDEN))


def _laplace(noise: Floats) -> Floats:
    return np.asarray(np.where(noise < 0, math.log(2) + log_ndtr(noise), -math.log(2) - log_ndtr(-noise)))


def _rate(values: Floats) -> Floats:
    return np.digitize(values, RATINGS).astype(np.float64)


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
        lambda z, d: _rate(z + d), _rate, 0.0, 9.0, "N(0, 1) and N(mu, 1) in five ratings",
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
    def labels(self) -> Indices:
        return np.repeat([1, 0], [self.positives, self.negatives])

    @property
    def prevalence(self) -> float:
        return self.positives / (self.positives + self.negatives)


def everybody(shape: str, apart: float, prevalence: float = 0.5) -> tuple[Floats, Floats]:
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
    """The mean precision over the positives of an endless population, none of which counts itself."""
    found, labels = everybody(shape, distance(shape, auroc))
    high, low = -np.sort(-found[labels > 0]), np.sort(found[labels == 0])
    recall = prevalence * (np.arange(len(high)) + 0.5) / len(high)
    rate = (1 - prevalence) * (1 - np.searchsorted(low, high) / len(low))
    return float(np.mean(recall / (recall + rate)))


@cache
def ranked_positives(shape: str, auroc: float) -> Floats:
    found, labels = everybody(shape, distance(shape, auroc))
    return np.sort(found[labels > 0])


def scored(case: Case, noise: Floats, auroc: float) -> Floats:
    shape, apart = SHAPES[case.shape], distance(case.shape, auroc)
    return np.where(case.labels > 0, shape.positives(noise, apart), shape.negatives(noise))


def scores(case: Case, rng: np.random.Generator) -> Floats:
    return scored(case, rng.normal(size=len(case.labels)), case.auroc)


def two_scores(case: Case, rng: np.random.Generator, together: float = TOGETHER) -> tuple[Floats, Floats]:
    shared = rng.normal(size=len(case.labels))
    own = rng.normal(size=(2, len(case.labels)))
    noise = math.sqrt(together) * shared + math.sqrt(1 - together) * own
    return scored(case, noise[0], case.auroc), scored(case, noise[1], case.other)


def _delong(case: Case, rng: np.random.Generator, draws: int) -> Found:
    found = delong(scores(case, rng), case.labels)
    return Found(found.low, found.high, case.auroc)


def _logit(case: Case, rng: np.random.Generator, draws: int) -> Found:
    """DeLong's variance on the logit scale, a textbook's interval (M. Pepe, 2003); none for a perfect ranking."""
    placed = placements(scores(case, rng), case.labels)
    area = placed.auroc
    if not 0 < area < 1:
        return Found(math.nan, math.nan, case.auroc)
    reach = float(norm.ppf(0.975)) * math.sqrt(covariance(placed)[0, 0]) / (area * (1 - area))
    low, high = (float(expit(logit(area) + side * reach)) for side in (-1, 1))
    return Found(low, high, case.auroc)


def _newcombe(case: Case, rng: np.random.Generator, draws: int) -> Found:
    """R. Newcombe's method 5 (Statistics in Medicine 25, 2006): all areas that Hanley and McNeil's model allows."""
    area, (m, n) = placements(scores(case, rng), case.labels).auroc, (case.positives, case.negatives)
    most, z = (m + n) / 2 - 1, float(norm.ppf(0.975))

    def beyond(t: float) -> float:
        variance = t * (1 - t) * (1 + most * (1 - t) / (2 - t) + most * t / (1 + t)) / (m * n)
        return abs(area - t) - z * math.sqrt(variance)

    low = brentq(beyond, 1e-12, area) if area > 0 and beyond(1e-12) > 0 else 0.0
    high = brentq(beyond, area, 1 - 1e-12) if area < 1 and beyond(1 - 1e-12) > 0 else 1.0
    return Found(low, high, case.auroc)


def _plain(case: Case, rng: np.random.Generator, draws: int) -> Found:
    """The textbook's interval with DeLong's variance, for comparison: symmetric, with a normal distribution."""
    placed = placements(scores(case, rng), case.labels)
    reach = float(norm.ppf(0.975)) * math.sqrt(covariance(placed)[0, 0])
    return Found(placed.auroc - reach, placed.auroc + reach, case.auroc)


def _interval(name: str, truth: Callable[[Case, float], float]) -> Callable[[Case, np.random.Generator, int], Found]:
    def one(case: Case, rng: np.random.Generator, draws: int) -> Found:
        found = interval(name, scores(case, rng), case.labels, draws=draws, seed=int(rng.integers(2**31)))
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
        found = means([name], Scores(scored, classes, tuple(map(str, range(labels)))))[name]
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
    "pauc": _interval(f"pauc@{LIMIT}", _partial),
    "ap": _interval("ap", _precision),
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
    "logit": _logit,
    "newcombe": _newcombe,
}
SHOWN = {
    "delong": "AUROC, DeLong, Wilson's form",
    "difference": "difference of AUROC, DeLong, both intervals joined",
    "difference alike": f"difference of AUROC of models that hardly differ: their noise has correlation {ALIKE}",
    "sensitivity": f"sensitivity at a threshold for specificity {SPECIFICITY}, Wilson",
    "pauc": f"partial AUC to {LIMIT}, DeLong, Wilson's form",
    "ap": "average precision, test inversion",
    "plain": "for comparison: AUROC, DeLong's variance, plain and symmetric",
    "logit": "for comparison: AUROC, DeLong's variance on the logit scale",
    "newcombe": "for comparison: AUROC, Newcombe's method 5",
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
ALL = ((20, 20), (10, 190), *SIZES, (200, 1800))
MANY = ((10, 90), (10, 190), (10, 5100), (20, 80), (20, 1000), (20, 5100), (40, 260), (50, 5000), (100, 100))
RARE = ((5, 95), (10, 190), (20, 380))  # 5 % positives, on average over sets
AREAS: tuple[tuple[float, ...], ...] = ((0.7,), (0.85,), (0.95,))
TWO: tuple[tuple[float, ...], ...] = ((0.8, 0.8), (0.85, 0.8), (0.95, 0.9))
GRID: dict[str, tuple[tuple[tuple[int, int], ...], tuple[tuple[float, ...], ...]]] = {
    "delong": (ALL, ((0.7,), (0.8,), (0.9,), (0.95,), (0.99,))),
    "difference": (SIZES, TWO),
    "sensitivity": (SIZES, AREAS),
    "pauc": (MANY, ((0.7,), (0.8,), (0.9,), (0.95,))),
    "ap": (MANY, ((0.7,), (0.8,), (0.9,), (0.95,))),
    "pauc difference": (((100, 100),), TWO[:2]),
    "ap difference": (((20, 80), (100, 100)), TWO),
    "difference alike": (SIZES, TWO),
    **dict.fromkeys(("plain", "logit", "newcombe"), (ALL, ((0.7,), (0.8,), (0.9,), (0.95,), (0.99,)))),
} | {kind: (RARE, ((0.7,), (0.8,), (0.9,), (0.95,))) for kind in KINDS if " of " in kind}
SURVIVAL = "survival"  # all kinds of `coverage_survival`
ALL_KINDS = (*KINDS, SURVIVAL)


def measure(planned: Planned) -> Outcome:
    """The shares of intervals that hold the truth, that lie above it, and that lie below it."""
    found = coverage_survival.intervals(planned) if "patients" in planned.case else _intervals(planned)
    low, high, truth = np.array(list(found)).T
    inside = (low <= truth) & (truth <= high)  # an interval of NaN covers nothing
    shares = {"covers": inside, "above": low > truth, "below": high < truth}
    return {name: float(share.mean()) for name, share in shares.items()}, {}


def _intervals(planned: Planned) -> Iterator[Found]:
    sets, draws, seed = (int(planned.case[name]) for name in ("sets", "draws", "seed"))
    case = Case(**{name: value for name, value in planned.case.items() if name in Case._fields})
    seeds = [seed, list(KINDS).index(case.kind), *case[1:3], int(1000 * case.auroc)]  # of all shapes
    rng = np.random.default_rng(seeds)
    for _ in range(sets):
        yield KINDS[case.kind](case, rng, draws)


def cases(kinds: Sequence[str], shape: str, sets: int, draws: int, seed: int) -> list[Planned]:
    """Every cell of the tables of these kinds."""
    common = {"shape": shape, "sets": sets, "draws": draws, "seed": seed}
    found = []
    for kind in filter(KINDS.__contains__, kinds):
        sizes, areas = GRID[kind]
        for positives, negatives in sizes:
            for area in areas:
                models = dict(zip(("auroc", "other"), area, strict=False))
                found.append(
                    Planned({"kind": kind, "positives": positives, "negatives": negatives, **models, **common})
                )
    return found + (coverage_survival.cases(sets, seed) if SURVIVAL in kinds else [])


def markdown(rows: Sequence[Row]) -> str:
    """One table per kind and shape."""
    parts = ["# How often 95 % intervals cover the truth"]
    timed, others = ([row for row in rows if ("patients" in row.case) == of_times] for of_times in (True, False))
    for (kind, shape), own in group(others, "kind", "shape").items():
        described = "" if shape == "normal" else f"; {SHAPES[shape].described}"
        body = [[f"{p}, {n}", *map(_cell, found)] for (p, n), found in group(own, "positives", "negatives").items()]
        areas = [" and ".join(f"{area:g}" for area in pair if area) for pair in group(own, "auroc", "other")]
        table = as_markdown(body, ["positives, negatives", f"AUROC {areas[0]}", *areas[1:]])
        parts += [f"**{SHOWN[kind]}{described}**", table.strip()]
    return "\n\n".join([*parts, *coverage_survival.tables(timed, _cell)]) + "\n"


def _cell(row: Row) -> str:
    covers, above, below = (100 * row.found[name] for name in ("covers", "above", "below"))
    inside = GOAL[0] <= row.found["covers"] <= GOAL[1]
    return f"{covers:.1f}" if inside else f"**{covers:.1f}** ({above:.1f} above, {below:.1f} below)"


def command(
    sets: Annotated[int, typer.Option(help="Simulated sets per cell.")] = 2000,
    draws: Annotated[int, typer.Option(help="Of a bootstrap.")] = 500,
    seed: Annotated[int, typer.Option(help="Of the simulated sets.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help=f"{', '.join(ALL_KINDS)}; repeatable.")] = None,
    shape: Annotated[str, typer.Option(help=f"Of the scores: {', '.join(SHAPES)}.")] = "normal",
    jobs: Jobs = 1,
    folder: Folder = OUT,
) -> None:
    """How often 95 % intervals cover the truth.

    On simulated sets. 50 minutes on one core.
    """
    check(folder, jobs=jobs)
    require(sets >= 1 and draws >= 1, f"sets and draws must be at least 1, got {sets} and {draws}")
    for kind in only or ():
        if kind not in ALL_KINDS:
            raise unknown("kind", kind, ALL_KINDS)
    if shape not in SHAPES:
        raise unknown("shape", shape, SHAPES)
    with Harness(folder / "coverage.jsonl", measure, jobs) as do:
        rows = do(cases(only or ALL_KINDS, shape, sets, draws, seed))
    finish("coverage", folder, markdown(rows))

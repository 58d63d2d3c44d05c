"""How good metrics of histograms are: their bounds by the number of bins, and what noise does to them.

Scores are normal, of one unit's spread at any level, 30 % of them positive and shifted by 1.5 (AUROC 0.86).
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from fedxl import metrics
from fedxl.deploy.server.examiner import FAR
from fedxl.evaluation.bins import Bins, Spread
from fedxl.evaluation.histogram import Histogram, count, measure_one, pooled
from fedxl.evaluation.noise import noise, variance
from fedxl.reporting.text import as_markdown
from studies.options import OUT, Folder, finish

NAMED = metrics.resolve(["auroc", "pauc", "ap"], [0.3])
EXAMPLES, DRAWS = 2000, 40


def command(folder: Folder = OUT) -> None:
    """How good metrics from histograms of scores are.

    Their bounds by the number of bins, and what noise does to them. Half a minute on one core.
    """
    known = [[str(bins), str(level), *bounds(bins, level)] for bins in (64, 128, 512, 2048) for level in (0, 5)]
    noised = [
        [str(sites), f"{examples:,}", epsilon, *(noisy(sites, examples, epsilon, bins) for bins in (32, 64, 512))]
        for sites, examples in ((1, 1000), (10, 1000), (10, 10_000))
        for epsilon in ("0.1", "1")
    ]
    parts = [
        "# Metrics from histograms",
        f"Bounds of AUROC / pAUC@0.3 / AP, {EXAMPLES:,} examples, by what the server knows of their scores.",
        as_markdown(known, ["bins", "level", "nothing", "pooled scores", "counts of other examples"]),
        f"Noise: mean error and standard error of AUROC over {DRAWS} draws, bins by counts.",
        as_markdown(noised, ["sites", "examples of each", "epsilon", "32 bins", "64 bins", "512 bins"]),
    ]
    finish("histograms", folder, "\n\n".join(part.strip() for part in parts) + "\n")


def scored(examples: int, level: float = 0.0) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    rng = np.random.default_rng(examples)
    labels = (rng.random(examples) < 0.3).astype(np.int64)
    return rng.normal(size=examples) + 1.5 * labels + level, labels


def bounds(bins: int, level: float) -> Iterator[str]:
    scores, labels = scored(EXAMPLES, level)
    others = scored(EXAMPLES // 2, level)
    nothing = Bins(bins)
    pooled = Bins.around(bins, Spread.of(others[0]), FAR)
    counts = count(pooled.edges(), *others).bins_around(bins)
    for chosen in (nothing, pooled, counts):
        each = measure_one(NAMED, count(chosen.edges(), scores, labels)).values()
        yield " / ".join(f"{found.bound:.4f}" for found in each)


def noisy(sites: int, examples: int, epsilon: str, bins: int) -> str:
    scores, labels = scored(sites * examples)
    edges = count(Bins(bins).edges(), scores, labels).bins_around(bins).edges()
    each = [count(edges, scores[part::sites], labels[part::sites]) for part in range(sites)]
    exact = pooled(each).auroc().value
    errors = (
        np.array([pooled([disclosed(part, epsilon) for part in each]).auroc().value for _ in range(DRAWS)]) - exact
    )
    lost = int(np.isnan(errors).sum())
    return f"{np.nanmean(errors):+.4f}, {np.nanstd(errors):.4f}" + (f" ({lost} lost)" if lost else "")


def disclosed(found: Histogram, epsilon: str) -> Histogram:
    """A site's counts as the server adds them."""
    more = noise(Fraction(epsilon), 2 * len(found.positives)).reshape(2, -1)
    both = found.positives + more[0], found.negatives + more[1]
    return Histogram(found.edges, *both, variance(float(epsilon))).without_noise()

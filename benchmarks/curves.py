"""How good a curve is: its bounds by the number of bins, and what noise does to it.

Scores are normal, of one unit's spread at any level, 30 % of them positive and shifted by 1.5 (AUROC 0.86).
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from fedxl import metrics
from fedxl.deploy.server.curves import FAR
from fedxl.evaluation.binned import Binned, count, judge
from fedxl.evaluation.grid import Grid, Spread
from fedxl.evaluation.noise import noise, variance

NAMED = metrics.resolve(["auroc", "pauc", "ap"], [0.3])
EXAMPLES, DRAWS = 2000, 100


def main() -> None:
    print(f"Bounds of AUROC / pAUC@0.3 / AP, {EXAMPLES:,} examples, by what the server knows of their scores\n")
    print("| bins | level | nothing | pooled scores | counts of other examples |")
    print("|---:|---:|---:|---:|---:|")
    for bins, level in ((bins, level) for bins in (64, 128, 512, 2048) for level in (0, 5)):
        print(f"| {bins} | {level} | {' | '.join(bounds(bins, level))} |")
    print(f"\nNoise: mean error and standard error of AUROC over {DRAWS} draws, bins by counts\n")
    print("| examples | epsilon | " + " | ".join(f"{bins} bins" for bins in (32, 64, 512)) + " |")
    print("|---:|---:|---:|---:|---:|")
    for examples, epsilon in ((n, e) for n in (1000, 10_000, 100_000) for e in ("0.1", "0.5", "1", "4")):
        print(f"| {examples:,} | {epsilon} | {' | '.join(noisy(examples, epsilon))} |")


def scored(examples: int, level: float = 0.0) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    rng = np.random.default_rng(examples)
    labels = (rng.random(examples) < 0.3).astype(np.int64)
    return rng.normal(size=examples) + 1.5 * labels + level, labels


def bounds(bins: int, level: float) -> Iterator[str]:
    scores, labels = scored(EXAMPLES, level)
    others = scored(EXAMPLES // 2, level)
    nothing = Grid(bins)
    pooled = Grid.around(bins, Spread.of(others[0]), FAR)
    counts = count(pooled.edges(), *others).grid_around(bins)
    for grid in (nothing, pooled, counts):
        each = judge(NAMED, count(grid.edges(), scores, labels)).values()
        yield " / ".join(f"{found.bound:.4f}" for found in each)


def noisy(examples: int, epsilon: str) -> Iterator[str]:
    scores, labels = scored(examples)
    for bins in (32, 64, 512):
        exact = count(count(Grid(bins).edges(), scores, labels).grid_around(bins).edges(), scores, labels)
        errors = []
        for _ in range(DRAWS):
            more = noise(Fraction(epsilon), 2 * bins).reshape(2, bins)
            found = Binned(
                exact.edges, exact.positives + more[0], exact.negatives + more[1], variance(float(epsilon))
            )
            errors.append(found.auroc().value - exact.auroc().value)
        lost = int(np.isnan(errors).sum())
        yield f"{np.nanmean(errors):+.4f}, {np.nanstd(errors):.4f}" + (f" ({lost} lost)" if lost else "")


if __name__ == "__main__":
    main()

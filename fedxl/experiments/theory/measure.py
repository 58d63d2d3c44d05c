"""The theorems' rates, measured: four small experiments on problems whose exact gradient is at hand.

Each looks at |grad F|^2 of the averaged model. A *floor* is its mean over a run that starts at the minimum: noise and
drift alone keep it up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fedxl.algorithms.fedxl import FeDXL1, FeDXL2
from fedxl.experiments.theory.testbed import Testbed, linear, squared_norms
from fedxl.risks import auroc, partial_auc

# Lipschitz and smooth, with a minimum at finite weights. Sigmoid scores keep the second one bounded.
AUROC = auroc(surrogate="logistic")
PARTIAL_AUC = partial_auc(lam=1.0)
SEEDS = (0, 1, 2)
SETTLED = 0.2  # the part of a run that a floor leaves out: the way from the minimum up to the floor
LOCAL_STEPS, LR, MOVING = 4, 0.5, 0.3  # of the floors, where they are not what is varied; MOVING: beta and gamma
SMALLER_LR = 0.3  # cohorts that differ are noisy; at LR the floor would leave the neighbourhood of the minimum


@dataclass(frozen=True)
class Line:
    """One algorithm on one kind of federation: |grad F|^2 of each run, by what is varied."""

    name: str
    x: tuple[int, ...]
    runs: tuple[tuple[float, ...], ...]  # a row for each seed

    @property
    def mean(self) -> list[float]:
        return [float(value) for value in np.mean(self.runs, 0)]

    @property
    def error(self) -> list[float]:
        """Standard errors of the means over seeds."""
        return [float(value) for value in _error(np.asarray(self.runs))]

    def slope(self, low: float = 0, high: float = np.inf) -> tuple[float, float]:
        """d log |grad F|^2 / d log x, fitted to each seed where low <= x <= high: mean and standard error.

        >>> Line("", (1, 2, 4), ((8.0, 4.0, 2.0), (4.0, 2.0, 1.0))).slope()
        (-1.0, 0.0)
        """
        x = np.asarray(self.x)
        kept = (x >= low) & (x <= high)
        fits = [np.polyfit(np.log(x[kept]), np.log(np.asarray(run)[kept]), 1)[0] for run in self.runs]
        return round(float(np.mean(fits)), 6), round(float(_error(np.asarray(fits))), 6)


def _error(
    runs: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.asarray(np.std(runs, 0, ddof=1) / np.sqrt(len(runs)))


@dataclass(frozen=True)
class Panel:
    """One experiment."""

    title: str
    varied: str
    measured: str
    setting: str
    expected: float  # the theorem's slope
    fitted: tuple[float, float]  # the x between which the slope is fitted
    lines: tuple[Line, ...]


Progress = Callable[[str], None]
Run = Callable[[int, int], float]  # x and seed to |grad F|^2


def _line(name: str, x: Sequence[int], seeds: Sequence[int], run: Run, say: Progress) -> Line:
    def row(seed: int) -> Iterator[float]:
        for value in x:
            say(f"{name}, {value}, seed {seed} ...")
            yield run(value, seed)

    return Line(name, tuple(x), tuple(tuple(row(seed)) for seed in seeds))


def fedxl1(lr: float) -> FeDXL1:
    return FeDXL1(risk=AUROC, lr=lr, level="free")


def fedxl2(lr: float, moving: float) -> FeDXL2:
    return FeDXL2(risk=PARTIAL_AUC, lr=lr, beta=moving, gamma=moving, level="free")


def floor(bed: Testbed, algorithm: FeDXL2, steps: int, local_steps: int, seed: int, cohort: int = 0) -> float:
    """The mean of |grad F|^2 from a start at the minimum."""
    norms = squared_norms(
        bed,
        algorithm,
        rounds=steps // local_steps,
        local_steps=local_steps,
        seed=seed,
        start=bed.stationary(),
        cohort=cohort,
    )
    return float(norms[1 + int(SETTLED * (len(norms) - 1)) :].mean())


def rounds(
    say: Progress = lambda line: None,
    seeds: Sequence[int] = SEEDS,
    cubes: Sequence[int] = (3, 4, 5, 6, 7),
    num_clients: int = 4,
) -> Panel:
    """Theorems 1 and 2: eta, beta and gamma of order R^(-2/3), K = R^(1/3), and the mean falls like R^(-2/3)."""

    def run(second: bool, rounds: int, seed: int) -> float:
        scale = rounds ** (-2 / 3)
        algorithm = fedxl2(2 * scale, min(1.0, 4 * scale)) if second else fedxl1(3 * scale)
        bed = linear(algorithm.risk, num_clients, differ=True)
        local_steps = round(rounds ** (1 / 3))
        norms = squared_norms(bed, algorithm, rounds=rounds, local_steps=local_steps, seed=seed)
        return float(norms[:-1].mean())  # at the models with which rounds begin, as in the theorems

    x = [cube**3 for cube in cubes]
    lines = (
        _line("FeDXL1, AUROC", x, seeds, partial(run, False), say),
        _line("FeDXL2, partial AUC", x, seeds, partial(run, True), say),
    )
    setting = (
        f"{num_clients} clients that differ, K = R^(1/3); FeDXL1: eta = 3 R^(-2/3); FeDXL2: eta = 2 R^(-2/3), "
        "beta = gamma = 4 R^(-2/3)"
    )
    return Panel("Rounds", "R, rounds", "mean over rounds", setting, -2 / 3, (0, np.inf), lines)


def clients(
    say: Progress = lambda line: None,
    seeds: Sequence[int] = SEEDS,
    numbers: Sequence[int] = (1, 2, 4, 8, 16),
    steps: int = 1000,
) -> Panel:
    """The speed-up: the noise of the averaged step, and with it the floor, falls like 1 / N."""

    def run(algorithm: FeDXL2, num_clients: int, seed: int) -> float:
        return floor(linear(algorithm.risk, num_clients), algorithm, steps, LOCAL_STEPS, seed)

    lines = (
        _line("FeDXL1, AUROC", numbers, seeds, partial(run, fedxl1(LR)), say),
        _line("FeDXL2, partial AUC", numbers, seeds, partial(run, fedxl2(LR, MOVING)), say),
    )
    setting = f"clients alike, K = {LOCAL_STEPS}, T = {steps}, eta = {LR}, beta = gamma = {MOVING}"
    return Panel("Clients", "N, clients", "floor", setting, -1.0, (0, np.inf), lines)


def local_steps(
    say: Progress = lambda line: None,
    seeds: Sequence[int] = SEEDS,
    numbers: Sequence[int] = (1, 4, 8, 16, 32, 64),
    steps: int = 1024,
    num_clients: int = 8,
) -> Panel:
    """K at fixed T = R K: free until the drift, of order (eta K)^2, exceeds the noise, of order eta / N."""

    def run(differ: bool, local_steps: int, seed: int) -> float:
        return floor(linear(AUROC, num_clients, differ), fedxl1(LR), steps, local_steps, seed)

    lines = (
        _line("FeDXL1, clients alike", numbers, seeds, partial(run, False), say),
        _line("FeDXL1, clients differ", numbers, seeds, partial(run, True), say),
    )
    setting = f"{num_clients} clients, T = R K = {steps}, eta = {LR}"
    return Panel("Local steps", "K, local steps a round", "floor", setting, 0.0, (0, 8), lines)


def cohort(
    say: Progress = lambda line: None,
    seeds: Sequence[int] = SEEDS,
    sizes: Sequence[int] = (1, 2, 4, 8, 16),
    steps: int = 800,
    num_clients: int = 16,
) -> Panel:
    """Theorem 3: with a cohort P of N clients the noise is of order 1 / |P|."""

    def run(differ: bool, size: int, seed: int) -> float:
        bed = linear(PARTIAL_AUC, num_clients, differ)
        return floor(bed, fedxl2(SMALLER_LR, MOVING), steps, LOCAL_STEPS, seed, size)

    lines = (
        _line("FeDXL2, clients alike", sizes, seeds, partial(run, False), say),
        _line("FeDXL2, clients differ", sizes, seeds, partial(run, True), say),
    )
    setting = f"{num_clients} clients, K = {LOCAL_STEPS}, T = {steps}, eta = {SMALLER_LR}, beta = gamma = {MOVING}"
    return Panel("Cohort", "|P|, clients of a round", "floor", setting, -1.0, (0, np.inf), lines)


PANELS: dict[str, Callable[[Progress], Panel]] = {
    "rounds": rounds,
    "clients": clients,
    "local_steps": local_steps,
    "cohort": cohort,
}

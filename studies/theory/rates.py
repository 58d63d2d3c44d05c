"""The theorems' rates, measured: four small experiments on problems whose exact gradient is at hand.

Each looks at |grad F|^2 of the averaged model. A *floor* is its mean over a run that starts at the minimum: noise and
drift alone keep it up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedxl.algorithms import build
from fedxl.algorithms.protocol import Algorithm
from fedxl.risks import auroc, partial_auc
from studies import pictures
from studies.harness import Harness, Outcome, Planned, Row, group, machine, machines
from studies.options import OUT, Folder, Jobs, check, finish
from studies.theory.testbed import EXAMPLES, FEATURES, Testbed, linear, squared_norms

# Lipschitz and smooth, with a minimum at finite weights. Sigmoid scores keep the second one bounded.
AUROC = auroc(surrogate="logistic")
PARTIAL_AUC = partial_auc(lam=1.0)
SEEDS = (0, 1, 2)
SETTLED = 0.2  # the part of a run that a floor leaves out: the way from the minimum up to the floor
LOCAL_STEPS, LR, MOVING = 4, 0.5, 0.3  # of the floors, where they are not what is varied; MOVING: beta and gamma
SMALLER_LR = 0.3  # cohorts that differ are noisy; at LR the floor would leave the neighbourhood of the minimum
PROBLEM = (
    f"A linear score on {EXAMPLES} positives and {EXAMPLES} negatives with {FEATURES} features, float64, batch 8+8, "
    "draws with replacement. FeDXL1: AUROC, logistic surrogate. FeDXL2: partial AUC, lam = 1, squared hinge of "
    "sigmoid scores."
)
Measure = Callable[[int, int], float]  # x and seed to |grad F|^2


@dataclass(frozen=True)
class Panel:
    """One experiment: what is varied, and how each of its lines is measured."""

    title: str
    varied: str
    measured: str
    setting: str
    expected: float  # the theorem's slope
    x: tuple[int, ...]
    lines: Mapping[str, Measure]
    fitted: tuple[float, float] = (0, np.inf)  # the x between which the slope is fitted


@dataclass(frozen=True)
class Line:
    """|grad F|^2, or its root, of each run, by what is varied."""

    x: tuple[int, ...]
    runs: Sequence[Sequence[float]]  # [seeds, x]

    @property
    def mean(self) -> list[float]:
        return [float(value) for value in np.mean(self.runs, 0)]

    @property
    def error(self) -> list[float]:
        """Standard errors of the means over seeds."""
        return [float(value) for value in _error(self.runs)]

    @property
    def points(self) -> list[pictures.Point]:
        return [pictures.Point(*point) for point in zip(self.x, self.mean, self.error, strict=True)]

    def slope(self, low: float = 0, high: float = np.inf) -> tuple[float, float]:
        """d log y / d log x, fitted to each seed where low <= x <= high: mean and standard error.

        >>> Line((1, 2, 4), ((8.0, 4.0, 2.0), (4.0, 2.0, 1.0))).slope()
        (-1.0, 0.0)
        """
        x = np.asarray(self.x)
        kept = (x >= low) & (x <= high)
        fits = [np.polyfit(np.log(x[kept]), np.log(np.asarray(run)[kept]), 1)[0] for run in self.runs]
        return round(float(np.mean(fits)), 6), round(float(_error(fits)), 6)


def _error(runs: Any) -> Any:
    return np.std(runs, 0, ddof=1) / np.sqrt(len(runs))


def fedxl1(lr: float) -> Algorithm:
    return build("fedxl1", AUROC, lr=lr, level="free")


def fedxl2(lr: float, moving: float) -> Algorithm:
    return build("fedxl2", PARTIAL_AUC, lr=lr, beta=moving, gamma=moving, level="free")


def floor(bed: Testbed, algorithm: Algorithm, steps: int, local_steps: int, seed: int, cohort: int = 0) -> float:
    """The mean of |grad F|^2 from a start at the minimum."""
    norms = squared_norms(
        bed, algorithm, rounds=steps // local_steps, local_steps=local_steps, seed=seed, start=bed.stationary(),
        cohort=cohort,
    )  # fmt: skip
    return float(norms[1 + int(SETTLED * (len(norms) - 1)) :].mean())


def rounds(cubes: Sequence[int] = (3, 4, 5, 6, 7), num_clients: int = 4) -> Panel:
    """Theorems 1 and 2: eta, beta and gamma of order R^(-2/3), K = R^(1/3), and the mean falls like R^(-2/3)."""

    def run(second: bool, rounds: int, seed: int) -> float:
        scale = rounds ** (-2 / 3)
        algorithm = fedxl2(2 * scale, min(1.0, 4 * scale)) if second else fedxl1(3 * scale)
        bed = linear(algorithm.risk, num_clients, differ=True)
        local_steps = round(rounds ** (1 / 3))
        norms = squared_norms(bed, algorithm, rounds=rounds, local_steps=local_steps, seed=seed)
        return float(norms[:-1].mean())  # at the models with which rounds begin, as in the theorems

    setting = (
        f"{num_clients} clients that differ, K = R^(1/3); FeDXL1: eta = 3 R^(-2/3); FeDXL2: eta = 2 R^(-2/3), "
        "beta = gamma = 4 R^(-2/3)"
    )
    lines = {"FeDXL1, AUROC": partial(run, False), "FeDXL2, partial AUC": partial(run, True)}
    x = tuple(cube**3 for cube in cubes)
    return Panel("Rounds", "R, rounds", "mean over rounds", setting, -2 / 3, x, lines)


def clients(numbers: Sequence[int] = (1, 2, 4, 8, 16), steps: int = 1000) -> Panel:
    """The speed-up: the noise of the averaged step, and with it the floor, falls like 1 / N."""

    def run(algorithm: Algorithm, num_clients: int, seed: int) -> float:
        return floor(linear(algorithm.risk, num_clients), algorithm, steps, LOCAL_STEPS, seed)

    lines = {"FeDXL1, AUROC": partial(run, fedxl1(LR)), "FeDXL2, partial AUC": partial(run, fedxl2(LR, MOVING))}
    setting = f"clients alike, K = {LOCAL_STEPS}, T = {steps}, eta = {LR}, beta = gamma = {MOVING}"
    return Panel("Clients", "N, clients", "floor", setting, -1.0, tuple(numbers), lines)


def local_steps(numbers: Sequence[int] = (1, 4, 8, 16, 32, 64), steps: int = 1024, num_clients: int = 8) -> Panel:
    """K at fixed T = R K: free until the drift, of order (eta K)^2, exceeds the noise, of order eta / N."""

    def run(differ: bool, local_steps: int, seed: int) -> float:
        return floor(linear(AUROC, num_clients, differ), fedxl1(LR), steps, local_steps, seed)

    lines = {"FeDXL1, clients alike": partial(run, False), "FeDXL1, clients differ": partial(run, True)}
    setting = f"{num_clients} clients, T = R K = {steps}, eta = {LR}"
    return Panel("Local steps", "K, local steps per round", "floor", setting, 0.0, tuple(numbers), lines, (0, 8))


def cohort(sizes: Sequence[int] = (1, 2, 4, 8, 16), steps: int = 800, num_clients: int = 16) -> Panel:
    """Theorem 3: with a cohort P of N clients the noise is of order 1 / |P|."""

    def run(differ: bool, size: int, seed: int) -> float:
        bed = linear(PARTIAL_AUC, num_clients, differ)
        return floor(bed, fedxl2(SMALLER_LR, MOVING), steps, LOCAL_STEPS, seed, size)

    lines = {"FeDXL2, clients alike": partial(run, False), "FeDXL2, clients differ": partial(run, True)}
    setting = f"{num_clients} clients, K = {LOCAL_STEPS}, T = {steps}, eta = {SMALLER_LR}, beta = gamma = {MOVING}"
    return Panel("Cohort", "|P|, clients of a round", "floor", setting, -1.0, tuple(sizes), lines)


PANELS = {"rounds": rounds(), "clients": clients(), "local_steps": local_steps(), "cohort": cohort()}


def cases(panels: Mapping[str, Panel], seeds: Sequence[int] = SEEDS) -> list[Planned]:
    return [
        Planned({"panel": name, "line": line, "x": x, "seed": seed})
        for name, panel in panels.items()
        for line in panel.lines
        for seed in seeds
        for x in panel.x
    ]


def measure(planned: Planned, panels: Mapping[str, Panel] = PANELS) -> Outcome:
    case = planned.case
    return {"norm": panels[case["panel"]].lines[case["line"]](case["x"], case["seed"]), "on": machine()}, {}


def lines_of(rows: Sequence[Row], panel: str) -> dict[str, Line]:
    """The lines of a panel from its rows."""
    found = {}
    for name, own in group([row for row in rows if row.case["panel"] == panel], "line").items():
        x = tuple(sorted({row.case["x"] for row in own}))
        seeds = group(sorted(own, key=lambda row: row.case["x"]), "seed").values()
        found[name] = Line(x, [[float(row.found["norm"]) for row in runs] for runs in seeds])
    return found


def markdown(rows: Sequence[Row]) -> str:
    """One table per experiment."""
    parts = ["# The theorems' rates, measured", PROBLEM, f"On {machines(rows)}."]
    for name in group(rows, "panel"):
        panel, lines = PANELS[name], lines_of(rows, name)
        first, varied = next(iter(lines.values())), panel.varied.replace("|", "\\|")
        body = [
            f"| {varied} | {' | '.join(map(str, first.x))} | slope{_between(panel)} |",
            "|---|" + "---:|" * (len(first.x) + 1),
            *(_table_line(panel, line_name, line) for line_name, line in lines.items()),
        ]
        parts += [
            f"## {panel.title}",
            f"|grad F|^2, {panel.measured}: mean and standard error over {len(first.runs)} seeds. "
            f"{panel.setting}. The theorem's slope: {panel.expected:.2f}.",
            "\n".join(body),
        ]
    return "\n\n".join(parts) + "\n"


def _table_line(panel: Panel, name: str, line: Line) -> str:
    cells = [f"{mean:.2e} ± {error:.0e}" for mean, error in zip(line.mean, line.error, strict=True)]
    slope, error = line.slope(*panel.fitted)
    return f"| {name} | {' | '.join(cells)} | {slope:.2f} ± {error:.2f} |"


def _between(panel: Panel) -> str:
    """For which x the slope is fitted, if not for all."""
    low, high = panel.fitted
    return f", from {low:.0f}" * (low > 0) + f", up to {high:.0f}" * bool(np.isfinite(high))


def draw(path: Path, rows: Sequence[Row]) -> None:
    """A panel per experiment, log-log; thin: the theorem's slope through the first fitted point."""
    shown = []
    for name in group(rows, "panel"):
        panel, lines = PANELS[name], lines_of(rows, name)
        first = int(np.argmax(np.asarray(panel.x) >= panel.fitted[0]))
        points = {each: line.points for each, line in lines.items()}
        slopes = dict.fromkeys(lines, (first, panel.expected))
        title = f"{panel.title} (thin: the theorem, slope {panel.expected:.2f}{_between(panel)})"
        up = f"|grad F|², {panel.measured}"
        shown.append(pictures.Panel(title, panel.varied, up, points, slopes=slopes, log=True))
    pictures.lines(path, "The theorems' rates, measured", shown)


def command(jobs: Jobs = 1, folder: Folder = OUT) -> None:
    """The theorems' rates, measured.

    In rounds, in clients, in local steps and in the size of the cohort. Five minutes on one core.
    """
    check(folder, jobs=jobs)
    with Harness(folder / "rates.jsonl", measure, jobs) as do:
        rows = do(cases(PANELS))
    draw(folder / "rates.png", rows)
    finish("rates", folder, markdown(rows))

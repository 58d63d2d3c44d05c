"""The paper's table of sample complexities, measured: the gradient norm against the samples that a machine has read.

Every method has as many settings. For each number of samples the best of them is chosen on a seed of its own, by the
same quantity that other seeds then report: the root of the mean of |grad F|^2 over the second half of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from fedxl.algorithms import build
from fedxl.algorithms.protocol import Algorithm
from fedxl.models import Weights, weights_of
from fedxl.risks import XRisk, p_norm_push
from studies import pictures
from studies.harness import Harness, Outcome, Planned, Row, best, machine, machines, tune
from studies.options import OUT, Folder, Jobs, check, finish
from studies.theory.rates import AUROC, Line
from studies.theory.testbed import EXAMPLES, FEATURES, Testbed, linear, squared_norms

PUSH = p_norm_push(p=3.0)  # a mean inside, its cube outside: the inner estimate matters, and no exponential hides it
BATCH = 8  # of S1, and of S2 unless a setting says otherwise
SAMPLES = 256  # that a machine reads in a round
MACHINES = 4  # of the federated methods, each with a quarter of the examples
RATES = (0.002, 0.006, 0.02, 0.06)
TUNED_ON, SEEDS = 100, (0, 1, 2)
ROUNDS = 64
PROBLEM = (
    f"A linear score on {EXAMPLES} positives and {EXAMPLES} negatives with {FEATURES} features, float64, from "
    f"weights of 0, batch {BATCH}+{BATCH} unless a setting says otherwise, draws with replacement, rounds of "
    f"{SAMPLES} samples on each machine. P-norm push with p = 3; FeDXL1: AUROC; both with the logistic surrogate. "
    f"Federated methods: {MACHINES} clients that differ."
)
MEASURED = (
    "|grad F|: root of the mean of |grad F|^2 over the second half of a run, mean and standard error over seeds. "
    f"The setting is the best of eight for each number of samples, chosen on seed {TUNED_ON}, which is not among "
    "those shown."
)


@dataclass(frozen=True)
class Setting:
    """One way to run a method."""

    algorithm: Algorithm
    batch2: int = BATCH

    @property
    def local_steps(self) -> int:
        return SAMPLES // (BATCH + self.batch2)


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    risk: XRisk
    machines: int
    expected: str  # the order of the samples on each machine for a gradient norm of eps, as printed
    settings: Mapping[str, Setting]


def _settings(build: Callable[[float, float], tuple[str, Setting]], others: Sequence[float]) -> dict[str, Setting]:
    return dict(build(lr, other) for lr in RATES for other in others)


def _bsgd(lr: float, batch2: float) -> tuple[str, Setting]:
    algorithm = build("sox", PUSH, lr=lr, beta=1.0, gamma=1.0)
    return f"lr {lr:g}, batch 8+{batch2:g}", Setting(algorithm, int(batch2))


def _sox(lr: float, moving: float) -> tuple[str, Setting]:
    algorithm = build("sox", PUSH, lr=lr, beta=moving, gamma=moving)
    return f"lr {lr:g}, beta = gamma = {moving:g}", Setting(algorithm)


def _fedxl2(lr: float, moving: float) -> tuple[str, Setting]:
    algorithm = build("fedxl2", PUSH, lr=lr, beta=moving, gamma=moving, level="free")
    return f"lr {lr:g}, beta = gamma = {moving:g}", Setting(algorithm)


def _fedxl1(lr: float, factor: float) -> tuple[str, Setting]:
    """It has a learning rate alone, so there are twice as many; they are larger, as AUROC's gradients are smaller."""
    return f"lr {lr * factor:g}", Setting(build("fedxl1", AUROC, lr=lr * factor, level="free"))


METHODS = {
    "BSGD": Method(PUSH, 1, "eps^-6", _settings(_bsgd, (8, 24))),
    "SOX": Method(PUSH, 1, "n eps^-4", _settings(_sox, (0.1, 0.3))),
    "FeDXL1 (AUROC)": Method(AUROC, MACHINES, "eps^-4 / N", _settings(_fedxl1, (5.0, 8.5))),
    "FeDXL2": Method(PUSH, MACHINES, "max n_i eps^-4", _settings(_fedxl2, (0.1, 0.3))),
}


@dataclass(frozen=True)
class Curve:
    """One method: its gradient norms against samples per machine, and what was chosen for each number of them."""

    line: Line
    chosen: tuple[str, ...]


def samples_for(rounds: int) -> list[int]:
    """Where curves are read: powers of two of rounds, from 4 on."""
    return [SAMPLES * 2**power for power in range(2, int(math.log2(rounds)) + 1)]


def late(norms: Sequence[float], rounds: int) -> float:
    """The root of the mean |grad F|^2 over the second half of so many rounds; infinite if a run has diverged.

    >>> late([9.0, 4.0, 4.0, 1.0, 1.0], 4)
    1.0
    """
    value = math.sqrt(float(np.mean(norms[rounds // 2 + 1 : rounds + 1])))
    return value if math.isfinite(value) else math.inf


def measure(planned: Planned) -> Outcome:
    """A run, read at every number of samples."""
    case = planned.case
    method, rounds = METHODS[case["method"]], case["rounds"]
    setting, bed = method.settings[case["setting"]], linear(method.risk, method.machines, differ=True)
    norms = squared_norms(
        bed, setting.algorithm, rounds=rounds, local_steps=setting.local_steps, seed=case["seed"], start=origin(bed),
        batch=BATCH, batch2=setting.batch2,
    ).tolist()  # fmt: skip
    found = {f"norm at {at}": late(norms, at // SAMPLES) for at in samples_for(rounds)}
    return {"validation": found, "on": machine()}, {}


def origin(bed: Testbed) -> Weights:
    """Weights of 0: all scores alike."""
    weights = weights_of(bed.model)
    return weights._replace(params={name: torch.zeros_like(leaf) for name, leaf in weights.params.items()})


def plan(method: str, setting: str, rounds: int, seed: int) -> Planned:
    return Planned({"method": method, "setting": setting, "rounds": rounds, "seed": seed})


def curves(do: Callable[[Sequence[Planned]], list[Row]], rounds: int = ROUNDS) -> tuple[dict[str, Curve], list[Row]]:
    """Every method at its best setting for each number of samples, and all rows."""
    trials = {
        name: {setting: [plan(name, setting, rounds, TUNED_ON)] for setting in method.settings}
        for name, method in METHODS.items()
    }
    x = tuple(samples_for(rounds))
    tuned = {at: tune(do, trials, f"-norm at {at}") for at in x}
    chosen = {name: tuple(best(tuned[at][name]) for at in x) for name in METHODS}
    rows = do([plan(name, each, rounds, seed) for seed in SEEDS for name in METHODS for each in chosen[name]])
    norms = {(r.case["method"], r.case["setting"], r.case["seed"]): r.found["validation"] for r in rows}

    def read(name: str, setting: str, seed: int, at: int) -> float:
        value = norms[name, setting, seed][f"norm at {at}"]
        return math.inf if value is None else float(value)

    found = {
        name: Curve(
            Line(x, [[read(name, each, seed, at) for at, each in zip(x, own, strict=True)] for seed in SEEDS]), own
        )
        for name, own in chosen.items()
    }
    return found, rows


def markdown(found: Mapping[str, Curve], rows: Sequence[Row]) -> str:
    x = next(iter(found.values())).line.x
    head = f"| samples per machine | {' | '.join(map(str, x))} | slope | the paper's table: samples for eps |"
    norms = [
        f"| {name} | "
        + " | ".join(f"{m:.4f} ± {e:.4f}" for m, e in zip(curve.line.mean, curve.line.error, strict=True))
        + f" | {curve.line.slope()[0]:.2f} ± {curve.line.slope()[1]:.2f} | {METHODS[name].expected} |"
        for name, curve in found.items()
    ]
    chosen = [f"| {name} | {' | '.join(curve.chosen)} |" for name, curve in found.items()]
    parts = [
        "# Sample complexities, measured",
        PROBLEM,
        f"On {machines(rows)}.",
        "![Gradient norm against samples](complexity.png)",
        "## Gradient norms",
        MEASURED,
        "\n".join([head, "|---|" + "---:|" * (len(x) + 1) + "---|", *norms]),
        "## Chosen settings",
        "\n".join([f"| | {' | '.join(map(str, x))} |", "|---|" + "---|" * len(x), *chosen]),
    ]
    return "\n\n".join(parts) + "\n"


def draw(path: Path, found: Mapping[str, Curve]) -> None:
    slopes = {name: curve.line.slope() for name, curve in found.items()}
    lines = {f"{n}: slope {slopes[n][0]:.2f} ± {slopes[n][1]:.2f}": curve.line.points for n, curve in found.items()}
    title = "Gradient norm against samples, tuned for each number of samples"
    panel = pictures.Panel(
        "FeDXL1 has another objective", "samples read by each machine", "|grad F|", lines, log=True
    )
    pictures.lines(path, title, [panel])


def command(
    rounds: Annotated[int, typer.Option(help="Rounds of the longest runs.")] = ROUNDS,
    jobs: Jobs = 1,
    folder: Folder = OUT,
) -> None:
    """The paper's table of sample complexities, measured.

    BSGD, SOX, FeDXL1 and FeDXL2, tuned alike. Three minutes on one core.
    """
    check(folder, jobs=jobs)
    with Harness(folder / "complexity.jsonl", measure, jobs) as do:
        found, rows = curves(do, rounds)
    draw(folder / "complexity.png", found)
    finish("complexity", folder, markdown(found, rows))

"""The paper's table of sample complexities, measured: the gradient norm against the samples that a machine has read.

Every method has as many settings. For each number of samples the best of them is chosen on a seed of its own, by the
same quantity that other seeds then report: the root of the mean of |grad F|^2 over the second half of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from fedxl.algorithms import SOX, FeDXL1, FeDXL2
from fedxl.algorithms.protocol import AnyAlgorithm
from fedxl.experiments.theory.measure import AUROC, Line, Progress
from fedxl.experiments.theory.testbed import Testbed, linear, squared_norms
from fedxl.models import Weights, weights_of
from fedxl.risks import XRisk, p_norm_push

PUSH = p_norm_push(p=3.0)  # a mean inside, its cube outside: the inner estimate matters, and no exponential hides it
BATCH = 8  # of S1, and of S2 unless a setting says otherwise
SAMPLES = 256  # that a machine reads in a round
MACHINES = 4  # of the federated methods, each with a quarter of the examples
RATES = (0.002, 0.006, 0.02, 0.06)
TUNED_ON, SEEDS = 100, (0, 1, 2)


@dataclass(frozen=True)
class Setting:
    """One way to run a method."""

    name: str
    algorithm: AnyAlgorithm
    batch2: int = BATCH

    @property
    def local_steps(self) -> int:
        return SAMPLES // (BATCH + self.batch2)


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    name: str
    risk: XRisk
    machines: int
    expected: str  # the order of the samples on each machine for a gradient norm of eps, as printed
    settings: tuple[Setting, ...]


def _settings(build: Callable[[float, float], Setting], others: Sequence[float]) -> tuple[Setting, ...]:
    return tuple(build(lr, other) for lr in RATES for other in others)


def _bsgd(lr: float, batch2: float) -> Setting:
    return Setting(f"lr {lr:g}, batch 8+{batch2:g}", SOX(PUSH, lr=lr, beta=1.0, gamma=1.0), int(batch2))


def _sox(lr: float, moving: float) -> Setting:
    return Setting(f"lr {lr:g}, beta = gamma = {moving:g}", SOX(PUSH, lr=lr, beta=moving, gamma=moving))


def _msvr(lr: float, moving: float) -> Setting:
    algorithm = SOX(PUSH, lr=lr, beta=moving, gamma=moving, estimator="msvr")
    return Setting(f"lr {lr:g}, beta = gamma = {moving:g}", algorithm)


def _fedxl2(lr: float, moving: float) -> Setting:
    algorithm = FeDXL2(PUSH, lr=lr, beta=moving, gamma=moving, level="free")
    return Setting(f"lr {lr:g}, beta = gamma = {moving:g}", algorithm)


def _fedxl1(lr: float, factor: float) -> Setting:
    """It has a learning rate alone, so there are twice as many; they are larger, as AUROC's gradients are smaller."""
    return Setting(f"lr {lr * factor:g}", FeDXL1(AUROC, lr=lr * factor, level="free"))


METHODS = (
    Method("BSGD", PUSH, 1, "eps^-6", _settings(_bsgd, (8, 24))),
    Method("SOX", PUSH, 1, "n eps^-4", _settings(_sox, (0.1, 0.3))),
    Method("MSVR", PUSH, 1, "max(eps^-4, n eps^-3)", _settings(_msvr, (0.1, 0.3))),
    Method("FeDXL1 (AUROC)", AUROC, MACHINES, "eps^-4 / N", _settings(_fedxl1, (5.0, 8.5))),
    Method("FeDXL2", PUSH, MACHINES, "max n_i eps^-4", _settings(_fedxl2, (0.1, 0.3))),
)


@dataclass(frozen=True)
class Curve:
    """One method: its gradient norms, and what was chosen."""

    method: Method
    line: Line  # x: samples read by each machine
    chosen: tuple[str, ...]  # for each x


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


def curve(
    method: Method,
    rounds: int,
    say: Progress = lambda line: None,
    seeds: Sequence[int] = SEEDS,
    tuned_on: int = TUNED_ON,
) -> Curve:
    """A method at its best setting for each number of samples."""
    bed = linear(method.risk, method.machines, differ=True)
    x = samples_for(rounds)

    @cache
    def norms(number: int, seed: int) -> tuple[float, ...]:
        setting = method.settings[number]
        say(f"{method.name}, {setting.name}, seed {seed} ...")
        return tuple(_run(bed, setting, rounds, seed))

    def best(at: int) -> int:
        return min(range(len(method.settings)), key=lambda number: late(norms(number, tuned_on), at // SAMPLES))

    chosen = [best(at) for at in x]
    runs = tuple(
        tuple(late(norms(number, seed), at // SAMPLES) for at, number in zip(x, chosen, strict=True))
        for seed in seeds
    )
    return Curve(method, Line(method.name, tuple(x), runs), tuple(method.settings[number].name for number in chosen))


def _run(bed: Testbed, setting: Setting, rounds: int, seed: int) -> list[float]:
    found = squared_norms(
        bed, setting.algorithm, rounds=rounds, local_steps=setting.local_steps, seed=seed, start=_origin(bed),
        batch=BATCH, batch2=setting.batch2,
    )  # fmt: skip
    return [float(value) for value in found]


def _origin(bed: Testbed) -> Weights:
    """Weights of 0: all scores alike."""
    weights = weights_of(bed.model)
    return weights._replace(params={name: torch.zeros_like(leaf) for name, leaf in weights.params.items()})

"""How fast a step of all clients is: the executors against each other and against one model on all their data."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fedxl import sampling
from fedxl.algorithm import RoundOf
from fedxl.algorithms import ALGORITHMS
from fedxl.data.augment import Augment
from fedxl.data.federation import Federation
from fedxl.data.source import TensorSource
from fedxl.engine.choose import executor, possible
from fedxl.engine.simulator import Simulator
from fedxl.engine.wave import Executor
from fedxl.models import scorer, weights_of
from fedxl.risk import partial_auc
from fedxl.task import build_algorithm

# What images undergo on their way, as in the paper's experiments on CIFAR.
AUGMENT = Augment(crop=4, flip=True, noise=0.2)
LOOP_STEPS = 2  # of the eager loop, which takes a second for each
EXAMPLES = 1500  # of a client, as the paper's CIFAR-10 on 16 machines; one in six is positive


@dataclass(frozen=True)
class Setting:
    """What is timed."""

    clients: int = 16
    local_steps: int = 32
    batch: int = 32  # of each side
    shape: tuple[int, int, int] = (3, 32, 32)
    precision: str = "bf16"
    device: str = "cuda"
    compile: bool = True


@dataclass(frozen=True)
class Row:
    """One line of the table; ratios are to other lines of the same run."""

    algorithm: str
    executor: str
    ms_per_step: float  # of all clients, averaging and merging included
    images_per_second: float
    to_joint_batch: float | None = None
    to_loop: float | None = None
    peak_memory_gb: float | None = None
    note: str = ""


class Job:
    """Rounds of one algorithm on one executor, to be timed."""

    def __init__(
        self,
        model: nn.Module,
        federation: Federation,
        algorithm: str,
        run: Executor,
        local_steps: int,
        batch: int,
        cohort: int = 0,
        device: str = "cpu",
        precision: str = "fp32",
    ) -> None:
        where = torch.device(device)
        model = model.to(where)
        self.cohort, self.clients = cohort, len(federation.parts)
        self.algorithm = build_algorithm(
            ALGORITHMS[algorithm], scorer(model, True, precision), partial_auc(), federation, {"lr": 0.01}
        )
        self.engine = Simulator(
            self.algorithm, federation, run, local_steps, batch, batch, device=where, precision=precision
        )
        self.server = self.algorithm.init(weights_of(model))
        self.number = 0
        if self.algorithm.prelude:
            self.round(self.algorithm.prelude)

    def round(self, algorithm: RoundOf | None = None) -> None:
        running = algorithm or self.algorithm
        members = sampling.cohort(0, self.number, self.clients, self.cohort)
        self.server = running.aggregate(
            self.server, self.engine.run_round(running, self.server, self.number, members)
        )
        self.number += 1

    def finish(self) -> None:
        """Wait until all that was asked for is done."""
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)


def timed(job: Job, rounds: int, warm_up: int = 2) -> float:
    """Seconds a round, over so many of them without a pause, the host's part included."""
    for _ in range(warm_up):
        job.round()
    job.finish()
    began = time.perf_counter()
    for _ in range(rounds):
        job.round()
    job.finish()
    return (time.perf_counter() - began) / rounds


def images(setting: Setting, augment: Augment = AUGMENT) -> Federation:
    """Clients with random images of bytes: how long a step takes does not depend on what is on them."""
    total = setting.clients * EXAMPLES
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 256, (total, *setting.shape), np.uint8))
    y = torch.from_numpy((np.arange(total) % 6 == 0).astype(np.int64))
    means = tuple(-0.08 + 0.01 * (i % 17) for i in range(setting.clients))
    federation = Federation(TensorSource(x, y), list(np.arange(total).reshape(setting.clients, -1)))
    return federation.augmented(Augment(**{**asdict(augment), "site_means": means}))


def table(
    build: Callable[[], nn.Module],
    setting: Setting,
    executors: tuple[str, ...] = ("loop", "graph"),
    algorithms: tuple[str, ...] = ("fedxl2", "local_sgd"),
    rounds: int = 3,
    joint: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """All lines: each algorithm on each executor, and one model on the joint batch with the last of the executors."""
    federation = images(setting)
    device = torch.device(setting.device)
    measure = _Measure(build, setting, rounds, say)
    bound = None
    if joint:
        pooled = federation.pooled()
        bound = measure("local_sgd", possible(executors[-1], device)[0], pooled, setting.clients * setting.batch)
    rows: list[Row] = []
    for algorithm in algorithms:
        base = None
        for name in executors:
            row = measure(algorithm, name, federation, setting.batch)
            base = row.ms_per_step if name == "loop" else base
            ratio = None if bound is None else row.ms_per_step / bound.ms_per_step
            rows.append(_with(row, to_joint_batch=ratio, to_loop=None if base is None else row.ms_per_step / base))
    return rows + ([] if bound is None else [_with(bound, algorithm="one model, joint batch", to_joint_batch=1.0)])


def _with(row: Row, **changes: Any) -> Row:
    return Row(**{**asdict(row), **changes})


@dataclass
class _Measure:
    build: Callable[[], nn.Module]
    setting: Setting
    rounds: int
    say: Callable[[str], None]

    def __call__(self, algorithm: str, name: str, federation: Federation, batch: int) -> Row:
        setting = self.setting
        notes: list[str] = []
        steps = min(LOOP_STEPS, setting.local_steps) if name == "loop" else setting.local_steps
        self.say(f"{algorithm}, {name} ...")
        torch.manual_seed(0)
        on_gpu = setting.device.startswith("cuda")
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        run = executor(name, setting.compile, notes.append)
        job = Job(self.build(), federation, algorithm, run, steps, batch, 0, setting.device, setting.precision)
        seconds = timed(job, self.rounds) / steps
        shown = len(federation.parts) * 2 * batch
        memory = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
        note = notes[-1].removeprefix("executor: ") if notes else ""
        return Row(algorithm, name, 1000 * seconds, shown / seconds, peak_memory_gb=memory, note=note)


def machine(device: str) -> dict[str, str]:
    """What the figures were measured on."""
    gpu = device.startswith("cuda")
    name = torch.cuda.get_device_name() if gpu else f"{platform.machine()}, {torch.get_num_threads()} threads"
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {"device": name, **versions, **({"cuda": str(torch.version.cuda)} if gpu else {})}


def compare(jobs: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each job. They take turns, so that a noisy moment of the machine falls on all of them."""
    for job in jobs.values():
        job()
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            began = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}

"""What the benchmarks share: populations of MLP clients, and fair timing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from benchmarks import step as bench
from benchmarks.step import Job
from fedxl.data.examples import Examples
from fedxl.engine.executors import executor as build_executor
from fedxl.models import mlp

BATCH = 16  # of S1, and of S2


def population(num_clients: int, examples: int = 64, features: int = 64) -> Examples:
    """Clients with so many examples each, a quarter of them positive."""
    rng = np.random.default_rng(0)
    total = num_clients * examples
    x = torch.from_numpy(rng.normal(size=(total, features)).astype(np.float32))
    y = torch.from_numpy((np.arange(total) % 4 == 0).astype(np.int64))
    return Examples(x, y[:, None], np.arange(total) // examples)


def job(
    algorithm: str,
    data: Examples,
    executor: str,
    steps: int,
    hidden: tuple[int, ...] = (64,),
    cohort: int = 0,
) -> Job:
    """Rounds of one algorithm on one executor, to be timed."""
    torch.manual_seed(0)
    return Job(mlp(data.shape, hidden=hidden), data, algorithm, build_executor(executor), steps, BATCH, cohort)


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


def machine() -> str:
    return ", ".join(f"{key} {value}" for key, value in bench.machine("cpu").items())

"""Engines and rounds for tests, put together as training does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fedxl import fit
from fedxl.algorithms import ALGORITHMS, build
from fedxl.algorithms.protocol import Algorithm
from fedxl.data.examples import Examples, facts_about
from fedxl.engine.executors import Executor
from fedxl.engine.simulator import Simulator
from fedxl.options import accepted
from fedxl.risks import XRisk
from fedxl.training.problem import Problem, assemble
from fedxl.training.result import Result
from fedxl.training.rounds import play_round
from fedxl.training.settings import Settings
from fedxl.training.simulation import simulator


def problem_of(algorithm: Algorithm, model: nn.Module, data: Examples, **settings: Any) -> Problem:
    run = Settings(**{"device": "cpu", "dtype": "float64", **settings})
    return assemble(model, algorithm, run, facts_about(data.holdings(), run.weighting, algorithm.risk.pairing))


def engine_for(
    algorithm: Algorithm, model: nn.Module, data: Examples, executor: Executor, local_steps: int,
    batch1: int, batch2: int, **settings: Any,
) -> Simulator:  # fmt: skip
    sizes = {"local_steps": local_steps, "batch1": batch1, "batch2": batch2}
    return simulator(problem_of(algorithm, model, data, **sizes, **settings), data, executor)


def play(algorithm: Algorithm, engine: Any, server: Any, round: int, cohort: Any) -> Any:
    """The server's state after a round."""
    return play_round(algorithm, engine, server, round, cohort)[0]


def fit_named(model: nn.Module, clients: Any, risk: XRisk, name: str = "fedxl2", **settings: Any) -> Result:
    """`fit` with an algorithm of the table; hyper-parameters stand among the settings of the run."""
    known = accepted(ALGORITHMS[name])
    options = {key: settings.pop(key) for key in [*settings] if key in known}
    if "batch1" in settings:
        settings["batch_size"] = (settings.pop("batch1"), settings.pop("batch2"))
    return fit(model, clients, build(name, risk, **options), **settings)


def again(lanes: Sequence[Callable[[], None]], repeats: int, large: bool) -> Callable[[], None]:
    """The stand-in for devices without graphs: the same lanes in the same memory, warmed up and called again."""
    for lane in lanes:
        lane()

    def replay() -> None:
        for lane in lanes:
            for _ in range(repeats):
                lane()

    return replay

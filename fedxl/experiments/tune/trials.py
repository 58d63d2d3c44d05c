"""Trials: what each came to, on disk after every rung, and the runs that they consist of."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedxl.config.experiment import Config, dump, simulate
from fedxl.errors import DivergedError, UserError, require
from fedxl.files import read_bytes, write_json
from fedxl.metrics import value_of
from fedxl.options import call
from fedxl.training.run_folder import COLLAPSED, CONFIG, checkpointed, is_run
from fedxl.training.settings import Hooks
from fedxl.training.simulation import Simulation
from fedxl.training.trainer import train


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a trial came to after a rung, over its seeds."""

    rounds: int  # of the rung
    value: float | None  # the mean of the best validation metrics, the higher the better; None: it failed
    values: tuple[float, ...]  # by seed
    spent: int  # rounds trained up to here, over all seeds
    seconds: float
    failed: str = ""  # why: diverged or collapsed


NOT_BEGUN = Outcome(rounds=0, value=None, values=(), spent=0, seconds=0.0)


@dataclass
class Trial:
    """Settings, and what came of them."""

    algorithm: str
    number: int
    settings: dict[str, Any]
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def last(self) -> Outcome:
        return self.outcomes[-1] if self.outcomes else NOT_BEGUN

    @property
    def value(self) -> float:
        """The higher the better; -inf: it failed, or has not begun."""
        return -math.inf if self.last.value is None else self.last.value

    def at(self, rounds: int) -> Outcome | None:
        """What it came to on the rung that ends there."""
        return next((outcome for outcome in self.outcomes if outcome.rounds == rounds), None)


@dataclass(frozen=True)
class TrialStore:
    """A folder with a record of each trial and a run folder for each of its seeds."""

    folder: Path

    def run(self, trial: Trial, seed: int | str) -> Path:
        return self.folder / "runs" / f"{self.path(trial).stem}-seed-{seed}"

    def load(self, algorithm: str, number: int) -> Trial | None:
        path = self.path(trial := Trial(algorithm, number, {}))
        try:
            content = json.loads(read_bytes(path))
            outcomes = [call(Outcome, each, "trial") for each in content["outcomes"]]
            right = content["algorithm"] == algorithm and isinstance(content["settings"], dict)
            require(right, f"it is no record of {algorithm}")
            return Trial(algorithm, number, content["settings"], outcomes)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            how = f"remove it and {self.run(trial, '*')} to repeat the trial"
            raise UserError(f"cannot read {path}: {error}; {how}") from None

    def save(self, trial: Trial) -> None:
        path = self.path(trial)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(trial))

    def path(self, trial: Trial) -> Path:
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", trial.algorithm)
        return self.folder / "trials" / f"{name}-{trial.number:04d}.json"


Build = Callable[[Config], tuple[Simulation, Mapping[str, str]]]  # a run, and files for its folder


def built(config: Config) -> tuple[Simulation, Mapping[str, str]]:
    """What a config names, without test data."""
    return simulate(config, lambda line: None, test=False), {CONFIG: dump(config)}


def require_validation(simulation: Simulation) -> None:
    require("validation" in simulation.examiner.splits, "tuning needs validation data, and these data have none")


class TrialRun(NamedTuple):
    """One run of a trial, up to the end of a rung: a piece of work for a process."""

    config: Config
    folder: Path
    base: int = 0  # the end of the rung before
    build: Build = built

    @property
    def rounds(self) -> int:
        """To train on this rung."""
        return int(self.config.run["rounds"]) - self.base

    @property
    def kind(self) -> str:
        """The same for runs that may share a compiled program."""
        return str(self.config.algorithm["name"])


class RunOutcome(NamedTuple):
    value: float  # NaN: it failed
    rounds: int
    seconds: float
    failed: str = ""


def perform(run: TrialRun, advance: Callable[[int], None]) -> RunOutcome:
    """Train up to the rounds of the config, from the run's last checkpoint if it has one, on no test data.

    Divergence and collapse are outcomes; anything else that fails is an error.
    """
    done, end = run.base, run.base + run.rounds

    def reach(round: int) -> None:
        nonlocal done
        advance(max(0, round - done))  # a run that is resumed may repeat rounds
        done = max(done, round)

    ahead = checkpointed(run.folder) > end  # somebody removed the record of its trial
    require(not ahead, f"{run.folder} is ahead of its trial's record; remove it to repeat the trial")
    simulation, files = run.build(run.config)  # files also of a resumed run, whose rounds have changed
    require_validation(simulation)
    hooks = Hooks(lambda now: reach(now.round), say=lambda line: None, stop_collapsed=True)
    try:
        result = train(simulation, hooks, run.folder, resume=is_run(run.folder), files=files)
    except DivergedError as error:
        failed = RunOutcome(math.nan, done, 0.0, f"diverged: {error}")
        reach(end)  # the remaining rounds need not be done
        return failed
    reach(end)
    rounds = result.history[-1]["round"] if result.history else done
    collapsed = [row["round"] for row in result.history if COLLAPSED in row]
    if collapsed:
        return RunOutcome(math.nan, rounds, result.seconds, f"the scores have collapsed by round {collapsed[0]}")
    value = value_of(result.metrics["validation"], simulation.problem.select)
    return RunOutcome(value, rounds, result.seconds, "" if math.isfinite(value) else "it has no validation metric")

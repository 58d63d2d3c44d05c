"""One harness for every study: planned runs, resumed, tuned alike, recorded as one row per run, tabled and grouped.

A study plans its runs, each told from the others by its `case`. The harness does those that have no row yet and
writes the file of rows after every run, whole or not at all: a killed study continues where it was. Tables and
pictures are made from rows alone. Arrays (test scores, curves) lie beside the rows and need not be kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from safetensors.numpy import load_file, save

from benchmarks import step as bench
from fedxl.config.experiment import Config, execute
from fedxl.errors import DivergedError, UserError, require
from fedxl.experiments.workers import WorkerPool
from fedxl.files import plain, write_atomically
from fedxl.metrics import value_of
from fedxl.progress import progress
from fedxl.reporting.text import mean_and_spread, mean_with_spread
from fedxl.sampling import Floats
from fedxl.training.result import Result
from fedxl.training.settings import Hooks

FORMAT = 4  # of rows and of the meaning of settings: a new number makes all runs be done again
# Settings that are inputs of a compiled program, and those that it does not depend on.
NUMBERS = {"lam", "lr", "milestones", "stage_steps", "seed", "flipped"}
UNREAD = {"root", "rounds", "eval_every", "select"}
PATHS = {"root", "trace"}
K = TypeVar("K", bound=Hashable)
C = TypeVar("C", bound=Hashable)
Case = Mapping[str, Any]
Outcome = tuple[dict[str, Any], dict[str, Floats]]  # what goes into the row, and arrays beside it


class Planned(NamedTuple):
    """A run to do. Its case tells it from the other runs of its study; a config is part of what it is."""

    case: Case
    config: Config | None = None
    trial: bool = False  # of tuning, which ends once its scores have collapsed

    @property
    def key(self) -> str:
        """The same for the same run, whatever its machine and the folder of its data."""
        return key_of(self.case if self.config is None else without_paths(self.config))

    @property
    def kind(self) -> str:
        """The same for runs that share a compiled program."""
        tables = {} if self.config is None else self.config.tables()
        rest = {
            section: {name: value for name, value in table.items() if name not in NUMBERS | UNREAD}
            for section, table in tables.items()
        }
        return json.dumps(rest, sort_keys=True)


def key_of(case: Case) -> str:
    text = json.dumps([FORMAT, plain(case)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def without_paths(config: Config) -> dict[str, Any]:
    """The tables of a config without the paths of its files, which are private and differ between machines."""
    return {
        section: {name: value for name, value in table.items() if name not in PATHS}
        for section, table in config.tables().items()
    }


class Row(NamedTuple):
    """A run that is done: its case, and what it came to."""

    key: str
    case: dict[str, Any]
    found: dict[str, Any]

    @property
    def diverged(self) -> bool:
        return "diverged" in self.found

    def test(self, metric: str) -> float:
        """A metric of the test data; NaN if the run has none."""
        return _number(self.found.get("test", {}).get(metric))

    def validation(self, metric: str) -> float:
        """The metric that models are chosen by, the higher the better; minus infinity for a run that diverged."""
        return -math.inf if self.diverged else value_of(self.found["validation"], metric)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def read(path: Path) -> list[Row]:
    """The rows of a file; none if there is no such file. Raises UserError if it holds something else."""
    if not path.exists():
        return []
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [Row(line.get("key") or key_of(line["case"]), line["case"], line["found"]) for line in lines]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise UserError(f"{path} holds no rows of a study; name another folder") from None


def write(path: Path, rows: Iterable[Row]) -> None:
    """One line of JSON per row. A case alone says what its key is, so the key is left out."""
    lines = (row._asdict() if row.key != key_of(row.case) else {"case": row.case, "found": row.found} for row in rows)
    text = "".join(json.dumps(plain(line), separators=(",", ":"), ensure_ascii=False) + "\n" for line in lines)
    write_atomically(path, text.encode())


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass
class Harness:
    """Does the planned runs that have no row in `path`, several in parallel if asked. Use it in a `with`."""

    path: Path
    work: Callable[[Planned], Outcome]
    jobs: int = 1
    say: Callable[[str], None] = to_stderr
    pool: WorkerPool[Planned, Outcome] | None = field(default=None, init=False)  # keeps what it has compiled

    def __call__(self, planned: Sequence[Planned], jobs: int = 0) -> list[Row]:
        """The rows of all planned runs, in order. Runs that have a row already are not repeated."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = {row.key: row for row in read(self.path)}
        todo = list({run.key: run for run in planned if run.key not in rows}.values())
        if todo:
            with progress(f"{self.path.stem}: {len(todo)} of {len(planned)} runs to do, runs", len(todo)) as advance:
                for run, (found, arrays) in self._outcomes(todo, jobs or self.jobs):
                    if arrays:  # first, so that a row always has its arrays
                        self._arrays(run.key).parent.mkdir(exist_ok=True)
                        floats = {name: values.astype(np.float32) for name, values in arrays.items()}
                        write_atomically(self._arrays(run.key), save(floats))
                    rows[run.key] = Row(run.key, dict(run.case), plain(found))
                    write(self.path, rows.values())
                    self.say(describe(rows[run.key]))
                    advance(1)
        return [rows[run.key]._replace(case=dict(run.case)) for run in planned]

    def _outcomes(self, todo: Sequence[Planned], jobs: int) -> Iterator[tuple[Planned, Outcome]]:
        if jobs == 1 or (len(todo) == 1 and self.pool is None):
            self.stop()  # idle workers would still hold memory
            return ((run, self.work(run)) for run in todo)
        self.pool = self.pool or WorkerPool(jobs, self.work)
        return self.pool(todo)

    def arrays(self, row: Row) -> dict[str, Floats]:
        """The arrays of a run; empty if they were not kept."""
        path = self._arrays(row.key)
        return {name: leaf.astype(np.float64) for name, leaf in load_file(path).items()} if path.exists() else {}

    def _arrays(self, key: str) -> Path:
        return self.path.parent / "arrays" / f"{key}.safetensors"

    def stop(self) -> None:
        if self.pool:
            self.pool.stop()
        self.pool = None

    def __enter__(self) -> Harness:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.stop()
        if isinstance(error, KeyboardInterrupt):
            self.say("stopped; finished runs are kept; run the command again to continue")
            sys.exit(130)


def train(planned: Planned, device: str = "cpu", more: Callable[[Result], Outcome] | None = None) -> Outcome:
    """Train a config: its metrics, best round and seconds, and its test scores beside. Divergence is an outcome.

    more: what else a study wants of a result that is not a trial's.
    """
    assert planned.config is not None, "a run without a config needs work of its own"
    tables = planned.config.tables()
    config = Config(**{**tables, "run": {**tables["run"], "device": device}})
    on = machine(device)
    began = time.process_time()
    try:
        result = execute(config, hooks=Hooks(say=lambda line: None, stop_collapsed=planned.trial))
    except DivergedError as error:
        return {"diverged": str(error), "on": on}, {}
    found = {
        "validation": _rounded(result.metrics["validation"]),
        "test": _rounded(result.metrics["test"]),
        "best_round": result.best_round,
        "seconds": round(result.seconds, 1),
        "cpu": round(time.process_time() - began, 1),
        "on": on,
    }
    collapsed = [row["round"] for row in result.history if "collapsed" in row]
    found |= {"collapsed": collapsed[0]} if collapsed else {}
    if planned.trial:
        return found, {}
    scores = dict(zip(("scores", "labels"), result.test_scores, strict=True)) if result.test_scores else {}
    extra, arrays = more(result) if more else ({}, {})
    return {**found, **extra}, {**scores, **arrays}


def machine(device: str = "cpu") -> str:
    return ", ".join(f"{name} {value}" for name, value in bench.machine(device).items())


def _rounded(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics without counts and without those that follow from others."""
    own = {name: value for name, value in metrics.items() if isinstance(value, float) and "raw" not in name}
    return {name: round(value, 8) for name, value in own.items()}


class Trial(NamedTuple, Generic[C]):
    """A choice of settings, and what it came to: the mean over its runs on validation data."""

    choice: C
    value: float
    rows: list[Row]


def tune(
    do: Callable[[Sequence[Planned]], list[Row]], planned: Mapping[K, Mapping[C, Sequence[Planned]]], metric: str
) -> dict[K, list[Trial[C]]]:
    """The trials of every method, in one go. Raises UserError unless every method has as many of them."""
    counts = {name: len(choices) for name, choices in planned.items()}
    require(len(set(counts.values())) <= 1, f"methods are not tuned alike, their numbers of trials are {counts}")
    # All methods with their first choice, then the second: parallel runs then compile different programs, once each.
    rounds = zip(*([(name, choice) for choice in choices] for name, choices in planned.items()), strict=True)
    order = [pair for each in rounds for pair in each]
    rows = iter(do([run for name, choice in order for run in planned[name][choice]]))
    found: dict[K, list[Trial[C]]] = {name: [] for name in planned}
    for name, choice in order:
        own = [next(rows) for _ in planned[name][choice]]
        value = sum(row.validation(metric) for row in own) / len(own)
        found[name].append(Trial(choice, -math.inf if math.isnan(value) else value, own))
    return found


def best(trials: Sequence[Trial[C]]) -> C:
    """The choice with the highest value. Raises UserError if every one diverged."""
    top = max(trials, key=lambda trial: trial.value)
    require(math.isfinite(top.value), "every choice of settings that was tried diverged")
    return top.choice


def describe(row: Row) -> str:
    """A run in one line."""
    parts = (value if isinstance(value, str) else f"{name} {value}" for name, value in row.case.items())
    case = ", ".join(parts)
    if row.diverged:
        return f"{case}: diverged"
    values = row.found.get("validation") or row.found.get("test") or {}
    shown = [f"{name} {value:.4f}" for name, value in values.items() if value is not None][:3]
    return f"{case}: {', '.join(shown) or 'done'}"


def group(rows: Iterable[Row], *names: str) -> dict[Any, list[Row]]:
    """Rows by these parts of their cases: by the value of one, or by a tuple of several."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        values = tuple(row.case.get(name) for name in names)
        found.setdefault(values[0] if len(names) == 1 else values, []).append(row)
    return found


def cell(rows: Sequence[Row], metric: str) -> str:
    """Mean and standard deviation of a test metric, for a table."""
    return mean_with_spread([row.test(metric) for row in rows])


def with_error(values: Sequence[float], sign: str = "") -> str:
    """Mean and standard error, for a table."""
    mean, spread = mean_and_spread(values)
    return f"{mean:{sign}.4f} ± {spread / math.sqrt(len(values)):.4f}"


def difference(own: Sequence[float], base: Sequence[float]) -> str:
    """The mean difference of runs of the same seeds, and its standard error."""
    return with_error(np.subtract(own, base).tolist(), "+")


def machines(rows: Iterable[Row]) -> str:
    """Where runs were done."""
    return "; ".join(sorted({str(row.found["on"]) for row in rows if "on" in row.found})) or "an unknown machine"

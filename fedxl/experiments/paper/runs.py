"""Runs that are done only once. A run is identified by its config; later, its run record on disk replaces it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save

from fedxl.config.experiment import Config, execute
from fedxl.errors import DivergedError, UserError, require
from fedxl.experiments import bench
from fedxl.experiments.workers import WorkerPool, report_progress
from fedxl.files import write_atomically, write_json
from fedxl.metrics import value_of
from fedxl.progress import progress
from fedxl.reporting.text import in_words
from fedxl.training.hooks import Hooks, Progress
from fedxl.training.run_files import COLLAPSED
from fedxl.training.settings import pick_device

FORMAT = 3  # of run records and of the meaning of settings; a new number makes all runs be done again
# Part of every key. It was fedxl's version when the stored runs were made. A new release alone does not change what a
# run comes to, so it must not invalidate them: raise FORMAT when it does.
KEYED_AS = "0.2.0"
Floats = npt.NDArray[np.float64]
# Settings that are inputs of a compiled program, and those that it does not depend on.
READ_AS_NUMBERS = {"lam", "lr", "milestones", "stage_steps", "seed", "flipped"}
UNREAD = {"root", "rounds", "eval_every", "select"}


class PlannedRun(NamedTuple):
    """A run to do, and its label."""

    label: str
    config: Config
    trial: bool = False  # one of tuning, which ends once its scores have collapsed

    @property
    def key(self) -> str:
        """The same for the same experiment, whatever its folder and machine."""
        text = json.dumps([FORMAT, KEYED_AS, without_root(self.config.tables())], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def rounds(self) -> int:
        return int(self.config.run["rounds"])

    @property
    def local_steps(self) -> int:
        return int(self.config.run["local_steps"])

    @property
    def kind(self) -> str:
        """The same for runs that share a compiled program."""
        rest = {
            section: {name: value for name, value in table.items() if name not in READ_AS_NUMBERS | UNREAD}
            for section, table in self.config.tables().items()
        }
        return json.dumps(rest, sort_keys=True)


def without_root(tables: dict[str, Any]) -> dict[str, Any]:
    """The settings of an experiment without the folder of its data, which is private."""
    return {**tables, "data": {name: value for name, value in tables["data"].items() if name != "root"}}


class RunRecord(NamedTuple):
    """The outcome of a run, as stored on disk."""

    key: str
    content: dict[str, Any]

    @property
    def diverged(self) -> bool:
        return "diverged" in self.content

    @property
    def collapsed(self) -> bool:
        """Whether its scores collapsed, or its weights diverged."""
        return self.diverged or self.collapsed_in is not None

    @property
    def collapsed_in(self) -> int | None:
        """The round whose evaluation found its scores collapsed; None: they have not."""
        return self.content.get("collapsed")

    def validation(self, select: str) -> float:
        """The metric that models are chosen by, the higher the better."""
        return float("-inf") if self.diverged else value_of(self.content["validation"], select)

    def test(self, metric: str) -> float:
        """A metric of the test data; NaN if the run ended before it was tested."""
        return float("nan") if self.diverged else float(self.content["test"].get(metric, "nan"))


@dataclass(frozen=True)
class RunStore:
    """A folder of run records. Processes can share it, because each file is written atomically."""

    folder: Path

    def find(self, job: PlannedRun) -> RunRecord | None:
        path = self.folder / f"{job.key}.json"
        try:
            return RunRecord(job.key, json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            raise UserError(f"cannot read {path}: {error}; remove it to repeat the run") from None

    def scores(self, record: RunRecord) -> tuple[Floats, Floats]:
        """The scores of a run on its test data, and their labels."""
        tensors = load_file(self.folder / f"{record.key}.safetensors")
        return tensors["scores"].astype(np.float64), tensors["labels"].astype(np.float64)

    def save(self, job: PlannedRun, content: dict[str, Any], scores: tuple[Floats, Floats] | None) -> RunRecord:
        self.folder.mkdir(parents=True, exist_ok=True)
        if scores:  # first, so that a run record always has its scores
            values, labels = (array.astype(np.float32) for array in scores)
            write_atomically(self.folder / f"{job.key}.safetensors", save({"scores": values, "labels": labels}))
        write_json(self.folder / f"{job.key}.json", content)
        return RunRecord(job.key, content)


@dataclass
class Runner:
    """Does the runs that have no run record yet, several in parallel if asked."""

    store: RunStore
    at_once: int = 1
    device: str = "auto"
    say: Callable[[str], None] = lambda line: None
    pool: WorkerPool[PlannedRun, RunRecord] | None = field(
        default=None, init=False
    )  # created when there is work for several

    def __call__(self, jobs: Sequence[PlannedRun], at_once: int | None = None) -> list[RunRecord]:
        """The run records of all jobs, in order."""
        found = {job.key: record for job in jobs if (record := self.store.find(job))}
        todo = list({job.key: job for job in jobs if job.key not in found}.values())
        if not todo:
            return [found[job.key] for job in jobs]
        iterations = sum(job.rounds * job.local_steps for job in todo)
        number = "one run" if len(todo) == 1 else f"{len(todo)} runs"
        before = f" ({len(found)} done before)" if found else ""
        with progress(f"{number}{before}, iterations", iterations) as advance:
            for job, record in self._run(todo, at_once or self.at_once, advance):
                found[job.key] = record
                self.say(_line(job, record))
        return [found[job.key] for job in jobs]

    def _run(
        self, jobs: Sequence[PlannedRun], at_once: int, advance: Callable[[int], None]
    ) -> Iterator[tuple[PlannedRun, RunRecord]]:
        task = partial(perform, store=self.store, device=self.device)
        if at_once == 1 or (len(jobs) <= 1 and self.pool is None):
            self.stop_workers()  # idle workers would still hold memory
            yield from ((job, task(job, side_by_side=1, advance=advance)) for job in jobs)
            return
        self.pool = self.pool or WorkerPool(at_once, partial(task, side_by_side=at_once, advance=report_progress))
        try:
            yield from self.pool(jobs, advance)
        except BaseException:
            self.stop_workers()
            raise

    def stop_workers(self) -> None:
        """Stop the worker processes, if there are any. Call this when done with a runner."""
        if self.pool:
            self.pool.stop()
        self.pool = None


def perform(
    job: PlannedRun, store: RunStore, device: str, side_by_side: int, advance: Callable[[int], None]
) -> RunRecord:
    """Do one run and store its run record. Divergence is an outcome; anything else that fails is an error."""
    began = time.time()
    notes: list[str] = []
    rounds = 0  # done

    def on_progress(now: Progress) -> None:
        nonlocal rounds
        advance((now.round - rounds) * job.local_steps)
        rounds = now.round

    where = str(pick_device(device))
    tables = job.config.tables()
    config = Config(**{**tables, "run": {**tables["run"], "device": where}})
    content: dict[str, Any] = {
        "experiment": tables,
        "machine": bench.machine(where),
        "date": time.strftime("%Y-%m-%d", time.gmtime(began)),
        "side_by_side": side_by_side,  # runs that shared the machine; with several, seconds mean little
    }
    try:
        result = execute(config, hooks=Hooks(on_progress, say=notes.append, stop_collapsed=job.trial))
    except DivergedError as error:
        advance((job.rounds - rounds) * job.local_steps)  # the remaining rounds need not be done
        return store.save(job, {**content, "diverged": str(error)}, None)
    advance((job.rounds - rounds) * job.local_steps)  # those that a collapsed trial leaves out
    require(
        bool(result.metrics["validation"] and (result.metrics["test"] or result.interrupted)),
        f"{job.label} needs validation and test data",
    )
    content |= {
        "validation": result.metrics["validation"],
        "test": result.metrics["test"],
        "best_round": result.best_round,
        "rounds": rounds,
        "seconds": result.seconds,
        "traffic": result.traffic and result.traffic._asdict(),
        "executor": next((note for note in reversed(notes) if note.startswith("executor:")), ""),
        "history": result.history,
    }
    collapsed = [row["round"] for row in result.history if COLLAPSED in row]
    if collapsed:
        content[COLLAPSED] = collapsed[0]
    return store.save(job, content, result.test_scores)


def _line(job: PlannedRun, record: RunRecord) -> str:
    if record.diverged:
        return f"{job.label}: diverged"
    shown, seconds = in_words(record.content["validation"]), f"{record.content['seconds']:.0f} s"
    collapsed = "" if record.collapsed_in is None else f", collapsed by round {record.collapsed_in}"
    return f"{job.label}: validation {shown}{collapsed}  ({seconds})"

"""Runs that are done once: each is known by its config, and its record on disk is taken for it from then on."""

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
from fedxl.experiments.paper.workers import Crew, tell
from fedxl.files import write_atomically, write_json
from fedxl.progress import progress
from fedxl.reporting.report import in_words
from fedxl.training.evaluate import value_of
from fedxl.training.settings import pick_device
from fedxl.training.trainer import Hooks, Progress

FORMAT = 3  # of a record, and of what its settings mean; another number, and all is run anew
# Part of every key. It was fedxl's version when the stored runs were made. A new release alone does not change what a
# run comes to, so it must not invalidate them: raise FORMAT when it does.
KEYED_AS = "0.2.0"
Floats = npt.NDArray[np.float64]
# Settings that a compiled program reads as numbers, and those that it knows nothing of.
READ_AS_NUMBERS = {"lam", "lr", "milestones", "stage_steps", "seed", "flipped"}
UNREAD = {"root", "rounds", "eval_every", "select"}


class Job(NamedTuple):
    """A run to be done, and what it is called on the way."""

    label: str
    config: Config

    @property
    def key(self) -> str:
        """The same for the same experiment, wherever its files lie and whatever it runs on."""
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
        """The same for runs that one compiled program does."""
        rest = {
            section: {name: value for name, value in table.items() if name not in READ_AS_NUMBERS | UNREAD}
            for section, table in self.config.tables().items()
        }
        return json.dumps(rest, sort_keys=True)


def without_root(tables: dict[str, Any]) -> dict[str, Any]:
    """The settings of an experiment but for where its files lie, which is nobody else's business."""
    return {**tables, "data": {name: value for name, value in tables["data"].items() if name != "root"}}


class Record(NamedTuple):
    """What a run came to, as its file says it."""

    key: str
    content: dict[str, Any]

    @property
    def diverged(self) -> bool:
        return "diverged" in self.content

    def validation(self, select: str) -> float:
        """The metric that models are chosen by, the higher the better."""
        return float("-inf") if self.diverged else value_of(self.content["validation"], select)

    def test(self, metric: str) -> float:
        return float("nan") if self.diverged else float(self.content["test"][metric])


@dataclass(frozen=True)
class Store:
    """A folder of records; safe to share between processes, since each file is written whole or not at all."""

    folder: Path

    def find(self, job: Job) -> Record | None:
        path = self.folder / f"{job.key}.json"
        try:
            return Record(job.key, json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            raise UserError(f"cannot read {path}: {error}; remove it, and it is run again") from None

    def scores(self, record: Record) -> tuple[Floats, Floats]:
        """A run's scores of its test data, and their labels."""
        tensors = load_file(self.folder / f"{record.key}.safetensors")
        return tensors["scores"].astype(np.float64), tensors["labels"].astype(np.float64)

    def save(self, job: Job, content: dict[str, Any], scores: tuple[Floats, Floats] | None) -> Record:
        self.folder.mkdir(parents=True, exist_ok=True)
        if scores:  # first, so that whoever finds the record finds them, too
            values, labels = (array.astype(np.float32) for array in scores)
            write_atomically(self.folder / f"{job.key}.safetensors", save({"scores": values, "labels": labels}))
        write_json(self.folder / f"{job.key}.json", content)
        return Record(job.key, content)


@dataclass
class Runner:
    """Does what has not been done yet, some of it side by side."""

    store: Store
    at_once: int = 1
    device: str = "auto"
    say: Callable[[str], None] = lambda line: None
    crew: Crew[Job, Record] | None = field(default=None, init=False)  # once there is work for more than one

    def __call__(self, jobs: Sequence[Job], at_once: int | None = None) -> list[Record]:
        """The records of all jobs, in their order."""
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

    def _run(self, jobs: Sequence[Job], at_once: int, advance: Callable[[int], None]) -> Iterator[tuple[Job, Record]]:
        task = partial(perform, store=self.store, device=self.device)
        if at_once == 1 or (len(jobs) <= 1 and self.crew is None):
            self.dismiss()  # alone means alone: a crew would hold memory, also when it does nothing
            yield from ((job, task(job, side_by_side=1, advance=advance)) for job in jobs)
            return
        self.crew = self.crew or Crew(at_once, partial(task, side_by_side=at_once, advance=tell))
        try:
            yield from self.crew(jobs, advance)
        except BaseException:
            self.dismiss()
            raise

    def dismiss(self) -> None:
        """Whoever works for us goes. Whoever is done with a runner sees to it."""
        if self.crew:
            self.crew.stop()
        self.crew = None


def perform(job: Job, store: Store, device: str, side_by_side: int, advance: Callable[[int], None]) -> Record:
    """One run, from data to record. A rate too high is an outcome; anything else that goes wrong is an error."""
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
        "side_by_side": side_by_side,  # runs that shared the machine: then seconds say little
    }
    try:
        result = execute(config, hooks=Hooks(on_progress, say=notes.append))
    except DivergedError as error:
        advance((job.rounds - rounds) * job.local_steps)  # which need not be done
        return store.save(job, {**content, "diverged": str(error)}, None)
    require(
        bool(result.metrics["validation"] and result.metrics["test"]),
        f"{job.label} needs data to validate and to test on",
    )
    content |= {
        "validation": result.metrics["validation"],
        "test": result.metrics["test"],
        "best_round": result.best_round,
        "rounds": job.rounds,
        "seconds": result.seconds,
        "traffic": result.traffic and result.traffic._asdict(),
        "executor": notes[-1] if notes else "",
        "history": result.history,
    }
    return store.save(job, content, result.test_scores)


def _line(job: Job, record: Record) -> str:
    if record.diverged:
        return f"{job.label}: diverged"
    shown = in_words(record.content["validation"])
    return f"{job.label}: validation {shown}  ({record.content['seconds']:.0f} s)"

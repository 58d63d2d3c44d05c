"""The search itself: rung by rung, all algorithms together, in several processes if asked, resumable."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedxl.errors import UserError, require
from fedxl.experiments.tune.plan import FIRST_SEED, Distribution, Plan, Range, Rung, draw
from fedxl.experiments.tune.trials import Build, Outcome, RunOutcome, Trial, TrialRun, TrialStore, built, perform
from fedxl.experiments.workers import WorkerPool, report_progress
from fedxl.files import plain, read_json, write_json
from fedxl.progress import progress

FILE = "tune.json"  # what the search in a folder is
Found = dict[str, list[Trial]]  # by algorithm


@dataclass
class Search:
    """Does the trials of a plan that have no outcome yet."""

    plan: Plan
    folder: Path
    jobs: int = 1
    say: Callable[[str], None] = lambda line: None
    build: Build = built

    def __call__(self) -> Found:
        """All trials, by algorithm."""
        require(self.jobs >= 1, f"jobs must be at least 1, got {self.jobs}")
        if self.plan.settings.sampler == "optuna":
            require_optuna()
        self.store = TrialStore(self.folder)
        self._begin()
        task = partial(perform, advance=report_progress)
        self.pool: WorkerPool[TrialRun, RunOutcome] | None = WorkerPool(self.jobs, task) if self.jobs > 1 else None
        try:
            return self._climb()
        finally:
            if self.pool:
                self.pool.stop()

    def _begin(self) -> None:
        """Begin a search in the folder, or go on with the one that is there, if it is this one."""
        wanted = json.loads(json.dumps(plain(self.plan.as_json())))
        path = self.folder / FILE
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            there = read_json(path)
        except FileNotFoundError:
            write_json(path, wanted)
            return
        except UserError as error:
            raise UserError(f"{error}; remove {self.folder} to begin anew") from None
        changed = _changes(there, wanted)
        what = f"{self.folder} holds a search with another {', '.join(changed)}"
        require(not changed, f"{what}; choose another --out, or remove it")
        write_json(path, {**wanted, "space": there["space"] | wanted["space"]})

    def _climb(self) -> Found:
        found: Found = {name: [] for name in self.plan.spaces}
        rungs = self.plan.rungs
        numbers = range(1, rungs[0].trials + 1)
        if self.plan.settings.sampler == "optuna":
            # A proposal looks at the trials before it: as many at once as there are processes.
            for first in range(0, len(numbers), self.jobs):
                now = numbers[first : first + self.jobs]
                fresh = [self._trial(name, number, found[name]) for number in now for name in found]
                self._advance(fresh, rungs[0], 0)
                for trial in fresh:
                    found[trial.algorithm].append(trial)
            return found
        found = {name: [self._trial(name, number, []) for number in numbers] for name in found}
        base = 0
        for rung in rungs:
            chosen = [trial for trials in found.values() for trial in promoted(trials, rung.trials, base)]
            self._advance(chosen, rung, base)
            base = rung.rounds
        return found

    def _trial(self, algorithm: str, number: int, before: Sequence[Trial]) -> Trial:
        """A trial as it was stored, or a new one, whose settings are stored before it begins."""
        trial = self.store.load(algorithm, number)
        if trial is None:
            tune, space = self.plan.settings, self.plan.spaces[algorithm]
            settings = propose(tune.sampler, space, tune.seed, number, before)
            trial = Trial(algorithm, number, settings)
            self.store.save(trial)
        return trial

    def _advance(self, trials: Sequence[Trial], rung: Rung, base: int) -> None:
        """Train these trials up to the rung's end, where they have not been."""
        seeds = range(self.plan.settings.seeds)
        # All algorithms with one number, then the next: processes that compile do so once a kind.
        waiting = sorted((t for t in trials if t.at(rung.rounds) is None), key=lambda trial: trial.number)
        owner = {self.store.run(trial, seed): trial for trial in waiting for seed in seeds}
        todo = [self._run(trial, seed, rung, base) for trial in waiting for seed in seeds]
        if not todo:
            return
        done: dict[Path, RunOutcome] = {}
        what = f"{len(waiting)} trials to round {rung.rounds}, rounds"
        with progress(what, sum(run.rounds for run in todo)) as advance:
            alone = ((run, perform(run, advance)) for run in todo)
            for run, outcome in self.pool(todo, advance) if self.pool else alone:
                done[run.folder] = outcome
                trial = owner[run.folder]
                folders = [self.store.run(trial, seed) for seed in seeds]
                if all(folder in done for folder in folders):
                    trial.outcomes.append(_together([done[folder] for folder in folders], rung.rounds))
                    self.store.save(trial)
                    self.say(self._line(trial))

    def _run(self, trial: Trial, seed: int, rung: Rung, base: int) -> TrialRun:
        run = {"rounds": rung.rounds, "seed": int(self.plan.config.run.get("seed", 0)) + FIRST_SEED + seed}
        config = self.plan.configure(trial.algorithm, trial.settings, run)
        return TrialRun(config, self.store.run(trial, seed), base, self.build)

    def _line(self, trial: Trial) -> str:
        outcome, label = trial.last, f"{trial.algorithm} trial {trial.number} ({in_words(trial.settings)})"
        if outcome.value is None:
            return f"{label}: {outcome.failed}"
        value = shown(outcome.value, self.plan.metric)
        return f"{label}: {value} after {outcome.rounds} rounds  ({outcome.seconds:.1f} s)"


def _changes(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What differs between the search in a folder and the one asked for; other algorithms may join it."""
    if not isinstance(there.get("space"), dict):
        return ["form"]
    found = []
    for part in ("config", "tune", "space"):
        before, now = there.get(part) or {}, wanted[part]
        names = before.keys() & now.keys() if part == "space" else before.keys() | now.keys()
        found += [f"{part}.{name}" for name in sorted(names) if before.get(name) != now.get(name)]
    return found + (["metric"] if there.get("metric") != wanted["metric"] else [])


def promoted(trials: Sequence[Trial], count: int, base: int) -> list[Trial]:
    """The best `count` trials of those that stand at the end of the rung before; failed ones never go on."""
    if base == 0:
        return list(trials)
    here = [(trial, trial.at(base)) for trial in trials]
    values = {trial.number: each.value for trial, each in here if each is not None and each.value is not None}
    best = sorted(values, key=lambda number: (-values[number], number))[:count]
    return [trial for trial in trials if trial.number in best]


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Those that have not failed, the best first; before them all, those that trained longest."""
    ended = [trial for trial in trials if math.isfinite(trial.value)]
    return sorted(ended, key=lambda trial: (-trial.last.rounds, -trial.value, trial.number))


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """None: all have failed."""
    return next(iter(ranked(trials)), None)


def _together(runs: Sequence[RunOutcome], rounds: int) -> Outcome:
    """The outcome of a trial from its seeds; one that fails makes it fail."""
    failed = next((run.failed for run in runs if run.failed), "")
    values = tuple(run.value for run in runs if not run.failed)
    value = None if failed else sum(values) / len(values)
    spent, seconds = sum(run.rounds for run in runs), sum(run.seconds for run in runs)
    return Outcome(rounds=rounds, value=value, values=values, spent=spent, seconds=seconds, failed=failed)


def shown(value: float, metric: str) -> str:
    """pauc@0.3 0.8812, without the sign of metrics of which less is better."""
    return f"{metric.removeprefix('-')} {natural(value, metric):.4f}"


def natural(value: float, metric: str) -> float:
    """The metric itself, where a trial's value is the higher the better."""
    return -value if metric.startswith("-") else value


def in_words(settings: dict[str, object]) -> str:
    """lr 0.3, lam 1"""
    return ", ".join(f"{name.partition('.')[2]} {number_text(value)}" for name, value in settings.items())


def number_text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def propose(
    sampler: str, space: Mapping[str, Distribution], seed: int, number: int, before: Sequence[Trial]
) -> dict[str, Any]:
    """The settings of a trial. before: the finished ones of this algorithm, which random draws do not look at."""
    if sampler != "optuna":
        return draw(space, seed, number)
    # TPE (Bergstra et al. 2011). The study is built anew from the trials, so that a search can be resumed.
    optuna = require_optuna()
    known = {name: _distribution(optuna, each) for name, each in space.items()}
    own = zlib.crc32(f"{seed} {number}".encode())
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=own))
    for trial in before:
        given = {name: (each, trial.settings[name]) for name, each in space.items()}
        params = {name: v if isinstance(each, Range) else each.values.index(v) for name, (each, v) in given.items()}
        # Optuna ignores failed trials, but keeps away from those that were given up with a bad value.
        pruned = {"state": optuna.trial.TrialState.PRUNED, "intermediate_values": {0: -math.inf}}
        ending = {"value": trial.value} if math.isfinite(trial.value) else pruned
        study.add_trial(optuna.trial.create_trial(params=params, distributions=known, **ending))
    asked = study.ask(known).params
    found = ((name, each, asked[name]) for name, each in space.items())
    return {name: each.rounded(v) if isinstance(each, Range) else each.values[v] for name, each, v in found}


def _distribution(optuna: Any, given: Distribution) -> Any:
    kinds = optuna.distributions
    if not isinstance(given, Range):
        return kinds.CategoricalDistribution(range(len(given.values)))  # by place: a value may be a list
    if given.kind == "whole":
        return kinds.IntDistribution(int(given.low), int(given.high))
    return kinds.FloatDistribution(given.low, given.high, log=given.kind == "log")


def require_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError("sampler = 'optuna' needs optuna; pip install 'fedxl[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna

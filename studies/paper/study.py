"""What the paper's commands share: their comparisons, the same search for every method, and planned runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedxl.config.experiment import Table, build_model, build_risk, load_data
from fedxl.errors import require
from studies import harness
from studies.harness import Harness, Planned, Row, Trial
from studies.paper import published, setup
from studies.paper.published import PublishedTable
from studies.paper.setup import Budget, HyperParameters, TableColumn, Task, experiment, title_of

OURS = "FeDXL"
TUNING_SEED = 100  # the first of tuning; results are of other seeds
Pair = tuple[Task, TableColumn]
Name = tuple[str, str]  # of a task and a method
Tuned = dict[Name, list[Trial[HyperParameters]]]


@dataclass(frozen=True)
class Comparison:
    """A table of the paper: methods, metrics and changes to the data."""

    name: str
    title: str
    methods: Sequence[TableColumn]
    metrics: Mapping[str, str]  # by name, and how to say them; models are chosen by the first
    data: Table
    published: PublishedTable

    @property
    def select(self) -> str:
        return next(iter(self.metrics))


TABLE1 = Comparison(
    "table1",
    "Partial AUC",
    setup.TABLE1,
    {"pauc@0.3": "partial AUC, FPR ≤ 0.3", "pauc@0.5": "partial AUC, FPR ≤ 0.5"},
    {},
    published.TABLE1,
)
TABLE2 = Comparison(
    "table2",
    "AUC, one in five labels flipped",
    setup.TABLE2,
    {"auroc": "AUC"},
    {"flipped": 0.2},
    published.TABLE2,
)


@dataclass(frozen=True)
class Study:
    """Tasks and a budget. All commands share the rows of one file, so that none tunes what another has tuned."""

    tasks: Sequence[Task]
    budget: Budget
    seeds: int
    do: Harness

    @property
    def folder(self) -> Path:
        return self.do.path.parent

    def check_data(self) -> None:
        """Find missing or wrong data before the first run, not after hours."""
        for task in self.tasks:
            config = experiment(task, setup.TABLE1[0], self.budget, HyperParameters(1.0), 0, 1)
            splits = load_data(config)
            build_model(config, splits.train.shape, build_risk(config))
            parts = [len(splits.train), *(len(found) for found in splits.held_back.values())]
            train, validation, test = (f"{n:,}" for n in parts)
            self.do.say(f"{title_of(task.case)}: {train} images to train, {validation} to validate, {test} to test")

    def trials(
        self,
        comparison: Comparison,
        pairs: Sequence[Pair],
        choices: Callable[[Task, TableColumn], Sequence[HyperParameters]],
    ) -> Tuned:
        """One stage of tuning: each method of each task with its choices, as many for all."""
        iterations = self.budget.trial_iterations
        planned = {
            (task.name, method.label): {
                choice: [
                    self.plan(comparison, task, method, choice, TUNING_SEED + extra, iterations, trial=True)
                    for extra in range(self.budget.tuning_seeds)
                ]
                for choice in choices(task, method)
            }
            for task, method in pairs
        }
        return harness.tune(self.do, planned, comparison.select)

    def tune(self, comparison: Comparison, methods: Sequence[TableColumn]) -> Tuned:
        """First learning rates; then lam or, without lam, as many learning rates in between."""
        pairs = [(task, method) for task in self.tasks for method in methods]
        first = self.trials(comparison, pairs, lambda task, method: rates(self.budget, method))
        best = {name: harness.best(trials) for name, trials in first.items()}
        second = self.trials(
            comparison, pairs, lambda task, method: refine(self.budget, method, best[task.name, method.label])
        )
        return {name: first[name] + second[name] for name in first}

    def plan(
        self, comparison: Comparison, task: Task, method: TableColumn, choice: HyperParameters, seed: int,
        iterations: int = 0, trial: bool = False, data: Table | None = None, case: Table | None = None, **run: Any,
    ) -> Planned:  # fmt: skip
        """One run. data: changes to the task's data; case: what its row says besides."""
        iterations = iterations or self.budget.iterations
        changes, run = {**comparison.data, **(data or {})}, {"select": comparison.select, **run}
        told = {**task.case, "method": method.label, **(case or {}), **choice.case}
        told |= {"iterations": iterations, "seed": seed, **({"trial": True} if trial else {})}
        return Planned(told, experiment(task, method, self.budget, choice, seed, iterations, changes, **run), trial)

    def runs(
        self, comparison: Comparison, task: Task, method: TableColumn, trials: Sequence[Trial[HyperParameters]],
        **options: Any,
    ) -> list[Planned]:  # fmt: skip
        """The runs of a method with what its trials chose, one per seed."""
        choice = harness.best(trials)
        return [self.plan(comparison, task, method, choice, seed, **options) for seed in range(self.seeds)]

    def keep(self, name: str, tuned: Tuned, rows: Sequence[Row]) -> list[Row]:
        """Write NAME.jsonl: the rows of all trials, and of the runs that a table is of."""
        trials = [row for found in tuned.values() for trial in found for row in trial.rows]
        harness.write(self.folder / f"{name}.jsonl", [*trials, *rows])
        return [*trials, *rows]


def rates(budget: Budget, method: TableColumn) -> list[HyperParameters]:
    lam = budget.lams[0] if method.tunes_lam else None
    return [HyperParameters(rate, lam) for rate in budget.rates]


def refine(budget: Budget, method: TableColumn, best: HyperParameters) -> list[HyperParameters]:
    """The other values of lam; for methods without lam, as many learning rates closer to the best one."""
    others = budget.lams[1:]
    if method.tunes_lam:
        return [HyperParameters(best.lr, lam) for lam in others]
    step = (budget.rates[-1] / budget.rates[0]) ** (1 / max(1, len(budget.rates) - 1))  # between two rates
    pairs = math.ceil(len(others) / 2)
    nearer = [step ** (sign * place / (pairs + 1)) for place in range(1, pairs + 1) for sign in (1, -1)]
    return [HyperParameters(float(f"{best.lr * factor:.3g}")) for factor in nearer[: len(others)]]


def column_named(comparison: Comparison, label: str) -> TableColumn:
    """The method of this name. Raises UserError if it was left out."""
    found = {method.label: method for method in comparison.methods}
    require(label in found, f"this study is of {label}; --only must name it")
    return found[label]

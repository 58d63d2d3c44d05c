"""The same search for every method: first learning rates, then lam, or as many learning rates in between."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedxl.config.experiment import Table
from fedxl.errors import require
from fedxl.experiments.paper.runs import PlannedRun, Runner
from fedxl.experiments.paper.setup import Budget, HyperParameters, TableColumn, Task, experiment

SEED = 100  # the first of tuning; results are of other seeds


class Trial(NamedTuple):
    choice: HyperParameters
    value: float  # on validation data
    collapsed: bool = False  # the run itself says that it came to nothing


class TuningResult(NamedTuple):
    choice: HyperParameters
    trials: list[Trial]


@dataclass(frozen=True)
class TuningSearch:
    """Tunes the methods of a table on one task. The runner gets all trials of a stage together."""

    budget: Budget
    runner: Runner
    select: str  # the metric of the validation data that choices are made by
    data: Table  # what the table asks of the data

    def __call__(self, tasks: Sequence[Task], methods: Sequence[TableColumn]) -> dict[tuple[str, str], TuningResult]:
        pairs = [(task, method) for task in tasks for method in methods]
        first = self.trials(pairs, {_name(*pair): self.rates(pair[1]) for pair in pairs})
        best = {name: choose(trials) for name, trials in first.items()}
        second = self.trials(pairs, {_name(*pair): self.refine(pair[1], best[_name(*pair)]) for pair in pairs})
        trials = {name: first[name] + second[name] for name in first}
        return {name: TuningResult(choose(found), found) for name, found in trials.items()}

    def rates(self, method: TableColumn) -> list[HyperParameters]:
        lam = self.budget.lams[0] if method.tunes_lam else None
        return [HyperParameters(rate, lam) for rate in self.budget.rates]

    def refine(self, method: TableColumn, best: HyperParameters) -> list[HyperParameters]:
        """The other values of lam; for methods without lam, as many learning rates closer to the best one."""
        others = self.budget.lams[1:]
        if method.tunes_lam:
            return [HyperParameters(best.lr, lam) for lam in others]
        rates = self.budget.rates
        step = (rates[-1] / rates[0]) ** (1 / max(1, len(rates) - 1))  # factor between two learning rates of the grid
        count = len(others)
        pairs = math.ceil(count / 2)
        nearer = [step ** (sign * place / (pairs + 1)) for place in range(1, pairs + 1) for sign in (1, -1)]
        return [HyperParameters(float(f"{best.lr * factor:.3g}")) for factor in nearer[:count]]

    def trials(
        self, pairs: Sequence[tuple[Task, TableColumn]], choices: Mapping[tuple[str, str], Sequence[HyperParameters]]
    ) -> dict[tuple[str, str], list[Trial]]:
        """One stage: each pair with its choices, as many for all pairs."""
        jobs: list[tuple[tuple[str, str], HyperParameters, list[PlannedRun]]] = []
        # All methods with one learning rate, then the next: parallel runs then compile different programs, once each.
        for number in range(max(map(len, choices.values()))):
            for task, method in pairs:
                choice = choices[_name(task, method)][number]
                configs = [
                    experiment(
                        task, method, self.budget, choice, SEED + extra, self.budget.trial_iterations, self.data,
                        select=self.select,
                    )
                    for extra in range(self.budget.tuning_seeds)
                ]  # fmt: skip
                label = f"trial {task.title}, {method.label}, {describe(choice)}"
                jobs.append(
                    (_name(task, method), choice, [PlannedRun(label, config, trial=True) for config in configs])
                )
        records = iter(self.runner([run for _, _, runs in jobs for run in runs]))
        found: dict[tuple[str, str], list[Trial]] = {_name(*pair): [] for pair in pairs}
        for name, choice, runs in jobs:
            of_trial = [next(records) for _ in runs]
            value = sum(record.validation(self.select) for record in of_trial) / len(of_trial)
            found[name].append(Trial(choice, value, any(record.collapsed for record in of_trial)))
        return found


def choose(trials: Sequence[Trial]) -> HyperParameters:
    best = max(trials, key=lambda trial: trial.value)
    require(math.isfinite(best.value), "every learning rate that was tried diverged")
    return best.choice


def describe(choice: HyperParameters) -> str:
    return f"lr {choice.lr:g}" + ("" if choice.lam is None else f", lam {choice.lam:g}")


def _name(task: Task, method: TableColumn) -> tuple[str, str]:
    return task.name, method.label

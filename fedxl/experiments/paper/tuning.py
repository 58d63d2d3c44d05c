"""The same search for every method: rates first, then as many trials again of lam, or of rates in between."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedxl.config.experiment import Table
from fedxl.errors import require
from fedxl.experiments.paper.runs import Job, Record, Runner
from fedxl.experiments.paper.setup import Budget, Choice, Method, Subject, experiment

SEED = 100  # of tuning; results are of other seeds


class Trial(NamedTuple):
    choice: Choice
    value: float  # on validation data


class Tuned(NamedTuple):
    choice: Choice
    trials: list[Trial]


@dataclass(frozen=True)
class Search:
    """Tunes the methods of a table on one subject. All trials of a stage go to the runner together."""

    budget: Budget
    runner: Runner
    select: str  # the metric of the validation data that choices are made by
    data: Table  # what the table asks of the data

    def __call__(self, subjects: Sequence[Subject], methods: Sequence[Method]) -> dict[tuple[str, str], Tuned]:
        pairs = [(subject, method) for subject in subjects for method in methods]
        first = self._stage(pairs, {_name(*pair): self.rates(pair[1]) for pair in pairs})
        best = {name: choose(trials) for name, trials in first.items()}
        second = self._stage(pairs, {_name(*pair): self.refine(pair[1], best[_name(*pair)]) for pair in pairs})
        trials = {name: first[name] + second[name] for name in first}
        return {name: Tuned(choose(found), found) for name, found in trials.items()}

    def rates(self, method: Method) -> list[Choice]:
        lam = self.budget.lams[0] if method.tunes_lam else None
        return [Choice(rate, lam) for rate in self.budget.rates]

    def refine(self, method: Method, best: Choice) -> list[Choice]:
        """With lam its other values; without as many rates around the best one, nearer than the grid's."""
        others = self.budget.lams[1:]
        if method.tunes_lam:
            return [Choice(best.lr, lam) for lam in others]
        rates = self.budget.rates
        step = (rates[-1] / rates[0]) ** (1 / max(1, len(rates) - 1))  # from one rate of the grid to the next
        count = len(others)
        pairs = math.ceil(count / 2)
        nearer = [step ** (sign * place / (pairs + 1)) for place in range(1, pairs + 1) for sign in (1, -1)]
        return [Choice(float(f"{best.lr * factor:.3g}")) for factor in nearer[:count]]

    def _stage(
        self, pairs: Sequence[tuple[Subject, Method]], choices: Mapping[tuple[str, str], Sequence[Choice]]
    ) -> dict[tuple[str, str], list[Trial]]:
        jobs: list[tuple[tuple[str, str], Choice, Job]] = []
        # Method by method, not rate by rate: runs side by side then compile different programs, each of them once.
        for number in range(max(map(len, choices.values()))):
            for subject, method in pairs:
                choice = choices[_name(subject, method)][number]
                config = experiment(
                    subject, method, self.budget, choice, SEED, self.budget.trial_iterations, self.data,
                    select=self.select,
                )  # fmt: skip
                label = f"trial {subject.title}, {method.label}, {describe(choice)}"
                jobs.append((_name(subject, method), choice, Job(label, config)))
        records: list[Record] = self.runner([job for _, _, job in jobs])
        found: dict[tuple[str, str], list[Trial]] = {_name(*pair): [] for pair in pairs}
        for (name, choice, _), record in zip(jobs, records, strict=True):
            found[name].append(Trial(choice, record.validation(self.select)))
        return found


def choose(trials: Sequence[Trial]) -> Choice:
    best = max(trials, key=lambda trial: trial.value)
    require(math.isfinite(best.value), "every rate that was tried diverged")
    return best.choice


def describe(choice: Choice) -> str:
    return f"lr {choice.lr:g}" + ("" if choice.lam is None else f", lam {choice.lam:g}")


def _name(subject: Subject, method: Method) -> tuple[str, str]:
    return subject.name, method.label

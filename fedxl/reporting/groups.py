"""Runs that differ by their seed only, as one; and which runs judged the same examples."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedxl.errors import UserError, unknown
from fedxl.evaluation.compare import paired
from fedxl.metrics import value_of
from fedxl.reporting.runs import Run
from fedxl.training.checkpoint import FREE

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# What follows from the seed where a config names the data: `fit` knows its data by nothing else.
DRAWN = ("task.data", "task.examples", "task.validation", "task.clients")
UNCOUNTED = FREE | {"run.seed"}


@dataclass(frozen=True, eq=False)
class Group:
    """Runs with the same settings but for the seed. `shown` stands for them where one model is looked at."""

    letter: str
    label: str
    runs: Sequence[Run]
    shown: Run

    def over_runs(self, name: str) -> list[float]:
        """A metric of each run, where it is known."""
        found = (run.values.get(name) for run in self.runs)
        return [float(value) for value in found if value is not None]


def grouped(runs: Sequence[Run], reference: str = "") -> tuple[list[Group], Group]:
    """The groups in the order of their first runs, and the one that the report looks at closely.

    That is the one which `reference` names, or else the best on validation data among the federated ones.
    """
    sorted_: dict[str, list[Run]] = {}
    for run in runs:
        sorted_.setdefault(_sameness(run), []).append(run)
    members = list(sorted_.values())
    labels, preference = _labels(members), _preference(runs)
    if reference:
        named = [n for n, each in enumerate(members) if reference in (labels[n], *(run.name for run in each))]
        if not named:
            raise unknown("run", reference, {*labels, *(run.name for run in runs)})
        index = named[0]
    else:
        federated = [n for n, each in enumerate(members) if not each[0].centralized] or range(len(members))
        index = max(federated, key=lambda n: float(np.mean([preference(run) for run in members[n]])))
    focus = max(members[index], key=preference)
    groups = []
    for number, (label, each) in enumerate(zip(labels, members, strict=True)):
        letter = LETTERS[number] if number < len(LETTERS) else str(number + 1)
        # One that judged the same examples as the focus if there is one, else the preferred one.
        shown = next((run for run in each if same_examples(run, focus)), max(each, key=preference))
        groups.append(Group(letter, label, each, focus if number == index else shown))
    return groups, groups[index]


def _preference(runs: Sequence[Run]) -> Callable[[Run], float]:
    """How good a run is on validation data, the higher the better; minus infinity if that is not known.

    By the metric that chose the best rounds; by AUROC if these differ, for values of two metrics cannot be compared.
    """
    chosen = {run.chosen_by for run in runs}
    metric = chosen.pop() if len(chosen) == 1 else "auroc"

    def preference(run: Run) -> float:
        value = value_of(run.shown.get("validation") or {}, metric)
        return value if np.isfinite(value) else -np.inf

    return preference


def same_examples(first: Run, second: Run) -> bool:
    """Whether two runs scored the same test (else validation) examples, so that they form pairs."""
    split = judged_on(first)
    if not split or split != judged_on(second) or _data(first) != _data(second):
        return False
    if first.counts or second.counts:
        return False  # counts in bins do not say which example is which
    try:
        paired(first.scored[split], second.scored[split])
    except UserError:
        return False
    return True


def judged_on(run: Run) -> str:
    """The split that a report measures on: test, else validation; empty if there are no scores."""
    return next((split for split in ("test", "validation") if split in run.scored), "")


def _data(run: Run) -> Any:
    """What tells data apart beyond their labels: a digest of the validation data, else how they were drawn."""
    if digest := run.settings.get("task.validation"):
        return digest
    data = {key: value for key, value in run.settings.items() if key.startswith("data.")}
    return [json.dumps(data, sort_keys=True, default=str), run.seed]


def _sameness(run: Run) -> str:
    """Equal for runs that differ by seed only."""
    if run.label:
        return f"={run.label}"
    dropped = UNCOUNTED | set(DRAWN if "data.name" in run.settings else ())
    kept = {key: value for key, value in run.settings.items() if key not in dropped}
    alone = "" if kept else run.name  # of nothing but a name we know no equal
    return json.dumps([kept, alone], sort_keys=True, default=str)


def _labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """A name for each group: its run's, or what sets it apart from the other groups."""
    algorithms = [runs[0].algorithm for runs in groups]
    apart = len(set(algorithms)) == len(groups)
    found = []
    for runs, algorithm in zip(groups, algorithms, strict=True):
        shared = algorithm if apart else f"{runs[0].name} and {len(runs) - 1} more"
        found.append(runs[0].label or (runs[0].name if len(runs) == 1 else shared))
    return found


def differing(groups: Sequence[Group]) -> tuple[dict[str, list[Any]], Mapping[str, Any]]:
    """Settings that differ between groups, a value each; and those that all share."""
    tables = [group.shown.settings for group in groups]
    names = list(dict.fromkeys(name for table in tables for name in table))
    differ = {name: [table.get(name) for table in tables] for name in names}
    unlike = {name: values for name, values in differ.items() if any(value != values[0] for value in values)}
    shared = {name: values[0] for name, values in differ.items() if name not in unlike}
    return unlike, shared

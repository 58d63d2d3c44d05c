"""Tables 1 and 2: every method tuned in the same way, then run with several seeds; our results beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedxl import metrics
from fedxl.experiments.paper import pictures
from fedxl.experiments.paper.published import Cell
from fedxl.experiments.paper.runs import RunRecord, RunStore
from fedxl.experiments.paper.setup import Task
from fedxl.experiments.paper.study import OURS, Comparison, Study, machines, outline
from fedxl.experiments.paper.tuning import TuningResult, describe
from fedxl.reporting.text import as_markdown, mean_and_spread, mean_with_spread, over_seeds

Floats = npt.NDArray[np.float64]


class Entry(NamedTuple):
    """A method on a task: its hyper-parameters, and its runs, one per seed."""

    tuned: TuningResult
    records: list[RunRecord]


Entries = Mapping[tuple[str, str], Entry]


class Row(NamedTuple):
    """One metric on one task, for each method."""

    task: Task
    metric: str
    ours: dict[str, list[float]]  # one value per seed
    drawn: dict[str, Floats]  # on bootstrapped test data, mean over seeds; missing where labels differ
    paper: Mapping[str, Cell]


def run(study: Study, comparison: Comparison) -> str:
    """Make a table, from tuning to files. Returns the text to print."""
    study.check_data()
    tuned = study.tune(comparison)
    entries = _finals(study, comparison, tuned)
    store = study.runner.store
    rows = [row(store, comparison, entries, task, metric) for task in study.tasks for metric in comparison.metrics]
    text = markdown(study, comparison, rows, entries)
    study.write(comparison.name, text, content(study, comparison, rows, entries))
    bars = {f"{r.task.title}\n{comparison.metrics[r.metric]}": _bars(r) for r in rows}
    pictures.bars(
        study.folder / f"{comparison.name}.png", comparison.title, [m.label for m in comparison.methods], bars
    )
    return text


def _finals(study: Study, comparison: Comparison, tuned: Mapping[tuple[str, str], TuningResult]) -> Entries:
    pairs = [(task, method) for task in study.tasks for method in comparison.methods]
    jobs = {(s.name, m.label): study.jobs(comparison, s, m, tuned[s.name, m.label].choice) for s, m in pairs}
    return {name: Entry(tuned[name], records) for name, records in study.perform(jobs).items()}


def row(store: RunStore, comparison: Comparison, entries: Entries, task: Task, metric: str) -> Row:
    ours, drawn = {}, {}
    for method in comparison.methods:
        records = entries[task.name, method.label].records
        ours[method.label] = [record.test(metric) for record in records]
        if not any(record.diverged for record in records):
            drawn[method.label] = _resampled([store.scores(record) for record in records], metric)
    known = comparison.published.get((task.name, metric), {})  # not for a data set with other options
    return Row(task, metric, ours, {name: values for name, values in drawn.items() if len(values)}, known)


def _resampled(runs: Sequence[tuple[Floats, Floats]], metric: str) -> Floats:
    labels = runs[0][1]
    if not all(np.array_equal(labels, other) for _, other in runs):
        return np.empty(0)
    return metrics.resampled([scores for scores, _ in runs], labels, metrics.split(metric)[1] or 1.0)


def _bars(row: Row) -> list[pictures.Bar]:
    bars = []
    for name, values in row.ours.items():
        mean, spread = mean_and_spread(values)
        paper = row.paper.get(name)
        interval = metrics.interval(row.drawn[name]) if name in row.drawn else None
        bars.append(pictures.Bar(mean, spread, paper and paper.mean, interval))
    return bars


def markdown(study: Study, comparison: Comparison, rows: Sequence[Row], entries: Entries) -> str:
    labels = [method.label for method in comparison.methods]
    lines: list[list[str]] = []
    for found in rows:
        head = [found.task.title, comparison.metrics[found.metric]]
        lines.append([*head, "ours", *(mean_with_spread(found.ours[name]) for name in labels)])
        intervals = [_interval(found.drawn.get(name)) for name in labels]
        lines.append(["", "", "95 % interval", *intervals])
        if found.paper:
            cells = [f"{found.paper[name].mean:.4f} ± {found.paper[name].spread:.4f}" for name in labels]
            lines.append(["", "", "the paper", *cells])
    budget, runs = study.budget, [record for entry in entries.values() for record in entry.records]
    trials = len(budget.rates) + len(budget.lams) - 1
    parts = [
        f"# {comparison.title}\n",
        f"Test data; {over_seeds(study.seeds)} of {budget.iterations:,} iterations, each at its best round "
        f"on validation data. Every method was tuned by {trials} trials of {budget.trial_iterations:,} iterations "
        f"with another seed, on validation data. "
        f"The second line is the 95 % bootstrap interval over test sets.\n",
        as_markdown(lines, ["data", "metric", "", *labels]),
        *_leads(comparison, rows),
        "## Chosen hyper-parameters\n",
        as_markdown(
            [
                [task.title, *(describe(entries[task.name, name].tuned.choice) for name in labels)]
                for task in study.tasks
            ],
            ["data", *labels],
        ),
        f"On {'; '.join(machines(runs))}.\n",
    ]
    return "\n".join(parts)


def _leads(comparison: Comparison, rows: Sequence[Row]) -> list[str]:
    """FeDXL against each of the others; nothing if only one of them was asked for."""
    others = [method.label for method in comparison.methods if method.label != OURS]
    if not others or len(others) == len(comparison.methods):
        return []
    lines = [[r.task.title, comparison.metrics[r.metric], *(str(lead(r, name)) for name in others)] for r in rows]
    return [
        f"## {OURS} against the others\n",
        "Difference of the means, with its 95 % bootstrap interval. Both methods see the same resampled test sets.\n",
        as_markdown(lines, ["data", "metric", *others]),
    ]


def _interval(drawn: Floats | None) -> str:
    if drawn is None:
        return ""
    low, high = metrics.interval(drawn)
    return f"{low:.4f} to {high:.4f}"


class Lead(NamedTuple):
    """By how much FeDXL is above another method, and between what on bootstrapped test sets."""

    mean: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        if np.isnan(self.mean):
            return "diverged"
        if self.interval is None:
            return f"{self.mean:+.4f}"
        low, high = self.interval
        return f"{self.mean:+.4f} ({low:+.4f} to {high:+.4f})"


def lead(row: Row, other: str) -> Lead:
    mean = float(np.mean(row.ours[OURS]) - np.mean(row.ours[other]))
    paired = OURS in row.drawn and other in row.drawn
    return Lead(mean, metrics.interval(row.drawn[OURS] - row.drawn[other]) if paired else None)


def content(study: Study, comparison: Comparison, rows: Sequence[Row], entries: Entries) -> dict[str, Any]:
    """The table and all runs behind it, as JSON. The whole history of a run is in its own file."""
    return {
        "table": comparison.name,
        **study.how(),
        "rows": [
            {
                "data": found.task.name,
                "figure": found.metric,  # as files of earlier versions call it
                "ours": found.ours,
                "intervals": {name: metrics.interval(values) for name, values in found.drawn.items()},
                "paper": {name: cell._asdict() for name, cell in found.paper.items()},
            }
            for found in rows
        ],
        "methods": [
            {
                "data": task,
                "method": method,
                "chosen": vars(entry.tuned.choice),
                "trials": [{**vars(trial.choice), "value": trial.value} for trial in entry.tuned.trials],
                "runs": [outline(record) for record in entry.records],
            }
            for (task, method), entry in entries.items()
        ],
    }

"""Tables 1 and 2: every method tuned alike, then run with several seeds; our results beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedxl import metrics
from fedxl.experiments.paper import pictures
from fedxl.experiments.paper.published import Cell
from fedxl.experiments.paper.runs import Record, Store
from fedxl.experiments.paper.setup import Subject
from fedxl.experiments.paper.study import OURS, Contest, Study, machines, outline
from fedxl.experiments.paper.tuning import Tuned, describe
from fedxl.reporting.report import as_markdown, mean_and_spread, over_seeds, within

Floats = npt.NDArray[np.float64]


class Entry(NamedTuple):
    """A method on a subject: what was chosen, and its runs, one a seed."""

    tuned: Tuned
    records: list[Record]


Entries = Mapping[tuple[str, str], Entry]


class Row(NamedTuple):
    """One metric on one subject, method by method."""

    subject: Subject
    metric: str
    ours: dict[str, list[float]]  # a value for each seed
    drawn: dict[str, Floats]  # on resampled test data, mean over seeds; empty where labels differ
    paper: Mapping[str, Cell]


def run(study: Study, contest: Contest) -> str:
    """Everything of a table, from tuning to files; returns what to print."""
    study.check_data()
    tuned = study.tune(contest)
    entries = _finals(study, contest, tuned)
    store = study.runner.store
    rows = [row(store, contest, entries, subject, metric) for subject in study.subjects for metric in contest.metrics]
    text = markdown(study, contest, rows, entries)
    study.write(contest.name, text, content(study, contest, rows, entries))
    bars = {f"{r.subject.title}\n{contest.metrics[r.metric]}": _bars(r) for r in rows}
    pictures.bars(study.folder / f"{contest.name}.png", contest.title, [m.label for m in contest.methods], bars)
    return text


def _finals(study: Study, contest: Contest, tuned: Mapping[tuple[str, str], Tuned]) -> Entries:
    pairs = [(subject, method) for subject in study.subjects for method in contest.methods]
    jobs = {(s.name, m.label): study.jobs(contest, s, m, tuned[s.name, m.label].choice) for s, m in pairs}
    return {name: Entry(tuned[name], records) for name, records in study.perform(jobs).items()}


def row(store: Store, contest: Contest, entries: Entries, subject: Subject, metric: str) -> Row:
    ours, drawn = {}, {}
    for method in contest.methods:
        records = entries[subject.name, method.label].records
        ours[method.label] = [record.test(metric) for record in records]
        if not any(record.diverged for record in records):
            drawn[method.label] = _resampled([store.scores(record) for record in records], metric)
    known = contest.published.get((subject.name, metric), {})  # not of a set with other options
    return Row(subject, metric, ours, {name: values for name, values in drawn.items() if len(values)}, known)


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


def markdown(study: Study, contest: Contest, rows: Sequence[Row], entries: Entries) -> str:
    labels = [method.label for method in contest.methods]
    lines: list[list[str]] = []
    for found in rows:
        head = [found.subject.title, contest.metrics[found.metric]]
        lines.append([*head, "ours", *(within(found.ours[name]) for name in labels)])
        intervals = [_interval(found.drawn.get(name)) for name in labels]
        lines.append(["", "", "95 % of test sets", *intervals])
        if found.paper:
            cells = [f"{found.paper[name].mean:.4f} ± {found.paper[name].spread:.4f}" for name in labels]
            lines.append(["", "", "the paper", *cells])
    budget, runs = study.budget, [record for entry in entries.values() for record in entry.records]
    trials = len(budget.rates) + len(budget.lams) - 1
    parts = [
        f"# {contest.title}\n",
        f"Test data; {over_seeds(study.seeds)} of {budget.iterations:,} iterations, each at the round that is best "
        f"on validation data. Every method was tuned by {trials} trials of {budget.trial_iterations:,} iterations "
        f"with another seed, on validation data. "
        f"The second line holds the middle 95 % of bootstrapped test sets.\n",
        as_markdown(lines, ["data", "metric", "", *labels]),
        "## FeDXL against the others\n",
        "Difference of the means, and the middle 95 % of it over bootstrapped test sets, which both meet alike.\n",
        as_markdown(
            [[r.subject.title, contest.metrics[r.metric], *(_lead(r, name) for name in labels[:-1])] for r in rows],
            ["data", "metric", *labels[:-1]],
        ),
        "## What was chosen\n",
        as_markdown(
            [
                [subject.title, *(describe(entries[subject.name, name].tuned.choice) for name in labels)]
                for subject in study.subjects
            ],
            ["data", *labels],
        ),
        f"On {'; '.join(machines(runs))}.\n",
    ]
    return "\n".join(parts)


def _interval(drawn: Floats | None) -> str:
    if drawn is None:
        return ""
    low, high = metrics.interval(drawn)
    return f"{low:.4f} to {high:.4f}"


def _lead(row: Row, other: str) -> str:
    mean = float(np.mean(row.ours[OURS]) - np.mean(row.ours[other]))
    if np.isnan(mean):
        return "diverged"
    if OURS not in row.drawn or other not in row.drawn:
        return f"{mean:+.4f}"
    low, high = metrics.interval(row.drawn[OURS] - row.drawn[other])
    return f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"


def content(study: Study, contest: Contest, rows: Sequence[Row], entries: Entries) -> dict[str, Any]:
    """The table for programs, and what went into it; curves and all, each run is in its own file."""
    return {
        "table": contest.name,
        **study.how(),
        "rows": [
            {
                "data": found.subject.name,
                "figure": found.metric,  # as files of earlier versions call it
                "ours": found.ours,
                "intervals": {name: metrics.interval(values) for name, values in found.drawn.items()},
                "paper": {name: cell._asdict() for name, cell in found.paper.items()},
            }
            for found in rows
        ],
        "methods": [
            {
                "data": subject,
                "method": method,
                "chosen": vars(entry.tuned.choice),
                "trials": [{**vars(trial.choice), "value": trial.value} for trial in entry.tuned.trials],
                "runs": [outline(record) for record in entry.records],
            }
            for (subject, method), entry in entries.items()
        ],
    }

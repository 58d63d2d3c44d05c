"""Tables 1 and 2: every method tuned in the same way, then run with several seeds; our results beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedxl import metrics
from fedxl.evaluation import resampling
from fedxl.reporting.text import as_markdown, mean_and_spread, mean_with_spread, over_seeds
from fedxl.sampling import Floats
from studies import pictures
from studies.harness import Row, group, machines
from studies.paper.published import Cell
from studies.paper.setup import HyperParameters, title_of
from studies.paper.study import OURS, Comparison, Study

Arrays = Callable[[Row], Mapping[str, Floats]]


class Line(NamedTuple):
    """One metric on one data set, for each method."""

    title: str
    metric: str
    ours: dict[str, list[float]]  # one value per seed
    drawn: dict[str, Floats]  # on bootstrapped test data, mean over seeds; missing where scores were not kept
    paper: Mapping[str, Cell]


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


def run(study: Study, comparison: Comparison) -> str:
    """Make a table, from tuning to files. Returns the text to print."""
    study.check_data()
    tuned = study.tune(comparison, comparison.methods)
    planned = [
        run
        for task in study.tasks
        for method in comparison.methods
        for run in study.runs(comparison, task, method, tuned[task.name, method.label])
    ]
    rows = study.keep(comparison.name, tuned, study.do(planned))
    lines = table(comparison, rows, study.do.arrays)
    draw(study, comparison, lines)
    return markdown(comparison, rows, lines)


def table(comparison: Comparison, rows: Sequence[Row], arrays: Arrays = lambda row: {}) -> list[Line]:
    """The lines of the table. With the scores of all runs they have intervals over test sets."""
    finals = [row for row in rows if not row.case.get("trial")]
    return [
        line_of(comparison, group(own, "method"), metric, arrays)
        for own in group(finals, "data", "network").values()
        for metric in comparison.metrics
    ]


def line_of(comparison: Comparison, methods: Mapping[str, Sequence[Row]], metric: str, arrays: Arrays) -> Line:
    case = next(iter(methods.values()))[0].case
    ours = {name: [row.test(metric) for row in rows] for name, rows in methods.items()}
    drawn = {name: resample([arrays(row) for row in rows], metric) for name, rows in methods.items()}
    known = comparison.published.get((case["data"], metric), {})  # not for a data set with other options
    return Line(title_of(case), metric, ours, {name: values for name, values in drawn.items() if len(values)}, known)


def resample(runs: Sequence[Mapping[str, Floats]], metric: str) -> Floats:
    """The mean of a metric over seeds on bootstrapped test sets; empty unless all runs have scores of the same."""
    if not all("scores" in run and np.array_equal(runs[0]["labels"], run["labels"]) for run in runs):
        return np.empty(0)
    limit = metrics.split(metric)[1] or 1.0
    return resampling.resampled([run["scores"] for run in runs], runs[0]["labels"], limit)


def lead(line: Line, other: str) -> Lead:
    mean = float(np.mean(line.ours[OURS]) - np.mean(line.ours[other]))
    paired = OURS in line.drawn and other in line.drawn
    return Lead(mean, metrics.interval(line.drawn[OURS] - line.drawn[other]) if paired else None)


def markdown(comparison: Comparison, rows: Sequence[Row], lines: Sequence[Line]) -> str:
    """The table as a page. All of it comes from rows, but for the intervals."""
    labels = list(lines[0].ours)
    finals = [row for row in rows if not row.case.get("trial")]
    trials = group([row for row in rows if row.case.get("trial")], "data", "network", "method")
    count = len(next(iter(trials.values()), []))
    length = {row.case["iterations"] for rows in trials.values() for row in rows}
    second = " The second line is the 95 % bootstrap interval over test sets." if lines[0].drawn else ""
    parts = [
        f"# {comparison.title}\n",
        f"Test data; {over_seeds(len(next(iter(lines[0].ours.values()))))} of {finals[0].case['iterations']:,} "
        "iterations, each at its best round on validation data. Every method was tuned by "
        f"{count} trials of {', '.join(f'{n:,}' for n in sorted(length))} iterations with another seed, on "
        f"validation data.{second}\n",
        as_markdown(_body(comparison, lines, labels), ["data", "metric", "", *labels]),
        *_leads(comparison, lines, labels),
        "## Chosen hyper-parameters\n",
        _choices(finals, labels),
        f"On {machines(finals)}.\n",
    ]
    return "\n".join(parts)


def _body(comparison: Comparison, lines: Sequence[Line], labels: Sequence[str]) -> list[list[str]]:
    found: list[list[str]] = []
    for line in lines:
        head = [line.title, comparison.metrics[line.metric]]
        found.append([*head, "ours", *(mean_with_spread(line.ours[name]) for name in labels)])
        if line.drawn:
            found.append(["", "", "95 % interval", *(_interval(line, name) for name in labels)])
        if line.paper:
            cells = [f"{line.paper[name].mean:.4f} ± {line.paper[name].spread:.4f}" for name in labels]
            found.append(["", "", "the paper", *cells])
    return found


def _interval(line: Line, name: str) -> str:
    if name not in line.drawn:
        return ""
    low, high = metrics.interval(line.drawn[name])
    return f"{low:.4f} to {high:.4f}"


def _leads(comparison: Comparison, lines: Sequence[Line], labels: Sequence[str]) -> list[str]:
    """FeDXL against each of the others; nothing if only one of them was asked for."""
    others = [label for label in labels if label != OURS]
    if not others or len(others) == len(labels):
        return []
    cells = [[li.title, comparison.metrics[li.metric], *(str(lead(li, name)) for name in others)] for li in lines]
    return [
        f"## {OURS} against the others\n",
        "Difference of the means, with its 95 % bootstrap interval. Both methods see the same resampled test sets.\n",
        as_markdown(cells, ["data", "metric", *others]),
    ]


def _choices(finals: Sequence[Row], labels: Sequence[str]) -> str:
    body = []
    for own in group(finals, "data", "network").values():
        cases = {name: rows[0].case for name, rows in group(own, "method").items()}
        chosen = [str(HyperParameters(cases[name]["lr"], cases[name].get("lam"))) for name in labels]
        body.append([title_of(own[0].case), *chosen])
    return as_markdown(body, ["data", *labels])


def draw(study: Study, comparison: Comparison, lines: Sequence[Line]) -> None:
    bars = {f"{line.title}\n{comparison.metrics[line.metric]}": _bars(line) for line in lines}
    path = study.folder / f"{comparison.name}.png"
    pictures.bars(path, comparison.title, list(lines[0].ours), bars)


def _bars(line: Line) -> list[pictures.Bar]:
    found = []
    for name, values in line.ours.items():
        paper = line.paper.get(name)
        interval = metrics.interval(line.drawn[name]) if name in line.drawn else None
        found.append(pictures.Bar(*mean_and_spread(values), paper and paper.mean, interval))
    return found

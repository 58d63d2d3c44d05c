"""What people read after a run: tables of runs, as text and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedxl import metrics
from fedxl.errors import printable
from fedxl.evaluation.intervals import Interval, bootstrap, delong
from fedxl.evaluation.label_means import mean_auroc
from fedxl.reporting.runs import Run, read_run

MOST = 10_000  # examples; a bootstrap of more takes seconds a run


class Outcome(NamedTuple):
    """One run for the table: metrics of the best round once it has finished, the latest ones before."""

    run: Sequence[str]  # its name, algorithm, risk, state and best round
    metrics: Mapping[str, Any]
    intervals: Mapping[str, Interval]
    rest: Sequence[str]  # which data the metrics are of, and seconds
    epsilon: str = ""  # of a run with differential privacy


def table(paths: Sequence[Path]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a table of runs. A metric of the user's own has a column if any of the runs has it."""
    outcomes = [_outcome(read_run(path)) for path in paths]
    names = metrics.shown(*(outcome.metrics for outcome in outcomes))
    columns = ["run", "algorithm", "risk", "state", "best round", *map(printable, names), "on", "seconds"]
    rows = [[*each.run, *(_cell(each, name) for name in names), *each.rest] for each in outcomes]
    if any(each.epsilon for each in outcomes):
        columns.append("epsilon")
        rows = [[*row, each.epsilon] for row, each in zip(rows, outcomes, strict=True)]
    return columns, rows


def _outcome(run: Run) -> Outcome:
    best = "" if run.best_round is None else str(run.best_round)
    told = [printable(run.name), printable(run.algorithm, 60), printable(run.risk, 60), run.state, best]
    seconds = (run.done or run.shown).get("seconds")
    return Outcome(told, run.values, intervals(run), [run.split, _number(seconds, 1)], run.epsilon)


def intervals(run: Run) -> dict[str, Interval]:
    """Of AUROC, and of the metric that chose the model: where its scores are known, and without much waiting."""
    scored = run.scored.get(run.split)
    if run.split in run.by_label:
        return {"auroc": mean_auroc(run.by_label[run.split])}
    if scored is None:
        return {}
    found = {"auroc": delong(scored.scores, scored.labels)}
    base = run.metric.partition("@")[0]
    if base in metrics.usual() and run.metric not in found and len(scored) <= MOST:
        found[run.metric] = bootstrap(run.metric, scored.scores, scored.labels)
    return found


def _cell(outcome: Outcome, name: str) -> str:
    found = outcome.intervals.get(name)
    known = found is not None and math.isfinite(found.low) and math.isfinite(found.high)
    ends = f" [{found.low:.3f}, {found.high:.3f}]" if found is not None and known else ""
    return _number(outcome.metrics.get(name), 4) + ends


def _number(value: Any, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else ""

"""What people read after a run: tables of runs, as text and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedxl import metrics
from fedxl.errors import printable
from fedxl.evaluation.intervals import Interval, bootstrap, delong
from fedxl.evaluation.label_means import mean_auroc
from fedxl.reporting.runs import Run, read_run

MOST = 10_000  # examples; a bootstrap of more takes seconds per run


def table(paths: Sequence[Path]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a table of runs: metrics of the best round once a run has finished, the latest ones before.

    A metric of the user's own, and epsilon, have a column if any of the runs has them.
    """
    runs = [read_run(path) for path in paths]
    names = metrics.shown(*(run.values for run in runs))
    private = any(run.epsilon for run in runs)
    columns = ["run", "algorithm", "risk", "state", "best round", *map(printable, names), "on", "seconds"]
    rows = []
    for run in runs:
        known, best = intervals(run), "" if run.best_round is None else str(run.best_round)
        head = [printable(run.name), printable(run.algorithm, 60), printable(run.risk, 60), run.state, best]
        cells = [_number(run.values.get(name), 4) + _ends(known.get(name)) for name in names]
        seconds = _number((run.done or run.shown).get("seconds"), 1)
        rows.append([*head, *cells, run.split, seconds, *([run.epsilon] if private else [])])
    return [*columns, *(["epsilon"] if private else [])], rows


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


def _ends(found: Interval | None) -> str:
    known = found is not None and math.isfinite(found.low) and math.isfinite(found.high)
    return f" [{found.low:.3f}, {found.high:.3f}]" if found is not None and known else ""


def _number(value: Any, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else ""

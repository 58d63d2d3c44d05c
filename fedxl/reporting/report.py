"""What people read after a run: tables of runs, as text and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from fedxl import metrics, toml
from fedxl.errors import printable, require
from fedxl.training.rundir import STOPPED_EARLY, read_metrics


def run_dirs(paths: Iterable[Path]) -> list[Path]:
    """The runs among these folders and directly under them."""
    found: list[Path] = []
    for path in paths:
        require(path.is_dir(), f"there is no folder {path}")
        inside = [path] if is_run(path) else sorted(child for child in path.iterdir() if is_run(child))
        require(bool(inside), f"{path} holds no run: no config.toml in it or directly below it")
        found += inside
    return found


def is_run(path: Path) -> bool:
    return (path / "config.toml").is_file()


class Outcome(NamedTuple):
    """One run for the table: metrics of the best round once it has finished, the latest ones before."""

    run: Sequence[str]  # its name, algorithm, risk, state and best round
    metrics: Mapping[str, Any]
    rest: Sequence[str]  # which data the metrics are of, and seconds


def table(paths: Sequence[Path]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a table of runs. A metric of the user's own has a column if any of the runs has it."""
    outcomes = [_outcome(path) for path in paths]
    names = metrics.shown(*(outcome.metrics for outcome in outcomes))
    columns = ["run", "algorithm", "risk", "state", "best round", *map(printable, names), "on", "seconds"]
    rows = [[*run, *(_number(values.get(name), 4) for name in names), *rest] for run, values, rest in outcomes]
    return columns, rows


def _outcome(path: Path) -> Outcome:
    config = toml.read(path / "config.toml")
    records, _ = read_metrics(path)
    done = next((record for record in records if "test" in record), None)
    evaluations = {record["round"]: record for record in records if "test" not in record}
    latest: dict[str, Any] = evaluations[max(evaluations)] if evaluations else {}
    shown = evaluations.get(done.get("best_round", 0), latest) if done else latest
    values = (done or {}).get("test") or shown.get("validation") or {}
    run = [
        path.resolve().name,
        *(str(config.get(section, {}).get("name", "?")) for section in ("algorithm", "risk")),
        _state(done, latest),
        str(done.get("best_round", "")) if done else "",
    ]
    on = "test" if (done or {}).get("test") else "validation" if values else ""
    return Outcome(run, values, [on, _number((done or latest).get("seconds"), 1)])


def _state(done: Mapping[str, Any] | None, latest: Mapping[str, Any]) -> str:
    """How far a run is."""
    if done is None:
        return f"at round {latest.get('round', 0)}"
    return "finished (stopped early)" if done.get(STOPPED_EARLY) else "finished"


def in_words(values: Mapping[str, Any]) -> str:
    """The metrics that people ask for, in one line."""
    names = (name for name in metrics.shown(values) if values.get(name) is not None)
    return "  ".join(f"{printable(name)} {values[name]:.4f}" for name in names)


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation; of one value the latter is 0."""
    return float(np.mean(values)), float(np.std(values, ddof=min(1, len(values) - 1)))


def mean_with_spread(values: Sequence[float]) -> str:
    """0.8281 ± 0.0012, of one run 0.8281, or what stands for runs that came to nothing."""
    mean, spread = mean_and_spread(values)
    if np.isnan(mean):
        return "diverged"
    return f"{mean:.4f} ± {spread:.4f}" if len(values) > 1 else f"{mean:.4f}"


def over_seeds(count: int, what: str = "mean ± standard deviation") -> str:
    """In words what a table holds, by default the values of `mean_with_spread`."""
    return f"{what} over {count} seeds" if count > 1 else "one seed"


def _number(value: Any, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else ""


def as_text(rows: Sequence[Sequence[str]], columns: Sequence[str], title: str = "") -> Table:
    table = Table(title=title or None)
    for name, cells in zip(columns, zip(*rows, strict=True), strict=True):
        table.add_column(Text(name), justify="right" if _numeric(cells) else "left", no_wrap=True)
    for line in rows:
        table.add_row(*map(Text, line))  # as they are: a folder's name may look like rich's markup
    return table


def as_markdown(rows: Sequence[Sequence[str]], columns: Sequence[str]) -> str:
    aligned = ["---:" if _numeric(cells) else "---" for cells in zip(*rows, strict=True)]
    lines: list[Sequence[str]] = [columns, aligned, *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _numeric(cells: Iterable[str]) -> bool:
    return all(set(cell) <= set("0123456789.-± ") for cell in cells)

"""Numbers and tables as text and as Markdown. It loads nothing large: every command uses it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from fedxl import metrics
from fedxl.errors import printable
from fedxl.training.run_folder import sites_heard

NAME = 9  # characters of a name before it folds


def in_words(values: Mapping[str, Any]) -> str:
    """The metrics that people ask for, in one line."""
    names = (name for name in metrics.shown(values) if values.get(name) is not None)
    return "  ".join(f"{printable(name)} {values[name]:.4f}" for name in names)


def evaluation_in_words(row: Mapping[str, Any], split: str) -> str:
    """The metrics of a metrics row, and how many sites they rest on, if these sent them."""
    heard = sites_heard(row, split)
    return in_words(row.get(split) or {}) + (f"  (measured at {heard})" if heard else "")


def sites_in_words(remarks: Mapping[str, Any]) -> str:
    """How many sites took part in the latest of these rounds: ", trained by 2 of 3 sites"; "" in a simulation."""
    latest = (remarks.get("participants") or [{}])[-1]
    return f", trained by {len(latest['sites'])} of {latest['of']} sites" if latest else ""


def state_in_words(site: Mapping[str, Any]) -> str:
    """Whether a site is connected, as the server's status file says: lost at 20:54:13, waited for until 20:55:13."""
    parts = ((site.get("state"), ""), (site.get("since"), " at "), (site.get("until"), ", waited for until "))
    return "".join(f"{before}{printable(value, 40)}" for value, before in parts if value)


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


def as_text(rows: Sequence[Sequence[str]], columns: Sequence[str], title: str = "", lines: bool = True) -> Table:
    """A table in which names fold where there is little room, and numbers never do: print it with crop=False.

    lines: whether there are lines between columns, which cost room.
    """
    table = Table(title=title or None, box=box.HEAVY_HEAD if lines else None, pad_edge=lines)
    for name, cells in zip(columns, zip(*rows, strict=True), strict=True):
        numbers, widest = _numeric(cells), max(map(len, cells))
        # rich cuts what may not wrap, unless its column has a width; the words of a head stay whole.
        head = textwrap.fill(name, max(widest, *map(len, name.split())), break_on_hyphens=False) if numbers else name
        table.add_column(
            Text(head), justify="right" if numbers else "left", no_wrap=numbers, overflow="fold",
            min_width=widest if numbers else min(widest, NAME),
        )  # fmt: skip
    for line in rows:
        table.add_row(*map(Text, line))  # as they are: a folder's name may look like rich's markup
    return table


def as_markdown(rows: Sequence[Sequence[str]], columns: Sequence[str]) -> str:
    aligned = ["---:" if _numeric(cells) else "---" for cells in zip(*rows, strict=True)]
    lines: list[Sequence[str]] = [_plain(columns), aligned, *map(_plain, rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _plain(cells: Sequence[str]) -> list[str]:
    """Cells that Markdown shows as they are: a folder's name may hold a bar or a tag of HTML."""
    return [re.sub(r"<(?=[A-Za-z/!?])", "&lt;", cell.replace("|", "\\|")) for cell in cells]


def _numeric(cells: Iterable[str]) -> bool:
    return all(set(cell) <= set("0123456789.-±[], ") for cell in cells)

"""What a report consists of: sections of text, tables and figures, without a word on how they look."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedxl import metrics
from fedxl.errors import printable
from fedxl.evaluation.compare import Difference
from fedxl.evaluation.intervals import Interval
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.charts.scale import Svg, element

LINE = Svg("\n")
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


class Cell(NamedTuple):
    """A text, what stands below it in small letters, or a small picture instead."""

    text: str = ""
    more: str = ""
    svg: Svg | None = None


class Column(NamedTuple):
    name: str
    numeric: bool = True


def columns(first: str, *others: str, numeric: bool = True) -> list[Column]:
    """Columns, the first of which holds the rows' names."""
    return [Column(first, numeric=False), *(Column(name, numeric) for name in others)]


class Row(NamedTuple):
    """Cells, the first of which is the row's head; the key's letter stands before it."""

    cells: Sequence[Cell]
    key: Key | None = None
    focus: bool = False

    @classmethod
    def of(cls, *cells: Cell | str, key: Key | None = None, focus: bool = False) -> Row:
        """Some of the cells are plain texts."""
        return cls([Cell(cell) if isinstance(cell, str) else cell for cell in cells], key, focus)


class Table(NamedTuple):
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]


def table_html(found: Table) -> Svg:
    """A table as HTML, in a box that scrolls where it is too wide."""
    heads = [element("th", name, scope="col", class_="num" if numeric else None) for name, numeric in found.columns]
    rows = [_row_html(row, found.columns) for row in found.rows]
    parts = [
        element("caption", element("span", found.caption)),
        element("thead", element("tr", *heads)),
        element("tbody", *(part for row in rows for part in (LINE, row))),
    ]
    box = {"class_": "scroll", "tabindex": 0, "role": "region", "aria_label": found.caption}
    return element("div", element("table", *parts), **box)


def _row_html(row: Row, heads: Sequence[Column]) -> Svg:
    first, *others = row.cells
    tag = [element("span", row.key.letter, class_=f"tag {row.key.css}")] if row.key else []
    cells = [element("th", *tag, *_texts(first), scope="row")]
    for cell, head in zip(others, heads[1:], strict=True):
        kind = "picture" if cell.svg else "num" if head.numeric else "value"
        inside = cell.svg or element("span", *_texts(cell))
        cells.append(element("td", inside, class_=kind, data_name=head.name))
    return element("tr", *cells, class_="focus" if row.focus else None)


def _texts(cell: Cell) -> list[str | Svg]:
    return [cell.text, *([element("small", cell.more)] if cell.more else [])]


class Figure(NamedTuple):
    title: str
    svg: Svg
    caption: str


class Block(NamedTuple):
    """Something to copy: a command, a file."""

    title: str
    code: str


class Fact(NamedTuple):
    name: str
    text: str
    more: str


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    text: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    small: Sequence[Figure] = ()  # many small ones, side by side
    tables: Sequence[Table] = ()
    blocks: Sequence[Block] = ()
    missing: Sequence[str] = ()  # what is not shown, and why


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    question: str
    answer: Sequence[str]
    sections: Sequence[Section]
    facts: Sequence[Fact] = ()
    method: str = ""


def shown(value: object, most: int = 120) -> str:
    """Another party's value as text, no longer than `most`."""
    text = printable(value, most + 1)
    return text if len(text) <= most else text[: most - 1] + "…"


def figure_of(value: float | None) -> str:
    """A number for people; a dash where there is none."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.3f}"


def between(found: Interval | Difference | None) -> str:
    """The ends of an interval, or nothing."""
    if found is None or not (math.isfinite(found.low) and math.isfinite(found.high)):
        return ""
    return f"[{found.low:.3f}, {found.high:.3f}]".replace("-", "−")


def interval_text(found: Interval) -> str:
    """A metric with its interval."""
    return f"{figure_of(found.value)} {between(found)}".strip()


def interval_cell(found: Interval | None) -> Cell:
    """The same, the interval below."""
    return Cell("–") if found is None else Cell(figure_of(found.value), between(found))


def left_out(count: int, most: int, what: str) -> list[str]:
    """A line on those beyond the first `most`, if there are any."""
    return [f"{count - most} more {what}"] if count > most else []


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names as one writes them.

    >>> listed(["a", "b", "c"]), listed(["a", "b", "c"], most=2)
    ('a, b and c', 'a, b and 1 more')
    """
    head = [*names[:most], *([f"{len(names) - most} more"] if len(names) > most else [])]
    return " and ".join(filter(None, [", ".join(head[:-1]), *head[-1:]]))


def metric_name(name: str) -> str:
    """A metric in words.

    >>> metric_name("pauc@0.3"), metric_name("sensitivity"), metric_name("ndcg@10")
    ('partial AUC (FPR ≤ 0.3)', 'sensitivity', 'NDCG@10')
    >>> metric_name("uno@1825"), metric_name("auc_at@730")
    ("Uno's C (events before 1825)", 'AUC at 730')
    """
    words = {
        "auroc": "AUROC", "ap": "average precision", "pauc": "partial AUC", "pauc_raw": "partial AUC, raw",
        "cindex": "concordance index", "uno": "Uno's C", "auc_at": "AUC",
    }  # fmt: skip
    base, at, limit = name.partition("@")
    if base in metrics.QUERY_METRICS:
        return shown(name, 20).upper()
    text = words.get(base, shown(base, 40))
    of_limit = {"uno": " (events before {})", "auc_at": " at {}"}.get(base, " (FPR ≤ {})")
    return text + of_limit.format(shown(limit, 12)) if at else text


def unit_of(count: float) -> tuple[float, str]:
    """The largest unit of bytes that is no larger than `count`."""
    return next((unit for unit in UNITS if count >= unit[0]), UNITS[-1])


def in_bytes(count: int) -> str:
    """Bytes with a unit that fits.

    >>> in_bytes(17_332), in_bytes(12_500_000_000), in_bytes(999)
    ('17.3 kB', '12.5 GB', '999 B')
    """
    size, unit = unit_of(count)
    return f"{count / size:.3g} {unit}"

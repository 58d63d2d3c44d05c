"""What a report consists of: sections of text, tables and figures, without a word on how they look."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedxl import metrics
from fedxl.errors import printable
from fedxl.evaluation.compare import Difference
from fedxl.evaluation.intervals import Interval
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.charts.scale import Svg, element

LINE = Svg("\n")
WIDEST = 6  # columns that fit beside the rows' heads, on a page and in the output of a notebook
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


class Cell(NamedTuple):
    """A text, lines below it in small letters, or a small picture instead."""

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
    folded: str = ""  # what stands there until a reader opens it


def table_html(found: Table) -> Svg:
    """A table as HTML: of many columns in parts, one below the other, each with the rows' heads."""
    count = len(found.columns) - 1
    parts = np.array_split(np.arange(1, count + 1), max(1, math.ceil(count / WIDEST)))
    tables = [_part_html(found, [0, *map(int, each)], first=not n) for n, each in enumerate(parts)]
    box = {"class_": "scroll", "tabindex": 0, "role": "region", "aria_label": found.caption}
    content = element("div", *tables, **box)
    return element("details", element("summary", found.folded), content) if found.folded else content


def _part_html(found: Table, chosen: Sequence[int], first: bool) -> Svg:
    """Some columns of a table; the first part has the caption."""
    some = [found.columns[number] for number in chosen]
    heads = [element("th", name, scope="col", class_="num" if numeric else None) for name, numeric in some]
    rows = [_row_html(row._replace(cells=[row.cells[number] for number in chosen]), some) for row in found.rows]
    parts = [
        *([element("caption", element("span", found.caption))] if first else []),
        element("thead", element("tr", *heads)),
        element("tbody", *(part for row in rows for part in (LINE, row))),
    ]
    return element("table", *parts)


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
    return [cell.text, *(element("small", line) for line in cell.more.splitlines())]


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
    return "–" if value is None or not math.isfinite(value) else _rounded(value)


def difference_text(value: float) -> str:
    """The same of a difference, with its sign; 0.000 has none.

    >>> difference_text(-0.0004), difference_text(0.012), difference_text(-0.012)
    ('0.000', '+0.012', '−0.012')
    """
    text = figure_of(value)
    return text if text in ("–", "0.000") or text.startswith("−") else f"+{text}"


def _rounded(value: float) -> str:
    return f"{round(value, 3) + 0.0:.3f}".replace("-", "−")  # plus 0: no -0.000


def between(found: Interval | Difference | None) -> str:
    """The ends of an interval, or nothing."""
    if found is None or not (math.isfinite(found.low) and math.isfinite(found.high)):
        return ""
    return f"[{_rounded(found.low)}, {_rounded(found.high)}]"


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

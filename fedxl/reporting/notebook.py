"""What notebooks show of results, data and advice, and pictures of runs: parts of the report, without Jinja2."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, singledispatch
from pathlib import Path
from typing import Any

from fedxl.data.check import site_table
from fedxl.data.examples import Splits
from fedxl.errors import UserError, kind_of, require
from fedxl.evaluation.compare import Difference
from fedxl.evaluation.intervals import Interval
from fedxl.files import as_path, write_atomically, writing
from fedxl.reporting import document
from fedxl.reporting.charts.scale import Svg, element
from fedxl.reporting.page import LINE, Figure, Row, Table, columns, table_html
from fedxl.reporting.sections import comparison, ranking, rounds, sites, survival
from fedxl.reporting.study import Study, study
from fedxl.reporting.text import as_markdown
from fedxl.training.advice import Advice
from fedxl.training.result import Prediction, Result
from fedxl.training.run_folder import Run, read_run, run_dirs

MOST_SITES = 20
FIRST = 10  # predictions that are shown
# What a page of reports has as its body, and rules for the box that an output of a notebook is.
BOX = """
:root { font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif;
  background: var(--page); color: var(--ink); padding: .2rem .4rem .6rem; max-width: 62rem;
  container-type: inline-size; }
.title { margin: .3rem 0; font-weight: 600; }
.figures { grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); }
.scroll { width: fit-content; max-width: 100%; }
table { margin: 0; width: auto; font-size: .92rem; color: var(--ink); }
caption, figcaption { color: var(--soft); font-size: .9rem; }
h3 { font-size: 1rem; font-weight: 600; }
caption span { max-width: calc(100cqw - 2rem); }
th, td { padding: .35rem .5rem; }
tbody th { min-width: 6rem; }
tr { background: none; }
figure { max-width: 29rem; }
"""
SCOPE = ".fedxl.fedxl.fedxl"  # three times, so that the rules of notebooks for their tables do not win
DARK = ':is([data-jp-theme-light="false"], .vscode-dark)'  # notebooks have a theme of their own
Runs = Result | str | Path | Run


@singledispatch
def html(it: Any) -> str:
    """An object as a notebook shows it."""
    raise TypeError(f"there is no view of {kind_of(it)}")


@html.register
def _(it: Result) -> str:
    found = study([it.as_run()])
    known = found.found is not None and 0 < len(found.found.sites) <= MOST_SITES
    tables = [comparison.section(found).tables[0], *(sites.section(found).tables if known else [])]
    return page(repr(it), tables, _figures(found))


@html.register
def _(it: Prediction) -> str:
    count, table = len(it.scores), it.columns
    rows = [
        Row.of(str(number), *(f"{value:.4g}" for value in values))
        for number, values in enumerate(zip(*(column[:FIRST] for column in table.values()), strict=True))
    ]
    caption = f"{count:,} examples" + (f", the first {FIRST} of them." if count > FIRST else ".")
    return page("Predictions", [Table(caption, columns("example", *table), rows)])


@html.register
def _(it: Splits) -> str:
    names, rows = site_table(it, MOST_SITES)
    heads = columns(*(it.train.kind if name == "positive" else name for name in names))
    return page(repr(it), [Table("Examples by site and split.", heads, [Row.of(*texts) for texts in rows])])


@html.register
def _(it: Advice) -> str:
    rows = [Row.of(said or "–", why) for said, why in it.reasons]
    caption = "Settings that fit these clients by their counts, and why."
    parts = [element("p", flag) for flag in it.flags]
    return page("", [Table(caption, columns("settings", "reason", numeric=False), rows)], more=parts)


def page(title: str, tables: Iterable[Table] = (), figures: Iterable[Figure] = (), more: Iterable[Svg] = ()) -> str:
    """One output of a notebook, with a style that holds for nothing else."""
    head = [element("div", title, class_="title")] if title else []
    drawn = [
        element("figure", element("h3", each.title), each.svg, element("figcaption", each.caption))
        for each in figures
    ]
    parts = [*head, *map(table_html, tables), *more]
    parts += [element("div", *drawn, class_="figures")] if drawn else []
    lines = (each for part in parts for each in (LINE, part))
    return element("div", element("style", Svg(style())), *lines, class_="fedxl")


def _figures(it: Study) -> list[Figure]:
    """How well runs rank, or survival by risk, and the metric by round."""
    # Without the assessment there are no operating points, whose table is not here.
    first = survival.section(it) if it.timed else ranking.section(it._replace(found=None))
    return [*first.figures[:1], *(each for each in rounds.section(it).figures if each.title.startswith("Validation"))]


@dataclass(frozen=True)
class Picture:
    """Pictures of runs, which a notebook shows. `save` writes them into one SVG file."""

    figures: Sequence[Figure]

    def __repr__(self) -> str:
        return f"Picture of {', '.join(figure.title for figure in self.figures)}; save(path) writes an SVG file"

    def _repr_html_(self) -> str:
        return page("", figures=self.figures)

    def save(self, path: str | Path) -> Path:
        """Write one SVG file, the figures side by side."""
        return write_svg(path, self.svg())

    def svg(self) -> Svg:
        """All figures as one picture that needs no style sheet."""
        boxes = (re.findall(r'viewBox="0 0 (\S+) (\S+)"', each.svg)[0] for each in self.figures)
        sizes = [(float(width), float(height)) for width, height in boxes]
        parts, across = [element("style", Svg(style()))], 0.0
        for (width, height), figure in zip(sizes, self.figures, strict=True):
            title = element("text", figure.title, x=across + 48, y=18, font_weight="bold")
            placed = f'<svg x="{across:g}" y="24" width="{width:g}" height="{height:g}"'
            parts += [title, Svg(figure.svg.replace("<svg", placed, 1).replace('class="chart"', "", 1))]
            across += width + 16
        high = 30 + max(height for _, height in sizes)
        box = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {across:g} {high:g}", "class_": "fedxl"}
        return element("svg", *parts, width=across, height=high, **box)


def write_svg(path: str | Path, text: str) -> Path:
    target = as_path(path, "path")
    require(target.suffix == ".svg", f"{target} must end in .svg")
    with writing(target):
        write_atomically(target, text.encode())
    return target


def plot(*runs: Runs) -> Picture:
    """Pictures of runs: ROC curves (survival by risk of the first), and the validation metric by round."""
    found = _distinct(as_runs(runs))
    return _picture(study(found, found[0].name))


def _picture(it: Study) -> Picture:
    figures, without = _figures(it), "the runs have no validation and no test data, or no evaluation yet"
    require(bool(figures), f"there is nothing to draw: {without}")
    return Picture(figures)


def report(runs: Runs | Sequence[Runs], out: str | Path = "report.html", reference: str = "") -> Path:
    """Write a report of runs into one HTML file, and return its path. It needs `fedxl[report]`.

    Args:
        runs: A result, the folder of a run or of several, or a list of them.
        out: The file to write.
        reference: The run to compare with and show in detail, by its name; by default the best on validation data.
    """
    return document.write(as_path(out, "out"), _distinct(as_runs(runs)), reference)


class Comparison:
    """Runs side by side, those of one label together: metrics with intervals, and paired differences."""

    def __init__(self, runs: Sequence[Run], results: Mapping[str, Sequence[Result]], reference: str = "") -> None:
        self.runs, self.results = runs, results  # results: by label, of those that were trained here
        self._study, self._reference = study(runs, reference), reference

    @property
    def table(self) -> dict[str, Mapping[str, Interval]]:
        """Metrics by label, with 95 % intervals; of several seeds their means."""
        return {group.label: group.measured for group in self._study.groups if group.measured}

    @property
    def differences(self) -> dict[str, Mapping[str, Difference]]:
        """Metrics of each label less those of the reference on the same examples, with intervals and p."""
        return {group.label: group.compared for group in self._study.groups if group.compared}

    def to_frame(self) -> Any:
        """Both as a data frame of pandas: a row per label and metric, with its interval and the difference's."""
        none, rows = Difference(math.nan, math.nan, math.nan, math.nan, ""), []
        for label, measured in self.table.items():
            for name, found in measured.items():
                apart = self.differences.get(label, {}).get(name, none)
                row = {"label": label, "metric": name, "value": found.value, "low": found.low, "high": found.high}
                rows.append({**row, **{f"difference_{key}": value for key, value in apart._asdict().items()}})
        return frame(rows).drop(columns=["difference_how", "difference_level"])

    @property
    def reference(self) -> str:
        """What the others are compared with: by default the best on validation data."""
        return self._study.focus.label

    def plot(self) -> Picture:
        """ROC curves (of time to event survival by risk) and the validation metric by round, means over seeds."""
        return _picture(self._study)

    def report(self, path: str | Path = "report.html") -> Path:
        """Write all of it, and more, into one HTML file."""
        return report(self.runs, path, self._reference)

    def __repr__(self) -> str:
        found = comparison.section(self._study).tables
        return "\n".join(f"{one.caption}\n\n{_as_text(one)}" for one in found)

    def _repr_html_(self) -> str:
        return page("", comparison.section(self._study).tables, _figures(self._study))


def frame(table: Any) -> Any:
    """Columns by name, or rows, as a data frame of pandas. Raises UserError where that is not installed."""
    try:
        import pandas
    except ImportError:
        raise UserError("a data frame needs pandas: pip install pandas") from None
    return pandas.DataFrame(table)


def _as_text(table: Table) -> str:
    """Without what stands below the texts of a column."""
    numeric = [head.numeric for head in table.columns]
    each = (zip(row.cells, numeric, strict=True) for row in table.rows)
    rows = [[" ".join(f"{cell.text} {cell.more * shown}".split()) for cell, shown in cells] for cells in each]
    return as_markdown(rows, [head.name for head in table.columns])


def as_runs(it: Runs | Sequence[Runs]) -> list[Run]:
    """Of a result, of the folder of a run or of several, or of a list of them."""
    if isinstance(it, Run):
        return [it]
    if isinstance(it, Result):
        return [it.as_run()]
    if isinstance(it, (str, Path)):
        return [read_run(path) for path in run_dirs([as_path(it, "a run")])]
    told = f"runs must be a result, a folder, or a list of them, not {kind_of(it)}"
    require(isinstance(it, Sequence), told)
    return [run for each in it for run in as_runs(each)]


def _distinct(runs: Sequence[Run]) -> list[Run]:
    """With a number after a name that several have."""
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.name} ({names[: at + 1].count(run.name)})") if names.count(run.name) > 1 else run
        for at, run in enumerate(runs)
    ]


@cache
def style() -> str:
    """The report's rules for tables, figures and charts, within a `.fedxl` alone."""
    css = document.TEMPLATES["report.css"]
    light, dark = (re.search(r":root \{(.*?)\}", part, re.DOTALL)[1] for part in css.split("@media screen", 1))  # type: ignore[index]
    shared = css.split("/* Tables, figures and charts", 1)[1].split("*/", 1)[1].split("/* The rest", 1)[0]
    rules = f":root {{{light}}}\n{shared}\n{BOX}"
    rules = re.sub(r"/\*.*?\*/", "", rules, flags=re.DOTALL)
    return re.sub(r"([^{}]+)\{", _scoped, rules).strip() + f"\n{DARK} {SCOPE} {{{dark}}}"


def _scoped(head: re.Match[str]) -> str:
    each = (selector.strip() for selector in head[1].split(","))
    return "\n" + ", ".join(SCOPE if one == ":root" else f"{SCOPE} {one}" for one in each) + " {"

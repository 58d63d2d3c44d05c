"""A report of runs: a page, and one HTML file that loads nothing. Jinja2 is an extra: fedxl[report]."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedxl import __version__
from fedxl.errors import UserError, printable, require
from fedxl.files import read_templates, write_atomically, writing
from fedxl.reporting.charts.scale import Svg, style_hash
from fedxl.reporting.page import Page, table_html
from fedxl.reporting.sections import comparison, labels, ranking, rounds, setup, sites, summary, survival
from fedxl.reporting.study import study
from fedxl.training.run_folder import Run

TEMPLATES = read_templates("fedxl.reporting")


def write(target: Path, runs: Sequence[Run], reference: str = "", option: str = "out") -> Path:
    """Write a report into one HTML file, whole or not at all. option: what names the file."""
    require_jinja2()
    require(not target.is_dir(), f"{target} is a folder; {option} must name a file")
    content = render(build(runs, reference)).encode("utf-8", errors="replace")
    with writing(target, "choose another file"):
        write_atomically(target, content)
    return target


def build(runs: Sequence[Run], reference: str = "") -> Page:
    """The page. `reference` names the run, or the group of runs, that it looks at closely and compares with."""
    require(bool(runs), "a report needs a run")
    it = study(runs, reference)
    if it.timed:
        of_focus = [survival.section(it)]
    else:
        of_focus = labels.sections(it) if it.several else [ranking.section(it), ranking.probabilities(it)]
    of_runs = [rounds.section(it), setup.settings(it.groups), setup.reproduce(it.drawn)]
    sections = [comparison.section(it), *of_focus, sites.section(it), *of_runs]
    return summary.page(it, sections, preferred=not reference)


def require_jinja2() -> Any:
    try:
        import jinja2
    except ImportError:
        raise UserError("a report in HTML needs Jinja2: pip install 'fedxl[report]'") from None
    return jinja2


def render(page: Page) -> str:
    """The file. Whatever is not SVG of our own is escaped; of all content, only the style sheet is allowed."""
    jinja2 = require_jinja2()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_clean)
    template = environment.from_string(TEMPLATES["report.html"])
    style = TEMPLATES["report.css"]
    # Both are of this package, and go into the page as they are.
    trusted = {"style": Svg(style), "style_hash": Svg(style_hash(style))}
    return str(template.render(page=page, version=__version__, table=table_html, **trusted))


def _clean(value: object) -> object:
    """Text of others with its control characters spelled out, line by line; the rest as it is."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return "\n".join(printable(line.replace("\t", "    "), len(line) * 4) for line in value.split("\n"))

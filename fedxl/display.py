"""What notebooks show of an object. `reporting/notebook.py` makes it, and is loaded when something is shown."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def html(it: Any) -> str:
    """An object as HTML: what a class has as its `_repr_html_`."""
    return str(_home().html(it))


def plot(*runs: Any) -> Any:
    """Pictures of runs, the first in focus."""
    return _home().plot(*runs)


def frame(table: Any) -> Any:
    """Columns by name, or rows, as a data frame of pandas."""
    return _home().frame(table)


def _home() -> Any:
    # By its name: what is shown knows nothing of reports.
    return import_module("fedxl.reporting.notebook")

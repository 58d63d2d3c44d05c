"""Markdown of model cards: text of others that stays text, tables, and metrics with their intervals."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedxl.errors import printable


def text(value: Any) -> str:
    """Text of another party inside Markdown: a single line, without anything that Markdown or HTML would act on.

    >>> text("<b>|x|</b> [a](b)")
    '&lt;b&gt;\\\\|x\\\\|&lt;/b&gt; \\\\[a\\\\](b)'
    """
    return re.sub(r"([\\`*_{}\[\]|#~])", r"\\\1", html.escape(printable(value), quote=False))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown whose cells are escaped already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def interval(found: Mapping[str, Any]) -> str:
    """A metric with its interval, as far as both are known."""
    value, low, high = (found.get(name) for name in ("value", "low", "high"))
    if value is None or math.isnan(value):
        return "not defined"
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return f"{value:.3f}"
    return f"{value:.3f} ({low:.3f} to {high:.3f})"

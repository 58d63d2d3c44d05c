"""SVG elements as text. Whatever is not marked as SVG already is escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable

from fedxl.errors import printable


class Svg(str):
    """Text that is SVG: put into a page as it is. Only `element` makes it."""

    def __html__(self) -> str:  # what Jinja2 asks for
        return str(self)


def element(tag: str, *children: str | Svg, **attributes: object) -> Svg:
    """An element. Underscores in names of attributes are dashes; an attribute that is None is left out.

    >>> element("text", "a < b", x=1.50, text_anchor="end")
    '<text x="1.5" text-anchor="end">a &lt; b</text>'
    """
    inside = "".join(child if isinstance(child, Svg) else escape(child) for child in children)
    shown = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(number(value) if isinstance(value, float) else str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Svg(f"<{tag}{shown}>{inside}</{tag}>")


def joined(parts: Iterable[Svg]) -> Svg:
    return Svg("".join(parts))


def escape(text: object) -> str:
    """For text and attributes alike; control characters are spelled out."""
    return html.escape(printable(text, 100_000), quote=True)


def number(value: float) -> str:
    """A coordinate: hundredths of a unit are finer than any screen."""
    assert math.isfinite(value), "a picture has no place for it"
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text

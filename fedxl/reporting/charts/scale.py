"""Axes: from values to places in a picture, and which values are written beside them."""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedxl.errors import printable
from fedxl.evaluation.scores import Floats


@dataclass(frozen=True)
class Axis:
    """What an axis shows, between which values, and where its ticks are."""

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]

    def __post_init__(self) -> None:
        assert self.low < self.high, "an axis needs a length"

    def place(self, values: Any, start: float, end: float) -> Floats:
        """Where values lie between two places; those beyond the axis lie at its ends."""
        share = (np.clip(np.asarray(values, np.float64), self.low, self.high) - self.low) / (self.high - self.low)
        return np.asarray(start + share * (end - start), np.float64)

    def texts(self) -> list[str]:
        """The ticks, all with as many digits as tell them apart."""
        form = "e" if max(map(abs, self.ticks)) >= 1e6 else "f"
        step = float(min(np.diff(self.ticks))) if len(self.ticks) > 1 else abs(self.ticks[0]) or 1.0
        for digits in range(16):
            texts = [f"{tick:.{digits}{form}}" for tick in self.ticks]
            # 0.25 and 0.5 are apart with one digit, but only two say what they are.
            if np.allclose(np.array(texts, np.float64), self.ticks, rtol=0, atol=1e-6 * step):
                break
        return texts


def unit(label: str, count: int = 5, low: float = 0.0) -> Axis:
    """An axis of shares."""
    return Axis(label, low, 1.0, ticks_in(low, 1.0, count))


def around(label: str, values: Sequence[float] | Floats, floor: float = -math.inf, whole: bool = False) -> Axis:
    """An axis that holds these values with a little room; never below the floor unless a value is."""
    found = np.asarray(values, np.float64)
    found = found[np.isfinite(found)]
    low, high = (float(found.min()), float(found.max())) if len(found) else (0.0, 1.0)
    room = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = max(low - room, min(floor, low)), high + room
    return Axis(label, low, high, ticks_in(low, high, whole=whole))


def ticks_in(low: float, high: float, count: int = 5, whole: bool = False) -> tuple[float, ...]:
    """About `count` round values between two values, whole numbers if need be.

    >>> ticks_in(0.0, 12.0), ticks_in(0.0, 12.0, whole=True)
    ((0.0, 2.5, 5.0, 7.5, 10.0), (0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0))
    >>> ticks_in(0.0, 1.0), ticks_in(0.82, 0.97, 4)
    ((0.0, 0.2, 0.4, 0.6, 0.8, 1.0), (0.85, 0.9, 0.95))
    """
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    choices = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = power * min(choices, key=lambda nice: abs(math.log(nice * power / rough)))
    step = max(1.0, step) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    found = tuple(round(index * step, 12) for index in range(first, last + 1))
    return found or (round((low + high) / 2, 12),)


class Svg(str):
    """SVG that `element` has made, or other text of this package: put into a page as it is."""

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


def style_hash(style: str) -> str:
    """What a page's policy calls the one style sheet that it allows."""
    return f"sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}"


def escape(text: object) -> str:
    """For text and attributes alike; control characters are spelled out."""
    return html.escape(printable(text, 100_000), quote=True)


def number(value: float) -> str:
    """A coordinate: hundredths of a unit are finer than any screen."""
    assert math.isfinite(value), "a picture has no place for it"
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text

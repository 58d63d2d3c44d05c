"""A chart: axes, lines, bands, bars, points and letters, drawn as one inline SVG with a title and a description.

Colours come from the page's style sheet by class (s0, s1, ...). Line styles, markers and letters tell series apart
without colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedxl.reporting.charts import labels
from fedxl.reporting.charts.scale import Axis, Svg, element, joined, number

Floats = npt.NDArray[np.float64]
WIDTH, HEIGHT = 400, 300  # of the plotting area with its axes; the legend comes below
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 12, 42
ROW = 18  # height of a line of the legend
DASHES = (None, "7 4", "2 3", "9 3 2 3", "14 4", "5 2 1 2 1 2")
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "down")


class Key(NamedTuple):
    """What a series is called, and the number of its style, from 0; None: grey, as what others are compared with."""

    name: str
    style: int | None = None
    letter: str = ""

    @property
    def css(self) -> str:
        return "ref" if self.style is None else f"s{self.style % len(DASHES)}"

    @property
    def dash(self) -> str | None:
        return "3 4" if self.style is None else DASHES[self.style % len(DASHES)]


class Chart:
    """Collects what is drawn; `render` gives the SVG. `name` is its own in the page."""

    def __init__(
        self, name: str, title: str, description: str, x: Axis, y: Axis, height: int = HEIGHT, width: int = WIDTH
    ) -> None:
        self.name, self.title, self.description, self.x, self.y = name, title, description, x, y
        self.right, self.bottom = width - RIGHT, height - BOTTOM
        self.back: list[Svg] = []
        self.parts: list[Svg] = []
        self.curves: list[tuple[Key, Floats]] = []
        self.taken: list[Floats] = []  # where markers are, which letters keep away from
        self.legend: list[tuple[Key, str]] = []  # and "line" or "bar"

    def at(self, x: Any, y: Any) -> Floats:
        """Places [n, 2] of values."""
        across, up = self.x.place(x, LEFT, self.right), self.y.place(y, self.bottom, TOP)
        return np.stack(np.broadcast_arrays(across, up), -1)

    def line(self, x: Any, y: Any, key: Key, step: bool = False, legend: bool = True, thin: bool = False) -> None:
        """A curve; as a step it keeps its height until the next value. A thin one is no curve of its own."""
        places = [_thinned(run) for run in _runs(self.at(*_stairs(x, y) if step else (x, y)))]
        if not places:
            return
        path = " ".join(_path(run) for run in places)
        kind, dash = ("thin", None) if thin else ("line", key.dash)
        self.parts.append(element("path", d=path, class_=f"{kind} {key.css}", fill="none", stroke_dasharray=dash))
        if key.letter:
            self.curves.append((key, max(places, key=len)))
        if legend:
            self.legend.append((key, "line"))

    def band(self, x: Any, low: Any, high: Any, key: Key) -> None:
        """The area between two curves."""
        x, low, high = (np.asarray(each, np.float64) for each in (x, low, high))
        self.area(np.concatenate([np.stack([x, low], 1), np.stack([x, high], 1)[::-1]]), key)

    def area(self, outline: Floats, key: Key) -> None:
        """What lies inside of an outline [n, 2]."""
        edge = self.at(*outline.T)
        if np.isfinite(edge).all():
            self.back.append(element("path", d=_path(edge) + "Z", class_=f"band {key.css}", stroke="none"))

    def region(self, low: float, high: float, text: str = "") -> None:
        """A part of the x-axis that matters, shaded and, if there is room, named."""
        (left, top), (right, bottom) = self.at([low, high], [self.y.high, self.y.low]).tolist()
        self.back.append(element("rect", x=left, y=top, width=right - left, height=bottom - top, class_="region"))
        self.back.append(element("line", x1=right, x2=right, y1=top, y2=bottom, class_="edge"))
        if text:
            self.back.append(element("text", text, x=right + 4, y=bottom - 6, class_="note"))

    def bars(self, x: Any, heights: Any, width: float, key: Key) -> None:
        """Bars from the bottom of the chart."""
        for (across, top), height in zip(self.at(x, heights).tolist(), heights, strict=True):
            if height > 0:
                size = {"x": across - width / 2, "y": top, "width": width, "height": self.bottom - top}
                self.parts.append(
                    element("rect", element("title", f"{height:,.0f}"), **size, class_=f"bar {key.css}")
                )
        self.legend.append((key, "bar"))

    def points(self, x: Any, y: Any, key: Key, texts: Sequence[str] = (), size: float = 4.0) -> None:
        """Markers, with what they stand for as their tooltips."""
        for number_, (across, up) in enumerate(self.at(x, y).tolist()):
            if np.isfinite([across, up]).all():
                self.taken.append(np.array([across, up]))
                about = (element("title", texts[number_]),) if texts else ()
                self.parts.append(element("g", *about, marker(across, up, key, size)))

    def note(self, x: float, y: float, text: str, key: Key) -> None:
        """A few letters beside a point, where no other point or note is."""
        across, up = labels.beside(self.at(x, y), self.taken)
        self.taken.append(np.array([across, up]))
        shape = {"x": across, "y": up + 4, "text_anchor": "middle", "class_": f"letter small {key.css}"}
        self.parts.append(element("text", text, **shape))

    def vertical(self, x: float, key: Key, text: str = "") -> None:
        """A line across the whole height, named at its top."""
        ((across, top), (_, bottom)) = self.at([x, x], [self.y.high, self.y.low]).tolist()
        self.back.append(element("line", x1=across, x2=across, y1=top, y2=bottom, class_=f"edge {key.css}"))
        if text:
            late = across > (LEFT + self.right) / 2
            anchor = {"x": across - 4 if late else across + 4, "text_anchor": "end" if late else "start"}
            self.back.append(element("text", text, **anchor, y=bottom - 6, class_="note"))

    def render(self) -> Svg:
        total = self.bottom + BOTTOM + ROW * len(self.legend) + (6 if self.legend else 0)
        described = [
            element("title", self.title, id=f"{self.name}-title"),
            element("desc", self.description, id=f"{self.name}-desc"),
        ]
        inside = [*described, *self.back, *self._axes(), *self.parts, *self._letters(), *self._legend()]
        return element(
            "svg", *inside, viewBox=f"0 0 {self.right + RIGHT} {total}", role="img", class_="chart",
            aria_labelledby=f"{self.name}-title {self.name}-desc",
        )  # fmt: skip

    def _axes(self) -> list[Svg]:
        parts = []
        for value, text in zip(self.x.ticks, self.x.texts(), strict=True):
            across = float(self.x.place(value, LEFT, self.right))
            parts.append(element("line", x1=across, x2=across, y1=TOP, y2=self.bottom, class_="grid"))
            parts.append(element("text", text, x=across, y=self.bottom + 15, text_anchor="middle", class_="tick"))
        for value, text in zip(self.y.ticks, self.y.texts(), strict=True):
            up = float(self.y.place(value, self.bottom, TOP))
            parts.append(element("line", x1=LEFT, x2=self.right, y1=up, y2=up, class_="grid"))
            parts.append(element("text", text, x=LEFT - 6, y=up + 4, text_anchor="end", class_="tick"))
        middle = (LEFT + self.right) / 2
        parts.append(element("line", x1=LEFT, x2=self.right, y1=self.bottom, y2=self.bottom, class_="axis"))
        parts.append(
            element(
                "text",
                fitting(self.x.label, self.right - LEFT),
                x=middle,
                y=self.bottom + 34,
                text_anchor="middle",
                class_="label",
            )
        )
        turned = f"translate(12 {number((TOP + self.bottom) / 2)}) rotate(-90)"
        label = fitting(self.y.label, self.bottom - TOP)
        parts.append(element("text", label, transform=turned, text_anchor="middle", class_="label"))
        return parts

    def _letters(self) -> list[Svg]:
        if len(self.curves) < 2:
            return []
        box = (LEFT, TOP, self.right, self.bottom)
        places = labels.place([curve for _, curve in self.curves], box, self.taken)
        return [
            element("text", key.letter, x=across, y=up + 4, text_anchor="middle", class_=f"letter {key.css}")
            for (key, _), (across, up) in zip(self.curves, places, strict=True)
        ]

    def _legend(self) -> list[Svg]:
        parts = []
        for row, (key, kind) in enumerate(self.legend):
            up = self.bottom + BOTTOM + 6 + row * ROW
            parts.append(swatch(LEFT, up + 4, key, kind))
            text = f"{key.letter}  {key.name}" if key.letter else key.name
            parts.append(element("text", fitting(text, self.right - LEFT - 42), x=LEFT + 42, y=up + 8, class_="key"))
        return parts


def fitting(text: str, room: float) -> str:
    """As much of a text as fits, by what letters of 12 units measure in a wide font."""
    widths = np.cumsum(
        [12.5 if char in "MWmw@%—" or ord(char) > 0x2E80 else 9 if char.isupper() else 7.2 for char in text]
    )
    if not len(text) or widths[-1] <= room:
        return text
    return text[: int(np.searchsorted(widths, room - 12))] + "…"


def swatch(left: float, up: float, key: Key, kind: str = "line") -> Svg:
    """How a series is drawn, for legends."""
    if kind == "bar":
        return element("rect", x=left + 11, y=up - 6, width=12, height=12, class_=f"bar {key.css}")
    line = element("line", x1=left, x2=left + 34, y1=up, y2=up, class_=f"line {key.css}", stroke_dasharray=key.dash)
    return joined([line] if key.style is None or kind == "plain" else [line, marker(left + 17, up, key, 3.5)])


def marker(x: float, y: float, key: Key, size: float) -> Svg:
    """A circle, square, triangle ..., by style."""
    kind, css = MARKERS[(key.style or 0) % len(MARKERS)], f"marker {key.css}"
    if kind == "circle":
        return element("circle", cx=x, cy=y, r=size, class_=css)
    shapes: dict[str, list[tuple[float, float]]] = {
        "square": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
        "triangle": [(0, -1.3), (1.2, 1), (-1.2, 1)],
        "diamond": [(0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)],
        "cross": [(-1.3, -0.4), (-0.4, -0.4), (-0.4, -1.3), (0.4, -1.3), (0.4, -0.4), (1.3, -0.4), (1.3, 0.4),
                  (0.4, 0.4), (0.4, 1.3), (-0.4, 1.3), (-0.4, 0.4), (-1.3, 0.4)],
        "down": [(0, 1.3), (1.2, -1), (-1.2, -1)],
    }  # fmt: skip
    corners = " ".join(f"{number(x + size * a)},{number(y + size * b)}" for a, b in shapes[kind])
    return element("polygon", points=corners, class_=css)


def _path(places: Floats) -> str:
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in places.tolist())


def _runs(places: Floats) -> list[Floats]:
    """The parts of a curve between values that are not known."""
    known = np.isfinite(places).all(1)
    cuts = np.flatnonzero(np.diff(known.astype(int))) + 1
    return [run for run in np.split(places, cuts) if len(run) and np.isfinite(run).all()]


def _thinned(places: Floats) -> Floats:
    """Without points that nobody would see: a curve of a million examples is no larger than one of a thousand."""
    moved = np.any(np.diff(np.round(places * 2), axis=0) != 0, axis=1)
    kept = np.concatenate([[True], moved])
    kept[-1] = True
    return np.asarray(places[kept])


def _stairs(x: Any, y: Any) -> tuple[Floats, Floats]:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return np.repeat(x, 2)[1:], np.repeat(y, 2)[:-1]

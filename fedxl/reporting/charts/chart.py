"""A chart: axes, lines, bands, bars, points and letters, drawn as one inline SVG with a title and a description.

Colours come from the page's style sheet by class (s0, s1, ...). Line styles, markers and letters tell series apart
without colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedxl.evaluation.scores import Floats
from fedxl.reporting.charts.scale import Axis, Svg, element, number

WIDTH, HEIGHT = 400, 300  # of the plotting area with its axes; the legend comes below
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 42
ROW = 18  # height of a line of the legend
DASHES = (None, "7 4", "2 3", "9 3 2 3", "14 4", "5 2 1 2 1 2")
OFFSETS = np.array([(0, -11), (0, 11), (-11, -5), (11, 5), (11, -5), (-11, 5)], np.float64)
AROUND = np.array([(10, 10), (-10, -10), (-10, 10), (10, -10), (0, 15), (0, -15), (15, 0), (-15, 0)], np.float64)
SAMPLES = 40  # places along a curve that are tried
HALF = 3.8  # how far each further letter of a word reaches to either side
ENOUGH = 12.0  # units between a letter and anything else; more is not better
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

    def line(
        self, x: Any, y: Any, key: Key, legend: bool = True, thin: bool = False, breaks: Sequence[int] = ()
    ) -> None:
        """A curve, with gaps at NaN, and before the points of these numbers. A thin one is no curve of its own."""
        whole = np.insert(self.at(x, y), breaks, np.nan, 0)
        cuts = np.flatnonzero(np.diff(np.isfinite(whole).all(1).astype(int))) + 1
        places = [_thin_out(run) for run in np.split(whole, cuts) if len(run) and np.isfinite(run).all()]
        if not places:
            return
        kind, dash = ("thin", None) if thin else ("line", key.dash)
        path = " ".join(map(_path, places))
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
                about = element("title", f"{height:,.0f}")
                self.parts.append(element("rect", about, **size, class_=f"bar {key.css}"))
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
        tried = self.at(x, y) + AROUND
        others = [*(other[None] for other in self.taken), *(_along(curve, 200) for _, curve in self.curves)]
        clear = np.minimum(_clearance(tried, others), ENOUGH)
        across, up = tried[int(np.argmax(clear))].tolist()
        self.taken.append(np.array([across, up]))
        self.parts.append(_letter(text, across, up, f"letter small {key.css}"))

    def render(self) -> Svg:
        total = self.bottom + BOTTOM + ROW * len(self.legend) + (6 if self.legend else 0)
        title = element("title", self.title, id=f"{self.name}-title")
        about = element("desc", self.description, id=f"{self.name}-desc")
        inside = [title, about, *self.back, *self._axes(), *self.parts, *self._letters(), *self._legend()]
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
        parts.append(element("line", x1=LEFT, x2=self.right, y1=self.bottom, y2=self.bottom, class_="axis"))
        below = {"x": (LEFT + self.right) / 2, "y": self.bottom + 34}
        turned = {"transform": f"translate(12 {number((TOP + self.bottom) / 2)}) rotate(-90)"}
        for text, room, at in ((self.x.label, self.right - LEFT, below), (self.y.label, self.bottom - TOP, turned)):
            parts.append(element("text", fitting(text, room), **at, text_anchor="middle", class_="label"))
        return parts

    def _letters(self) -> list[Svg]:
        if len(self.curves) < 2:
            return []
        box = (LEFT, TOP, self.right, self.bottom)
        reach = [(len(key.letter) - 1) * HALF for key, _ in self.curves]
        places = place_letters([curve for _, curve in self.curves], box, self.taken, reach)
        return [
            _letter(key.letter, *place, f"letter {key.css}")
            for (key, _), place in zip(self.curves, places, strict=True)
        ]

    def _legend(self) -> list[Svg]:
        parts = []
        for row, (key, kind) in enumerate(self.legend):
            up = self.bottom + BOTTOM + 6 + row * ROW
            css, across = f"{kind} {key.css}", {"x1": LEFT, "x2": LEFT + 34, "y1": up + 4, "y2": up + 4}
            if kind == "bar":
                parts.append(element("rect", x=LEFT + 11, y=up - 2, width=12, height=12, class_=css))
            else:
                parts.append(element("line", **across, class_=css, stroke_dasharray=key.dash))
                parts += [marker(LEFT + 17, up + 4, key, 3.5)] if key.style is not None else []
            text = f"{key.letter}: {key.name}" if key.letter else key.name
            parts.append(element("text", fitting(text, self.right - LEFT - 42), x=LEFT + 42, y=up + 8, class_="key"))
        return parts


def _letter(text: str, x: float, y: float, css: str) -> Svg:
    return element("text", text, x=x, y=y + 4, text_anchor="middle", class_=css)


def fitting(text: str, room: float) -> str:
    """As much of a text as fits, by what letters of 12 units measure in a wide font."""
    wide = (char in "MWmw@%—" or ord(char) > 0x2E80 for char in text)
    widths = np.cumsum([12.5 if w else 9 if char.isupper() else 7.2 for w, char in zip(wide, text, strict=True)])
    if not len(text) or widths[-1] <= room:
        return text
    return text[: int(np.searchsorted(widths, room - 12))] + "…"


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


def _thin_out(places: Floats) -> Floats:
    """Without points that nobody would see: a curve of a million examples is no larger than one of a thousand."""
    moved = np.any(np.diff(np.round(places * 2), axis=0) != 0, axis=1)
    kept = np.concatenate([[True], moved])
    kept[-1] = True
    return np.asarray(places[kept])


def place_letters(
    curves: Sequence[Floats],
    box: tuple[float, float, float, float],
    taken: Sequence[Floats] = (),
    reach: Sequence[float] = (),
) -> list[tuple[float, float]]:
    """A place beside each curve [n, 2], inside the box (left, top, right, bottom), away from places taken [2].

    reach: how much farther to both sides than a letter each text goes.
    """
    dense = [_along(curve, 200) for curve in curves]
    found: list[tuple[float, float]] = []
    for mine, curve in enumerate(curves):
        half = reach[mine] if reach else 0.0
        offsets = OFFSETS + np.sign(OFFSETS) * np.array([half, 0.0])
        tried = (_along(curve, SAMPLES)[:, None] + offsets[None]).reshape(-1, 2)
        left, top, right, bottom = box
        inside = (tried[:, 0] > left + 6 + half) & (tried[:, 0] < right - 6 - half)
        inside &= (tried[:, 1] > top + 7) & (tried[:, 1] < bottom - 7)
        tried = tried[inside] if inside.any() else tried
        others = [points for number, points in enumerate(dense) if number != mine]
        others += [np.array([place]) for place in (*taken, *found)]
        ends = [tried + np.array([side, 0.0]) for side in {-half, 0.0, half}]
        clear = np.minimum(np.min([_clearance(each, others) for each in ends], 0), ENOUGH)
        own = np.min([_clearance(each, [dense[mine]]) for each in ends], 0)
        chosen = tried[int(np.argmax(clear - 0.15 * np.abs(own - 9)))]
        found.append((float(chosen[0]), float(chosen[1])))
    return found


def _clearance(places: Floats, others: Sequence[Floats]) -> Floats:
    """How far each place is from the nearest of all points."""
    if not others:
        return np.full(len(places), np.inf)
    points = np.concatenate(others)
    return np.asarray(np.hypot(*(places[:, None] - points[None]).transpose(2, 0, 1)).min(1))


def _along(curve: Floats, count: int) -> Floats:
    """Points at equal distances along a curve."""
    lengths = np.append(0.0, np.cumsum(np.hypot(*np.diff(curve, axis=0).T)))
    if lengths[-1] == 0:
        return curve[:1]
    at = np.linspace(0, lengths[-1], count)
    return np.stack([np.interp(at, lengths, curve[:, 0]), np.interp(at, lengths, curve[:, 1])], 1)

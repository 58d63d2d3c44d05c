"""Bins for scores of any size, described by four numbers.

They are fixed before anybody counts, narrow near a centre and wider outwards: edges are uniform in
asinh((score - centre) / scale).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedxl.errors import require
from fedxl.evaluation.scores import Floats

FEWEST_BINS, MOST_BINS = 4, 65_536
FARTHEST = 1e12  # of edges from zero
SMALLEST = 1e-12


class Spread(NamedTuple):
    """Where scores lie: their median, and the distance between their quartiles."""

    centre: float
    width: float

    @classmethod
    def of(cls, scores: npt.NDArray[np.floating[Any]]) -> Spread:
        low, centre, high = np.quantile(scores.astype(np.float64), [0.25, 0.5, 0.75])
        return cls(float(centre), float(high - low))


@dataclass(frozen=True)
class Bins:
    """Bins by four numbers. A request holds these instead of edges: it cannot ask for a bin made for one example."""

    bins: int = 512  # the lowest and the highest are open
    centre: float = 0.0
    scale: float = 0.01  # where bins begin to widen, as a distance from the centre
    reach: float = 1e4  # of the outermost edges from the centre

    def __post_init__(self) -> None:
        whole = isinstance(self.bins, int) and not isinstance(self.bins, bool)
        few = whole and FEWEST_BINS <= self.bins <= MOST_BINS
        require(few, f"bins must lie between {FEWEST_BINS} and {MOST_BINS}, got {self.bins!r:.50}")
        numbers = (self.centre, self.scale, self.reach)
        valid = all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers)
        # False for NaN, and for whole numbers too large for a float.
        near = valid and all(abs(n) <= FARTHEST for n in numbers)
        require(near, "the centre, scale and reach of bins must be finite numbers")
        fits = SMALLEST <= self.scale <= self.reach
        require(fits, f"the scale of bins must be at least {SMALLEST:g}, and not beyond their reach")
        require(bool((np.diff(self.edges()) > 0).all()), "the scale of bins is too small for their centre")

    def edges(self) -> Floats:
        """[bins - 1], ascending. A score at an edge belongs to the bin above it."""
        outermost = math.asinh(self.reach / self.scale)
        return self.centre + self.scale * np.sinh(np.linspace(-outermost, outermost, self.bins - 1))

    @classmethod
    def around(cls, bins: int, spread: Spread, reach: float) -> Bins:
        """Narrow bins where these scores lie. `reach`: of the outermost edges, in widths of the spread."""
        # No finer than scores are told apart, whether they are all alike or far from zero.
        width = max(spread.width, 1e-6 * (1 + abs(spread.centre)))
        return cls(bins, spread.centre, width / 8, width * reach)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> Bins:
        """The inverse of `to_json`. It may be another party's: everything is checked."""
        names = set(cls.__dataclass_fields__)
        known = isinstance(content, dict) and content.keys() == names
        require(known, f"bins are described by {', '.join(sorted(names))}, and by nothing else")
        return cls(**content)

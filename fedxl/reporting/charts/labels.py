"""Letters beside curves: where they touch neither another curve nor each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
OFFSETS = np.array([(0, -11), (0, 11), (-11, -5), (11, 5), (11, -5), (-11, 5)], np.float64)
AROUND = np.array([(10, 10), (-10, -10), (-10, 10), (10, -10), (0, 15), (0, -15), (15, 0), (-15, 0)], np.float64)
SAMPLES = 40  # places along a curve that are tried
ENOUGH = 12.0  # units between a letter and anything else; more is not better


def place(
    curves: Sequence[Floats], box: tuple[float, float, float, float], taken: Sequence[Floats] = ()
) -> list[tuple[float, float]]:
    """A place for the letter of each curve [n, 2], inside the box (left, top, right, bottom), one after another.

    Places that are taken [2] are kept clear, too.
    """
    dense = [_along(curve, 200) for curve in curves]
    found: list[tuple[float, float]] = []
    for mine, curve in enumerate(curves):
        tried = (_along(curve, SAMPLES)[:, None] + OFFSETS[None]).reshape(-1, 2)
        left, top, right, bottom = box
        inside = (tried[:, 0] > left + 6) & (tried[:, 0] < right - 6)
        inside &= (tried[:, 1] > top + 7) & (tried[:, 1] < bottom - 7)
        tried = tried[inside] if inside.any() else tried
        others = [points for number, points in enumerate(dense) if number != mine] + [
            np.array([p]) for p in (*taken, *found)
        ]
        clear = np.minimum(_clearance(tried, others), ENOUGH)
        own = _clearance(tried, [dense[mine]])
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


def beside(point: Floats, taken: Sequence[Floats]) -> tuple[float, float]:
    """A place beside a point [2], as far from those that are taken as is enough."""
    tried = point + AROUND
    clear = np.minimum(_clearance(tried, [np.array([other]) for other in taken]), ENOUGH)
    across, up = tried[int(np.argmax(clear))]
    return float(across), float(up)


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Heights with a gap between neighbours, in the order of the wanted ones and as near to them as can be.

    Least squares: neighbours that would be too close form a block around the mean of what they want.

    >>> spread([10, 12, 50], 10)
    [6.0, 16.0, 50.0]
    """
    from scipy.optimize import isotonic_regression  # takes a third of a second to load

    order = np.argsort(np.asarray(places, np.float64), kind="stable")
    steps = gap * np.arange(len(order))
    found = np.empty(len(order))
    found[order] = isotonic_regression(np.asarray(places, np.float64)[order] - steps).x + steps
    return [float(height) for height in found]

"""How many examples have which time: what pairs of time to event need to know of all clients together.

A client tells its times as counts, exact ones or in bins. Bins begin at public times, twenty per decade (`EDGES`), so
that a real site shows none of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedxl.errors import RefusedError, refuse
from fedxl.sampling import Floats, Indices

# 0, and from a millionth to a million millions: 1, 1.12, 1.26, 1.41, ..., 8.91, 10, 11.2, ...
EDGES: Floats = np.array([0.0, *(float(f"{10 ** (step / 20):.3g}") for step in range(-120, 241))])
UNREADABLE = "its counts of times cannot be read"


class Times(NamedTuple):
    """What one client tells of its times."""

    at: Floats  # [m] the different ones, ascending
    events: Indices  # [m] how many examples have the event then
    every: Indices  # [m] how many examples have this time


def times_of(time: Floats, event: npt.NDArray[Any]) -> Times:
    """A client's times, counted."""
    at, number = np.unique(time, return_inverse=True)
    count = np.bincount(number, minlength=len(at))
    return Times(at, np.bincount(number, weights=event > 0, minlength=len(at)).astype(np.int64), count)


class Timetable(NamedTuple):
    """How many examples there are at each time, over all clients as they count in the run."""

    at: Floats  # [m] the different times, or where bins begin, ascending
    mass: Floats  # [m] the share of examples with this time
    events: Floats  # [m] the share of examples that have the event then
    tied: Indices  # [m] how many events there are

    def number(self, times: Floats) -> Indices:
        """The latest of the table's times that each of these reaches, as numbers from 0."""
        return np.maximum(np.searchsorted(self.at, times, side="right") - 1, 0)

    @property
    def since(self) -> Floats:
        """[m] the share of examples whose time is this one or later."""
        return np.asarray(np.cumsum(self.mass[::-1])[::-1])

    @property
    def public(self) -> bool:
        """Whether no time is one that a client holds."""
        return bool(np.isin(self.at, EDGES).all())

    def to_json(self) -> dict[str, list[float]]:
        return {name: column.tolist() for name, column in self._asdict().items()}


def timetable(clients: Sequence[Times], by_samples: bool, bins: int = 0) -> Timetable:
    """The table of all clients. by_samples: whether they count by their examples; else all count the same.

    bins: at most so many, of about as many events each; 0: exact times.
    """
    edges = np.unique(np.concatenate([each.at for each in clients]))
    if bins:
        edges = _shared_edges(clients, bins)
    mass, events = np.zeros((2, len(edges)))
    count = np.zeros(len(edges), np.int64)
    total = sum(int(each.every.sum()) for each in clients)
    for each in clients:
        place = np.searchsorted(edges, each.at, side="right") - 1
        own, all_own = (
            np.bincount(place, column, len(edges)).astype(np.int64) for column in (each.events, each.every)
        )
        of = total if by_samples else len(clients) * int(each.every.sum())
        mass += all_own / of  # counted first, so that counts in bins give the same bits as exact times do
        events += own / of
        count += own
    return Timetable(edges, mass, events, count)


def _shared_edges(clients: Sequence[Times], bins: int) -> Floats:
    """Where bins begin: among public times, so that they hold about as many events each. The first begins at 0."""
    events = np.zeros(len(EDGES), np.int64)
    for each in clients:
        np.add.at(events, cells(each.at), each.events)
    upto = np.cumsum(events) - events  # events before each public time
    wanted = np.arange(bins) * (events.sum() / bins)
    begins = np.searchsorted(upto, wanted)[1:].clip(max=len(EDGES) - 1)
    return np.asarray(EDGES[np.unique(np.append(0, begins))])


def cells(times: Floats) -> Indices:
    """The latest public time that each of these reaches, as numbers from 0."""
    return np.maximum(np.searchsorted(EDGES, times, side="right") - 1, 0)


def binned(times: Times) -> dict[str, list[int]]:
    """What a real site tells: its counts between public times."""
    found, number = np.unique(cells(times.at), return_inverse=True)
    counts = [np.bincount(number, weights=each).astype(np.int64).tolist() for each in (times.events, times.every)]
    return {"cells": found.tolist(), "events": counts[0], "every": counts[1]}


def read_binned(content: Any, positives: int, examples: int) -> Times:
    """The inverse of `binned`, of so many events and examples. Raises RefusedError if it cannot be true."""
    lists = isinstance(content, dict) and content.keys() == {"cells", "events", "every"}
    refuse(not lists or not all(isinstance(each, list) for each in content.values()), UNREADABLE)
    numbers = [number for each in content.values() for number in each]
    whole = all(type(number) is int and 0 <= number <= examples + len(EDGES) for number in numbers)
    same = len({len(each) for each in content.values()}) == 1 and 0 < len(content["cells"]) <= len(EDGES)
    refuse(not (whole and same), UNREADABLE)
    at, events, every = (np.array(content[name], np.int64) for name in ("cells", "events", "every"))
    ascend = bool((np.diff(at) > 0).all()) and int(at[-1]) < len(EDGES)
    refuse(not (ascend and bool((events <= every).all()) and bool((every > 0).all())), UNREADABLE)
    right = int(events.sum()) == positives and int(every.sum()) == examples
    refuse(not right, f"its counts of times are not those of {positives} events of {examples} examples")
    return Times(EDGES[at], events, every)


def read_timetable(content: Any) -> Timetable:
    """The inverse of `Timetable.to_json`. Raises RefusedError for anything else."""
    known = isinstance(content, dict) and content.keys() == set(Timetable._fields)
    refuse(not known, "its table of times cannot be read")
    try:
        columns = {name: np.array(content[name], np.float64) for name in Timetable._fields}
    except (ValueError, TypeError, OverflowError):
        raise RefusedError("its table of times cannot be read") from None
    sizes = {column.shape for column in columns.values()}
    plain = len(sizes) == 1 and all(column.ndim == 1 and 0 < len(column) <= len(EDGES) for column in columns.values())
    finite = plain and all(bool((np.isfinite(column) & (column >= 0)).all()) for column in columns.values())
    refuse(not finite or not bool((np.diff(columns["at"]) > 0).all()), "its table of times cannot be one")
    return Timetable(columns["at"], columns["mass"], columns["events"], columns["tied"].astype(np.int64))

"""`Scores`: what evaluation, prediction, reports and sites exchange: `Examples` with scores in place of x."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fedxl.errors import UserError, require
from fedxl.files import DAMAGED, read_bytes, write_atomically
from fedxl.metrics import COUNTS, NamedMetric, judge
from fedxl.metrics import Floats as Floats

Ints = npt.NDArray[np.int64]
UNKNOWN = -1  # a label that is not known
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Scores:
    """Raw scores of examples, one column per label, and what is known of each example."""

    scores: Floats  # [n, L]
    y: Ints  # [n, L] 0 or 1, -1: not known; with groups grades of relevance, of which those above 0 are positive
    labels: tuple[str, ...] = ("",)  # [L] their names; one label needs none
    site: Ints | None = None  # [n] where each is from, as an index; None: not known
    sites: tuple[str, ...] = ()  # the names of the sites
    group: Ints | None = None  # [n] the query of each item
    time: Floats | None = None  # [n] of the event (y = 1), or until when there was none (y = 0)
    row: tuple[str, ...] = ()  # [n] what identifies each; empty: not known

    def __post_init__(self) -> None:
        shapes = f"scores {self.scores.shape} and labels {self.y.shape}"
        same = self.scores.shape == self.y.shape == (len(self.scores), len(self.labels))
        require(same, f"{shapes} are not of {len(self.labels)} label(s)")
        for name, column in (("site", self.site), ("group", self.group), ("time", self.time)):
            require(column is None or column.shape == (len(self),), f"scores do not have one {name} each")
        require(len(self.row) in (0, len(self)), "scores do not have one row each")

    @classmethod
    def of(cls, scores: Any, y: Any, **known: Any) -> Scores:
        """One label: scores [n] and labels [n]."""
        return cls(np.asarray(scores, np.float64)[:, None], np.asarray(y, np.int64)[:, None], **known)

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def flat(self) -> tuple[Floats, Ints]:
        """Scores [n] and labels [n], 0 or 1, of a record of one label that is known everywhere."""
        assert len(self.labels) == 1, "a column has one label"
        return self.scores[:, 0], (self.y[:, 0] > 0).astype(np.int64)

    @property
    def positives(self) -> int:
        return int((self.y > 0).sum())

    @property
    def negatives(self) -> int:
        return int((self.y == 0).sum())

    @property
    def both_classes(self) -> bool:
        """Whether there is a curve at all: both classes of one label, and finite scores."""
        return 0 < self.positives < len(self) and bool(np.isfinite(self.scores).all())

    @property
    def has_metrics(self) -> bool:
        """Whether one label has metrics: finite scores of both classes, or of time to event an event."""
        if self.time is None:
            return self.both_classes
        return self.positives > 0 and bool(np.isfinite(self.scores).all())

    def take(self, which: Ints) -> Scores:
        """Those at these indices."""
        columns = {"site": self.site, "group": self.group, "time": self.time}
        taken: dict[str, Any] = {name: None if each is None else each[which] for name, each in columns.items()}
        row = tuple(self.row[index] for index in which) if self.row else ()
        return replace(self, scores=self.scores[which], y=self.y[which], row=row, **taken)

    def by_label(self) -> dict[str, Scores]:
        """A record for each label, of the examples for which it is known."""
        found = {}
        for number, name in enumerate(self.labels):
            column = slice(number, number + 1)
            one = replace(self, scores=self.scores[:, column], y=self.y[:, column], labels=(name,))
            known = np.flatnonzero(one.y[:, 0] >= 0)
            found[name] = one if len(known) == len(one) else one.take(known)
        return found

    def by_site(self) -> dict[str, Scores]:
        """Each site's own, in the order of the names, without sites that have none; empty if sites are not known."""
        if self.site is None:
            return {}
        chosen = {name: np.flatnonzero(self.site == site) for site, name in enumerate(self.sites)}
        return {name: self.take(which) for name, which in chosen.items() if len(which)}


def measure(wanted: Iterable[NamedMetric], found: Scores) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The values of these metrics, and those of each label. With several labels a value is the mean over the labels
    for which it is defined; counts are those of all labels together.
    """
    wanted = list(wanted)
    each = {
        label: judge(wanted, one.scores[:, 0], one.y[:, 0], one.group, one.time)
        for label, one in found.by_label().items()
    }
    values = {metric.name: mean_defined(row[metric.name] for row in each.values()) for metric in wanted}
    return values | {count: sum(row[count] for row in each.values()) for count in COUNTS}, each


def mean_defined(values: Iterable[float]) -> float:
    """The mean of those that are not NaN; NaN if all are."""
    defined = [value for value in values if not np.isnan(value)]
    return float(np.mean(defined)) if defined else float("nan")


def save(path: Path, splits: Mapping[str, Scores]) -> None:
    """Write the scores of some splits into one .npz file: arrays called `test/scores`, `test/y` and so on."""
    arrays = {}
    for split, found in splits.items():
        texts = {name: np.array(getattr(found, name), np.str_) for name in ("labels", "sites", "row")}
        columns = {name: getattr(found, name) for name in ("scores", "y", "site", "group", "time")}
        arrays[split] = {name: column for name, column in columns.items() if column is not None} | texts
    save_arrays(path, arrays)


def load(path: Path) -> dict[str, Scores]:
    """What `save` wrote; nothing if there is no such file."""

    def read(arrays: Mapping[str, Any]) -> Scores:
        require("y" in arrays, "it was written by an older version of fedxl")
        y = arrays["y"].astype(np.int64)
        known = (y >= UNKNOWN) & ((y <= 1) | ("group" in arrays))  # items of queries have grades
        require(bool(known.all()), "its labels are not 0, 1 or -1")
        labels, sites, row = (tuple(map(str, arrays[name])) for name in ("labels", "sites", "row"))
        site, group = (arrays[name].astype(np.int64) if name in arrays else None for name in ("site", "group"))
        time = arrays["time"].astype(np.float64) if "time" in arrays else None
        named = site is None or bool(((site >= 0) & (site < len(sites))).all())
        require(named, "its sites have no names")
        return Scores(arrays["scores"].astype(np.float64), y, labels, site, sites, group, time, row)

    return load_arrays(path, read, "scores")


def save_arrays(path: Path, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Write arrays, each named by its part and what it holds: `test/scores`."""
    buffer = io.BytesIO()
    np.savez(buffer, **{f"{part}/{name}": array for part, each in parts.items() for name, array in each.items()})
    write_atomically(path, buffer.getvalue())


def load_arrays(path: Path, read: Callable[[Mapping[str, Any]], T], what: str) -> dict[str, T]:
    """`read(arrays)` of each part that `save_arrays` wrote; nothing if there is no file."""
    try:
        # From memory: of a damaged file, np.load would leave the handle open.
        with np.load(io.BytesIO(read_bytes(path)), allow_pickle=False) as arrays:
            parts: dict[str, dict[str, Any]] = {}
            for name in arrays.files:
                part, _, column = name.rpartition("/")
                parts.setdefault(part, {})[column] = arrays[name]
            return {part: read(found) for part, found in parts.items()}
    except FileNotFoundError:
        return {}
    except DAMAGED as error:
        raise UserError(f"cannot read {path}: {error}; remove it to do without its {what}") from None

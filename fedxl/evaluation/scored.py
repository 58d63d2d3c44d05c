"""The scores of a model on held-back data, of one label or of several: what every evaluation rests on."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fedxl import metrics
from fedxl.errors import UserError, require
from fedxl.files import DAMAGED, read_bytes, write_atomically
from fedxl.metrics import COUNTS, NamedMetric

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Scored:
    """Raw scores and labels of examples, where they are from, and what identifies them, if that is known."""

    scores: Floats  # [n]
    labels: Ints  # [n], 0 or 1
    sites: Ints | None = None  # [n], an index into `names`
    names: tuple[str, ...] = ()  # of the sites
    rows: tuple[str, ...] = ()  # [n], or empty

    def __post_init__(self) -> None:
        same = self.scores.shape == self.labels.shape and self.scores.ndim == 1
        require(same, f"{self.scores.shape} scores do not have one label each")
        require(self.sites is None or self.sites.shape == self.scores.shape, "scores do not have one site each")
        require(len(self.rows) in (0, len(self.scores)), "scores do not have one row each")

    def __len__(self) -> int:
        return len(self.scores)

    def by_site(self) -> dict[str, Scored]:
        """Each site's own, in the order of the names, without sites that have none; empty if sites are not known."""
        return {name: self.take(which) for name, which in _indices_by_site(self.sites, self.names).items()}

    def take(self, which: Ints) -> Scored:
        """Those at these indices."""
        sites = None if self.sites is None else self.sites[which]
        rows = tuple(self.rows[index] for index in which) if self.rows else ()
        return Scored(self.scores[which], self.labels[which], sites, self.names, rows)

    def arrays(self) -> dict[str, Any]:
        """As a file holds them."""
        sites = {} if self.sites is None else {"sites": self.sites, "names": np.array(self.names, np.str_)}
        rows = {"rows": np.array(self.rows, np.str_)} if self.rows else {}
        return {"scores": self.scores, "labels": self.labels, **sites, **rows}


@dataclass(frozen=True, eq=False)
class LabelScores:
    """Raw scores and labels of the same examples, with one column per label."""

    scores: Floats  # [n, L]
    labels: Ints  # [n, L] 0 or 1, -1 where it is not known
    names: tuple[str, ...]  # [L]
    sites: Ints | None = None  # [n], an index into `site_names`
    site_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        shapes = f"scores {self.scores.shape} and labels {self.labels.shape}"
        same = self.scores.shape == self.labels.shape == (len(self.scores), len(self.names))
        require(same, f"{shapes} are not of {len(self.names)} labels")
        sited = self.sites is None or self.sites.shape == (len(self.scores),)
        require(sited, "scores do not have one site each")

    def label(self, number: int) -> Scored:
        """The scores of one label, of the examples of which it is known."""
        known = self.labels[:, number] >= 0
        sites = None if self.sites is None else self.sites[known]
        return Scored(self.scores[known, number], self.labels[known, number], sites, self.site_names)

    def by_label(self) -> dict[str, Scored]:
        return {name: self.label(number) for number, name in enumerate(self.names)}

    def by_site(self) -> dict[str, LabelScores]:
        """Each site's own, without sites that have none; empty if sites are not known."""
        chosen = _indices_by_site(self.sites, self.site_names)
        return {name: LabelScores(self.scores[at], self.labels[at], self.names) for name, at in chosen.items()}

    def arrays(self) -> dict[str, Any]:
        """As a file holds them."""
        sites = {} if self.sites is None else {"sites": self.sites, "site_names": np.array(self.site_names, np.str_)}
        return {"scores": self.scores, "labels": self.labels, "names": np.array(self.names, np.str_), **sites}


def _indices_by_site(sites: Ints | None, names: tuple[str, ...]) -> dict[str, Ints]:
    chosen = {} if sites is None else {name: np.flatnonzero(sites == site) for site, name in enumerate(names)}
    return {name: which for name, which in chosen.items() if len(which)}


def judge_labels(
    wanted: Iterable[NamedMetric], found: LabelScores
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Each metric's mean over the labels for which it is defined, and its values by label.

    Counts are those of all labels together.
    """
    wanted = list(wanted)
    each = {name: metrics.judge(wanted, one.scores, one.labels) for name, one in found.by_label().items()}
    values = {metric.name: mean_defined([row[metric.name] for row in each.values()]) for metric in wanted}
    return values | {count: sum(row[count] for row in each.values()) for count in COUNTS}, each


def mean_defined(values: Iterable[float]) -> float:
    """The mean of those that are not NaN; NaN if all are."""
    defined = [value for value in values if not np.isnan(value)]
    return float(np.mean(defined)) if defined else float("nan")


def save(path: Path, splits: Mapping[str, Scored] | Mapping[str, LabelScores]) -> None:
    """Write the scores of some splits into one .npz file."""
    save_arrays(path, {split: found.arrays() for split, found in splits.items()})


def load(path: Path) -> dict[str, Scored]:
    """What `save` wrote; nothing if there is no such file."""

    def read(arrays: Mapping[str, Any]) -> Scored:
        scores, labels = _scores_and_labels(arrays, (0, 1), "0 or 1")
        return Scored(scores, labels, *_sites(arrays, "names"), _texts(arrays, "rows"))

    return load_splits(path, "scores", read, "scores")


def load_labels(path: Path) -> dict[str, LabelScores]:
    """What `save` wrote of several labels; nothing if there is no such file."""

    def read(arrays: Mapping[str, Any]) -> LabelScores:
        scores, labels = _scores_and_labels(arrays, (-1, 0, 1), "0, 1 or -1")
        return LabelScores(scores, labels, tuple(map(str, arrays["names"])), *_sites(arrays, "site_names"))

    return load_splits(path, "scores", read, "scores")


def _scores_and_labels(arrays: Mapping[str, Any], known: tuple[int, ...], words: str) -> tuple[Floats, Ints]:
    labels = arrays["labels"].astype(np.int64)
    require(bool(np.isin(labels, known).all()), f"its labels are not {words}")
    return arrays["scores"].astype(np.float64), labels


def _sites(arrays: Mapping[str, Any], named: str) -> tuple[Ints | None, tuple[str, ...]]:
    if "sites" not in arrays:
        return None, ()
    sites, names = arrays["sites"].astype(np.int64), _texts(arrays, named)
    require(bool(((sites >= 0) & (sites < len(names))).all()), "its sites have no names")
    return sites, names


def _texts(arrays: Mapping[str, Any], name: str) -> tuple[str, ...]:
    return tuple(map(str, arrays[name])) if name in arrays else ()


def save_arrays(path: Path, splits: Mapping[str, Mapping[str, Any]]) -> None:
    """Write arrays, each named by its split and what it holds: `test_scores`."""
    buffer = io.BytesIO()
    np.savez(buffer, **{f"{split}_{name}": array for split, each in splits.items() for name, array in each.items()})
    write_atomically(path, buffer.getvalue())


def load_splits(path: Path, mark: str, read: Callable[[Mapping[str, Any]], T], what: str) -> dict[str, T]:
    """`read(arrays)` of each split that has an array called `mark`; nothing if there is no file."""
    try:
        # From memory: of a damaged file, np.load would leave the handle open.
        with np.load(io.BytesIO(read_bytes(path)), allow_pickle=False) as arrays:
            splits = [name.removesuffix(f"_{mark}") for name in arrays.files if name.endswith(f"_{mark}")]
            begins = {split: [name for name in arrays.files if name.startswith(f"{split}_")] for split in splits}
            return {
                split: read({name.removeprefix(f"{split}_"): arrays[name] for name in names})
                for split, names in begins.items()
            }
    except FileNotFoundError:
        return {}
    except DAMAGED as error:
        raise UserError(f"cannot read {path}: {error}; remove it to do without its {what}") from None

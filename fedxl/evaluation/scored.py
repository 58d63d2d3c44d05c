"""The scores of a model on data that were held back: what every figure of an evaluation rests on."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from fedxl.errors import UserError, require
from fedxl.files import DAMAGED, read_bytes, write_atomically

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


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
        if self.sites is None:
            return {}
        chosen = {name: np.flatnonzero(self.sites == site) for site, name in enumerate(self.names)}
        return {name: self.take(which) for name, which in chosen.items() if len(which)}

    def take(self, which: Ints) -> Scored:
        """Those at these indices."""
        sites = None if self.sites is None else self.sites[which]
        rows = tuple(self.rows[index] for index in which) if self.rows else ()
        return Scored(self.scores[which], self.labels[which], sites, self.names, rows)


def save(path: Path, splits: dict[str, Scored]) -> None:
    """Write the scores of some splits into one .npz file."""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for split, found in splits.items():
        arrays |= {f"{split}_scores": found.scores, f"{split}_labels": found.labels}
        if found.sites is not None:
            arrays |= {f"{split}_sites": found.sites, f"{split}_names": _texts(found.names)}
        if found.rows:
            arrays[f"{split}_rows"] = _texts(found.rows)
    save_arrays(path, arrays)


def load(path: Path) -> dict[str, Scored]:
    """What `save` wrote; nothing if there is no such file."""
    return load_splits(path, "scores", _scored, "scores")


def _scored(arrays: np.lib.npyio.NpzFile, split: str) -> Scored:
    scores, labels = arrays[f"{split}_scores"].astype(np.float64), arrays[f"{split}_labels"].astype(np.int64)
    require(bool(np.isin(labels, (0, 1)).all()), "its labels are not 0 or 1")
    rows = tuple(map(str, arrays[f"{split}_rows"])) if f"{split}_rows" in arrays.files else ()
    if f"{split}_sites" not in arrays.files:
        return Scored(scores, labels, rows=rows)
    sites, names = arrays[f"{split}_sites"].astype(np.int64), tuple(map(str, arrays[f"{split}_names"]))
    require(bool(((sites >= 0) & (sites < len(names))).all()), "its sites have no names")
    return Scored(scores, labels, sites, names, rows)


def _texts(values: Sequence[str]) -> npt.NDArray[np.str_]:
    return np.array(values, dtype=np.str_)


T = TypeVar("T")


def save_arrays(path: Path, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
    """Write arrays, each named by its split and what it holds: `test_scores`."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    write_atomically(path, buffer.getvalue())


def load_splits(path: Path, mark: str, read: Callable[[np.lib.npyio.NpzFile, str], T], what: str) -> dict[str, T]:
    """`read(arrays, split)` for each split that has an array called `split_mark`; nothing if there is no file."""
    try:
        # From memory: of a damaged file, np.load would leave the handle open.
        with np.load(io.BytesIO(read_bytes(path)), allow_pickle=False) as arrays:
            splits = [name.removesuffix(f"_{mark}") for name in arrays.files if name.endswith(f"_{mark}")]
            return {split: read(arrays, split) for split in splits}
    except FileNotFoundError:
        return {}
    except DAMAGED as error:
        raise UserError(f"cannot read {path}: {error}; remove it to do without its {what}") from None

"""curves.npz: the counts in bins that sites disclosed of the chosen model, by split and site."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedxl.errors import require
from fedxl.evaluation.array_file import load_splits, save_arrays
from fedxl.evaluation.binned import Binned, pooled
from fedxl.evaluation.scored import Scored

Curves = Mapping[str, Binned]  # by site; all in the same bins


def save(path: Path, splits: Mapping[str, Curves]) -> None:
    """Write the counts of some splits into one .npz file."""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for split, curves in splits.items():
        each = list(curves.values())
        arrays |= {
            f"{split}_edges": each[0].edges,
            f"{split}_names": np.array(list(curves), dtype=np.str_),
            f"{split}_positives": np.stack([found.positives for found in each]),
            f"{split}_negatives": np.stack([found.negatives for found in each]),
            f"{split}_noise": np.array([found.noise for found in each]),
        }
    save_arrays(path, arrays)


def load(path: Path) -> dict[str, dict[str, Binned]]:
    """What `save` wrote; nothing if there is no such file."""
    return load_splits(path, "edges", _curves, "curves")


def as_scored(curves: Curves) -> Scored:
    """Scores with these counts, each in the middle of its bin, for whatever asks for scores. No row is known.

    Noise is removed from sums of counts. What is left of one site's own would stay in far bins, and count for all
    sites together. So where there is noise, nobody knows whose a score is.
    """
    if any(found.noise for found in curves.values()):
        return together(curves)
    each = [found.as_scores() for found in curves.values()]
    sites = np.repeat(np.arange(len(each)), [len(labels) for _, labels in each])
    scores, labels = (np.concatenate(column) for column in zip(*each, strict=True))
    return Scored(scores, labels, sites, tuple(curves))


def scores_of(splits: Mapping[str, Curves]) -> dict[str, Scored]:
    """`as_scored` of each split."""
    return {split: as_scored(found) for split, found in splits.items()}


def together(curves: Curves) -> Scored:
    """The same of all sites' counts added up."""
    return Scored(*pooled(curves.values()).as_scores())


def _curves(arrays: np.lib.npyio.NpzFile, split: str) -> dict[str, Binned]:
    edges, noise = (arrays[f"{split}_{name}"].astype(np.float64) for name in ("edges", "noise"))
    positives, negatives = (arrays[f"{split}_{name}"].astype(np.int64) for name in ("positives", "negatives"))
    names = [str(name) for name in arrays[f"{split}_names"]]
    same = len(names) == len(set(names)) == len(noise) == len(positives) == len(negatives)
    require(same and bool(names), "its counts do not have one site each")
    return {name: Binned(edges, positives[row], negatives[row], float(noise[row])) for row, name in enumerate(names)}

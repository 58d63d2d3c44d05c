"""Scores of several labels on data that were held back, and metrics of each label and of all together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedxl import metrics
from fedxl.errors import require
from fedxl.evaluation.scored import Floats, Ints, Scored, load_splits, save_arrays
from fedxl.metrics import COUNTS, NamedMetric


@dataclass(frozen=True, eq=False)
class LabelScores:
    """Raw scores and labels of the same examples, a column for each label."""

    scores: Floats  # [n, L]
    labels: Ints  # [n, L] 0 or 1, -1 where it is not known
    names: tuple[str, ...]  # [L]
    sites: Ints | None = None  # [n], an index into `site_names`
    site_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        same = self.scores.shape == self.labels.shape == (len(self.scores), len(self.names))
        require(
            same, f"scores {self.scores.shape} and labels {self.labels.shape} are not of {len(self.names)} labels"
        )
        sited = self.sites is None or self.sites.shape == (len(self.scores),)
        require(sited, "scores do not have one site each")

    def label(self, number: int) -> Scored:
        """The scores of one label, of the examples of which it is known."""
        known = self.labels[:, number] >= 0
        sites = None if self.sites is None else self.sites[known]
        return Scored(self.scores[known, number], self.labels[known, number], sites, self.site_names)

    def by_label(self) -> dict[str, Scored]:
        """The scores of each label."""
        return {name: self.label(number) for number, name in enumerate(self.names)}

    def by_site(self) -> dict[str, LabelScores]:
        """Each site's own, without sites that have none; empty if sites are not known."""
        if self.sites is None:
            return {}
        chosen = {name: self.sites == site for site, name in enumerate(self.site_names)}
        return {
            name: LabelScores(self.scores[which], self.labels[which], self.names)
            for name, which in chosen.items()
            if which.any()
        }


def judge(wanted: Iterable[NamedMetric], found: LabelScores) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Each metric's mean over the labels for which it is defined, and its values by label.

    Counts are those of all labels together.
    """
    wanted = list(wanted)
    each = {name: metrics.judge(wanted, one.scores, one.labels) for name, one in found.by_label().items()}
    values = {metric.name: mean([row[metric.name] for row in each.values()]) for metric in wanted}
    return values | {count: sum(row[count] for row in each.values()) for count in COUNTS}, each


def mean(values: Iterable[float]) -> float:
    """Of those that are defined."""
    defined = [value for value in values if not np.isnan(value)]
    return float(np.mean(defined)) if defined else float("nan")


def save(path: Path, splits: Mapping[str, LabelScores]) -> None:
    """Write the scores of some splits into one .npz file."""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for split, found in splits.items():
        arrays |= {f"{split}_scores": found.scores, f"{split}_labels": found.labels}
        arrays[f"{split}_names"] = np.array(found.names, dtype=np.str_)
        if found.sites is not None:
            names = np.array(found.site_names, dtype=np.str_)
            arrays |= {f"{split}_sites": found.sites, f"{split}_site_names": names}
    save_arrays(path, arrays)


def load(path: Path) -> dict[str, LabelScores]:
    """What `save` wrote; nothing if there is no such file."""
    return load_splits(path, "scores", _loaded, "scores")


def _loaded(arrays: np.lib.npyio.NpzFile, split: str) -> LabelScores:
    scores, labels = arrays[f"{split}_scores"].astype(np.float64), arrays[f"{split}_labels"].astype(np.int64)
    require(bool(np.isin(labels, (-1, 0, 1)).all()), "its labels are not 0, 1 or -1")
    found = LabelScores(scores, labels, tuple(map(str, arrays[f"{split}_names"])))
    if f"{split}_sites" not in arrays.files:
        return found
    sites, names = arrays[f"{split}_sites"].astype(np.int64), tuple(map(str, arrays[f"{split}_site_names"]))
    require(bool(((sites >= 0) & (sites < len(names))).all()), "its sites have no names")
    return replace(found, sites=sites, site_names=names)

"""Counts of scores in bins: what a site may disclose instead of scores, and what follows from them, with bounds.

Counts of several sites are added. At the edges of bins the ROC curve is exact. Within a bin nobody knows the order: a
metric is that of scores which are equal within their bin, and its bounds are those of the best and the worst order.

Of time to event, examples are counted by bins of their times, too: positives are those with the event.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedxl.censored import concordance_of_counts
from fedxl.errors import require
from fedxl.evaluation.bins import Bins, Spread
from fedxl.evaluation.hazard import HazardSums, hazard_sums
from fedxl.evaluation.scores import Floats, Ints, Scores, load_arrays, mean_defined, save_arrays
from fedxl.metrics import COUNTS, NamedMetric, area_under, mcclish
from fedxl.metrics import split as split_name

MOST_SCORES = 50_000_000  # that counts are written out as
DRAWS = 50  # of noise, for the error that it causes


class Bounded(NamedTuple):
    """A metric from counts, and between which values that of the scores lies. With noise: besides the noise."""

    value: float  # scores of a bin taken as equal
    low: float
    high: float

    @property
    def bound(self) -> float:
        """How far the value may be from that of the scores."""
        return max(self.high - self.value, self.value - self.low)


class EdgePoint(NamedTuple):
    """An operating point at an edge, where sensitivity and specificity are exact."""

    threshold: float  # positive at or above it; infinite: nothing is
    sensitivity: float
    specificity: float
    more: float  # how much more sensitivity, or specificity, a threshold within the next bin could have at most


@dataclass(frozen=True, eq=False)
class Histogram:
    """How many positives and negatives have their score in each bin."""

    edges: Floats  # [bins - 1], ascending; the lowest and the highest bin are open
    positives: Ints  # [bins], or [times, bins], from the lowest bin up; with noise they may be negative
    negatives: Ints  # the same shape
    noise: float = 0.0  # its variance in each count
    times: Floats | None = None  # [times] where bins of time begin, ascending; None: not of time to event

    def __post_init__(self) -> None:
        require(self.edges.ndim == 1 and len(self.edges) > 0, "bins need edges")
        ascending = bool(np.isfinite(self.edges).all() and (np.diff(self.edges) > 0).all())
        require(ascending, "the edges of bins must be finite and ascending")
        rows = () if self.times is None else self.times.shape
        counted = self.positives.shape == self.negatives.shape == (*rows, len(self.edges) + 1)
        require(counted, f"{len(self.edges)} edges need {len(self.edges) + 1} counts of each class")
        known = math.isfinite(self.noise) and self.noise >= 0
        require(known, f"the variance of noise must not be negative, got {self.noise}")
        least = min(int(self.positives.min()), int(self.negatives.min()))
        require(self.noise > 0 or least >= 0, f"a bin cannot hold {least} examples")

    # What is known of all scores together

    @property
    def _layout(self) -> tuple[Any, ...]:
        """Counts can be added if this is the same."""
        return tuple(None if each is None else each.tolist() for each in (self.edges, self.times))

    def counts(self) -> tuple[Floats, Floats]:
        """Negatives and positives at or above each edge, from the highest down: from (0, 0) to all."""
        positives, negatives = self._by_bin
        return _from_above(negatives), _from_above(positives)

    def totals(self) -> tuple[float, float]:
        """How many positives and negatives there are, up to noise."""
        positives, negatives = self._likely
        return float(positives.sum()), float(negatives.sum())

    def roc(self) -> tuple[Floats, Floats]:
        """(false positive rate, true positive rate) at the edges, exactly; needs both classes."""
        false, true = self.counts()
        return false / false[-1], true / true[-1]

    def envelope(self) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """The lowest and the highest ROC curve that scores with these counts can have."""
        fpr, tpr = (np.repeat(rates, 2) for rates in self.roc())
        return (fpr[1:], tpr[:-1]), (fpr[:-1], tpr[1:])

    def auroc(self) -> Bounded:
        return self.partial_auc_raw(1.0)

    def partial_auc_raw(self, max_fpr: float) -> Bounded:
        if min(self.totals()) <= 0:
            return UNKNOWN
        low, high = self.envelope()
        return Bounded(*(area_under(*curve, max_fpr) for curve in (self.roc(), low, high)))

    def partial_auc(self, max_fpr: float) -> Bounded:
        """On McClish's scale."""
        return Bounded(*(mcclish(area, max_fpr) for area in self.partial_auc_raw(max_fpr)))

    def average_precision(self) -> Bounded:
        """Low: the positives of a bin come one by one after its negatives. High: together, before its negatives.

        Low is a sum of (t + j) / (t + j + f) over the positives j = 1, ..., p of each bin, for t positives above the
        bin and f negatives down to its end: p - f (digamma(t + f + p + 1) - digamma(t + f + 1)).
        """
        if min(self.totals()) <= 0:
            return UNKNOWN
        false, true = self.counts()
        some = np.diff(true) > 0  # other bins add nothing, and might divide by zero
        p, t, f = np.diff(true)[some], true[:-1][some], false[1:][some]
        equal = p * (t + p) / (t + p + f)
        above = false[:-1][some]
        from scipy.special import digamma  # training loads this module, and does not need scipy

        low = p - f * (digamma(t + f + p + 1) - digamma(t + f + 1))
        high = p * (t + p) / (t + p + above)
        return Bounded(*(float(each.sum() / true[-1]) for each in (equal, low, high)))

    def concordance(self) -> Bounded:
        """Of time to event."""
        return Bounded(*concordance_of_counts(*self._likely)) if self.times is not None else UNKNOWN

    def at_specificity(self, specificity: float) -> EdgePoint:
        """The lowest edge with at least this specificity."""
        fpr, tpr = self.roc()
        at = int(np.searchsorted(fpr, 1 - specificity + 1e-12, side="right")) - 1
        return self._point(at, float(tpr[min(at + 1, len(tpr) - 1)] - tpr[at]))

    def at_sensitivity(self, sensitivity: float) -> EdgePoint:
        """The highest edge with at least this sensitivity."""
        fpr, tpr = self.roc()
        at = int(np.searchsorted(tpr, sensitivity - 1e-12, side="left"))
        return self._point(at, float(fpr[at] - fpr[max(at - 1, 0)]))

    def _point(self, at: int, more: float) -> EdgePoint:
        (fpr, tpr), edges = self.roc(), np.concatenate(([math.inf], self.edges[::-1], [-math.inf]))
        return EdgePoint(float(edges[at]), float(tpr[at]), float(1 - fpr[at]), more)

    def as_scores(self) -> Scores:
        """Scores with these counts: each in the middle of its bin, and so its time. For calibration, for example."""
        total = sum(self.totals())
        require(total <= MOST_SCORES, f"counts of {total:g} examples are too many to stand for scores one by one")
        each = [rounded(counts) for counts in self._likely]
        scores = [np.repeat(np.broadcast_to(self._middles, counts.shape).ravel(), counts.ravel()) for counts in each]
        labels, time = np.repeat([1, 0], list(map(len, scores))), None
        if self.times is not None:
            middles = (self.times + np.append(self.times[1:], self.times[-1:])) / 2
            time = np.concatenate([np.repeat(middles, counts.sum(1)) for counts in each])
        return Scores.of(np.concatenate(scores), labels, time=time)

    def hazard(self) -> HazardSums | None:
        """The sums that a baseline hazard takes, at the times between which examples are counted."""
        if self.times is None or not self.totals()[0]:
            return None
        found = self.as_scores()
        return hazard_sums(*found.flat, found.time, self.times, math.ceil(found.scores.max()))

    def bins_around(self, bins: int) -> Bins:
        """Bins for scores such as these, with narrow bins where most of them lie; needs at least one."""
        below = np.cumsum(sum(self._by_bin))
        low, centre, high = (int(np.searchsorted(below, share * below[-1])) for share in (0.25, 0.5, 0.75))
        at = min(max(centre, 1), len(self.edges) - 1)
        known = float(self.edges[at] - self.edges[at - 1])  # nobody sees further than this
        width = max(float(self._middles[high] - self._middles[low]), known)
        return Bins.around(bins, Spread(float(self._middles[centre]), width), reach=100)

    @property
    def _middles(self) -> Floats:
        """Of the bins; of an open one, its edge."""
        ends = np.concatenate((self.edges[:1], self.edges, self.edges[-1:]))
        return (ends[1:] + ends[:-1]) / 2

    # Noise

    @cached_property
    def _likely(self) -> tuple[Floats, Floats]:
        """The counts; with noise, likely ones that are not negative and have the same sum."""
        sides = (self.positives.astype(np.float64), self.negatives.astype(np.float64))
        return (_without_noise(sides[0]), _without_noise(sides[1])) if self.noise else sides

    @property
    def _by_bin(self) -> tuple[Floats, Floats]:
        """Likely counts [bins], of all times."""
        positives, negatives = (each.reshape(-1, len(self.edges) + 1).sum(0) for each in self._likely)
        return positives, negatives

    def without_noise(self) -> Histogram:
        """With likely counts, which are not negative, in place of noisy ones. Their noise stays on record."""
        positives, negatives = map(rounded, self._likely)
        return replace(self, positives=positives, negatives=negatives)

    def with_noise_again(self, seed: int = 0) -> Iterator[Histogram]:
        """Endlessly: likely counts with as much noise added again, and removed again."""
        rng, likely = np.random.default_rng(seed), self.without_noise()
        while True:
            noise = np.rint(rng.normal(scale=math.sqrt(self.noise), size=(2, *self.positives.shape))).astype(np.int64)
            both = likely.positives + noise[0], likely.negatives + noise[1]
            yield replace(self, positives=both[0], negatives=both[1]).without_noise()


UNKNOWN = Bounded(math.nan, math.nan, math.nan)


def count(
    edges: Floats, scores: Floats, labels: Ints, time: Floats | None = None, times: Floats | None = None
) -> Histogram:
    """The counts of these scores. One that is no number counts as the lowest.

    times: where bins of time begin, of time to event. What comes before the first counts as in it.
    """
    bins, shape = np.searchsorted(edges, np.where(np.isnan(scores), -np.inf, scores), side="right"), [len(edges) + 1]
    if time is not None and times is not None:
        row = np.maximum(np.searchsorted(times, time, side="right") - 1, 0)
        bins, shape = bins + row * shape[0], [len(times), *shape]
    positives, negatives = (
        np.bincount(bins[side], minlength=math.prod(shape)).astype(np.int64).reshape(shape)
        for side in (labels > 0, labels <= 0)
    )
    return Histogram(edges, positives, negatives, times=times)


def pooled(parts: Iterable[Histogram]) -> Histogram:
    """The counts of several sites in the same bins, added."""
    first, *others = parts
    for part in others:
        require(part._layout == first._layout, "counts can be added only if their bins are the same")
        names = ("positives", "negatives", "noise")
        first = replace(first, **{name: getattr(first, name) + getattr(part, name) for name in names})
    return first


# Metrics that follow from counts, by their names in `METRICS`.
FROM_COUNTS: Mapping[str, Callable[..., Bounded]] = {
    "auroc": Histogram.auroc,
    "pauc": Histogram.partial_auc,
    "pauc_raw": Histogram.partial_auc_raw,
    "ap": Histogram.average_precision,
    "cindex": Histogram.concordance,
}


def measure_one(wanted: Iterable[NamedMetric], found: Histogram) -> dict[str, Bounded]:
    """Those of these metrics that follow from counts, by name."""
    values = {}
    for metric in wanted:
        if compute := FROM_COUNTS.get(split_name(metric.name)[0]):
            values[metric.name] = compute(found, *(() if metric.limit is None else (metric.limit,)))
    return values


def noise_errors(wanted: Sequence[NamedMetric], parts: Sequence[Histogram], draws: int = DRAWS) -> dict[str, float]:
    """How far the noise of these sites moves the same metrics of all: root mean squares over so many draws of it."""
    found = measure_one(wanted, pooled(parts))
    again = [part.with_noise_again(seed) for seed, part in enumerate(parts)]
    each = [measure_one(wanted, pooled([next(part) for part in again])) for _ in range(draws)]
    return {
        name: math.sqrt(np.mean([(values[name].value - value) ** 2 for values in each]))
        for name, (value, _, _) in found.items()
    }


Histograms = Mapping[str, Mapping[str, Histogram]]  # by label and site; those of a label are in the same bins


class Counted(NamedTuple):
    """Metrics that follow from counts."""

    values: dict[str, float]  # means over the labels for which they are defined; counts are those of all labels
    by_label: dict[str, dict[str, float]]
    bounds: dict[str, dict[str, float]]  # by label: how far a metric may be from that of the scores
    noise: dict[str, float]  # how far noise moves each mean, as a root mean square; empty without noise

    @property
    def mean_bounds(self) -> dict[str, float]:
        """Of the means: each label's metric may be off by its own bound, all in one direction."""
        names = next(iter(self.bounds.values()))
        return {name: mean_defined(each[name] for each in self.bounds.values()) for name in names}


def measure(wanted: Iterable[NamedMetric], found: Histograms, noise: bool = True) -> Counted:
    """The metrics of all sites' counts together, label by label, and their means.

    noise: whether to find out, by drawing it again, how far noise moves them.
    """
    wanted = list(wanted)
    together = {label: pooled(sites.values()) for label, sites in found.items()}
    each = {label: measure_one(wanted, one) for label, one in together.items()}
    by_label = {
        label: {name: value.value for name, value in values.items()}
        | dict(zip(COUNTS, map(round, together[label].totals()), strict=True))
        for label, values in each.items()
    }
    bounds = {label: {name: value.bound for name, value in values.items()} for label, values in each.items()}
    names = next(iter(each.values()))
    values = {name: mean_defined(row[name] for row in by_label.values()) for name in names}
    values |= {count: sum(row[count] for row in by_label.values()) for count in COUNTS}
    moved = {}
    if noise and any(one.noise for one in together.values()):
        errors = {label: noise_errors(wanted, list(sites.values())) for label, sites in found.items()}
        for name in names:
            # Each label has noise of its own, so the squares add up.
            each_error = [errors[label][name] for label in found if not math.isnan(by_label[label][name])]
            moved[name] = math.sqrt(sum(e**2 for e in each_error)) / len(each_error) if each_error else math.nan
    return Counted(values, by_label, bounds, moved)


def _from_above(counts: Floats) -> Floats:
    return np.append(0.0, np.cumsum(counts[::-1]))


def _without_noise(counts: Floats) -> Floats:
    """Counts that are not negative, with the same sum in each row: running sums are the nearest ascending ones.

    Cutting each count off at zero would turn the noise of empty bins into examples, and pull AUROC towards one half.
    """
    if counts.ndim > 1:
        return np.stack(list(map(_without_noise, counts)))
    total = max(float(counts.sum()), 0.0)
    from scipy.optimize import isotonic_regression  # as above

    sums: Floats = isotonic_regression(np.cumsum(counts)[:-1]).x
    return np.diff(np.clip(sums, 0.0, total), prepend=0.0, append=total)


def rounded(counts: npt.NDArray[np.floating[Any]]) -> Ints:
    """Whole numbers whose running sums are those of the counts, rounded."""
    return np.diff(np.rint(np.cumsum(counts)), prepend=0.0).astype(np.int64).reshape(counts.shape)


def save(path: Path, splits: Mapping[str, Histograms]) -> None:
    """Write the counts of some splits into one .npz file: arrays called `test/LABEL/positives` and so on."""
    arrays = {}
    for split, found in splits.items():
        for label, sites in found.items():
            each = list(sites.values())
            counts = {n: np.stack([getattr(one, n) for one in each]) for n in ("positives", "negatives", "noise")}
            counts |= {} if each[0].times is None else {"times": each[0].times}
            arrays[f"{split}/{label}"] = {"edges": each[0].edges, "sites": np.array(list(sites), np.str_), **counts}
    save_arrays(path, arrays)


def load(path: Path) -> dict[str, dict[str, dict[str, Histogram]]]:
    """What `save` wrote, by split, label and site; nothing if there is no such file."""
    found: dict[str, dict[str, dict[str, Histogram]]] = {}
    for name, sites in load_arrays(path, _read, "counts").items():
        split, _, label = name.partition("/")
        found.setdefault(split, {})[label] = sites
    return found


def _read(arrays: Mapping[str, Any]) -> dict[str, Histogram]:
    require("edges" in arrays, "it was written by an older version of fedxl")
    edges, noise = (arrays[name].astype(np.float64) for name in ("edges", "noise"))
    positives, negatives = (arrays[name].astype(np.int64) for name in ("positives", "negatives"))
    names = [str(name) for name in arrays["sites"]]
    same = len(names) == len(set(names)) == len(noise) == len(positives) == len(negatives)
    require(same and bool(names), "its counts do not have one site each")
    times = arrays["times"].astype(np.float64) if "times" in arrays else None
    rows = enumerate(names)
    return {name: Histogram(edges, positives[row], negatives[row], float(noise[row]), times) for row, name in rows}


def as_scores(sites: Mapping[str, Histogram]) -> Scores:
    """Scores with these counts of one label, each in the middle of its bin. With noise, nobody knows whose one is.

    Noise is removed from sums of counts: what is left of one site's own would stay in far bins, and count for all.
    """
    if any(found.noise for found in sites.values()):
        return pooled(sites.values()).as_scores()
    each = [found.as_scores() for found in sites.values()]
    scores, labels = (np.concatenate(column) for column in zip(*(one.flat for one in each), strict=True))
    time = None if each[0].time is None else np.concatenate([one.time for one in each if one.time is not None])
    site = np.repeat(np.arange(len(each)), list(map(len, each)))
    return Scores.of(scores, labels, site=site, sites=tuple(sites), time=time)


def hazard_of(found: Histograms) -> HazardSums | None:
    """What counts say of a baseline hazard, of all sites together; None if they are not of time to event."""
    return next((pooled(sites.values()).hazard() for sites in found.values()), None)


def by_label(
    scores: Mapping[str, Scores], histograms: Mapping[str, Histograms] = MappingProxyType({})
) -> dict[str, dict[str, Scores]]:
    """The scores of each label by split; where only counts in bins are known, scores that these stand for."""
    known = {split: found.by_label() for split, found in scores.items()}
    counted = {split: found for split, found in histograms.items() if split not in known}
    stand_ins = {split: {name: as_scores(sites) for name, sites in found.items()} for split, found in counted.items()}
    return stand_ins | known

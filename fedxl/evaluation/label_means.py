"""Metrics as means over several labels, with intervals of a bootstrap of the examples.

Labels of one example go together, so a draw is of whole examples. A bootstrap of each label by itself, or of the
labels, would take them for independent, and its interval would be too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

from fedxl import metrics
from fedxl.evaluation.intervals import DRAWS, LEVEL, Interval, one_metric
from fedxl.evaluation.labelled import LabelScores, judge
from fedxl.evaluation.resampling import BATCH, Floats, Ints, Statistic, measured, weights

HOW = "bias-corrected bootstrap of examples"


class _Label(NamedTuple):
    """A label that holds both classes: which examples, and its metrics as functions of their weights."""

    positives: Ints
    negatives: Ints
    statistics: Mapping[str, Statistic]


def means(
    wanted: Sequence[str], found: LabelScores, level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> dict[str, Interval]:
    """The mean over labels of each metric, with the interval of `bias_corrected`.

    A label of which a draw holds one class only is left out of that draw.
    """
    named = {name: one_metric(name) for name in wanted}
    here, _ = judge(named.values(), found)
    labels = [one for number in range(len(found.names)) if (one := _label(found, number, named)) is not None]
    if not labels:
        why = "not defined: no label has both classes and finite scores"
        return {name: Interval(math.nan, math.nan, math.nan, level, why) for name in wanted}
    drawn = list(_drawn(labels, named, len(found.scores), draws, seed))
    intervals = {}
    for name, metric in named.items():
        values = np.concatenate([batch[name] for batch in drawn])
        values = values[np.isfinite(values)]
        if len(values) < 2 or np.ptp(values) <= 1e-12:  # as of a perfect ranking of few examples
            intervals[name] = Interval(here[metric.name], math.nan, math.nan, level, "not defined: all draws agree")
            continue
        intervals[name] = Interval(here[metric.name], *bias_corrected(here[metric.name], values, level), level, HOW)
    return intervals


def bias_corrected(value: float, drawn: Floats, level: float) -> tuple[float, float]:
    """Efron's bias-corrected percentiles of bootstrap values (JASA 82, 1987), without acceleration.

    Draws hold examples twice, which raises average precision: plain percentiles lie too high. Ties count half, and
    rounding must not decide which draws are below the value.
    """
    near = np.isclose(drawn, value, rtol=0.0, atol=1e-12)
    below = float(np.mean(np.where(near, 0.5, drawn < value)))
    shift = ndtri(min(max(below, 1 / len(drawn)), 1 - 1 / len(drawn)))
    ends = ndtr(2 * shift + ndtri(np.array([(1 - level) / 2, (1 + level) / 2])))
    low, high = np.quantile(drawn, ends)
    return float(low), float(high)


def _label(found: LabelScores, number: int, named: Mapping[str, metrics.NamedMetric]) -> _Label | None:
    classes = found.labels[:, number]
    known = np.flatnonzero(classes >= 0)
    scores, labels = found.scores[known, number], classes[known]
    if not 0 < labels.sum() < len(labels) or not np.isfinite(scores).all():
        return None
    each = {name: measured(metric, scores, labels) for name, metric in named.items()}
    return _Label(known[labels > 0], known[labels == 0], each)


def _drawn(
    labels: Sequence[_Label], names: Mapping[str, metrics.NamedMetric], size: int, draws: int, seed: int
) -> Iterator[dict[str, Floats]]:
    """The means of each metric in every draw, a batch of draws at a time."""
    rng, step = np.random.default_rng(seed), max(1, BATCH // size)
    for start in range(0, draws, step):
        count = weights(rng.integers(size, size=(min(step, draws - start), size)), size)
        sides = [(count[:, one.positives], count[:, one.negatives]) for one in labels]
        both = np.stack([(true.sum(1) > 0) & (false.sum(1) > 0) for true, false in sides])  # [L, draws]
        with np.errstate(all="ignore"):  # of draws with one class, which do not count
            yield {
                name: _mean([one.statistics[name](*side) for one, side in zip(labels, sides, strict=True)], both)
                for name in names
            }


def _mean(values: Sequence[Floats], defined: npt.NDArray[np.bool_]) -> Floats:
    """Over labels [L, draws], those that are defined; NaN where none is."""
    return np.asarray(np.where(defined, np.stack(values), 0.0).sum(0) / defined.sum(0))

"""The pictures of a report, one function each: from numbers to a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedxl.evaluation.calibration import Reliability
from fedxl.reporting.charts.chart import Chart, Key
from fedxl.reporting.charts.curves import Curve
from fedxl.reporting.charts.scale import Axis, Svg, around, element, ticks_in, unit

Floats = npt.NDArray[np.float64]


class Mark(NamedTuple):
    """An operating point in a picture: where it is, and in words."""

    key: Key
    x: float
    y: float
    text: str
    number: str = ""  # as in the table of operating points


def roc(
    curves: Mapping[Key, Curve],
    max_fpr: float,
    marks: Sequence[Mark] = (),
    envelopes: Mapping[Key, tuple[Curve, Curve]] = MappingProxyType({}),
) -> Svg:
    """ROC curves with the partial-AUC region shaded and operating points marked.

    An envelope is the lowest and the highest curve that counts in bins allow.
    """
    words = f"True against false positive rate of {_names(curves)}; the region up to {max_fpr:g} is shaded."
    chart = Chart("roc", "ROC curves", words, unit("false positive rate"), unit("true positive rate"))
    if max_fpr < 1:
        chart.region(0, max_fpr, f"partial AUC: FPR ≤ {max_fpr:g}")
    chart.line([0, 1], [0, 1], Key("chance"), legend=False)
    for key, (low, high) in envelopes.items():
        chart.area(np.concatenate([np.stack(low, 1), np.stack(high, 1)[::-1]]), key)
    return _with_curves(chart, curves, marks)


def precision_recall(curves: Mapping[Key, Curve], prevalence: float, marks: Sequence[Mark] = ()) -> Svg:
    """Precision against recall; chance has the share of positives as its precision."""
    words = f"Precision against recall of {_names(curves)}; {prevalence:.3f} of the examples are positive."
    chart = Chart("pr", "Precision and recall", words, unit("recall (true positive rate)"), unit("precision"))
    chart.line([0, 1], [prevalence, prevalence], Key("chance (share of positives)"), legend=False)
    return _with_curves(chart, curves, marks, step=True)


def _with_curves(chart: Chart, curves: Mapping[Key, Curve], marks: Sequence[Mark], step: bool = False) -> Svg:
    for key, (x, y) in curves.items():
        # A step of precision holds from the recall before it.
        chart.line(*(_falling(x, y) if step else (x, y)), key)
    for mark in marks:
        chart.points([mark.x], [mark.y], mark.key, [mark.text], size=4.5)
    for mark in marks:  # when all points are known
        chart.note(mark.x, mark.y, mark.number, mark.key)
    return chart.render()


def _falling(x: Floats, y: Floats) -> Curve:
    """As steps whose height is that of their right end."""
    return np.repeat(x, 2)[:-1], np.repeat(y, 2)[1:]


def reliability(curves: Mapping[Key, Reliability]) -> Svg:
    """How often predictions come true, with intervals."""
    words = f"Observed share of positives against the predicted probability: {_names(curves)}."
    chart = Chart("calibration", "Calibration", words, unit("predicted probability"), unit("observed share"))
    chart.line([0, 1], [0, 1], Key("perfect"), legend=False)
    for key, bins in curves.items():
        reliability_bins(chart, bins, key)
    return chart.render()


def reliability_bins(chart: Chart, bins: Reliability, key: Key, legend: bool = True) -> None:
    """Draw one calibration into a chart."""
    for x, low, high in zip(bins.predicted, bins.low, bins.high, strict=True):
        chart.line([x, x], [low, high], key._replace(letter=""), legend=False, thin=True)
    chart.line(bins.predicted, bins.observed, key, legend=legend)
    texts = [
        f"predicted {p:.3f}, observed {o:.3f}, {n:,} examples"
        for p, o, n in zip(bins.predicted, bins.observed, bins.counts, strict=True)
    ]
    chart.points(bins.predicted, bins.observed, key, texts, 3.5)


BINS = np.linspace(0, 1, 21)


def histogram(probabilities: Floats, labels: npt.NDArray[np.int64]) -> Svg:
    """How many examples have which predicted probability, by class."""
    words = "Counts of positive and negative examples by predicted probability, after calibration."
    found = {
        Key(name, style): np.histogram(probabilities[labels == side], BINS)[0]
        for name, side, style in (("negatives", 0, 5), ("positives", 1, 1))
    }
    top = float(max(max(counts.max() for counts in found.values()), 1)) * 1.05
    y = Axis("examples", 0.0, top, ticks_in(0.0, top, 4))
    chart = Chart("histogram", "How many examples", words, unit("predicted probability"), y)
    # Side by side, so that neither hides the other.
    for shift, (key, counts) in zip((-0.01, 0.01), found.items(), strict=True):
        chart.bars((BINS[:-1] + BINS[1:]) / 2 + shift, counts, 6.0, key)
    return chart.render()


def decision(thresholds: Floats, benefits: Mapping[Key, Floats]) -> Svg:
    """Net benefit against the probability from which on one would act."""
    words = f"Net benefit by probability threshold: {_names(benefits)}."
    top = max(float(np.max(values)) for values in benefits.values())
    low = -0.12 * (top or 1.0)  # what does worse than nothing needs no more room
    y = Axis("net benefit", low, top * 1.08 or 1.0, ticks_in(low, top * 1.08 or 1.0))
    chart = Chart("decision", "Decision curve", words, around("threshold probability", thresholds), y)
    for key, values in benefits.items():
        inside = np.where(values >= low, values, np.nan)
        chart.line(thresholds, inside, key)
    return chart.render()


class History(NamedTuple):
    """A validation metric by round: its mean over runs, their spread, and the chosen rounds with their values."""

    rounds: Floats
    mean: Floats
    spread: Floats
    chosen: Sequence[tuple[float, float]]


def convergence(metric: str, histories: Mapping[Key, History], split: str = "validation") -> Svg:
    """A metric by round, with the chosen rounds marked."""
    # Bands may leave the picture, lines and markers may not: one wild seed would flatten all others.
    values = np.concatenate([[*h.mean, *(value for _, value in h.chosen)] for h in histories.values()])
    rounds = np.concatenate([h.rounds for h in histories.values()])
    words = f"{metric} on {split} data by round: {_names(histories)}; markers are the chosen rounds."
    x = around("round", rounds, floor=0.0)
    chart = Chart("convergence", "Convergence", words, x, around(metric, values))
    for key, history in histories.items():
        if np.any(history.spread > 0):
            chart.band(history.rounds, history.mean - history.spread, history.mean + history.spread, key)
        chart.line(history.rounds, history.mean, key)
        for round, value in history.chosen:
            chart.points([round], [value], key, [f"{key.name}: round {round:g}, {value:.4f}"], 4.5)
    return chart.render()


def bytes_by_round(unit_name: str, totals: Mapping[Key, Curve]) -> Svg:
    """What all clients have received and sent, by round."""
    words = f"Bytes that all clients have received and sent until each round, in {unit_name}: {_names(totals)}."
    x = around("round", np.concatenate([rounds for rounds, _ in totals.values()]), floor=0.0)
    top = max(float(values.max()) for _, values in totals.values())
    y = Axis(f"{unit_name} in all", 0.0, top * 1.05, ticks_in(0.0, top * 1.05))
    chart = Chart("bytes", "Bytes by round", words, x, y)
    for key, (rounds, values) in totals.items():
        chart.line(rounds, values, key)
    return chart.render()


class Dot(NamedTuple):
    """A value with its interval; None: not known."""

    value: float
    low: float
    high: float


def dot_and_interval(dot: Dot, axis: Axis, pooled: float, key: Key, title: str) -> Svg:
    """One row of a column of intervals: they share their axis, and a line at the pooled value."""
    width, middle = 150, 11.0
    low, value, high, line = axis.place([dot.low, dot.value, dot.high, pooled], 6, width - 6).tolist()
    parts = [
        element("title", title),
        element("line", x1=line, x2=line, y1=0, y2=22, class_="edge"),
        element("line", x1=low, x2=high, y1=middle, y2=middle, class_=f"line {key.css}"),
        element("circle", cx=value, cy=middle, r=4, class_=f"marker {key.css}"),
    ]
    return element("svg", *parts, viewBox=f"0 0 {width} 22", role="img", class_="dot", aria_label=title)


def _names(keys: Mapping[Key, Any]) -> str:
    return ", ".join(key.name for key in keys)

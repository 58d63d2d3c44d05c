"""The pictures of a report, one function each: from numbers to a chart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedxl import metrics
from fedxl.evaluation.calibration import Reliability
from fedxl.evaluation.intervals import Interval
from fedxl.evaluation.scores import Floats, Scores
from fedxl.evaluation.survival_curves import KaplanMeier
from fedxl.reporting.charts.chart import Chart, Key
from fedxl.reporting.charts.scale import Axis, Svg, around, element, ticks_in, unit

Curve = tuple[Floats, Floats]
BINS = np.linspace(0, 1, 21)
GRID = np.linspace(0, 1, 501)
SURVIVAL_STEPS = 100
SMALL = 200  # sides of one of many pictures, so that its letters are as large as those of the others


def roc_curve(runs: Sequence[Scores]) -> Curve:
    """False and true positive rates: of one run exactly, of several the mean on a grid."""
    found = [metrics.roc(*each.flat) for each in runs]
    return _mean(found, lambda curve: np.asarray(np.interp(GRID, *curve)))


def precision_recall_curve(runs: Sequence[Scores]) -> Curve:
    """Recall and precision, the mean over runs; a step that falls where a false positive comes first."""
    found = []
    for each in runs:
        false, true = metrics.counts(*each.flat)
        precision = true[1:] / (true[1:] + false[1:])
        # The precision of the first threshold holds from recall 0 on: no examples have no precision.
        found.append((np.append(0.0, true[1:] / true[-1]), np.append(precision[:1], precision)))
    return _mean(found, precision_on_grid)


def precision_on_grid(curve: Curve) -> Floats:
    """The precision of the highest threshold that reaches each recall."""
    x, y = curve
    return np.asarray(y[np.minimum(np.searchsorted(x, GRID - 1e-12), len(x) - 1)])


def _mean(curves: Sequence[Curve], on_grid: Callable[[Curve], Floats]) -> Curve:
    return curves[0] if len(curves) == 1 else (GRID, np.asarray(np.mean([on_grid(curve) for curve in curves], 0)))


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
    small: str = "",
) -> Svg:
    """ROC curves with the partial-AUC region shaded and operating points marked.

    An envelope is the lowest and the highest curve that counts in bins allow. small: the name of one of many.
    """
    words = f"True against false positive rate of {_names(curves)}; the region up to {max_fpr:g} is shaded."
    title = f"ROC curve of {_names(curves)}" if small else "ROC curves"
    chart = _square(small or "roc", title, words, "false positive rate", "true positive rate", bool(small))
    if max_fpr < 1:
        chart.region(0, max_fpr, "" if small else f"partial AUC: FPR ≤ {max_fpr:g}")
    chart.line([0, 1], [0, 1], Key("chance"), legend=False)
    for key, (low, high) in envelopes.items():
        chart.area(np.concatenate([np.stack(low, 1), np.stack(high, 1)[::-1]]), key)
    for key, curve in curves.items():
        chart.line(*curve, key, legend=not small)
    return _with_marks(chart, marks)


def precision_recall(curves: Mapping[Key, Curve], prevalence: float, marks: Sequence[Mark] = ()) -> Svg:
    """Precision against recall; chance has the share of positives as its precision."""
    words = f"Precision against recall of {_names(curves)}; {prevalence:.3f} of the examples are positive."
    chart = _square("pr", "Precision and recall", words, "recall (true positive rate)", "precision")
    chart.line([0, 1], [prevalence, prevalence], Key("chance (share of positives)"), legend=False)
    for key, (x, y) in curves.items():  # steps whose height is that of their right end
        chart.line(np.repeat(x, 2)[:-1], np.repeat(y, 2)[1:], key)
    return _with_marks(chart, marks)


def _square(name: str, title: str, words: str, x: str, y: str, small: bool = False, low: float = 0.0) -> Chart:
    if small:
        return Chart(name, title, words, unit(x, 2), unit(y, 2), height=SMALL, width=SMALL)
    return Chart(name, title, words, unit(x, low=low), unit(y, low=low))


def _with_marks(chart: Chart, marks: Sequence[Mark]) -> Svg:
    for mark in marks:
        chart.points([mark.x], [mark.y], mark.key, [mark.text], size=4.5)
    for mark in marks:  # when all points are known
        if mark.number:
            chart.note(mark.x, mark.y, mark.number, mark.key)
    return chart.render()


def kaplan_meier(curves: Mapping[Key, KaplanMeier], end: float) -> Svg:
    """The share without an event up to `end`, with bands, in steps at even spaces: none shows an example's time."""
    words = f"Share without an event against time, with bands of 95 %: {_names(curves)}."
    chart = Chart("survival", "Kaplan-Meier curves", words, survival_axis(end), unit("share without an event"))
    grid = np.linspace(0.0, end, SURVIVAL_STEPS + 1)
    for key, curve in curves.items():
        found = [each[np.isfinite(each)] for each in curve.at(grid)]  # until the last example has left
        share, low, high = (np.repeat(each, 2)[:-1] for each in found)
        x = np.repeat(grid[: len(found[0])], 2)[1:]
        chart.band(x, low, high, key)
        chart.line(x, share, key)
    return chart.render()


def survival_axis(end: float) -> Axis:
    """Time from 0 on."""
    return Axis("time", 0.0, end, ticks_in(0.0, end))


def reliability(
    curves: Mapping[Key, Reliability], small: str = "", what: str = "share of positives", low: float = 0.0
) -> Svg:
    """How often predictions come true, with intervals.

    small: the name of one of many; what: which share it is; low: where both axes begin.
    """
    words = f"Observed {what} against the predicted probability: {_names(curves)}."
    title = f"Calibration of {_names(curves)}" if small else "Calibration"
    x = "predicted" if small else "predicted probability"
    chart = _square(small or "calibration", title, words, x, "observed share", bool(small), low)
    chart.line([low, 1], [low, 1], Key("perfect"), legend=False)
    for key, bins in curves.items():
        for place, low, high in zip(bins.predicted, bins.low, bins.high, strict=True):
            chart.line([place, place], [low, high], key._replace(letter=""), legend=False, thin=True)
        chart.line(bins.predicted, bins.observed, key, legend=not small)
        each = zip(bins.predicted, bins.observed, bins.counts, strict=True)
        texts = [f"predicted {p:.3f}, observed {o:.3f}, {n:,} examples" for p, o, n in each]
        chart.points(bins.predicted, bins.observed, key, texts, 3.5)
    return chart.render()


def histogram(probabilities: Floats, labels: npt.NDArray[np.int64]) -> Svg:
    """Counts of examples by predicted probability, by class."""
    words = "Counts of positive and negative examples by predicted probability, after calibration."
    classes = {Key("negatives", 5): 0, Key("positives", 1): 1}
    found = {key: np.histogram(probabilities[labels == side], BINS)[0] for key, side in classes.items()}
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
        chart.line(thresholds, np.where(values >= low, values, np.nan), key)
    return chart.render()


class History(NamedTuple):
    """A validation metric by round: its mean over runs, their spread, and the chosen rounds with their values."""

    rounds: Floats
    mean: Floats
    spread: Floats
    chosen: Sequence[tuple[float, float]]
    breaks: Sequence[int] = ()  # before which of the rounds the line breaks: other sites were measured


def convergence(metric: str, histories: Mapping[Key, History]) -> Svg:
    """A metric by round, with the chosen rounds marked."""
    # Bands may leave the picture, lines and markers may not: one wild seed would flatten all others.
    values = np.concatenate([[*h.mean, *(value for _, value in h.chosen)] for h in histories.values()])
    rounds = np.concatenate([h.rounds for h in histories.values()])
    words = f"{metric} on validation data by round: {_names(histories)}; markers are the chosen rounds."
    x = around("round", rounds, floor=0.0, whole=True)
    chart = Chart("convergence", "Convergence", words, x, around(metric, values))
    for key, history in histories.items():
        if np.any(history.spread > 0):
            chart.band(history.rounds, history.mean - history.spread, history.mean + history.spread, key)
        chart.line(history.rounds, history.mean, key, breaks=history.breaks)
        if history.breaks:  # of a single evaluation there is no line
            chart.points(history.rounds, history.mean, key, size=2.0)
        for round, value in history.chosen:
            chart.points([round], [value], key, [f"{key.name}: round {round:g}, {value:.4f}"], 4.5)
    return chart.render()


def bytes_by_round(unit_name: str, totals: Mapping[Key, Curve]) -> Svg:
    """What all clients have received and sent, by round."""
    words = f"Bytes that all clients have received and sent until each round, in {unit_name}: {_names(totals)}."
    x = around("round", np.concatenate([rounds for rounds, _ in totals.values()]), floor=0.0, whole=True)
    top = max(float(values.max()) for _, values in totals.values())
    y = Axis(f"{unit_name} in all", 0.0, top * 1.05, ticks_in(0.0, top * 1.05))
    chart = Chart("bytes", "Bytes by round", words, x, y)
    for key, (rounds, values) in totals.items():
        chart.line(rounds, values, key)
    return chart.render()


def dot_and_interval(found: Interval, axis: Axis, pooled: float, key: Key, title: str) -> Svg:
    """One row of a column of intervals, which share their axis; the vertical line is at the pooled value."""
    width, middle = 150, 11.0
    ends = [found.value if np.isnan(end) else end for end in (found.low, found.high)]
    low, high, value, line = axis.place([*ends, found.value, pooled], 6, width - 6).tolist()
    parts = [
        element("title", title),
        element("line", x1=line, x2=line, y1=0, y2=22, class_="edge"),
        element("line", x1=low, x2=high, y1=middle, y2=middle, class_=f"line {key.css}"),
        element("circle", cx=value, cy=middle, r=4, class_=f"marker {key.css}"),
    ]
    return element("svg", *parts, viewBox=f"0 0 {width} 22", role="img", class_="dot", aria_label=title)


def _names(keys: Mapping[Key, Any]) -> str:
    return ", ".join(key.name for key in keys)

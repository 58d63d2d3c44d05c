"""Small pictures, many of them side by side: one for each label."""

from __future__ import annotations

import math

from fedxl.evaluation.calibration import Reliability
from fedxl.reporting.charts.chart import Chart, Key
from fedxl.reporting.charts.curves import Curve
from fedxl.reporting.charts.pictures import reliability_bins
from fedxl.reporting.charts.scale import Svg, unit

SIZE = 200  # of the picture's sides, so that its letters are as large as those of other pictures


def roc(name: str, label: str, curve: Curve, max_fpr: float, key: Key, mark: tuple[float, float] | None) -> Svg:
    """The ROC curve of a label; mark: its operating point, false and true positive rate."""
    words = f"True against false positive rate of {label}; the region up to {max_fpr:g} is shaded."
    chart = _chart(name, f"ROC curve of {label}", words, "false positive rate", "true positive rate")
    if max_fpr < 1:
        chart.region(0, max_fpr)
    chart.line([0, 1], [0, 1], Key("chance"), legend=False)
    chart.line(*curve, key._replace(letter=""), legend=False)
    if mark is not None and all(map(math.isfinite, mark)):
        text = f"sensitivity {mark[1]:.3f}, specificity {1 - mark[0]:.3f}"
        chart.points([mark[0]], [mark[1]], key, [text], size=4.5)
    return chart.render()


def reliability(name: str, label: str, bins: Reliability, key: Key) -> Svg:
    """How often calibrated probabilities of a label come true."""
    words = f"Observed share of positives of {label} against the predicted probability."
    chart = _chart(name, f"Calibration of {label}", words, "predicted", "observed share")
    chart.line([0, 1], [0, 1], Key("perfect"), legend=False)
    reliability_bins(chart, bins, key._replace(letter=""), legend=False)
    return chart.render()


def _chart(name: str, title: str, words: str, x: str, y: str) -> Chart:
    return Chart(name, title, words, unit(x, count=2), unit(y, count=2), height=SIZE, width=SIZE)

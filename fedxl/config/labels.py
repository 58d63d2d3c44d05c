"""Several labels in a config: `labels` and `label_weights` in [risk], beside the settings of the risk itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from fedxl.options import call
from fedxl.risks import XRisk, several


def several_labels(labels: int | Sequence[str], label_weights: Sequence[float] = ()) -> dict[str, Any]:
    """labels: how many there are, or their names. label_weights: how much each counts; empty: the same."""
    return {"labels": labels, "weights": label_weights}


def taken_out(options: dict[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Take the settings of several labels out of a risk's options, unless they are its own."""
    mine = [name for name in ("labels", "label_weights") if name in options and name not in own]
    return {name: options.pop(name) for name in mine}


def with_labels(risk: XRisk, given: dict[str, Any]) -> XRisk:
    """The risk for as many labels as these settings say."""
    if not given:
        return risk
    found = call(several_labels, given, "risk")
    return several(risk, found["labels"], found["weights"])

"""`fedxl algorithms`, `risks` and `metrics`: what there is, a line each."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from fedxl.algorithms import ALGORITHMS
from fedxl.metrics import METRICS
from fedxl.risks import KNOWN_RISKS


def algorithms() -> None:
    """What there is to train with, one line each."""
    listed({name: (inspect.getdoc(kind) or "").splitlines()[0] for name, kind in ALGORITHMS.items()})


def risks() -> None:
    """What there is to optimise, one line each."""
    listed({name: (inspect.getdoc(risk) or "").splitlines()[0] for name, risk in KNOWN_RISKS.items()})


def metrics() -> None:
    """What models are judged by, one line each."""
    listed({name + "@LIMIT" * metric.takes_limit: metric.summary for name, metric in METRICS.items()})


def listed(lines: Mapping[str, str]) -> None:
    width = max(map(len, lines))
    for name, line in lines.items():
        print(f"{name:<{width}}  {line}")

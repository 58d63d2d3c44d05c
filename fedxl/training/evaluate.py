"""Scoring held-back data with a model, and the metrics that come of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedxl import metrics, registry
from fedxl.data.examples import Examples, floats_as
from fedxl.errors import require, unknown
from fedxl.evaluation.histogram import Histograms
from fedxl.evaluation.scores import Scores, measure
from fedxl.metrics import METRICS, Item, NamedMetric
from fedxl.models import Score, Weights
from fedxl.models.functional import PRECISIONS, products
from fedxl.risks.xrisk import XRisk

BATCH = 4096


@dataclass(frozen=True)
class Evaluator:
    """Metrics and the exact empirical risk of a model on any data."""

    score: Score
    risk: XRisk
    metrics: Sequence[NamedMetric]  # besides the risk; none where scores are vectors
    dtype: torch.dtype
    precision: str = "fp32"
    shown: Callable[[Tensor, Tensor], Tensor] | None = None  # outputs and labels -> what the risk sees; None: outputs

    def outputs(self, weights: Weights, data: Examples, part: slice = slice(None)) -> Tensor:
        """Raw outputs [n, *d] for all examples, or for a part of them."""
        found = []
        with torch.no_grad(), products(PRECISIONS[self.precision]):
            for indices in torch.arange(len(data), device=data.x.device)[part].split(BATCH):
                found.append(self.score(weights, floats_as(data.fetch(indices), self.dtype))[0])
        return torch.cat(found)

    def scores_of(self, h: Tensor, data: Examples) -> Scores:
        """Outputs, [n] or of several labels [n, L], as a record."""
        group, time = (None if each is None else each.cpu().numpy() for each in (data.group, data.time))
        found = h.double().cpu().numpy().reshape(len(data), -1)
        y, names = data.y.to(torch.int64).cpu().numpy(), self.risk.pairing.labels or ("",)
        return Scores(found, y, names, data.site, data.sites, group, time, tuple(data.row))

    def findings(self, h: Tensor, data: Examples, split: str = "") -> Findings:
        """Metrics of outputs; of several labels their means, and each label's own as a remark."""
        targets = self.risk.pairing.targets(data.y)
        seen = self.shown(h, targets) if self.shown else h
        risk = {"risk": float(self.risk.value(seen, targets, data.group, data.time))}
        if not self.risk.single_score:
            return Findings(risk, outputs=(h, targets))
        found = self.scores_of(h, data)
        values, each = measure(self.metrics, found)
        remarks = {f"{split}_by_label": each} if self.risk.pairing.labels else {}
        return Findings(values | risk, found, remarks=remarks, outputs=(h, targets))

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Between which numbers each metric of `findings` can lie, counts left out."""
        return {m.name: m.metric.range for m in self.metrics} | {"risk": METRICS["risk"].range}


@dataclass(frozen=True)
class Findings:
    """The metrics of an evaluation; its scores, or counts of them in bins, where they are known here."""

    metrics: dict[str, float]  # empty: no site replied
    scores: Scores | None = field(default=None, repr=False)  # None also where a model gives vectors
    histograms: Histograms = field(default_factory=dict, repr=False)
    remarks: Mapping[str, Any] = field(default_factory=dict)  # for the metrics row
    outputs: tuple[Tensor, Tensor] | None = field(default=None, repr=False)  # raw ones, and labels as the risk reads


class Examiner(Protocol):
    """Evaluates a run's model on data that were held back."""

    @property
    def splits(self) -> Collection[str]:
        """Those of train, validation and test that exist."""

    def examine(self, weights: Weights, split: str) -> Findings: ...


@dataclass(frozen=True)
class HeldBack:
    """An examiner with the data at hand."""

    evaluator: Evaluator
    data: Mapping[str, Examples]

    @property
    def splits(self) -> Collection[str]:
        return self.data.keys()

    def examine(self, weights: Weights, split: str) -> Findings:
        data = self.data[split]
        return self.evaluator.findings(self.evaluator.outputs(weights, data), data, split)


def require_like(
    name: str,
    data: Examples,
    probe: Tensor,
    labels: int,
    clients: int,
    unknown: bool = False,
    scale: str = "",
) -> None:
    """Raises UserError unless held-back data are like the clients'.

    probe: their example; labels: how many the risk has; unknown: whether a label may be unknown of some examples;
    scale: of the clients' images, where that is known.
    """
    data.require_valid(name, unknown)
    data.require_scale(scale, name)
    seen = data.fetch(torch.tensor([0], device=data.x.device))
    shapes = [list(each.shape[1:]) for each in (seen, probe)]
    require(shapes[0] == shapes[1], f"{name} holds examples of shape {shapes[0]}, the clients of {shapes[1]}")
    tokens, rows = (not one.is_floating_point() for one in (probe, seen))
    require(rows or not tokens, f"{name} holds {seen.dtype}, the clients {probe.dtype}; give the same type")
    require(data.labels == labels, f"{name} has {data.labels} label(s) per example, and the risk is for {labels}")
    known = data.site is None or bool(np.isin(data.site, np.arange(clients)).all())
    require(known, f"{name}: sites must number the client of each example, from 0 to {clients - 1}")


def asked_for(risk: XRisk, select: str, fprs: Sequence[float], more: Sequence[Item] = ()) -> list[NamedMetric]:
    """The usual metrics, those asked for besides, and the one that the best model is chosen by, with its limit.

    A name in `select` that stands for nothing is left to `check_selection`.
    """
    if not risk.single_score:
        require(not more, "metrics need one score per example, and the risk pairs vectors")
        return []
    base = select.removeprefix("-").partition("@")[0]
    own = registry.own(base)
    limits = {f"{limit:g}": limit for limit in fprs}
    if base in METRICS and METRICS[base].takes_limit and (limit := metrics.split(select)[1]) is not None:
        limits[f"{limit:g}"] = limit
    usual = ["cindex"] if risk.pairing.timed else metrics.usual()
    more = [*more, *metrics.QUERY_METRICS] if risk.pairing.ranked else more
    chosen = [select.removeprefix("-")] if own or base in {**metrics.QUERY_METRICS, **metrics.TIME_METRICS} else []
    items = [*usual, *more, *chosen]
    return metrics.resolve(items, sorted(limits.values()))


def check_selection(select: str, evaluator: Evaluator, validation: Examples | None = None) -> None:
    """That there is a metric of this name, and that the validation data, where they are at hand, have it."""
    if validation is not None and evaluator.risk.single_score:
        y = validation.y
        both = bool(((y > 0).any(0) & (y == 0).any(0)).any()) or validation.time is not None
        require(both, "validation must hold both classes, or the best model cannot be chosen on it")
        some = validation.time is None or bool((y > 0).any())
        require(some, "validation must hold an event, or the best model cannot be chosen on it")
    known = {"-risk"} | {metric.select for metric in evaluator.metrics}
    sign = "-" if select.startswith("-") else ""  # less is better
    if sign + metrics.key(select) not in known:
        raise unknown("metric to select by", select, known)

"""Scoring a data split with a model, and the metrics that come of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fedxl import metrics, registry
from fedxl.data.federation import Split
from fedxl.data.forms import Columns
from fedxl.data.letor import ranked
from fedxl.data.source import Source, checked, floats_as, queries_of
from fedxl.errors import require, unknown
from fedxl.evaluation import scored
from fedxl.evaluation.binned import Curves
from fedxl.evaluation.label_counts import LabelCurves
from fedxl.evaluation.scored import LabelScores, Scored
from fedxl.metrics import METRICS, Item, NamedMetric
from fedxl.models import Score, Weights
from fedxl.models.precision import PRECISIONS, products
from fedxl.risks.xrisk import XRisk
from fedxl.sampling import Indices

BATCH = 4096
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Evaluator:
    """Metrics and the exact empirical risk of a model on any source."""

    score: Score
    risk: XRisk
    metrics: Sequence[NamedMetric]  # besides the risk; none where scores are vectors
    dtype: torch.dtype
    precision: str = "fp32"
    shown: Callable[[Tensor, Tensor], Tensor] | None = None  # outputs and labels -> what the risk sees; None: outputs

    def scores(self, weights: Weights, source: Source, part: slice = slice(None)) -> Tensor:
        """Raw outputs [n, *d] for all examples of a source, or for a part of them."""
        outputs = []
        with torch.no_grad(), products(PRECISIONS[self.precision]):
            for indices in torch.arange(len(source.labels), device=source.labels.device)[part].split(BATCH):
                x = floats_as(source.fetch(indices), self.dtype)
                outputs.append(self.score(weights, x)[0])
        return torch.cat(outputs)

    def metrics_of(self, h: Tensor, labels: Tensor, queries: Tensor | None = None) -> dict[str, float]:
        """The risk, and metrics if there is one score per example. With queries, labels are grades."""
        return self.findings(h, labels, "", Origin(), queries).metrics

    def label_scores(self, h: Tensor, labels: Tensor, origin: Origin | None = None) -> LabelScores:
        """Outputs [n, L] of several labels for reports."""
        sites, names, _ = origin or Origin()
        scores, y = h.double().cpu().numpy(), labels.to(torch.int64).cpu().numpy()
        return LabelScores(scores, y, self.risk.pairing.labels, sites, tuple(names))

    def findings(
        self, h: Tensor, labels: Tensor, split: str, origin: Origin, queries: Tensor | None = None
    ) -> Findings:
        """Metrics of outputs; of several labels their means, and each label's own as a remark."""
        seen = self.shown(h, labels) if self.shown else h
        risk, names = {"risk": float(self.risk.value(seen, labels, queries))}, self.risk.pairing.labels
        if not names and self.risk.score_shape:
            return Findings(risk, h, labels, origin=origin)
        if names:
            by_label = self.label_scores(h, labels, origin)
            values, each = scored.judge_labels(self.metrics, by_label)
            return Findings(values | risk, h, labels, {f"{split}_by_label": each}, origin, by_label=by_label)
        of = None if queries is None else queries.cpu().numpy()
        values = metrics.judge(self.metrics, h.double().cpu().numpy(), labels.cpu().numpy(), of)
        return Findings(values | risk, h, labels, origin=origin)

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Between which numbers each value of `metrics_of` can lie, counts left out."""
        return {m.name: m.metric.range for m in self.metrics} | {"risk": METRICS["risk"].range}


class Origin(NamedTuple):
    """Where the examples of a split are from, as far as it is known."""

    sites: Indices | None = None  # an index into `names`
    names: Sequence[str] = ()
    rows: Sequence[str] = ()  # what identifies each example


@dataclass(frozen=True)
class Findings:
    """The metrics of an evaluation; its scores and labels, or counts of them in bins, where they are known here."""

    metrics: dict[str, float]  # empty: no site replied
    scores: Tensor | None = field(default=None, repr=False)
    labels: Tensor | None = field(default=None, repr=False)
    remarks: Mapping[str, Any] = field(default_factory=dict)  # for the metrics row
    origin: Origin = field(default_factory=Origin)
    curves: Curves = field(default_factory=dict, repr=False)  # by site, where these are all that is known
    by_label: LabelScores | None = field(default=None, repr=False)  # its scores of several labels
    label_curves: LabelCurves = field(default_factory=dict, repr=False)  # or counts, by label and site

    def scored(self) -> Scored | None:
        """Its scores for reports; None where they are not known here, or are vectors."""
        if self.scores is None or self.labels is None or self.scores.ndim != 1:
            return None
        h, y = self.scores.double().cpu().numpy(), (self.labels > 0).to(torch.int64).cpu().numpy()
        return Scored(h, y, self.origin.sites, tuple(self.origin.names), tuple(self.origin.rows))


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
    sources: Mapping[str, Source]
    origins: Mapping[str, Origin] = field(default_factory=dict)

    @property
    def splits(self) -> Collection[str]:
        return self.sources.keys()

    def examine(self, weights: Weights, split: str) -> Findings:
        labels = self.sources[split].labels
        scores = self.evaluator.scores(weights, self.sources[split])
        origin = self.origins.get(split, Origin())
        return self.evaluator.findings(scores, labels, split, origin, queries_of(self.sources[split]))


def held_back(pairs: Mapping[str, Pair | Split | None], probe: Tensor, labels: int = 0) -> dict[str, Source]:
    """Sources of the splits that there are, on the device of `probe`, a client's example. labels: columns; 0: one."""
    sources: dict[str, Source] = {}
    for name, pair in pairs.items():
        if pair is None:
            continue
        right = isinstance(pair, Split) or (isinstance(pair, (tuple, list)) and len(pair) == 2)
        require(right, f"{name} must be a pair (x, y)")
        x, y = pair[:2]
        queries = pair.queries if isinstance(pair, Split) else None
        if queries is None:
            source = checked(x, y, name, Columns(labels) if labels else None).to(probe.device)
        else:
            source = ranked((x, y, queries), name).to(probe.device)
        seen = source.fetch(torch.tensor([0], device=probe.device))
        shapes = [list(each.shape[1:]) for each in (seen, probe)]
        require(shapes[0] == shapes[1], f"{name} holds examples of shape {shapes[0]}, the clients of {shapes[1]}")
        tokens, rows = (not one.is_floating_point() for one in (probe, seen))
        require(rows or not tokens, f"{name} holds {seen.dtype}, the clients {probe.dtype}; give the same type")
        sources[name] = source
    return sources


def origins(pairs: Mapping[str, Pair | Split | None], clients: Sequence[str]) -> dict[str, Origin]:
    """Where the examples of each split are from, where the splits say so; `clients` are the names."""
    for name, split in pairs.items():
        if isinstance(split, Split) and split.sites is not None:
            known = len(split.sites) == len(split.y) and bool(np.isin(split.sites, np.arange(len(clients))).all())
            require(known, f"{name}: sites must number the client of each example, from 0 to {len(clients) - 1}")
    return {
        name: Origin(split.sites, clients if split.sites is not None else (), split.rows)
        for name, split in pairs.items()
        if isinstance(split, Split)
    }


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
    if risk.pairing.ranked:
        more = [*more, *metrics.QUERY_METRICS, *([select] if base in metrics.QUERY_METRICS else [])]
    items = [*metrics.usual(), *more, *([select.removeprefix("-")] if own else [])]
    return metrics.resolve(items, sorted(limits.values()))


def check_selection(select: str, evaluator: Evaluator, validation: Source | None = None) -> None:
    """That there is a metric of this name, and that the validation data, where they are at hand, have it."""
    if validation is not None and evaluator.risk.single_score:
        labels = validation.labels
        both = bool(((labels > 0).any(0) & (labels == 0).any(0)).any())
        require(both, "validation must hold both classes, or the best model cannot be chosen on it")
    known = {"-risk"} | {metric.select for metric in evaluator.metrics}
    sign = "-" if select.startswith("-") else ""  # less is better
    if sign + metrics.key(select) not in known:
        raise unknown("metric to select by", select, known)


def pairs_in(values: Mapping[str, float]) -> float:
    """How many pairs of a positive and a negative metrics rest on."""
    return values.get("positives", 1) * values.get("negatives", 1)


def better_at_common_sites(record: Mapping[str, Any], best: Mapping[str, Any], select: str) -> bool:
    """Of two evaluations by different sites: whether the first is better at those that took part in both."""
    change = 0.0
    for name, mine in record.get("validation_by_site", {}).items():
        theirs = best.get("validation_by_site", {}).get(name)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            difference = metrics.value_of(mine, select) - metrics.value_of(theirs, select)
            change += 0.0 if math.isnan(difference) else pairs_in(mine) * difference
    return change > 0

"""Scoring a data split with a model, and the figures that come of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fedxl import metrics
from fedxl.data.source import Source, checked, floats_as
from fedxl.errors import require, unknown
from fedxl.models import Score, Weights
from fedxl.models.precision import PRECISIONS, products
from fedxl.risks import XRisk

BATCH = 4096
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Evaluator:
    """Figures of merit and the exact empirical risk of a model on any source."""

    score: Score
    risk: XRisk
    max_fprs: Sequence[float]
    dtype: torch.dtype
    precision: str = "fp32"

    def scores(self, weights: Weights, source: Source) -> Tensor:
        """Raw outputs [n, *d] for all examples of a source."""
        outputs = []
        with torch.no_grad(), products(PRECISIONS[self.precision]):
            for indices in torch.arange(len(source.labels), device=source.labels.device).split(BATCH):
                x = floats_as(source.fetch(indices), self.dtype)
                outputs.append(self.score(weights, x)[0])
        return torch.cat(outputs)

    def figures_of(self, h: Tensor, labels: Tensor) -> dict[str, float]:
        """Ranking metrics need a scalar score; the risk is always there."""
        figures = {"risk": float(self.risk.value(h, labels))}
        if self.risk.score_shape:
            return figures
        return metrics.summary(h.double().cpu().numpy(), labels.cpu().numpy(), self.max_fprs) | figures


@dataclass(frozen=True)
class Findings:
    """What an evaluation came to, and the scores and labels behind it, where they are known here."""

    figures: dict[str, float]  # empty: nobody could say
    scores: Tensor | None = field(default=None, repr=False)
    labels: Tensor | None = field(default=None, repr=False)
    remarks: Mapping[str, Any] = field(default_factory=dict)  # for the record


class Examiner(Protocol):
    """Whoever evaluates a run's model on data that were held back."""

    @property
    def splits(self) -> Collection[str]:
        """Of train, validation and test those that there are."""

    def examine(self, weights: Weights, split: str) -> Findings: ...


@dataclass(frozen=True)
class HeldBack:
    """An examiner with the data at hand."""

    evaluator: Evaluator
    sources: Mapping[str, Source]

    @property
    def splits(self) -> Collection[str]:
        return self.sources.keys()

    def examine(self, weights: Weights, split: str) -> Findings:
        labels = self.sources[split].labels
        scores = self.evaluator.scores(weights, self.sources[split])
        return Findings(self.evaluator.figures_of(scores, labels), scores, labels)


def held_back(pairs: Mapping[str, Pair | None], probe: Tensor) -> dict[str, Source]:
    """Sources of the splits that there are, on the device of `probe`, an example as clients have them."""
    sources: dict[str, Source] = {}
    for name, pair in pairs.items():
        if pair is None:
            continue
        require(isinstance(pair, (tuple, list)) and len(pair) == 2, f"{name} must be a pair (x, y)")
        source = checked(*pair, name).to(probe.device)
        seen = source.fetch(torch.tensor([0], device=probe.device))
        require(
            seen.shape[1:] == probe.shape[1:],
            f"{name} holds examples of shape {list(seen.shape[1:])}, the clients of {list(probe.shape[1:])}",
        )
        sources[name] = source
    return sources


def limits(select: str, fprs: Sequence[float]) -> tuple[float, ...]:
    """The false positive rates asked for, and the one that the best model is chosen by."""
    _, at, limit = select.partition("@")
    try:
        return tuple(sorted({*fprs, *([float(limit)] if at else [])}))
    except ValueError:
        return tuple(fprs)


def check_selection(select: str, evaluator: Evaluator, validation: Source | None = None) -> None:
    """That there is a figure of this name, and that the validation data, where they are at hand, have it."""
    ranked = not evaluator.risk.score_shape
    if validation is not None and ranked:
        labels = validation.labels
        both = 0 < int(labels.sum()) < len(labels)
        require(both, "validation must hold both classes, or the best model cannot be chosen on it")
    paucs = {f"pauc@{limit:g}" for limit in evaluator.max_fprs}
    known = {"-risk"} | ({"auroc", "ap"} | paucs if ranked else set())
    if select not in known:
        raise unknown("figure to select by", select, known)


def value_of(figures: Mapping[str, Any], select: str) -> float:
    """The figure that a model is chosen by, the higher the better; NaN where there is none."""
    found = figures.get("risk" if select == "-risk" else select)
    value = math.nan if found is None else float(found)
    return -value if select == "-risk" else value


def pairs_in(figures: Mapping[str, float]) -> float:
    """How many pairs of a positive and a negative figures rest on."""
    return figures.get("positives", 1) * figures.get("negatives", 1)


def better_at_common_sites(record: Mapping[str, Any], best: Mapping[str, Any], select: str) -> bool:
    """Of two evaluations by different sites: whether the first is better at those that took part in both."""
    change = 0.0
    for name, mine in record.get("validation_by_site", {}).items():
        theirs = best.get("validation_by_site", {}).get(name)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            difference = value_of(mine, select) - value_of(theirs, select)
            change += 0.0 if math.isnan(difference) else pairs_in(mine) * difference
    return change > 0

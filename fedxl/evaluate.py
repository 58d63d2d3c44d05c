"""Scoring a data split with a model, and the figures that come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedxl import metrics
from fedxl.data.source import Source, floats_as
from fedxl.models import Score, Weights
from fedxl.precision import PRECISIONS, products
from fedxl.risk import XRisk

BATCH = 4096


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

    def figures(self, weights: Weights, source: Source) -> dict[str, float]:
        return self.figures_of(self.scores(weights, source), source)

    def figures_of(self, h: Tensor, source: Source) -> dict[str, float]:
        """Ranking metrics need a scalar score; the risk is always there."""
        figures = {"risk": float(self.risk.value(h, source.labels))}
        if self.risk.score_shape:
            return figures
        return metrics.summary(h.double().cpu().numpy(), source.labels.cpu().numpy(), self.max_fprs) | figures

"""Local SGD (FedAvg; McMahan et al., AISTATS 2017) on the cross entropy: the baseline without X-risks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as nnf

from fedxl.algorithms.protocol import Algorithm, Assignment, Batch, NoTrace
from fedxl.errors import require
from fedxl.models import Score, Weights
from fedxl.risks.auc import auroc
from fedxl.risks.pairing import Share
from fedxl.risks.xrisk import XRisk


class LocalSGDServer(NamedTuple):
    weights: Weights
    step: Tensor
    rules: Any = ()


class LocalSGDClient(NamedTuple):
    buffers: dict[str, Tensor]


class LocalSGDWork(NamedTuple):
    weights: Weights
    step: Tensor
    moments: Any  # of the local optimiser


class LocalSGDUpdate(NamedTuple):
    weights: Weights
    share: Share
    steps: Tensor


# What a client descends: cross entropy of labels, or the squared distance of scores from grades of relevance.
Loss = Literal["cross_entropy", "squared"]


def cross_entropy(h: Tensor, y: Tensor) -> Tensor:
    """The cross entropy of h [B] and labels 0 or 1, or of h [B, classes] and the numbers of the right classes."""
    return nnf.binary_cross_entropy_with_logits(h, y) if h.ndim == 1 else nnf.cross_entropy(h, y.long())


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LocalSGD(Algorithm):
    """Cross entropy, models averaged (FedAvg).

    Each client descends the cross entropy of its own examples, drawn regardless of label. The risk is reported, not
    optimised.
    """

    risk: XRisk = field(default_factory=auroc, kw_only=False)  # what is reported
    loss: Loss = "cross_entropy"  # cross_entropy of labels; squared: distance from labels, which may be grades

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.risk.score_shape, "this algorithm needs one score per example, and the risk pairs vectors")

    @property
    def learns_grades(self) -> bool:  # type: ignore[override]
        return self.loss == "squared"

    def init(self, weights: Weights) -> LocalSGDServer:
        device = next(iter(weights.params.values())).device
        return LocalSGDServer(weights, torch.zeros((), dtype=torch.int64, device=device))

    def init_client(self, server: LocalSGDServer, num_rows: int) -> LocalSGDClient:
        return LocalSGDClient(self.own_buffers(server.weights.buffers))

    def start(self, server: LocalSGDServer, client: LocalSGDClient, share: Share) -> LocalSGDWork:
        weights = server.weights._replace(buffers=client.buffers or server.weights.buffers)
        return LocalSGDWork(weights, server.step, self.descent.optimiser.init(weights.params, server.step))

    def step(
        self, score: Score, server: LocalSGDServer, work: LocalSGDWork, batch: Batch
    ) -> tuple[LocalSGDWork, NoTrace]:
        of = batch.examples

        def objective(params: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            h, buffers = score(work.weights._replace(params=params), of.x)
            return nnf.mse_loss(h, of.y) if self.loss == "squared" else cross_entropy(h, of.y), buffers

        gradient, buffers = torch.func.grad(objective, has_aux=True)(work.weights.params)
        params, moments = self.descent.move(work.weights.params, gradient, self.lr, work.step, work.moments)
        after = work._replace(weights=Weights(params, buffers), step=work.step + 1, moments=moments)
        return after, NoTrace()

    def finish(
        self, server: LocalSGDServer, share: Share, work: LocalSGDWork, trace: NoTrace
    ) -> tuple[LocalSGDClient, LocalSGDUpdate]:
        client = LocalSGDClient(self.own_buffers(work.weights.buffers))
        return client, LocalSGDUpdate(work.weights, share, work.step - server.step)

    def update_like(self, server: LocalSGDServer, assignment: Assignment) -> LocalSGDUpdate:
        return LocalSGDUpdate(server.weights, assignment.share, server.step)

    def aggregate(self, server: LocalSGDServer, mean: dict[str, Any], updates: LocalSGDUpdate) -> LocalSGDServer:
        return LocalSGDServer(mean["weights"], server.step + updates.steps.max())

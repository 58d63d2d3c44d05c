"""Local SGD (FedAvg; McMahan et al., AISTATS 2017) on the cross entropy: what to do without X-risks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as nnf

from fedxl.algorithms.protocol import Batch, Descent, Share, average
from fedxl.models import Weights


class Server(NamedTuple):
    weights: Weights
    step: Tensor


class Client(NamedTuple):
    buffers: dict[str, Tensor]


class Work(NamedTuple):
    weights: Weights
    step: Tensor


class Trace(NamedTuple):
    """Nothing to tell."""


class Update(NamedTuple):
    weights: Weights
    share: Share
    steps: Tensor


def cross_entropy(h: Tensor, y: Tensor) -> Tensor:
    """Of one score an example and y 0 or 1, or of a score for each class and y the number of the right one."""
    return nnf.binary_cross_entropy_with_logits(h, y) if h.ndim == 1 else nnf.cross_entropy(h, y.long())


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalSGD(Descent):
    """Each client descends the cross entropy of its own examples, drawn regardless of label."""

    def init(self, weights: Weights) -> Server:
        device = next(iter(weights.params.values())).device
        return Server(weights, torch.zeros((), dtype=torch.int64, device=device))

    def init_client(self, server: Server, num_rows: int) -> Client:
        return Client(self.own_buffers(server.weights.buffers))

    def start(self, server: Server, client: Client, share: Share) -> Work:
        weights = server.weights._replace(buffers=client.buffers or server.weights.buffers)
        return Work(weights, server.step)

    def step(self, server: Server, work: Work, batch: Batch) -> tuple[Work, Trace]:
        def objective(params: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            h, buffers = self.score(work.weights._replace(params=params), batch.x)
            return cross_entropy(h, batch.y), buffers

        gradient, buffers = torch.func.grad(objective, has_aux=True)(work.weights.params)
        params = self.descend(work.weights.params, gradient, work.step)
        return work._replace(weights=Weights(params, buffers), step=work.step + 1), Trace()

    def finish(self, server: Server, share: Share, work: Work, trace: Trace) -> tuple[Client, Update]:
        client = Client(self.own_buffers(work.weights.buffers))
        return client, Update(work.weights, share, work.step - server.step)

    def aggregate(self, server: Server, updates: Update) -> Server:
        weights = average(updates.weights, updates.share.model, server.weights)
        return Server(weights, server.step + updates.steps.max())

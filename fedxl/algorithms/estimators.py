"""How inner estimates u follow a model that moves.

    average   u <- (1 - gamma) u + gamma g(w)                               SOX and FeDXL2; gamma = 1: BSGD
    msvr      u <- (1 - gamma) u + gamma g(w) + theta (g(w) - g(w'))        Jiang et al. Multi-block-Single-probe
                                                                            Variance Reduced Estimator. NeurIPS 2022
    theta = (n1 - B1) / (B1 (1 - gamma)) + 1 - gamma

g(w) and g(w') are estimates from the same pairs, w' the client's weights one step before; in the first step of a
round they are w, and nothing is corrected. An example of S1 is visited every n1 / B1 steps, so its correction is as
many times as large as that of a step. The passive side of a pair is the same number in both.

Theta may carry u beyond any loss, to where f is not defined. So a corrected u stays between the smallest and the
largest loss of the batch's pairs, or at its old value where that lies outside.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fedxl.errors import require, unknown
from fedxl.risks import XRisk

Estimator = Literal["average", "msvr"]


class Past(NamedTuple):
    """What MSVR remembers inside a round."""

    params: dict[str, Tensor]  # w'
    rows: Tensor  # n1, examples of S1 that the client holds


class Earlier(NamedTuple):
    """A batch by the weights one step before."""

    a: Tensor  # [B1, *d] linked scores
    b: Tensor  # [B2, *d]
    theta: Tensor


class Estimating:
    """The inner estimator. `Compositional` has the settings."""

    estimator: Estimator
    gamma: float
    correction: float

    def check_estimator(self, risk: XRisk) -> None:
        require(0 < self.gamma <= 1, f"gamma must lie in (0, 1], got {self.gamma}")
        require(self.correction >= 0, f"correction must not be negative, got {self.correction}")
        if self.estimator not in get_args(Estimator):
            raise unknown("estimator", self.estimator, get_args(Estimator))
        if not self.corrects:
            require(not self.correction, "correction is for estimator = 'msvr'; the average has none")
            return
        require(
            not risk.linear, "msvr estimates u, which a linear risk (auroc) does not use: set estimator = 'average'"
        )
        require(
            not risk.thresholds, "msvr corrects means, and this risk's u are thresholds: set estimator = 'average'"
        )
        require(self.gamma < 1, "msvr needs gamma below 1: with gamma = 1 nothing is left to correct")

    @property
    def corrects(self) -> bool:
        return self.estimator == "msvr"

    def theta(self, rows: Tensor, batch: int) -> Tensor:
        """The weight of the correction at a client with so many examples of S1."""
        if self.correction:
            return torch.full_like(rows, self.correction)
        unseen = (rows - batch).clamp(min=0) / batch
        return unseen / (1 - self.gamma) + (1 - self.gamma)


def corrected(risk: XRisk, u: Tensor, now: Tensor, earlier: Tensor, theta: Tensor) -> Tensor:
    """u + theta (now - earlier), in the log domain where estimates live there."""
    if risk.lam is None:
        return u + theta * (now - earlier)
    top = torch.maximum(torch.maximum(u, now), earlier)
    sum_ = (u - top).exp() + theta * ((now - top).exp() - (earlier - top).exp())
    return sum_.clamp(min=torch.finfo(u.dtype).tiny).log() + top

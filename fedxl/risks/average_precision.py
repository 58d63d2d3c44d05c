"""Average precision."""

from __future__ import annotations

import torch
from torch import Tensor

from fedxl.errors import require
from fedxl.risks.scores import link_named
from fedxl.risks.surrogates import surrogate_named
from fedxl.risks.xrisk import XRisk, gap, named


@named
def average_precision(
    surrogate: str = "squared_hinge", margin: float = 1.0, damping: float = 1e-3, scores: str = "sigmoid"
) -> XRisk:
    """Average precision (AUPRC): each positive against everything, a ratio of two inner estimates.

    F = mean_{i in +} 1 - u_i1 / (u_i2 + damping),  u_i = mean_{j in all} [y_j l(h_i - h_j), l(h_i - h_j)].
    The damping bounds f' where a sampled u_2 is zero (a positive that outranks its whole batch by the margin).
    """
    require(damping > 0, f"damping must be positive, got {damping}")
    loss, link = surrogate_named(surrogate, margin), link_named(scores)

    def pair(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        l = loss(gap(a, b))
        return torch.stack((y.unsqueeze(-2) * l, l), -1)

    def slope(u: Tensor) -> Tensor:
        low = 1 / (u[..., 1] + damping)
        return torch.stack((-low, u[..., 0] * low.square()), -1)

    return XRisk(
        pair=pair,
        outer=lambda u: 1 - u[..., 0] / (u[..., 1] + damping),
        slope=slope,
        sides=("positive", "all"),
        inner_shape=(2,),
        link=link.apply,
        score_range=link.range,
        metric="ap",
    )

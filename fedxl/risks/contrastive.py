"""Global contrastive loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as nnf

from fedxl.errors import require
from fedxl.risks.scores import named
from fedxl.risks.whole import by_tiles
from fedxl.risks.xrisk import ScoreRange, XRisk

MOST_OUTPUTS = 2**16  # numbers that an example is embedded in


@named
def contrastive(dim: int = 128, temperature: float = 0.1) -> XRisk:
    """Global contrastive loss of two views (Yuan et al. 2022): each example against all others, not its batch alone.

    The model maps an example, which holds both views, to their embeddings side by side: h = (p, q) in R^(2 dim).
    With <.,.> the cosine and t the temperature, summed over both directions:

    F = mean_i t log mean_j exp((<p_i, q_j> - <p_i, q_i>) / t) + t log mean_j exp((<q_i, p_j> - <q_i, p_i>) / t).
    """
    require(0 < dim <= MOST_OUTPUTS, f"dim must lie between 1 and {MOST_OUTPUTS}, got {dim}")
    require(temperature > 0, f"temperature must be positive, got {temperature}")

    def link(h: Tensor) -> Tensor:
        return nnf.normalize(h.unflatten(-1, (2, dim)), dim=-1).flatten(-2)

    def pair(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        p, q = a.split(dim, -1)
        own: Tensor = (p * q).sum(-1, keepdim=True)  # [.., B1, 1]
        across = torch.stack((p @ b[..., dim:].mT, q @ b[..., :dim].mT), -1)  # [.., B1, B2, 2]
        return across - own.unsqueeze(-1)

    return XRisk(
        pair=pair,
        whole=by_tiles,
        outer=lambda v: temperature * v.sum(-1),
        slope=1.0,
        lam=temperature,
        sides=("all", "all"),
        inner_shape=(2,),
        score_shape=(2 * dim,),
        link=link,
        score_range=ScoreRange(-1.0, 1.0, unit=dim),
        metric="-risk",
    )

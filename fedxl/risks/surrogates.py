"""Surrogates of the indicator [t <= 0] of a misranked pair: t = h(should be high) - h(should be low), m a margin."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as nnf

from fedxl.errors import require, unknown

SURROGATES: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "psm": lambda t, m: torch.sigmoid(-t),  # pairwise sigmoid: l(t) + l(-t) = 1, robust to flipped labels
    "square": lambda t, m: (m - t).square(),
    "squared_hinge": lambda t, m: torch.relu(m - t).square(),
    "logistic": lambda t, m: nnf.softplus(-t),
}


def surrogate_named(name: str, margin: float) -> Callable[[Tensor], Tensor]:
    if name not in SURROGATES:
        raise unknown("surrogate", name, SURROGATES)
    require(margin > 0, f"margin must be positive, got {margin}")
    return lambda t: SURROGATES[name](t, margin)

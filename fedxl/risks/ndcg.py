"""NDCG with smooth ranks, of all places or of the first K: SONG and K-SONG (Qiu et al., ICML 2022)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fedxl.errors import require, unknown
from fedxl.risks.queries import QueryRisk, ideal_dcg
from fedxl.risks.surrogates import surrogate_named
from fedxl.risks.top import TopRisk
from fedxl.risks.xrisk import XRisk, gap, named

TopForm = Literal["threshold", "weight", "rank"]


@named
def ndcg(
    surrogate: str = "psm",
    temperature: float = 1.0,
    top: int = 0,
    softness: float = 1.0,
    queries: int = 4,
    top_form: TopForm = "threshold",
    tau1: float = 1.0,
    tau2: float = 1e-4,
) -> XRisk:
    """Negative NDCG: each relevant item against all items of its query (SONG: Qiu et al., ICML 2022).

    F = - mean_q sum_{i in S1_q} gain_i / ideal_q psi_i / log2(1 + r_i),
    r_i = 1 - l(0) + sum_{j in S_q} l((h_i - h_j) / t).

    r_i is a smooth rank: with the surrogate psm it tends to the rank of i as the temperature t tends to 0, and F to
    -NDCG. SONG has squared_hinge. A step reads items of so many `queries`. With `top` = k only the first k places
    count: ideal_q is that of k places, and `top_form` says what psi_i is, which is 1 otherwise:

    - threshold: K-SONG. sigmoid((h_i - lambda_q) / softness), lambda_q a smooth (k+1)-th largest score of the query,
      found with the smoothings `tau1` and `tau2`. The gradient is that of all of it, lambda_q included.
    - weight: the same psi_i as a weight without gradient, the practical variant of K-SONG.
    - rank: sigmoid((k + 1/2 - r_i) / softness), with no threshold to find.
    """
    for name, value in (("temperature", temperature), ("softness", softness), ("tau1", tau1), ("tau2", tau2)):
        require(value > 0, f"{name} must be positive, got {value}")
    require(top >= 0, f"top must not be negative (0: all places), got {top}")
    if top_form not in get_args(TopForm):
        raise unknown("top_form", top_form, get_args(TopForm))
    loss = surrogate_named(surrogate, 1.0)
    own = float(loss(torch.zeros((), dtype=torch.float64)))  # the item against itself
    common: dict[str, Any] = {
        "queries": queries, "ideal": ideal_dcg(top), "metric": f"ndcg@{top}" if top else "ndcg@10",
    }  # fmt: skip

    def pair(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        return loss(gap(a, b) / temperature)

    def rank(s: Tensor) -> Tensor:
        return (s + (1 - own)).clamp(min=1)  # an estimate from a few pairs may lack the item itself

    def outer(s: Tensor) -> Tensor:
        return -1 / torch.log2(1 + rank(s))

    def slope(s: Tensor) -> Tensor:
        return outer(s).square() / ((1 + rank(s)) * math.log(2))

    if top and top_form != "rank":
        stopped = top_form == "weight"
        options = {"top": top, "softness": softness, "tau1": tau1, "tau2": tau2, "stopped": stopped, **common}
        return _by_threshold(pair, outer, slope, options)
    f, derivative = _by_rank(rank, outer, slope, top, softness) if top else (outer, slope)
    return QueryRisk(pair=pair, outer=f, slope=derivative, **common)


Function = Callable[[Tensor], Tensor]


def _by_threshold(
    pair: Callable[[Tensor, Tensor, Tensor], Tensor], outer: Function, slope: Function, options: dict[str, Any]
) -> TopRisk:
    """Items above their query's threshold count."""

    def both(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        l = pair(a, b, y)
        return torch.stack((l, -gap(a, b), a.unsqueeze(-1).expand_as(l)), -1)

    return TopRisk(
        pair=both,
        outer=lambda u: outer(u[..., 0]),
        slope=lambda u: slope(u[..., 0]),
        inner_shape=TopRisk.estimate_shape,
        **options,
    )


def _by_rank(
    rank: Function, outer: Function, slope: Function, top: int, softness: float
) -> tuple[Function, Function]:
    """f and its derivative, times a sigmoid of the smooth rank."""

    def counted(s: Tensor) -> Tensor:
        return torch.sigmoid((top + 0.5 - rank(s)) / softness)

    def slope_of_both(s: Tensor) -> Tensor:
        inside = counted(s)
        return inside * slope(s) - inside * (1 - inside) / softness * outer(s)

    return lambda s: counted(s) * outer(s), slope_of_both

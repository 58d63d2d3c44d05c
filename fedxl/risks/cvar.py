"""Partial AUC in CVaR form: an exact range of false positive rates.

The negatives at false positive rates up to beta are those with the largest losses, a share beta of them. Their mean
loss is a conditional value at risk (Zhu, Li, Wang, Wu, Yang. When AUC meets DRO. ICML 2022, SOPA):

    CVaR_beta(i) = min_s  s + mean_{j in S2} (l_ij - s)_+ / beta
    f_i = (beta CVaR_beta(i) - alpha CVaR_alpha(i)) / (beta - alpha)          rates from alpha to beta

An inner estimate is (s_beta, [s_alpha,] f). A batch moves the thresholds by stochastic subgradients, which have the
quantiles of all of S2 as their fixed points, however small a batch is; f is a moving average:

    s <- s + gamma width (mean_j 1[l_ij > s] - beta)
    c_ij = (1[l_ij > s_beta] - 1[l_ij > s_alpha]) / (beta - alpha)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedxl.errors import require
from fedxl.risks.scores import kink, link_named, named, surrogate_named
from fedxl.risks.whole import by_ranks
from fedxl.risks.xrisk import XRisk, gap


def top(values: Tensor, share: float) -> Tensor:
    """The threshold [..] of a share of the largest values [.., n]: the least that counts, wholly or in part."""
    n = values.shape[-1]
    count = max(1, math.ceil(share * n - 1e-9))
    return values.sort(dim=-1, descending=True).values[..., count - 1]


def counted(values: Tensor, threshold: Tensor, share: float) -> Tensor:
    """How much of each value [.., n] is in a share of the largest: 1 above the threshold [..], 0 below it.

    Values that are equal to the threshold divide what is left of the share, if any is.
    """
    threshold = threshold.unsqueeze(-1)
    above, equal = (values > threshold).to(values.dtype), (values == threshold).to(values.dtype)
    left = (share - above.mean(-1, keepdim=True)) / equal.mean(-1, keepdim=True).clamp(min=1 / values.shape[-1])
    return above + equal * left.clamp(0, 1)


def tail(values: Tensor, threshold: Tensor, share: float) -> Tensor:
    """threshold + mean (values - threshold)_+ / share: the CVaR of values [.., n], if the threshold is `top`'s."""
    return threshold + torch.relu(values - threshold.unsqueeze(-1)).mean(-1) / share


@dataclass(frozen=True, eq=False, repr=False)
class CVaRRisk(XRisk):
    """The mean loss of pairs in a range of ranks. l holds the same loss m times, once for each number of u."""

    mixes_pairs: ClassVar[bool] = True  # those with the same loss divide what is left of the range

    levels: tuple[float, ...] = (1.0,)  # beta, or beta and alpha
    width: float = 1.0  # unit of the steps of thresholds

    def estimate(self, l: Tensor, meets: Tensor | None = None) -> Tensor:
        assert meets is None, "thresholds are those of all pairs"
        l = l.to(self.dtype(l.dtype))[..., 0]
        return self._with_f(torch.stack([top(l, level) for level in self.levels], -1), l)

    def update_u(self, u: Tensor, l: Tensor, meets: Tensor | None, gamma: float) -> Tensor:
        """Thresholds step by gamma width at most, and not beyond the losses of the batch, or themselves."""
        l = l.to(self.dtype(l.dtype))
        each, s = l[..., 0], u[..., :-1]
        above = (each.unsqueeze(-1) > s.unsqueeze(-2)).to(s.dtype).mean(-2)  # [.., B1, levels]
        # Level by level: a tensor made of Python's numbers inside a step cannot be captured in a CUDA graph.
        missing = torch.stack([above[..., i] - level for i, level in enumerate(self.levels)], -1)
        new = self._with_f(s + gamma * self.width * missing, each)
        new = torch.cat((new[..., :-1], torch.lerp(u[..., -1:], new[..., -1:], gamma)), -1)
        low, high = torch.fmin(l.amin(-2), u), torch.fmax(l.amax(-2), u)
        return torch.where(u.isnan(), self.estimate(l, meets), new.clamp(low, high))

    def _with_f(self, s: Tensor, l: Tensor) -> Tensor:
        """Thresholds [.., levels] and f [..], of the losses l [.., B2]."""
        means = [level * tail(l, s[..., i], level) for i, level in enumerate(self.levels)]
        f = (means[0] - sum(means[1:])) / self._length
        return torch.cat((s, f.unsqueeze(-1)), -1)

    @property
    def _length(self) -> float:
        """beta - alpha."""
        return self.levels[0] - sum(self.levels[1:])

    def _inner_coupling(self, l: Tensor, u: Tensor) -> Tensor:
        each, s = l[..., 0], u[..., 0, :]
        inside = [counted(each, s[..., i], level) for i, level in enumerate(self.levels)]
        signed = [inside[0], *(-other for other in inside[1:]), torch.zeros_like(each)]
        return torch.stack(signed, -1) / self._length


@named
def cvar_partial_auc(
    fpr: float = 0.3,
    fpr_from: float = 0.0,
    width: float = 1.0,
    surrogate: str = "squared_hinge",
    margin: float = 1.0,
    scores: str = "sigmoid",
) -> XRisk:
    """One-way partial AUC, CVaR form: the negatives at false positive rates from `fpr_from` to `fpr`, all alike.

    F = mean_{i in +} of the mean loss l(h_i - h_j) over the negatives j in this range of ranks. Inner estimates are
    thresholds; `width` is about the spread of losses, and a step moves a threshold by gamma width at most.
    """
    require(0 < fpr <= 1, f"fpr must lie in (0, 1], got {fpr}")
    require(0 <= fpr_from < fpr, f"fpr_from must lie in [0, fpr), got {fpr_from} with fpr = {fpr}")
    require(width > 0, f"width must be positive, got {width}")
    loss, link = surrogate_named(surrogate, margin), link_named(scores)
    levels = (fpr, fpr_from) if fpr_from else (fpr,)
    m = len(levels) + 1

    def pair(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        l = loss(gap(a, b)).unsqueeze(-1)
        return l.expand(*l.shape[:-1], m)

    return CVaRRisk(
        pair=pair,
        whole=by_ranks(levels, loss, kink(surrogate, margin)) if surrogate != "square" else XRisk.inner,
        outer=lambda u: u[..., -1],
        inner_shape=(m,),
        link=link.apply,
        score_range=link.range,
        double=not link.range.bounded,
        metric=f"pauc@{fpr:g}" if fpr < 1 else "auroc",
        levels=levels,
        width=width,
    )

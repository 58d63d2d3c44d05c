"""Partial AUC, one-way and two-way, in CVaR form: exact ranges of false and true positive rates.

The negatives at false positive rates up to beta are those with the largest losses, a share beta of them. Their mean
loss is a conditional value at risk (Zhu, Li, Wang, Wu, Yang. When AUC meets DRO. ICML 2022, SOPA and SOTA-s):

    CVaR_beta(i) = min_s  s + mean_{j in S2} (l_ij - s)_+ / beta
    f_i = (beta CVaR_beta(i) - alpha CVaR_alpha(i)) / (beta - alpha)          rates from alpha to beta

An inner estimate is (s_beta, [s_alpha,] f). A batch moves the thresholds by stochastic subgradients, which have the
quantiles of all of S2 as their fixed points, however small a batch is; f is a moving average:

    s <- s + gamma width (mean_j 1[l_ij > s] - beta)
    c_ij = (1[l_ij > s_beta] - 1[l_ij > s_alpha]) / (beta - alpha)

Two-way, F is the mean of f over a share of S1: its CVaR, whose threshold is the quantile of f over all of S1. It is
taken over every f that is known, the score pool's or a client's own (`share_threshold`). That of a batch is biased.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedxl.errors import require
from fedxl.risks.scores import link_named
from fedxl.risks.surrogates import surrogate_named
from fedxl.risks.xrisk import XRisk, gap, named


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

    levels: tuple[float, ...] = (1.0,)  # beta, or beta and alpha
    share: float = 1.0  # of S1 that counts: the examples with the largest f
    width: float = 1.0  # unit of the steps of thresholds

    @property
    def thresholds(self) -> bool:
        return True

    @property
    def emphasises(self) -> bool:
        return self.counts_share

    @property
    def counts_share(self) -> bool:
        return self.share < 1

    def estimate(self, l: Tensor) -> Tensor:
        l = l.to(self.dtype(l.dtype))[..., 0]
        return self._with_f(torch.stack([top(l, level) for level in self.levels], -1), l)

    def renew(self, u: Tensor, l: Tensor, gamma: float) -> Tensor:
        l = l.to(self.dtype(l.dtype))
        each, s = l[..., 0], u[..., :-1]
        above = (each.unsqueeze(-1) > s.unsqueeze(-2)).to(s.dtype).mean(-2)  # [.., B1, levels]
        # Level by level: a tensor made of Python's numbers inside a step cannot be captured in a CUDA graph.
        missing = torch.stack([above[..., i] - level for i, level in enumerate(self.levels)], -1)
        new = self._with_f(s + gamma * self.width * missing, each)
        new = torch.cat((new[..., :-1], torch.lerp(u[..., -1:], new[..., -1:], gamma)), -1)
        return torch.where(u.isnan(), self.estimate(l), self.within(new, u, l))

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

    def share_threshold(self, u: Tensor, weight: Tensor | None = None) -> Tensor:
        """The quantile [] of f where u [n, m] is known (not NaN), by weight; NaN if it is known nowhere."""
        f = self.outer(u.detach())
        mass = (~f.isnan()).double() if weight is None else torch.where(f.isnan(), 0.0, weight.double())
        f, order = torch.where(mass > 0, f, -torch.inf).sort(descending=True)
        above = mass[order].cumsum(-1)
        last = (above < (self.share - 1e-9) * above[-1]).sum().clamp(max=len(f) - 1)
        return torch.where(above[-1] > 0, f.gather(0, last.reshape(1)).squeeze(0), torch.nan)

    def emphasis(self, u: Tensor, sample: Tensor | None = None, threshold: Tensor | None = None) -> Tensor:
        """1 / share for the examples of S1 with f above the threshold, 0 for the others; its mean over S1 is 1.

        Where the threshold is not known (NaN) it is that of the sample or, without one, of the rows.
        """
        f = self.outer(u.detach())
        if not self.emphasises:
            return torch.ones_like(f)
        t = top(f if sample is None else self.outer(sample.detach()), self.share)
        if threshold is not None:
            t = torch.where(threshold.isnan(), t, threshold)
        return counted(f, t, self.share) / self.share

    def over_first(self, f: Tensor) -> Tensor:
        return tail(f, top(f, self.share), self.share)


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
    return _cvar(1.0, fpr, fpr_from, width, surrogate, margin, scores)


@named
def cvar_two_way_partial_auc(
    tpr: float = 0.5,
    fpr: float = 0.5,
    fpr_from: float = 0.0,
    width: float = 1.0,
    surrogate: str = "squared_hinge",
    margin: float = 1.0,
    scores: str = "sigmoid",
) -> XRisk:
    """Two-way partial AUC, CVaR form: true positive rates from `tpr` on, false positive rates up to `fpr`.

    F = mean of the one-way f_i over the positives with the largest f_i, a share 1 - tpr of them.
    """
    require(0 <= tpr < 1, f"tpr must lie in [0, 1), got {tpr}")
    return _cvar(1 - tpr, fpr, fpr_from, width, surrogate, margin, scores)


def _cvar(
    share: float, fpr: float, fpr_from: float, width: float, surrogate: str, margin: float, scores: str
) -> CVaRRisk:
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
        outer=lambda u: u[..., -1],
        inner_shape=(m,),
        link=link.apply,
        score_range=link.range,
        double=not link.range.bounded,
        metric=f"pauc@{fpr:g}" if fpr < 1 else "auroc",
        levels=levels,
        share=share,
        width=width,
    )

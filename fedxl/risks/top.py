"""The first K places of a query by a threshold among its scores: K-SONG (Qiu et al., ICML 2022, top-K NDCG).

    F(w)     = mean_q mean_{i in S1_q} weight_i psi(h_i - lambda_q) f(s_i),    psi(x) = sigmoid(x / softness)
    lambda_q = argmin_x  p_q x + tau2 / 2 x^2 + mean_{j in S_q} tau1 log(1 + exp((h_j - x) / tau1))
    p_q      = (K + eps) / |S_q|

lambda_q is a smooth (K+1)-th largest score: the problem's derivative by x is p_q + tau2 x less the smoothed share of
scores above x. It is strongly convex, so by the implicit function theorem

    d lambda_q / d h_j = k_j / (|S_q| H_q),    H_q = tau2 + mean_j k_j
    k_j                = sigmoid'((h_j - lambda_q) / tau1) / tau1

An inner estimate is (u, d, H): the mean of pair losses as in SONG, how far the running threshold lies above the item,
d_i = lambda_q - h_i, and the running curvature. A pair has three numbers, (l_ij, h_j - h_i, h_i), so that its weights
reach the scores themselves:

    c = weight_i (psi n f'(n u),  -psi' f(n u) k_j / H,  psi' f(n u) tau2 / H),   n = |S_q|

docs/maths.md has the derivation, what a step does to d and H, and why d is kept and not lambda.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedxl.risks.queries import ItemConstants, QueryRisk

EPS = 0.1  # between 0 and 1: the threshold lies between the K-th and the (K+1)-th score, nearer to the latter
# Halvings of the interval in which a threshold is looked for: that of all scores, and the first of a batch.
EXACT, ROUGH = 40, 10


@dataclass(frozen=True, eq=False, repr=False)
class TopRisk(QueryRisk):
    """A risk of queries in which an item counts if its score is above its query's threshold. `ndcg` builds it."""

    estimate_shape: ClassVar[tuple[int, ...]] = (3,)

    top: int = 10  # K
    softness: float = 1.0  # of psi
    tau1: float = 1.0  # over which distance a score counts as above the threshold in part
    tau2: float = 1e-4  # how convex the problem of the threshold is at least
    stopped: bool = False  # whether psi is a weight without gradient

    @property
    def thresholds(self) -> bool:
        return True

    def target(self, size: Tensor) -> Tensor:
        """p_q. Of a query with K items or fewer all are selected, and its threshold is near the lowest."""
        size = size.clamp(min=1)
        return ((size - 1).clamp(max=self.top) + EPS) / size

    def above(self, b: Tensor, threshold: Tensor) -> Tensor:
        """How far each score [.., n] is above the threshold [..]: 0 to 1."""
        return torch.sigmoid((b - threshold.unsqueeze(-1)) / self.tau1)

    def steepness(self, b: Tensor, threshold: Tensor) -> Tensor:
        """k_j [.., n]."""
        inside = self.above(b, threshold)
        return inside * (1 - inside) / self.tau1

    def excess(self, x: Tensor, b: Tensor, target: Tensor, share: Tensor) -> Tensor:
        """The derivative [..] of the problem at x [..]; scores b [.., n] count by their share, which may be 1 / n."""
        return target + self.tau2 * x - (share * self.above(b, x)).sum(-1)

    def bisected(self, b: Tensor, target: Tensor, share: Tensor, halvings: int) -> Tensor:
        """lambda [..] of scores b [.., n], without gradient."""
        b, margin = b.detach(), self.tau1 * torch.logit(target).abs()
        low, high = b.amin(-1).clamp(max=0) - margin, b.amax(-1).clamp(min=0) + margin
        for _ in range(halvings):
            middle = (low + high) / 2
            too_low = self.excess(middle, b, target, share) < 0
            low, high = torch.where(too_low, middle, low), torch.where(too_low, high, middle)
        return (low + high) / 2

    def solved(self, b: Tensor, target: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """lambda and H [..] of scores b [.., n]. The gradient of lambda by b is that of the implicit function."""
        found = self.bisected(b, target, share, EXACT)
        curvature = self.tau2 + (share * self.steepness(b.detach(), found)).sum(-1)
        # A Newton step moves the solution by next to nothing, and has its derivative.
        return found - self.excess(found, b, target, share) / curvature, curvature

    def estimate(self, l: Tensor) -> Tensor:
        """With these pairs as the whole query."""
        number = l.shape[-2]
        size = torch.full_like(l[..., 0, 0], number)
        return self.estimated(l, size, torch.full_like(l[..., 0, :, 1], 1 / number))

    def estimated(self, l: Tensor, size: Tensor, share: Tensor) -> Tensor:
        mean, (a, b) = (l[..., 0] * share.unsqueeze(-2)).sum(-1), _scores(l)
        threshold, curvature = self.solved(b, self.target(size[..., 0]), share)
        return _joined(mean, threshold, a, curvature)

    def follow(self, u: Tensor, l: Tensor, size: Tensor, gamma: float) -> Tensor:
        """u as a moving average, and one threshold for all items of a block: they are of one query.

        The threshold descends by a gradient of its problem over H, which makes gamma the part of its error that a
        step takes away, whatever the scale of scores. Its first value is that of the batch's own problem.
        """
        mean, (a, b) = self.blend(u[..., 0], l[..., 0].mean(-1), gamma), _scores(l)
        target = self.target(size[..., 0])  # [.., Q]
        before, H = (u[..., 1] + a).nanmean(-1), u[..., 2].nanmean(-1)  # [.., Q]; NaN: no item was visited before
        share = torch.full_like(b, 1 / b.shape[-1])
        excess, first = self.excess(before, b, target, share), self.bisected(b, target, share, ROUGH)
        low, high = b.amin(-1), b.amax(-1)
        # Where few scores are near, H may be far too small. No step leaves the batch's scores and the threshold.
        moved = (before - gamma * excess / H).maximum(low.minimum(before)).minimum(high.maximum(before))
        threshold = torch.where(before.isnan(), first, moved)
        curvature = self.tau2 + self.steepness(b, threshold).mean(-1)
        least = (high - low + 4 * self.tau1).reciprocal()  # that of scores spread evenly
        curvature = torch.where(H.isnan(), curvature.maximum(least), torch.lerp(H, curvature, gamma))
        return _joined(mean, threshold, a, curvature)

    def selected(self, d: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """psi and psi' of items; 1 and 0 in a query with no more than K items."""
        inside = torch.sigmoid(-d / self.softness)
        all_in = size <= self.top
        steep = inside * (1 - inside) / self.softness
        return torch.where(all_in, torch.ones_like(d), inside), torch.where(all_in, torch.zeros_like(d), steep)

    def contribution(self, u: Tensor, size: Tensor) -> Tensor:
        inside, _ = self.selected(u[..., 1], size)
        return (inside.detach() if self.stopped else inside) * self.outer(u[..., :1] * size.unsqueeze(-1))

    def item_weights(self, l: Tensor, u: Tensor, items: ItemConstants) -> Tensor:
        gaps, (mean, d, H) = l[..., 1].detach(), u.detach().unbind(-1)
        s = (mean * items.size).unsqueeze(-1)
        inside, steep = self.selected(d, items.size)
        pulled = (inside * items.size * self._slope(s)).unsqueeze(-1).expand_as(gaps)
        crossing = (steep * self.outer(s)).unsqueeze(-1)  # [.., Q, B1, 1]
        if self.stopped:
            crossing = torch.zeros_like(crossing)
        # With exact H no item moves the threshold farther than itself. A stale H may say so, and is not believed.
        moves = torch.minimum(self.steepness(gaps, d) / H.unsqueeze(-1), items.size.unsqueeze(-1))
        alone = (crossing * (self.tau2 / H).clamp(max=1).unsqueeze(-1)).expand_as(gaps)
        c = torch.stack((pulled, -crossing * moves, alone), -1)
        return c * (items.weight / math.prod(gaps.shape[-3:])).unsqueeze(-1).unsqueeze(-1)

    def inner_range(self) -> tuple[Tensor, Tensor]:
        """As ever of means and thresholds; curvatures from tau2 to that of scores at the threshold."""
        low, high = super().inner_range()
        low[2], high[2] = 0.999 * self.tau2, 1.001 * (self.tau2 + 0.25 / self.tau1)
        return low, high


def _scores(l: Tensor) -> tuple[Tensor, Tensor]:
    """The scores a [.., B1] and b [.., B2] of pairs [.., B1, B2, 3]."""
    return l[..., 0, 2], l[..., 0, :, 1] + l[..., 0, :1, 2]


def _joined(mean: Tensor, threshold: Tensor, a: Tensor, curvature: Tensor) -> Tensor:
    """Inner estimates [.., B1, 3] of means [.., B1] and one threshold and curvature [..]."""
    return torch.stack((mean, threshold.unsqueeze(-1) - a, curvature.unsqueeze(-1).expand_as(mean)), -1)

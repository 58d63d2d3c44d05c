"""The worst site: a site counts the more, the higher its own risk is.

    F(w) = lam log sum_i p_i exp(L_i(w) / lam)
    grad F = sum_i p_i e_i grad L_i,     e_i = exp(L_i / lam) / sum_k p_k exp(L_k / lam)

L_i is the risk of site i and p_i its part. It is the KL-regularised objective of federated group DRO (Guo, Yang.
Communication-Efficient Federated Group Distributionally Robust Optimization. NeurIPS 2024): max over weights q of
sum_i q_i L_i - lam KL(q, p). A large lam is the plain average, a small one the largest L_i. As there, a site keeps a
running estimate of its risk. docs/maths.md has what L_i is for Local Pair and for FeDXL.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedxl.algorithms.protocol import Share
from fedxl.errors import RefusedError
from fedxl.risks import XRisk
from fedxl.risks.xrisk import log_mean_exp

PROBES = 65  # values of an inner estimate between which the outer function reaches its extremes
MOST_PROBED = 2  # numbers of an inner estimate up to which all combinations are probed


def risk_of(risk: XRisk, u: Tensor, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """The risk of examples of S1 with scores a and running estimates u; a linear risk has no u, and pairs a and b."""
    f = risk.outer(risk.estimate(risk.pairs(a, b, y)[0]) if risk.linear else u)
    return f.mean(-1) if risk.lam_outer is None else risk.lam_outer * log_mean_exp(f / risk.lam_outer, -1)


def blended(known: Tensor, new: Tensor, gamma: float) -> Tensor:
    """(1 - gamma) known + gamma new; a first estimate (NaN before) is taken as it is."""
    new = new.to(known.dtype)
    return torch.where(known.isnan(), new, torch.lerp(known, new, gamma))


def tilted(shares: Tensor, risks: Tensor, lam: float) -> Tensor:
    """Shares [C], each times exp(L_i / lam), up to a common factor; those that are 0 stay 0."""
    counted = shares > 0
    logs = torch.where(counted, risks / lam, torch.full_like(risks, -torch.inf))
    top = torch.where(counted.any(), logs.max(), torch.zeros_like(logs.max()))
    return torch.where(counted, shares * (logs - top).exp().to(shares.dtype), shares)


class RiskLevel(NamedTuple):
    """Where sites' own risks lie together."""

    known: Tensor  # 1 or 0
    log_mean: Tensor  # log sum_k p_k exp(L_k / lam)


def unknown_level(like: Tensor) -> RiskLevel:
    return RiskLevel(like.new_zeros(()), like.new_zeros(()))


def level_after(level: RiskLevel, share: Share, risks: Tensor, lam: float) -> RiskLevel:
    """The level with what a cohort reports: as much of it as the cohort is of S1, so that all together set it."""
    mass, present = (share.model * share.first).double(), (share.part * share.first).double().sum().clamp(0, 1)
    if not bool(mass.sum() > 0):
        return level
    logs = torch.where(mass > 0, risks.double() / lam, -torch.inf)
    now = torch.logsumexp(logs + mass.log(), 0) - mass.sum().log()
    before = level.log_mean.double() + torch.log1p(-present)
    after = torch.where(level.known > 0, torch.logaddexp(before, now + present.log()), now)
    return RiskLevel(torch.ones_like(level.known), after.to(level.log_mean.dtype))


def emphasis(level: RiskLevel, risk: Tensor, share: Share, lam: float) -> Tensor:
    """e_i; 1 while its risk or the level is not known. By itself a site is at most all of S1."""
    most = (share.part * share.first).reciprocal()
    e = torch.exp(torch.minimum(risk / lam - level.log_mean, most.log()))
    return torch.where((level.known > 0) & ~risk.isnan(), e, torch.ones_like(e))


def check_reported(risk: XRisk, reported: Tensor) -> None:
    """RefusedError for a risk that no scores in range can have: its site would count for far too much."""
    if len(risk.inner_shape) > 1 or sum(risk.inner_shape) > MOST_PROBED:
        return
    low, high = (end.reshape(-1) for end in risk.inner_range())
    ticks = [torch.linspace(float(a), float(b), PROBES, dtype=torch.float64) for a, b in zip(low, high, strict=True)]
    probes = torch.cartesian_prod(*ticks).reshape(-1, *risk.inner_shape)
    f = risk.outer(probes)
    f = f[f.isfinite()]
    margin = 1e-3 + 0.05 * (f.max() - f.min())
    if not bool((reported >= f.min() - margin) & (reported <= f.max() + margin)):
        raise RefusedError(f"its own risk is {float(reported):.3g}, which pairs of scores in range cannot give")

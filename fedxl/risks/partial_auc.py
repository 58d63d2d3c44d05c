"""Partial AUC, one-way and two-way, in KL form."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedxl.errors import require
from fedxl.risks.scores import link_named
from fedxl.risks.surrogates import surrogate_named
from fedxl.risks.xrisk import XRisk, gap, named


@named
def partial_auc(
    lam: float = 1.0, surrogate: str = "squared_hinge", margin: float = 1.0, scores: str = "sigmoid"
) -> XRisk:
    """One-way partial AUC (low false positive rates), KL form: the smaller lam, the harder the negatives that count.

    F = mean_{i in +} lam log mean_{j in -} exp(l(h_i - h_j) / lam)   (the paper's KL-OPAUC, section 4).
    Raw scores never overflow, but the weights of pairs then differ by orders of magnitude and want small rates;
    sigmoid scores, the default, bound them. Pairs and estimates of raw scores are float64: exp(l / lam - v) is a
    small difference of large numbers.
    """
    require(lam > 0, f"lam must be positive, got {lam}")
    loss, link = surrogate_named(surrogate, margin), link_named(scores)
    return XRisk(
        pair=lambda a, b, y: loss(gap(a, b)),
        outer=lambda v: lam * v,
        slope=1.0,
        lam=lam,
        link=link.apply,
        score_range=link.range,
        double=not link.range.bounded,
        metric="pauc@0.3",
    )


@named
def two_way_partial_auc(
    lam: float = 1.0,
    lam_outer: float = 1.0,
    surrogate: str = "squared_hinge",
    margin: float = 1.0,
    scores: str = "sigmoid",
    normalised: bool = True,
) -> XRisk:
    """Two-way partial AUC (low FPR and high TPR): hard positives count more, too.

    F = lam_outer log mean_{i in +} u_i^(lam / lam_outer),  u_i = mean_{j in -} exp(l(h_i - h_j) / lam).

    With normalised=False, F is mean_{i in +} u_i^(lam / lam_outer). Its minimisers are the same, but it grows like
    exp(l / lam_outer): with all scores equal and lam = lam_outer = 0.05 the gradient is 1e10 times that of the
    normalised form, and for raw scores with a gap of 8.4 the wrong way round it is beyond single precision.
    """
    require(lam_outer > 0, f"lam_outer must be positive, got {lam_outer}")
    one_way = partial_auc(lam, surrogate, margin, scores)
    if normalised:
        return replace(one_way, lam_outer=lam_outer)
    power = lam / lam_outer
    return replace(
        one_way,
        outer=lambda v: torch.exp(power * v),
        slope=lambda v: torch.exp(power * v) / lam_outer,
    )

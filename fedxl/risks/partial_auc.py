"""Partial AUC, one-way and two-way, in KL form."""

from __future__ import annotations

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
    sigmoid scores, the default, bound them.
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
        metric="pauc@0.3",
    )


@named
def two_way_partial_auc(
    lam: float = 1.0,
    lam_outer: float = 1.0,
    surrogate: str = "squared_hinge",
    margin: float = 1.0,
    scores: str = "sigmoid",
) -> XRisk:
    """Two-way partial AUC (low FPR and high TPR): hard positives count more, too.

    F = mean_{i in +} u_i^(lam / lam_outer),  u_i = mean_{j in -} exp(l(h_i - h_j) / lam), kept as v = log u.
    F itself grows like exp(l / lam_outer); the default sigmoid scores bound it. With raw scores a gap of 8.4 the
    wrong way round overflows single precision, and no limit on single scores prevents that.
    """
    require(lam > 0 and lam_outer > 0, f"lam and lam_outer must be positive, got {lam} and {lam_outer}")
    loss, link = surrogate_named(surrogate, margin), link_named(scores)
    power = lam / lam_outer
    return XRisk(
        pair=lambda a, b, y: loss(gap(a, b)),
        outer=lambda v: torch.exp(power * v),
        slope=lambda v: torch.exp(power * v) / lam_outer,
        lam=lam,
        link=link.apply,
        score_range=link.range,
        metric="pauc@0.3",
    )

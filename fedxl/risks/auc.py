"""Risks of one score per example: AUROC, partial AUC, average precision, p-norm push."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedxl.errors import require
from fedxl.risks.scores import kink, link_named, named, surrogate_named
from fedxl.risks.whole import by_gaps
from fedxl.risks.xrisk import XRisk, gap, identity


@named
def auroc(surrogate: str = "psm", margin: float = 1.0, scores: str = "raw") -> XRisk:
    """Area under the ROC curve: every positive against every negative, linear f.

    F = mean_{i in +} mean_{j in -} l(h_i - h_j). The default surrogate, psm, is the paper's section 4.
    """
    loss, link = surrogate_named(surrogate, margin), link_named(scores)
    return XRisk(
        pair=lambda a, b, y: loss(gap(a, b)),
        whole=by_gaps(kink(surrogate, margin)),
        outer=identity,
        slope=1.0,
        link=link.apply,
        score_range=link.range,
    )


@named
def partial_auc(
    lam: float = 1.0, surrogate: str = "squared_hinge", margin: float = 1.0, scores: str = "sigmoid"
) -> XRisk:
    """One-way partial AUC (low false positive rates), KL form: the smaller lam, the harder the negatives that count.

    F = mean_{i in +} lam log mean_{j in -} exp(l(h_i - h_j) / lam)   (the paper's KL-OPAUC, section 4).
    Raw scores never overflow, but the weights of pairs then differ by orders of magnitude and want small rates;
    sigmoid scores, the default, bound them. Pairs and estimates of raw scores are float64: exp(l / lam - v) is a
    small difference of large numbers. No lam stands for one false positive rate: `cvar_partial_auc(fpr=0.1)` takes
    one, and `fit(..., select="pauc@0.1")` chooses the round by one.
    """
    require(lam > 0, f"lam must be positive, got {lam}")
    loss, link = surrogate_named(surrogate, margin), link_named(scores)
    return XRisk(
        pair=lambda a, b, y: loss(gap(a, b)),
        whole=by_gaps(kink(surrogate, margin)),
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
        whole=by_gaps(kink(surrogate, margin)),
        outer=lambda u: 1 - u[..., 0] / (u[..., 1] + damping),
        slope=slope,
        sides=("positive", "all"),
        inner_shape=(2,),
        link=link.apply,
        score_range=link.range,
        metric="ap",
    )


@named
def p_norm_push(p: float = 3.0, surrogate: str = "logistic", margin: float = 1.0, scores: str = "raw") -> XRisk:
    """P-norm push (Rudin 2009): pushes down the negatives that outrank many positives, p >= 1.

    F = mean_{i in -} ( mean_{j in +} l(h_j - h_i) )^p.
    """
    require(p >= 1, f"p must be at least 1, got {p}")
    loss, link = surrogate_named(surrogate, margin), link_named(scores)
    return XRisk(
        pair=lambda a, b, y: loss(-gap(a, b)),
        whole=by_gaps(-kink(surrogate, margin)),
        outer=lambda u: u.pow(p),
        slope=lambda u: p * u.pow(p - 1),
        sides=("negative", "positive"),
        link=link.apply,
        score_range=link.range,
        metric="pauc@0.3",
    )

"""P-norm push."""

from __future__ import annotations

from fedxl.errors import require
from fedxl.risks.scores import link_named
from fedxl.risks.surrogates import surrogate_named
from fedxl.risks.xrisk import XRisk, gap, named


@named
def p_norm_push(p: float = 3.0, surrogate: str = "logistic", margin: float = 1.0, scores: str = "raw") -> XRisk:
    """P-norm push (Rudin 2009): pushes down the negatives that outrank many positives, p >= 1.

    F = mean_{i in -} ( mean_{j in +} l(h_j - h_i) )^p.
    """
    require(p >= 1, f"p must be at least 1, got {p}")
    loss, link = surrogate_named(surrogate, margin), link_named(scores)
    return XRisk(
        pair=lambda a, b, y: loss(-gap(a, b)),
        outer=lambda u: u.pow(p),
        slope=lambda u: p * u.pow(p - 1),
        sides=("negative", "positive"),
        link=link.apply,
        score_range=link.range,
        metric="pauc@0.3",
    )

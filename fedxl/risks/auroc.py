"""Area under the ROC curve."""

from __future__ import annotations

from fedxl.risks.scores import identity, link_named
from fedxl.risks.surrogates import surrogate_named
from fedxl.risks.xrisk import XRisk, gap, named


@named
def auroc(surrogate: str = "psm", margin: float = 1.0, scores: str = "raw") -> XRisk:
    """Area under the ROC curve: every positive against every negative, linear f.

    F = mean_{i in +} mean_{j in -} l(h_i - h_j). The default surrogate, psm, is the paper's section 4.
    """
    loss, link = surrogate_named(surrogate, margin), link_named(scores)
    return XRisk(
        pair=lambda a, b, y: loss(gap(a, b)),
        outer=identity,
        slope=1.0,
        link=link.apply,
        score_range=link.range,
    )

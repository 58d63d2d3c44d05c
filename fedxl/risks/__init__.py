"""X-risks by name. A line in RISKS enrols one in configs, in the command line and in the shared tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedxl.risks.auroc import auroc
from fedxl.risks.average_precision import average_precision
from fedxl.risks.contrastive import contrastive
from fedxl.risks.cvar import cvar_partial_auc, cvar_two_way_partial_auc
from fedxl.risks.ndcg import ndcg
from fedxl.risks.p_norm_push import p_norm_push
from fedxl.risks.partial_auc import partial_auc, two_way_partial_auc
from fedxl.risks.queries import QueryRisk, listwise
from fedxl.risks.scores import LINKS, ScoreRange, identity
from fedxl.risks.several import Several, several
from fedxl.risks.surrogates import SURROGATES
from fedxl.risks.xrisk import Side, XRisk, belongs, check_risk, gap, named

__all__ = [
    "KNOWN_RISKS", "LINKS", "QUERY_RISKS", "RISKS", "SURROGATES", "QueryRisk", "ScoreRange", "Several", "Side",
    "XRisk", "auroc", "average_precision", "belongs", "check_risk", "contrastive", "cvar_partial_auc",
    "cvar_two_way_partial_auc", "gap", "identity", "listwise", "named", "ndcg", "p_norm_push", "partial_auc",
    "several", "two_way_partial_auc",
]  # fmt: skip

RISKS: Mapping[str, Callable[..., XRisk]] = {
    "auroc": auroc,
    "pauc": partial_auc,
    "tpauc": two_way_partial_auc,
    "cvar_pauc": cvar_partial_auc,
    "cvar_tpauc": cvar_two_way_partial_auc,
    "ap": average_precision,
    "p_norm_push": p_norm_push,
    "contrastive": contrastive,
}
# Of items in queries: their pairs, and so their steps and their value, need the query of each item.
QUERY_RISKS: Mapping[str, Callable[..., XRisk]] = {"ndcg": ndcg, "listwise": listwise}
KNOWN_RISKS: Mapping[str, Callable[..., XRisk]] = {**RISKS, **QUERY_RISKS}

"""X-risks by name. A line in RISKS enrols one in configs, in the command line and in the shared tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedxl.risks.auc import auroc, average_precision, p_norm_push, partial_auc, two_way_partial_auc
from fedxl.risks.contrastive import contrastive
from fedxl.risks.cvar import cvar_partial_auc
from fedxl.risks.pairing import Entry, Holder, OneLabel, Pairing, Side, belongs
from fedxl.risks.ranking import listwise, ndcg
from fedxl.risks.scores import LINKS, SURROGATES, named
from fedxl.risks.several import SeveralLabels, several
from fedxl.risks.survival import TimeToEvent, concordance, cox
from fedxl.risks.xrisk import ScoreRange, XRisk, gap, identity

__all__ = [
    "KNOWN_RISKS", "LINKS", "QUERY_RISKS", "RISKS", "SURROGATES", "TIME_RISKS", "Entry", "Holder", "OneLabel",
    "Pairing", "ScoreRange", "SeveralLabels", "Side", "TimeToEvent", "XRisk", "auroc", "average_precision",
    "belongs", "concordance", "contrastive", "cox", "cvar_partial_auc", "gap", "identity", "listwise", "named",
    "ndcg", "p_norm_push", "partial_auc", "several", "two_way_partial_auc",
]  # fmt: skip

RISKS: Mapping[str, Callable[..., XRisk]] = {
    "auroc": auroc,
    "pauc": partial_auc,
    "tpauc": two_way_partial_auc,
    "cvar_pauc": cvar_partial_auc,
    "ap": average_precision,
    "p_norm_push": p_norm_push,
    "contrastive": contrastive,
}
# Of items in queries: their pairs, and so their steps and their value, need the query of each item.
QUERY_RISKS: Mapping[str, Callable[..., XRisk]] = {"ndcg": ndcg, "listwise": listwise}
# Of time to event: their pairs need the time of each example.
TIME_RISKS: Mapping[str, Callable[..., XRisk]] = {"cox": cox, "concordance": concordance}
KNOWN_RISKS: Mapping[str, Callable[..., XRisk]] = {**RISKS, **QUERY_RISKS, **TIME_RISKS}

"""fedxl: train across data holders who cannot pool their data, for objectives that couple their examples."""

from fedxl.algorithms import ALGORITHMS, Method
from fedxl.data.augment import Augment
from fedxl.errors import UserError
from fedxl.risk import (
    RISKS,
    XRisk,
    auroc,
    average_precision,
    contrastive,
    gap,
    identity,
    p_norm_push,
    partial_auc,
    two_way_partial_auc,
)
from fedxl.run import Hooks, Result, fit
from fedxl.task import Settings

__version__ = "0.2.0"
__all__ = [
    "ALGORITHMS",
    "RISKS",
    "Augment",
    "Hooks",
    "Method",
    "Result",
    "Settings",
    "UserError",
    "XRisk",
    "auroc",
    "average_precision",
    "contrastive",
    "fit",
    "gap",
    "identity",
    "p_norm_push",
    "partial_auc",
    "two_way_partial_auc",
]

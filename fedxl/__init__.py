"""fedxl: train across data holders who cannot pool their data, for objectives that couple their examples.

Names are loaded when they are first used: a process that only passes messages on needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedxl.algorithms import ALGORITHMS, Method
    from fedxl.data.augment import Augment
    from fedxl.errors import UserError
    from fedxl.risks import (
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
    from fedxl.training.problem import Settings
    from fedxl.training.run import Hooks, Result, fit

__version__ = "0.3.0"
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
_HOMES = {
    "ALGORITHMS": "fedxl.algorithms",
    "Method": "fedxl.algorithms",
    "Augment": "fedxl.data.augment",
    "UserError": "fedxl.errors",
    "RISKS": "fedxl.risks",
    "XRisk": "fedxl.risks",
    "auroc": "fedxl.risks",
    "average_precision": "fedxl.risks",
    "contrastive": "fedxl.risks",
    "gap": "fedxl.risks",
    "identity": "fedxl.risks",
    "p_norm_push": "fedxl.risks",
    "partial_auc": "fedxl.risks",
    "two_way_partial_auc": "fedxl.risks",
    "Hooks": "fedxl.training.run",
    "Result": "fedxl.training.run",
    "fit": "fedxl.training.run",
    "Settings": "fedxl.training.problem",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedxl' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

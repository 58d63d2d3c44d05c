"""fedxl: train across data holders who cannot pool their data, for objectives that couple their examples.

Names are loaded when they are first used: a process that only passes messages on needs no torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("fedxl does not run on Windows: it locks files and syncs folders as POSIX does; use WSL2")

if TYPE_CHECKING:
    from fedxl.algorithms import (
        ALGORITHMS,
        CODASCA,
        SOX,
        Algorithm,
        CentralizedSGD,
        FeDXL1,
        FeDXL2,
        LocalPair,
        LocalSGD,
    )
    from fedxl.data.augment import Augment
    from fedxl.data.frame import from_frame
    from fedxl.data.queries import from_queries
    from fedxl.errors import UserError
    from fedxl.metrics import METRICS, Metric
    from fedxl.prediction.export import export
    from fedxl.prediction.predictor import Predictor, load
    from fedxl.risks import (
        RISKS,
        XRisk,
        auroc,
        average_precision,
        contrastive,
        cvar_partial_auc,
        cvar_two_way_partial_auc,
        gap,
        identity,
        listwise,
        named,
        ndcg,
        p_norm_push,
        partial_auc,
        several,
        two_way_partial_auc,
    )
    from fedxl.training.advice import Advice, advise
    from fedxl.training.fit import fit
    from fedxl.training.hooks import Hooks
    from fedxl.training.predict import Prediction
    from fedxl.training.result import Result
    from fedxl.training.settings import Settings

__version__ = "0.3.0"
__all__ = [
    "ALGORITHMS",
    "CODASCA",
    "METRICS",
    "RISKS",
    "SOX",
    "Advice",
    "Algorithm",
    "Augment",
    "CentralizedSGD",
    "FeDXL1",
    "FeDXL2",
    "Hooks",
    "LocalPair",
    "LocalSGD",
    "Metric",
    "Prediction",
    "Predictor",
    "Result",
    "Settings",
    "UserError",
    "XRisk",
    "advise",
    "auroc",
    "average_precision",
    "contrastive",
    "cvar_partial_auc",
    "cvar_two_way_partial_auc",
    "export",
    "fit",
    "from_frame",
    "from_queries",
    "gap",
    "identity",
    "listwise",
    "load",
    "named",
    "ndcg",
    "p_norm_push",
    "partial_auc",
    "several",
    "two_way_partial_auc",
]
_HOMES = {
    "ALGORITHMS": "fedxl.algorithms",
    "Algorithm": "fedxl.algorithms",
    "CODASCA": "fedxl.algorithms",
    "CentralizedSGD": "fedxl.algorithms",
    "FeDXL1": "fedxl.algorithms",
    "FeDXL2": "fedxl.algorithms",
    "LocalPair": "fedxl.algorithms",
    "LocalSGD": "fedxl.algorithms",
    "SOX": "fedxl.algorithms",
    "Augment": "fedxl.data.augment",
    "from_frame": "fedxl.data.frame",
    "from_queries": "fedxl.data.queries",
    "UserError": "fedxl.errors",
    "METRICS": "fedxl.metrics",
    "Metric": "fedxl.metrics",
    "Predictor": "fedxl.prediction.predictor",
    "export": "fedxl.prediction.export",
    "load": "fedxl.prediction.predictor",
    "RISKS": "fedxl.risks",
    "XRisk": "fedxl.risks",
    "auroc": "fedxl.risks",
    "average_precision": "fedxl.risks",
    "contrastive": "fedxl.risks",
    "cvar_partial_auc": "fedxl.risks",
    "cvar_two_way_partial_auc": "fedxl.risks",
    "gap": "fedxl.risks",
    "identity": "fedxl.risks",
    "listwise": "fedxl.risks",
    "named": "fedxl.risks",
    "ndcg": "fedxl.risks",
    "p_norm_push": "fedxl.risks",
    "partial_auc": "fedxl.risks",
    "several": "fedxl.risks",
    "two_way_partial_auc": "fedxl.risks",
    "Advice": "fedxl.training.advice",
    "advise": "fedxl.training.advice",
    "Hooks": "fedxl.training.hooks",
    "Result": "fedxl.training.result",
    "fit": "fedxl.training.fit",
    "Prediction": "fedxl.training.predict",
    "Settings": "fedxl.training.settings",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedxl' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

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
        Descent,
        FeDXL1,
        FeDXL2,
        Level,
        LocalPair,
        LocalSGD,
        Pooling,
        build,
    )
    from fedxl.data.letor import from_queries
    from fedxl.data.source import Augment
    from fedxl.data.table import from_frame
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
    from fedxl.training.predict import Prediction
    from fedxl.training.result import Result
    from fedxl.training.settings import Hooks, Settings

__version__ = "0.4.0.dev0"
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
    "Descent",
    "FeDXL1",
    "FeDXL2",
    "Hooks",
    "Level",
    "LocalPair",
    "LocalSGD",
    "Metric",
    "Pooling",
    "Prediction",
    "Predictor",
    "Result",
    "Settings",
    "UserError",
    "XRisk",
    "advise",
    "auroc",
    "average_precision",
    "build",
    "contrastive",
    "cvar_partial_auc",
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
    name: module
    for module, names in {
        "fedxl.algorithms": "ALGORITHMS Algorithm CODASCA CentralizedSGD Descent FeDXL1 FeDXL2 Level LocalPair "
        "LocalSGD Pooling SOX build",
        "fedxl.data.source": "Augment",
        "fedxl.data.table": "from_frame",
        "fedxl.data.letor": "from_queries",
        "fedxl.errors": "UserError",
        "fedxl.metrics": "METRICS Metric",
        "fedxl.prediction.predictor": "Predictor load",
        "fedxl.prediction.export": "export",
        "fedxl.risks": "RISKS XRisk auroc average_precision contrastive cvar_partial_auc gap identity listwise named "
        "ndcg p_norm_push partial_auc several two_way_partial_auc",
        "fedxl.training.advice": "Advice advise",
        "fedxl.training.result": "Result",
        "fedxl.training.fit": "fit",
        "fedxl.training.predict": "Prediction",
        "fedxl.training.settings": "Hooks Settings",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedxl' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""fedxl: train across data holders who cannot pool their data, for objectives that couple their examples.

Names are loaded when they are first used: a process that only passes messages on needs no torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("fedxl does not run on Windows: it locks files and syncs folders as POSIX does; use WSL2")

if TYPE_CHECKING:  # `X as X` offers a name to type checkers
    from fedxl.algorithms import ALGORITHMS as ALGORITHMS
    from fedxl.algorithms import CODASCA as CODASCA
    from fedxl.algorithms import SOX as SOX
    from fedxl.algorithms import Algorithm as Algorithm
    from fedxl.algorithms import CentralizedSGD as CentralizedSGD
    from fedxl.algorithms import Descent as Descent
    from fedxl.algorithms import FeDXL1 as FeDXL1
    from fedxl.algorithms import FeDXL2 as FeDXL2
    from fedxl.algorithms import Level as Level
    from fedxl.algorithms import LocalPair as LocalPair
    from fedxl.algorithms import LocalSGD as LocalSGD
    from fedxl.algorithms import Pooling as Pooling
    from fedxl.algorithms import build as build
    from fedxl.data.examples import Augment as Augment
    from fedxl.data.examples import Examples as Examples
    from fedxl.data.examples import Splits as Splits
    from fedxl.data.inputs import from_queries as from_queries
    from fedxl.data.inputs import from_times as from_times
    from fedxl.data.tables.table import from_frame as from_frame
    from fedxl.errors import UserError as UserError
    from fedxl.evaluation.scores import Scores as Scores
    from fedxl.experiments.compare import compare as compare
    from fedxl.experiments.tune.objects import Tuned as Tuned
    from fedxl.experiments.tune.objects import tune as tune
    from fedxl.metrics import METRICS as METRICS
    from fedxl.metrics import Metric as Metric
    from fedxl.prediction.export import export as export
    from fedxl.prediction.predictor import Predictor as Predictor
    from fedxl.prediction.predictor import load as load
    from fedxl.reporting.notebook import Comparison as Comparison
    from fedxl.reporting.notebook import report as report
    from fedxl.risks import RISKS as RISKS
    from fedxl.risks import XRisk as XRisk
    from fedxl.risks import auroc as auroc
    from fedxl.risks import average_precision as average_precision
    from fedxl.risks import concordance as concordance
    from fedxl.risks import contrastive as contrastive
    from fedxl.risks import cox as cox
    from fedxl.risks import cvar_partial_auc as cvar_partial_auc
    from fedxl.risks import gap as gap
    from fedxl.risks import identity as identity
    from fedxl.risks import listwise as listwise
    from fedxl.risks import named as named
    from fedxl.risks import ndcg as ndcg
    from fedxl.risks import p_norm_push as p_norm_push
    from fedxl.risks import partial_auc as partial_auc
    from fedxl.risks import several as several
    from fedxl.risks import two_way_partial_auc as two_way_partial_auc
    from fedxl.training.advice import Advice as Advice
    from fedxl.training.advice import advise as advise
    from fedxl.training.fit import fit as fit
    from fedxl.training.result import Prediction as Prediction
    from fedxl.training.result import Result as Result
    from fedxl.training.settings import Hooks as Hooks
    from fedxl.training.settings import Settings as Settings

__version__ = "0.4.0.dev0"
_HOMES = {
    name: module
    for module, names in {
        "fedxl.algorithms": "ALGORITHMS Algorithm CODASCA CentralizedSGD Descent FeDXL1 FeDXL2 Level LocalPair "
        "LocalSGD Pooling SOX build",
        "fedxl.data.examples": "Augment Examples Splits",
        "fedxl.data.inputs": "from_queries from_times",
        "fedxl.data.tables.table": "from_frame",
        "fedxl.errors": "UserError",
        "fedxl.evaluation.scores": "Scores",
        "fedxl.experiments.compare": "compare",
        "fedxl.experiments.tune.objects": "Tuned tune",
        "fedxl.metrics": "METRICS Metric",
        "fedxl.prediction.predictor": "Predictor load",
        "fedxl.prediction.export": "export",
        "fedxl.reporting.notebook": "Comparison report",
        "fedxl.risks": "RISKS XRisk auroc average_precision concordance contrastive cox cvar_partial_auc gap "
        "identity listwise named ndcg p_norm_push partial_auc several two_way_partial_auc",
        "fedxl.training.advice": "Advice advise",
        "fedxl.training.fit": "fit",
        "fedxl.training.result": "Prediction Result",
        "fedxl.training.settings": "Hooks Settings",
    }.items()
    for name in names.split()
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedxl' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    ours = (name for name in globals() if name.startswith("__") or f"fedxl.{name}" in sys.modules)
    return sorted({*ours, *__all__})

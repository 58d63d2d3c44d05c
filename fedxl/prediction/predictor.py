"""A trained model that predicts: from a run's folder or from an exported one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedxl.data.examples import Digests, Examples
from fedxl.data.tables.prepare import Preparation
from fedxl.errors import require
from fedxl.evaluation.decision import DecisionOptions, Decisions
from fedxl.files import as_path
from fedxl.prediction import onnx_file
from fedxl.prediction.export import Exported, is_exported, read_exported
from fedxl.prediction.onnx_file import ONNX
from fedxl.prediction.run import network_of, preparation_of, read_finished, rebuilt, trained_on, with_weights
from fedxl.training.result import Prediction, Scorer, decisions_for, examples, predict, scorer_of
from fedxl.training.run_folder import WEIGHTS, Form, require_run
from fedxl.training.settings import pick_device


@dataclass(frozen=True, eq=False)
class Predictor:
    """What scores examples, and what their scores mean."""

    score: Scorer
    form: Form
    preparation: Preparation | None  # how files become examples; None: arrays as they are
    decisions: Decisions
    trained_on: Digests | None = None  # of the run's training data, if the folder holds them

    def predict(self, x: Any, where: str = "x") -> Prediction:
        """Scores of examples; probabilities and classes of labels that have a decision.

        x: what the network takes, as a tensor, an array or a data frame; or a table, if there is a preparation.
        """
        return predict(self.score, self.examples(x, where), self.form, self.decisions, self.trained_on)

    def examples(self, x: Any, where: str = "x") -> Examples:
        """What `predict` takes, as the network gets it: for other programs that run the network."""
        return examples(x, self.form, self.preparation, where)

    def with_threshold(self, threshold: float) -> Predictor:
        """With another threshold of the raw score."""
        require(not self.decisions.why_none, f"there are no classes: {self.decisions.why_none}")
        return replace(self, decisions=self.decisions.with_threshold(threshold))


def load(
    folder: str | Path,
    *,
    calibration: str = "platt",
    specificity: float | None = None,
    sensitivity: float | None = None,
    horizons: Sequence[float] = (),
    model: nn.Module | None = None,
    allow_code: bool = False,
    device: str = "cpu",
) -> Predictor:
    """The model of a run's folder, or of an exported folder.

    Args:
        folder: What `fedxl train`, `fit(out=...)`, a deployed server or `fedxl export` has written.
        calibration: platt or isotonic, fitted to the run's validation scores. In an exported folder it is fixed, like
            the threshold.
        specificity: The threshold between the classes reaches this on validation data; by default 0.9.
        sensitivity: Or it reaches this.
        horizons: Of time to event: times up to which to survive; by default quartiles of validation events.
        model: A network of the run's architecture, for runs of `fit` with a network of your own.
        allow_code: Whether a network that the folder names as "package.module:factory" may be imported.
        device: Where to score: cpu, cuda, ..., or auto.
    """
    path = as_path(folder, "folder")
    require(path.is_dir(), f"{path} is not a folder; give the folder of a run, or an exported one")
    options, place = DecisionOptions(calibration, specificity, sensitivity, horizons), pick_device(device)
    if is_exported(path):
        chosen = "its calibration, threshold and horizons were chosen when it was exported"
        fixed = f"{chosen}; export the run again to change them"
        require(options == DecisionOptions(), f"{path} is an exported folder: {fixed}")
        return _exported(read_exported(path), model, allow_code, place)
    require_run(path, f"{path} holds neither a run nor an exported model")
    run = read_finished(path)
    scorer = scorer_of(network_of(run, model, allow_code), place)
    decisions = decisions_for(run.form, run.scores, run.histograms, options, run.shown)
    return Predictor(scorer, run.form, preparation_of(run), decisions, trained_on(run))


def _exported(found: Exported, model: nn.Module | None, allow_code: bool, device: torch.device) -> Predictor:
    rest = (found.form, found.preparation, found.decisions)
    if found.model is None and model is None:  # code of the user's: the file of ONNX needs none
        return Predictor(onnx_file.scorer(found.content(ONNX)), *rest)
    if model is None:
        assert found.model is not None
        model = rebuilt(found.model, found.form, found.weights_dtype, allow_code)
    network = with_weights(model, found.content(WEIGHTS), found.path / WEIGHTS)
    return Predictor(scorer_of(network, device), *rest)

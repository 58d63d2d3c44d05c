"""What a run comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import nn

from fedxl.algorithms.protocol import ServerState
from fedxl.data.preparation import Preparation
from fedxl.errors import require
from fedxl.evaluation.binned import Curves
from fedxl.evaluation.label_counts import LabelCurves
from fedxl.evaluation.scored import LabelScores, Scored
from fedxl.models import Weights
from fedxl.training.members import Form
from fedxl.training.predict import Prediction, decision_for, examples, predict, scorer_of
from fedxl.training.rounds import Traffic

if TYPE_CHECKING:
    from fedxl.evaluation.label_means import LabelRow

Floats = npt.NDArray[np.float64]


@dataclass
class Result:
    """The result of a run: the chosen model, its metrics, and the history of evaluations."""

    model: nn.Module  # the chosen model, in evaluation mode
    weights: Weights  # its parameters and buffers
    best_round: int  # the round that it is from
    metrics: dict[str, dict[str, float]]  # by split: validation (of the best round) and test
    history: list[dict[str, Any]]  # a metrics row for each evaluation
    seconds: float  # since the run began, without interruptions
    scored: dict[str, Scored] = field(default_factory=dict, repr=False)  # its scores by split, where they are known
    curves: dict[str, Curves] = field(default_factory=dict, repr=False)  # or sites' counts in bins, by split and site
    by_label: dict[str, LabelScores] = field(default_factory=dict, repr=False)  # scores of several labels, by split
    label_curves: dict[str, LabelCurves] = field(default_factory=dict, repr=False)  # or counts, by split, label, site
    traffic: Traffic | None = None  # bytes that a client receives and sends in a round
    interrupted: bool = False  # whether it was stopped before its last round
    stopped_early: bool = False  # whether it ended before its last round because it no longer became better
    server: ServerState | None = field(default=None, repr=False)  # the state after the last round
    form: Form | None = field(default=None, repr=False)  # what its network takes and gives
    preparation: Preparation | None = field(default=None, repr=False)  # how its data were made of files, if they were

    @property
    def test_scores(self) -> tuple[Floats, Floats] | None:
        """Raw scores and labels of the test data."""
        test = self.scored.get("test")
        return None if test is None else (test.scores, test.labels.astype(np.float64))

    def label_table(self, split: str = "test", level: float = 0.95) -> list[LabelRow]:
        """AUROC of each of several labels, with DeLong's interval, and their mean, with a jackknife's."""
        require(split in self.by_label, f"there are no scores of several labels on {split} data")
        from fedxl.evaluation.label_means import label_table  # loads scipy, which training does not need

        return label_table(self.by_label[split], level)

    def predict(
        self,
        x: Any,
        *,
        calibration: str = "platt",
        specificity: float | None = None,
        sensitivity: float | None = None,
    ) -> Prediction:
        """Scores of new examples; with validation data, calibrated probabilities and classes, too.

        Of several labels there is a column for each, and a calibration and a threshold for each label that has enough
        validation data; `undecided` says which has not.

        Args:
            x: Examples as the clients of `fit` hold them: a tensor, an array, a data frame or a torch Dataset. With
                data from tables, a new table or its path, too.
            calibration: platt or isotonic, fitted to the validation scores.
            specificity: The threshold between the classes reaches this on validation data; by default 0.9.
            sensitivity: Or it reaches this.
        """
        require(self.form is not None, "this result does not say what its network takes; score with its model")
        assert self.form is not None
        from fedxl.evaluation.decision import (  # loads scipy, which training does not need
            Wish,
            deciding,
            deciding_labels,
        )

        wish = Wish(calibration, specificity, sensitivity)
        score = scorer_of(self.model, next(self.model.parameters()).device)
        by_label = deciding_labels(self.by_label, self.label_curves)
        decision, _ = decision_for(self.form, deciding(self.scored, self.curves), by_label, wish)
        return predict(score, examples(x, self.form, self.preparation), self.form, decision)

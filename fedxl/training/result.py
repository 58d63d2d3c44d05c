"""What a run comes to: its chosen model, and what that says of new examples.

Scores get their meaning, probabilities and classes, from the run's validation scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedxl import display
from fedxl.algorithms import ALGORITHMS
from fedxl.algorithms.protocol import ServerState
from fedxl.data.examples import UNKNOWN, Digests, Examples, are_known, digests
from fedxl.data.inputs import features, is_frame, read
from fedxl.data.tables.prepare import Preparation
from fedxl.data.tables.table import prepared, read_new
from fedxl.errors import UserError, first_line, printable, require
from fedxl.evaluation.histogram import Histograms, by_label, hazard_of
from fedxl.evaluation.scores import Floats, Ints, Scores
from fedxl.files import as_path, plain
from fedxl.models import Weights, scorer, weights_of
from fedxl.models.functional import PRECISIONS, products
from fedxl.progress import progress
from fedxl.training.rounds import Traffic
from fedxl.training.run_folder import ABOUT, CONFIG, PREPARATION, Form, Row, Run, described, is_run
from fedxl.training.run_writer import RunWriter

if TYPE_CHECKING:  # they load scipy, which training does not need
    from fedxl.evaluation.decision import DecisionOptions, Decisions
    from fedxl.evaluation.intervals import LabelRow

BLOCK = 4096  # examples scored at a time
Scorer = Callable[[Tensor], Tensor]  # [B, ...] -> [B], of several labels [B, L]


class Prediction(NamedTuple):
    """For each example its raw score, and where validation scores were kept, its probability and its class.

    Of several labels these are [n, L]. A label without enough validation data has NaN and -1.
    """

    scores: Floats  # [n]
    probabilities: Floats | None  # of the positive class, calibrated
    classes: Ints | None  # 1 at or above the threshold
    labels: tuple[str, ...] = ()  # of several labels, the name of each column
    undecided: Mapping[str, str] = MappingProxyType({})  # by label: why it has none
    trained_on: int = 0  # how many of the examples are among the run's training data, where that is known
    survival: Floats | None = None  # [n, horizons] of time to event: how likely an example has no event up to each
    horizons: tuple[float, ...] = ()

    @property
    def columns(self) -> dict[str, list[Any]]:
        """What a file of predictions holds, by column; a label without a decision has its score alone."""
        table: dict[str, list[Any]] = {}
        survival = {} if self.survival is None else dict(zip(self.horizons, self.survival.T, strict=True))
        for number, name in enumerate(self.labels or ("",)):
            end, at = (f"_{name}", (slice(None), number)) if self.labels else ("", ())
            table[f"score{end}"] = self.scores[at].tolist()
            if self.probabilities is not None and self.classes is not None and name not in self.undecided:
                table[f"probability{end}"] = self.probabilities[at].tolist()
                table[f"class{end}"] = self.classes[at].tolist()
        return table | {f"survival@{horizon:g}": each.tolist() for horizon, each in survival.items()}

    def to_frame(self) -> Any:
        """These columns as a data frame of pandas, a row per example."""
        return display.frame(self.columns)

    def _repr_html_(self) -> str:
        return display.html(self)


def scorer_of(network: nn.Module, device: torch.device) -> Scorer:
    """The network as a function of examples, in evaluation mode and full precision."""
    network = network.to(device)
    weights, score = weights_of(network), scorer(network, training=False)

    def scores(x: Tensor) -> Tensor:
        with torch.no_grad(), products(PRECISIONS["fp32"]):
            return score(weights, x.to(device))[0].cpu()

    return scores


def examples(x: Any, form: Form, preparation: Preparation | None = None, where: str = "x") -> Examples:
    """Checked examples of the shape and type that the network takes, in any form that `fit` takes.

    preparation: how tables become examples. Then x may be a data frame, or the path of a file, like those of the run.
    """
    if isinstance(x, (str, Path)) or (is_frame(x) and preparation is not None):
        require(preparation is not None, f"{where}: this model was trained on arrays and cannot prepare {x!r}")
        assert preparation is not None
        x = prepared(x, preparation).x if is_frame(x) else read_new(preparation, x).x
    elif isinstance(x, Dataset):
        x = read(x, where)[0]
    found = features(x, where)
    x = found.x
    if found.columns and form.columns and found.columns != form.columns:
        missing = [name for name in form.columns if name not in found.columns]
        require(not missing, f"{where} lacks the column(s) {', '.join(map(repr, missing[:4]))} of the training data")
        x = x[:, [found.columns.index(name) for name in form.columns]]
    wanted = f"[n, {', '.join(map(str, form.shape))}]"
    right = tuple(x.shape[1:]) == form.shape
    require(right, f"{where}: this model takes examples of shape {wanted}, not {list(x.shape)}")
    whole = not getattr(torch, form.dtype).is_floating_point
    require(not (whole and x.is_floating_point()), f"{where}: this model takes whole numbers, not {x.dtype}")
    made = Examples(x, torch.full((len(x), len(form.names)), UNKNOWN))
    made.require_usable(where)
    made.require_scale(form.scale, where)
    return made


def predict(
    score: Scorer, data: Examples, form: Form, decisions: Decisions | None, trained_on: Digests | None = None
) -> Prediction:
    """Score a block of examples at a time. trained_on: of the run's training data, sorted."""
    scalar = bool(form.labels) or not form.score_shape
    require(scalar, "this model gives vectors, not scores: there is nothing to decide by")
    found, known = np.empty((len(data), *form.score_shape), np.float64), 0
    with progress("scoring", len(data)) as advance:
        for indices in torch.arange(len(data)).split(BLOCK):
            x = data.fetch(indices).to(getattr(torch, form.dtype))
            found[indices.numpy()] = _scored(score, x, form.score_shape)
            known += 0 if trained_on is None else int(are_known(digests([x]), trained_on).sum())
            advance(len(indices))
    bad = np.flatnonzero(~np.isfinite(found.reshape(len(found), -1)).all(1))
    require(not len(bad), f"{len(bad)} examples have no finite score, the first of them is number {bad[:1]}")
    if decisions is not None and decisions.survival is not None:
        survival, horizons = decisions.survival.probabilities(found), decisions.survival.horizons
        return Prediction(found, None, None, trained_on=known, survival=survival, horizons=horizons)
    if decisions is None or not decisions.decided:
        return Prediction(found, None, None, form.labels, trained_on=known)
    columns = found.reshape(len(found), -1)
    probabilities = decisions.probabilities(columns).reshape(found.shape)
    classes = decisions.classes(columns).reshape(found.shape)
    return Prediction(found, probabilities, classes, form.labels, decisions.undecided, known)


def _scored(score: Scorer, x: Tensor, shape: tuple[int, ...]) -> Floats:
    try:
        h = score(x)
    except UserError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise UserError(
            f"the model cannot score examples of shape {list(x.shape[1:])}: {first_line(error)}"
        ) from error
    h = h[:, None] if shape == (1,) and h.ndim == 1 else h  # one of several labels
    require(h.shape == (len(x), *shape), f"the model gave scores of shape {list(h.shape)} for {len(x)} examples")
    return h.double().numpy()


def decisions_for(
    form: Form,
    scores: Mapping[str, Scores],
    histograms: Mapping[str, Histograms],
    options: DecisionOptions,
    row: Mapping[str, Any] = MappingProxyType({}),
) -> Decisions:
    """What scores mean by the validation scores, or by what sites told of them: counts in bins, sums of a hazard.

    row: the evaluation of the chosen round, as metrics rows have it.
    """
    from fedxl.evaluation.decision import decide
    from fedxl.evaluation.hazard import HazardSums

    told = row.get("validation_hazard")
    sums = hazard_of(histograms.get("validation", {})) if told is None else HazardSums.from_json(told)
    found = decide(form.names, by_label(scores, histograms).get("validation", {}), options, sums)
    told = f"there is no threshold of {options.rule}: {found.why_none}"
    require(not (found.why_none and options.asks), told)
    told = f"there is no probability to survive a horizon: {found.why_none}"
    require(found.survival is not None or not options.horizons, told)
    return found


@dataclass(repr=False)
class Result:
    """The result of a run: the chosen model, its metrics, and the history of evaluations."""

    model: nn.Module  # the chosen model, in evaluation mode
    weights: Weights  # its parameters and buffers
    best_round: int  # the round that it is from
    metrics: dict[str, dict[str, float]]  # by split: validation (of the best round) and test
    history: list[dict[str, Any]]  # a metrics row for each evaluation
    seconds: float  # since the run began, without interruptions
    scores: dict[str, Scores] = field(default_factory=dict)  # its scores by split, where they are known
    histograms: dict[str, Histograms] = field(default_factory=dict)  # or sites' counts in bins, by split
    traffic: Traffic | None = None  # bytes that a client receives and sends in a round
    interrupted: bool = False  # whether it was stopped before its last round
    stopped_early: bool = False  # whether it ended before its last round because it no longer became better
    server: ServerState | None = None  # the state after the last round
    form: Form | None = None  # what its network takes and gives
    preparation: Preparation | None = None  # how its data were made of files, if they were
    about: Mapping[str, Any] = field(default_factory=dict)  # settings, clients and versions: what run.json holds
    final: Row | None = None  # the last metrics row, with the metrics of the test data; None: interrupted
    files: Mapping[str, str] = field(default_factory=dict)  # that belong to the run: its config.toml, if it had one

    def __repr__(self) -> str:
        """One line, as "FeDXL2, best round 20 of 20, test auroc 0.9840"."""
        run = self.as_run()
        value = run.values.get(run.metric)
        judged = "" if value is None else f", {run.split} {printable(run.metric)} {value:.4f}"
        stopped = ", interrupted" if self.interrupted else ""
        rounds = max(self.best_round, run.last_round)
        return f"{run.name}, best round {self.best_round} of {rounds}{judged}{stopped}"

    _repr_html_ = display.html

    def plot(self, *others: Any) -> Any:
        """Its ROC curve, or survival by risk, and its validation metric by round; beside those of other runs.

        A notebook shows what this returns, and its `save(path)` writes an SVG file. others: results, folders of runs.
        """
        return display.plot(self, *others)

    def as_run(self, name: str = "", label: str = "") -> Run:
        """The run as reports see it, kept in memory. label: what it is called among runs that differ by seed only."""
        rows, known = [plain(row) for row in self.history], (self.scores, self.histograms)
        config, about = self.files.get(CONFIG, ""), described(self.about)
        run = Run(name, rows=rows, done=plain(self.final), config=config, label=label, in_memory=known, **about)
        kind = getattr(ALGORITHMS.get(run.algorithm), "__name__", printable(run.algorithm, 60))
        return run if name else replace(run, name=kind)

    def save(self, folder: str | Path) -> Path:
        """Write the folder that `fit(out=...)` would have written, without checkpoints, and return its path.

        `fedxl.load`, `fedxl.export` and the command line read it. It does not hold digests of the training data, by
        which predictions on these are told apart: `fit(out=...)` keeps them.
        """
        path = as_path(folder, "folder")
        require(self.final is not None, "the run was interrupted; fit(..., out=...) keeps a run that can be resumed")
        require(not is_run(path), f"{path} already holds a run; choose another folder")
        with RunWriter(path, resume=False) as writer:
            for name, text in self.files.items():
                writer.write(name, text)
            if self.preparation is not None:
                writer.write(PREPARATION, self.preparation.to_text())
            for row in (*self.history, self.final or {}):
                writer.append(row)
            writer.save_result(self.scores, self.histograms, self.model.state_dict())
            writer.write_json(ABOUT, self.about)  # last: where it is, the others are
        return path

    @property
    def test_scores(self) -> tuple[Floats, Floats] | None:
        """Raw scores and labels of the test data: [n], of several labels [n, L]."""
        test = self.scores.get("test")
        if test is None:
            return None
        shape = test.scores.shape if self.form is not None and self.form.labels else (len(test),)
        return test.scores.reshape(shape), test.y.astype(np.float64).reshape(shape)

    def label_table(self, split: str = "test", level: float = 0.95) -> list[LabelRow]:
        """AUROC of each label with its interval, and of several labels their mean."""
        require(split in self.scores, f"there are no scores on {split} data")
        from fedxl.evaluation.intervals import label_table  # loads scipy, which training does not need

        return label_table(self.scores[split], level)

    def predict(
        self,
        x: Any,
        *,
        calibration: str = "platt",
        specificity: float | None = None,
        sensitivity: float | None = None,
        horizons: Sequence[float] = (),
    ) -> Prediction:
        """Scores of new examples; with validation data, calibrated probabilities and classes, too.

        Of time to event: scores, the higher the earlier, and how likely an example has no event up to each horizon.

        Of several labels there is a column for each, and a calibration and a threshold for each label that has enough
        validation data; `undecided` says which has not.

        Args:
            x: Examples as the clients of `fit` hold them: a tensor, an array, a data frame or a torch Dataset. With
                data from tables, a new table or its path, too.
            calibration: platt or isotonic, fitted to the validation scores.
            specificity: The threshold between the classes reaches this on validation data; by default 0.9.
            sensitivity: Or it reaches this.
            horizons: Times up to which to survive; by default quartiles of the validation data's events.
        """
        require(self.form is not None, "this result does not say what its network takes; score with its model")
        assert self.form is not None
        from fedxl.evaluation.decision import DecisionOptions  # loads scipy, which training does not need

        options = DecisionOptions(calibration, specificity, sensitivity, horizons)
        score = scorer_of(self.model, next(self.model.parameters()).device)
        row = next((row for row in self.history if row["round"] == self.best_round), {})
        decisions = decisions_for(self.form, self.scores, self.histograms, options, row)
        return predict(score, examples(x, self.form, self.preparation), self.form, decisions)

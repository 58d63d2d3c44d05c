"""What a run's folder says of its model: run.json, scores.npz, preparation.json and model.safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedxl.data.preparation import NAME as PREPARATION
from fedxl.data.preparation import Preparation
from fedxl.errors import UserError, require
from fedxl.evaluation import binned, label_counts, labelled, scored
from fedxl.evaluation.binned import Curves
from fedxl.evaluation.decision import Wish, deciding
from fedxl.evaluation.label_counts import LabelCurves
from fedxl.evaluation.label_decisions import Meaning, deciding_labels
from fedxl.evaluation.labelled import LabelScores
from fedxl.evaluation.scored import Scored
from fedxl.files import read_json
from fedxl.options import convert
from fedxl.prediction.network import WEIGHTS, read_weights, rebuilt, with_weights
from fedxl.risks.several import label_names
from fedxl.training.members import Form
from fedxl.training.predict import decision_for
from fedxl.training.run_files import ABOUT, CURVES, LABEL_CURVES, LABEL_SCORES, SCORES, read_metrics
from fedxl.training.settings import DTYPES

OWN = (
    "the network of this run was an object in Python, and its code is not in the folder; name the function that "
    "builds it, --model package.module:factory (in Python model=...)"
)


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A run whose model is chosen."""

    path: Path
    about: Mapping[str, Any]  # run.json
    form: Form
    model: Mapping[str, Any] | None  # the [model] table; None: an object of Python's, passed to `fit`
    scored: Mapping[str, Scored]
    preparation: Preparation | None

    @property
    def settings(self) -> Mapping[str, Any]:
        """By dotted names."""
        return self.about["settings"]  # type: ignore[no-any-return]

    @property
    def dtype(self) -> str:
        """Of the weights."""
        return str(self.settings.get("run.dtype", "float32"))

    @property
    def by_label(self) -> Mapping[str, LabelScores]:
        """The scores of several labels, by split."""
        return labelled.load(self.path / LABEL_SCORES)

    @property
    def label_curves(self) -> Mapping[str, LabelCurves]:
        """Or sites' counts in bins, by split."""
        return label_counts.load(self.path / LABEL_CURVES)

    @property
    def curves(self) -> Mapping[str, Curves]:
        """Sites' counts in bins of one label, by split."""
        return binned.load(self.path / CURVES)

    def decided(self, wish: Wish) -> tuple[Meaning | None, str]:
        """Calibration and threshold by the run's validation scores, or by what sites' counts in bins say of them.

        None, and why, if there are none.
        """
        by_label = deciding_labels(self.by_label, self.label_curves)
        return decision_for(self.form, deciding(self.scored, self.curves), by_label, wish)

    @property
    def best_round(self) -> int | None:
        """The round that the model is from, as the last metrics row says."""
        rows, _ = read_metrics(self.path)
        return next((row["best_round"] for row in reversed(rows) if "best_round" in row), None)

    def network(self, given: nn.Module | None = None, allow_code: bool = False) -> nn.Module:
        """Its trained network; `given` is one of the same architecture, for runs whose own is code in Python."""
        if given is None:
            require(self.model is not None, OWN)
            assert self.model is not None
            given = rebuilt(self.model, self.form, self.dtype, allow_code)
        path = self.path / WEIGHTS
        return with_weights(given, read_weights(path), path)


def read_run(path: Path) -> FinishedRun:
    """A finished run; one line if the folder holds none."""
    old = f"{path} holds a run of an older version, which did not record what its network takes; train it again"
    try:
        about = read_json(path / ABOUT)
    except FileNotFoundError:
        raise UserError(old) from None
    require("shape" in about, old)
    require((path / WEIGHTS).exists(), f"{path} holds a run without a model; `fedxl resume {path}` finishes it")
    settings = about.get("settings")
    require(isinstance(settings, dict), f"{path / ABOUT} does not say the run's settings")
    assert isinstance(settings, dict)
    model = {key.removeprefix("model."): value for key, value in settings.items() if key.startswith("model.")}
    run = FinishedRun(
        path, about, read_form(about, path / ABOUT), model or None, scored.load(path / SCORES), read_preparation(path)
    )
    require(run.dtype in DTYPES, f"{path / ABOUT}: run.dtype must be one of {', '.join(DTYPES)}, not {run.dtype!r}")
    return run


def read_form(content: Mapping[str, Any], path: Path) -> Form:
    """What the network takes and gives, as run.json and model.json say it."""
    kinds: dict[str, Any] = {"shape": tuple[int, ...], "dtype": str, "score_shape": tuple[int, ...]}
    for name in kinds:
        require(name in content, f"{path} lacks '{name}'")
    form = Form(**{name: convert(content[name], kind, f"{path}: {name}") for name, kind in kinds.items()})
    sizes = (*form.shape, *form.score_shape)
    small = len(sizes) <= 8 and all(0 < size <= 10**6 for size in sizes)
    require(
        small and len(form.shape) > 0, f"{path}: shapes of {list(form.shape)} and {list(form.score_shape)} are none"
    )
    kinds_of_numbers = (*DTYPES, "int64", "int32", "bool")
    require(form.dtype in kinds_of_numbers, f"{path}: dtype must be one of {', '.join(kinds_of_numbers)}")
    columns = content.get("columns", [])
    named = isinstance(columns, list) and all(isinstance(name, str) for name in columns)
    require(named and len(columns) in (0, form.shape[0]), f"{path}: columns must name each number of an example")
    # A run names several labels here. An exported model of one label says what its two values are called.
    found = content.get("labels", [])
    labels = [] if isinstance(found, dict) else found
    right = isinstance(labels, list) and all(isinstance(name, str) for name in labels)
    require(right and (not labels or (len(labels),) == form.score_shape), f"{path}: labels must name each score")
    return form._replace(columns=tuple(columns), labels=label_names(labels) if labels else ())


def read_preparation(path: Path) -> Preparation | None:
    """How the run prepared its tables or images; None where it took arrays as they were."""
    try:
        return Preparation.from_json(read_json(path / PREPARATION))
    except FileNotFoundError:
        return None

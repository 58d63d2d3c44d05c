"""A finished run: what its folder says of its model, with nothing trusted, and the trained network."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from fedxl import registry
from fedxl.config.experiment import build_network
from fedxl.data.preparation import NAME as PREPARATION
from fedxl.data.preparation import Preparation
from fedxl.errors import RefusedError, UserError, first_line, require
from fedxl.evaluation import binned, label_counts, scored
from fedxl.evaluation.binned import Curves
from fedxl.evaluation.decision import Meaning, Wish, deciding, deciding_labels
from fedxl.evaluation.label_counts import LabelCurves
from fedxl.evaluation.scored import LabelScores, Scored
from fedxl.files import read_bytes, read_json
from fedxl.models import check_buffers
from fedxl.options import convert
from fedxl.risks.several import label_names
from fedxl.training.members import Form
from fedxl.training.predict import decision_for
from fedxl.training.run_files import ABOUT, CURVES, LABEL_CURVES, LABEL_SCORES, SCORES, read_metrics
from fedxl.training.settings import DTYPES

WEIGHTS = "model.safetensors"
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
        return scored.load_labels(self.path / LABEL_SCORES)

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
        require(path.is_file() or not path.exists(), f"{path} is not a file")
        try:
            return with_weights(given, read_bytes(path), path)
        except FileNotFoundError:
            raise UserError(f"there is no file {path}; a run writes it when it is finished") from None


def read_run(path: Path) -> FinishedRun:
    """A finished run. Raises UserError if the folder holds none."""
    old = f"{path} holds a run of an older version, which did not record what its network takes; train it again"
    about = read_json(path / ABOUT) if (path / ABOUT).exists() else {}
    require("shape" in about, old)
    require((path / WEIGHTS).exists(), f"{path} holds a run without a model; `fedxl resume {path}` finishes it")
    settings = convert(about.get("settings"), dict, f"{path / ABOUT}: settings")
    model = {key.removeprefix("model."): value for key, value in settings.items() if key.startswith("model.")}
    prepared = Preparation.from_json(read_json(path / PREPARATION)) if (path / PREPARATION).exists() else None
    form = read_form(about, path / ABOUT)
    run = FinishedRun(path, about, form, model or None, scored.load(path / SCORES), prepared)
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


def rebuilt(model: Mapping[str, Any], form: Form, dtype: str, allow_code: bool) -> nn.Module:
    """The network that a [model] table describes, without weights yet.

    A network of fedxl's own is built without memory for its weights: a hostile table cannot ask for more than the
    file of weights holds.
    """
    name = str(model.get("name", "mlp"))
    if registry.own(name):
        require(
            allow_code,
            f"the network '{name}' is code outside of fedxl, which would run here; if you trust it, --allow-code "
            "(in Python allow_code=True)",
        )
    # The trained weights are in the file: those that training began with are not needed, and may be elsewhere.
    table = {key: value for key, value in model.items() if key != "weights" or registry.own(name)}
    with nullcontext() if registry.own(name) else torch.device("meta"):
        return build_network(table, form.shape, form.score_shape, bool(form.labels)).to(DTYPES[dtype])


def with_weights(network: nn.Module, content: bytes, path: Path) -> nn.Module:
    """The network with the weights of a file, in evaluation mode. Raises UserError if they are another network's."""
    tensors = tensors_in(content, path)
    own = network.state_dict()
    for name, tensor in own.items():
        require(name in tensors, f"{path} lacks '{name}' {list(tensor.shape)} of this network")
        wanted, found = _words(tensor), _words(tensors[name])
        require(wanted == found, f"{path}: '{name}' must be {wanted} for this network, not {found}")
    more = next((name for name in tensors if name not in own), None)
    require(more is None, f"{path} holds '{more}', which this network does not have")
    network = copy.deepcopy(network)  # it may be the user's own
    network.load_state_dict(tensors, strict=True, assign=True)
    left = next((name for name, buffer in network.named_buffers() if buffer.is_meta), None)
    require(left is None, f"the network keeps '{left}' outside of its weights, so it cannot be rebuilt from them")
    return network.eval()


def tensors_in(content: bytes, path: Path) -> dict[str, Tensor]:
    """The tensors in the content of a safetensors file, all of them finite."""
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UserError(f"{path} is not a file of weights: {first_line(error)}") from None
    for name, tensor in tensors.items():
        finite = not tensor.is_floating_point() or bool(tensor.isfinite().all())
        require(finite, f"{path}: '{name}' holds NaN or infinity")
    try:
        check_buffers(tensors)
    except RefusedError as error:
        raise UserError(f"{path}: {error}") from None
    return tensors


def _words(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

"""The trained network of a finished run, or of an exported one, with nothing trusted that its files say."""

from __future__ import annotations

import copy
import hashlib
import io
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from fedxl import registry
from fedxl.config.experiment import build_network
from fedxl.data.examples import Digests
from fedxl.data.tables.prepare import Preparation
from fedxl.errors import RefusedError, UserError, first_line, kind_of, require
from fedxl.files import DAMAGED, read_bytes
from fedxl.models import check_buffers, uncompiled
from fedxl.models.libraries import library_of
from fedxl.training.run_folder import ABOUT, PREPARATION, TRAINED_ON, WEIGHTS, Form, Run, read_run
from fedxl.training.run_writer import BROKEN, metadata_of, unsealed
from fedxl.training.settings import DTYPES

OWN = (
    "the network of this run was an object in Python, and its code is not in the folder; name the function that "
    "builds it, --model package.module:factory (in Python model=...)"
)
COPY = "copy it again from where it was written, or train again"
log = logging.getLogger("fedxl")


def read_finished(path: Path) -> Run:
    """A run whose model is chosen. Raises UserError if the folder holds none."""
    run = read_run(path)
    form = run.form
    run = replace(run, settings=run.about["settings"])  # as it was trained; config.toml may have changed since
    require((path / WEIGHTS).exists(), f"{path} holds a run without a model; `fedxl resume {path}` finishes it")
    known = dtype_of(run) in DTYPES
    require(known, f"{run.source}: run.dtype must be one of {', '.join(DTYPES)}, not {dtype_of(run)!r}")
    for split, found in run.scores.items():
        same = found.labels == form.names
        require(same, f"the scores of {split} data in {path} are of other labels than its model; remove scores.npz")
    return run


def dtype_of(run: Run) -> str:
    """Of the weights."""
    return str(run.settings.get("run.dtype", "float32"))


def model_table(run: Run) -> Mapping[str, Any] | None:
    """[model]; None: the network was an object in Python, passed to `fit`."""
    parts = ((*name.partition("."), value) for name, value in run.settings.items())
    return {key: value for section, _, key, value in parts if section == "model"} or None


def preparation_of(run: Run) -> Preparation | None:
    """How its data were made of files; None: they were arrays. Raises UserError if its file is damaged."""
    path, known = run.folder / PREPARATION, run.about.get("preparation_digest")
    require(path.exists() or known is None, f"there is no file {path}, which a run writes when it begins")
    if not path.exists():
        return None
    content = read_bytes(path)
    if _has_digest(path, known is not None):
        same = hashlib.sha256(content).hexdigest() == known
        require(same, f"{path} is damaged (its digest is not that in {ABOUT}); {COPY}")
    return Preparation.from_text(content)


def _has_digest(path: Path, known: bool) -> bool:
    if not known:
        log.warning("warning: %s is of an older version of fedxl, which kept no digest: damage goes unnoticed", path)
    return known


def trained_on(run: Run) -> Digests | None:
    """Digests of the training examples, sorted; None if the folder does not hold them."""
    path = run.folder / TRAINED_ON
    try:
        found = np.load(io.BytesIO(read_bytes(path)), allow_pickle=False)
    except FileNotFoundError:
        return None
    except DAMAGED as error:
        raise UserError(f"cannot read {path}: {first_line(error)}; remove it to do without it") from None
    require(found.dtype == "S16" and found.ndim == 1, f"{path} does not hold digests; remove it to do without it")
    return found  # type: ignore[no-any-return]


def network_of(run: Run, given: nn.Module | None = None, allow_code: bool = False) -> nn.Module:
    """Its trained network; `given` is one of the same architecture, for runs whose own is code in Python."""
    if given is None:
        table = model_table(run)
        require(table is not None, OWN)
        assert table is not None
        given = rebuilt(table, run.form, dtype_of(run), allow_code)
    return with_weights(given, weights_of(run), run.folder / WEIGHTS)


def weights_of(run: Run) -> bytes:
    """The content of its file of weights, which is what was written. Raises UserError if it is damaged."""
    path = run.folder / WEIGHTS
    require(path.is_file() or not path.exists(), f"{path} is not a file")
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; a run writes it when it is finished") from None
    try:
        if _has_digest(path, "digest" in metadata_of(content)):
            unsealed(path, content)
    except BROKEN as error:
        raise UserError(f"{path} is damaged ({first_line(error)}); {COPY}") from None
    return content


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
    code = registry.own(name) and not library_of(name)
    table = {key: value for key, value in model.items() if key != "weights" or code}
    with nullcontext() if registry.own(name) else torch.device("meta"):
        return build_network(table, form.shape, form.score_shape, bool(form.labels)).to(DTYPES[dtype])


def with_weights(network: nn.Module, content: bytes, path: Path) -> nn.Module:
    """The network with the weights of a file, in evaluation mode. Raises UserError if they are another network's."""
    require(isinstance(network, nn.Module), f"model must be a torch.nn.Module, not {kind_of(network)}")
    network, tensors = uncompiled(network), tensors_in(content, path)
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

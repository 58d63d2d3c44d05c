"""A trained network from its description and its file of weights, with nothing trusted that a folder says."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from fedxl import registry
from fedxl.config.experiment import build_network
from fedxl.errors import RefusedError, UserError, first_line, require
from fedxl.files import read_bytes
from fedxl.models import check_buffers
from fedxl.training.members import Form
from fedxl.training.settings import DTYPES

WEIGHTS = "model.safetensors"


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
        return build_network(dict(model), form.shape, form.score_shape, bool(form.labels)).to(DTYPES[dtype])
    # The trained weights are in the file: those that training began with are not needed, and may be elsewhere.
    table = {key: value for key, value in model.items() if key != "weights"}
    with torch.device("meta"):
        return build_network(table, form.shape, form.score_shape, bool(form.labels)).to(DTYPES[dtype])


def with_weights(network: nn.Module, content: bytes, path: Path) -> nn.Module:
    """The network with the weights of a file, in evaluation mode; one line if they are another network's."""
    tensors = tensors_in(content, path)
    own = network.state_dict()
    for name, tensor in own.items():
        require(name in tensors, f"{path} lacks '{name}' {list(tensor.shape)} of this network")
        found = tensors[name]
        same = found.shape == tensor.shape and found.dtype == tensor.dtype
        require(same, f"{path}: '{name}' must be {_words(tensor)} for this network, not {_words(found)}")
    more = next((name for name in tensors if name not in own), None)
    require(more is None, f"{path} holds '{more}', which this network does not have")
    network = copy.deepcopy(network)  # it may be the user's own
    network.load_state_dict(tensors, strict=True, assign=True)
    left = next((name for name, buffer in network.named_buffers() if buffer.is_meta), None)
    require(left is None, f"the network keeps '{left}' outside of its weights, so it cannot be rebuilt from them")
    return network.eval()


def read_weights(path: Path) -> bytes:
    """The content of a run's file of weights."""
    require(path.is_file() or not path.exists(), f"{path} is not a file")
    try:
        return read_bytes(path)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; a run writes it when it is finished") from None


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

"""Initial weights from a file of torch or of safetensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn

from fedxl.errors import UserError, require
from fedxl.models.layers import ScoreNorm

State = Mapping[str, Tensor]
M = TypeVar("M", bound=nn.Module)
FORM = "tensors by name, a state_dict as torch or safetensors write it"
SCORE_NORM = "score_norm"  # a layer that a file may lack


def with_first_weights(
    model: nn.Sequential, outputs: int, weights: str, head: str, score_norm: bool
) -> nn.Sequential:
    """Apply options to a network: batch norm of its scores, and initial weights from a file."""
    if score_norm:
        model.add_module(SCORE_NORM, ScoreNorm(outputs))
    return load_file(model, weights, head) if weights else model


def load_file(model: M, path: str, head: str) -> M:
    """Write a file's weights into the model. Raises UserError if they do not belong to this network.

    head: the name of the last layer. The file's is taken if it fits; otherwise the network is for another task, and
    its head begins afresh. A network for grey images takes the first convolution of one for colours summed over the
    colours, which gives the scores of that one where each of its colours is the grey.
    """
    own = model.state_dict()
    stem = next(f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Conv2d))
    # Published files of torchvision's DenseNets use the old names `norm.1` and `conv.2` for `norm1` and `conv2`.
    old = r"(\.denselayer\d+\.(?:norm|conv))\.([12]\.)"
    state: State = {re.sub(old, r"\1\2", name): tensor for name, tensor in _read(Path(path)).items()}
    state = _without_unfit_head(state, own, head)
    state = _grey(state, own, stem)
    _check_norm(state, own, path)
    _check_shapes(state, own, head, stem, path)
    model.load_state_dict({**own, **state})
    return model


def _read(path: Path) -> State:
    """The tensors of a file by name. Files of torch are pickles; only tensors are read, code is never run."""
    try:
        if path.suffix == ".safetensors":
            found: Any = safetensors.torch.load_file(path)
        else:
            found = torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; model.weights must name a file of weights") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # torch's error depends on what the file is
        raise UserError(f"{path} is not a file of weights; it must hold {FORM}, and no code") from error
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    tensors = isinstance(found, dict) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in found.items()
    )
    require(tensors and len(found) > 0, f"{path} is not a file of weights; it must hold {FORM}")
    for name, tensor in found.items():
        require(_plain(tensor), f"{path}: '{name}' must be a plain dense tensor, as state_dict() gives it")
    return found  # type: ignore[no-any-return]


def _plain(tensor: Tensor) -> bool:
    """Whether it is a dense tensor of real numbers: not sparse, nested, quantised or meta."""
    dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    return dense and not tensor.is_meta and not tensor.is_complex()


def _without_unfit_head(state: State, own: State, head: str) -> State:
    """The file's tensors, without its head unless the whole head fits."""
    mine, theirs = ({name: t.shape for name, t in s.items() if _is_part(name, head)} for s in (own, state))
    return state if mine == theirs else {name: t for name, t in state.items() if not _is_part(name, head)}


def _grey(state: State, own: State, conv: str) -> State:
    """The file's tensors, with its first convolution summed over three colours if the network takes one."""
    one = conv in state and state[conv].ndim == 4 and (state[conv].shape[1], own[conv].shape[1]) == (3, 1)
    return {**state, conv: state[conv].sum(1, keepdim=True)} if one else state


def _check_norm(state: State, own: State, path: str) -> None:
    """Refuse batch-norm files for group norm: it has no statistics, and the weights were trained with them."""
    has, takes = (
        any(name.endswith(".running_mean") and not _is_part(name, SCORE_NORM) for name in tensors)
        for tensors in (state, own)
    )
    refused = f'{path} holds a network with batch norm, which group norm cannot take; set norm = "batch"'
    require(takes or not has, refused)


def _check_shapes(state: State, own: State, head: str, stem: str, path: str) -> None:
    """Raises UserError for the first tensor that is unexpected, missing, or of another shape."""
    first, *_, last = own
    names = f"its names run from '{first}' to '{last}'"
    for name in state:
        require(name in own, f"{path} holds '{name}', which this network does not have; {names}")
    for name, tensor in own.items():
        optional = _is_part(name, head) or _is_part(name, SCORE_NORM) or name.endswith(".num_batches_tracked")
        require(name in state or optional, f"{path} lacks '{name}' {list(tensor.shape)} of this network")
        found = state.get(name, tensor)
        require(
            found.shape == tensor.shape,
            f"{path}: '{name}' must be {list(tensor.shape)} for this network, not {list(found.shape)}"
            + ("; its stem or its channels are others" if name == stem else ""),
        )


def _is_part(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")

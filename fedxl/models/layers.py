"""What image networks share: norms, initial weights, also those of a file, and checks of their input."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn

from fedxl.errors import UserError, require

log = logging.getLogger("fedxl")  # one line on standard error, unless a program has it otherwise
Norm = Callable[[int], nn.Module]  # channels -> layer

NORMS: Mapping[str, Norm] = {
    "batch": nn.BatchNorm2d,
    "group": lambda width: nn.GroupNorm(math.gcd(8, width), width),
    "none": lambda width: nn.Identity(),
}
DEEP = ("batch", "group")  # deep networks do not train without a norm


def norm_layer(name: str, among: Collection[str] = tuple(NORMS)) -> Norm:
    """The norm of this name. Raises UserError if the network cannot use it."""
    require(name in among, f"norm must be one of {', '.join(among)}, not '{name}'")
    return NORMS[name]


def image_channels(shape: tuple[int, ...], network: str) -> int:
    """The number of channels of images [channels, height, width]. Raises UserError for other shapes."""
    needs = f"the {network} needs images [channels, height, width], not examples of shape {list(shape)}"
    require(len(shape) == 3, needs)
    return shape[0]


def kaiming(model: nn.Module, mode: Literal["fan_in", "fan_out"]) -> None:
    """He et al. 2015: convolutions ~ N(0, 2 / fan). Norms already start at one and zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")


class ScoreNorm(nn.BatchNorm1d):
    """Batch norm of the scores themselves, in the precision of the weights.

    A pairwise risk does not change if all scores move together, and with sigmoid scores it falls at first: where the
    sigmoid is flat, no pair is far out of order. At high rates the head moves all scores that way, and nothing is
    learned from then on. Behind this layer they move by its offset alone. Every client needs both classes.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def norms_features(model: nn.Module) -> bool:
    """Whether a network has a norm before its scores."""
    kinds = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
    return any(isinstance(module, kinds) and not isinstance(module, ScoreNorm) for module in model.modules())


def norms_scores(model: nn.Module) -> bool:
    return any(isinstance(module, ScoreNorm) for module in model.modules())


def check_classes(model: nn.Module, everyone_has_both: bool) -> None:
    """Refuse score norm if a client holds one class: it would norm that class as others norm both."""
    told = "score_norm needs both classes at every client, and one here has only one"
    require(everyone_has_both or not norms_scores(model), told)


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
    its head starts untrained. A network for grey images takes the first convolution of one for colours summed over
    the colours, which gives the scores of that one where each of its colours is the grey.
    """
    own = model.state_dict()
    convolutions = (f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Conv2d))
    stem = next(convolutions, "")
    # Published files of torchvision's DenseNets use the old names `norm.1` and `conv.2` for `norm1` and `conv2`.
    old = r"(\.denselayer\d+\.(?:norm|conv))\.([12]\.)"
    state: State = {re.sub(old, r"\1\2", name): tensor for name, tensor in read_tensors(Path(path)).items()}
    mine, theirs = ({name: t.shape for name, t in s.items() if _is_part(name, head)} for s in (own, state))
    if mine != theirs:
        log.warning("%s: its last layer, '%s', belongs to another task; this network's starts untrained", path, head)
        state = {name: tensor for name, tensor in state.items() if not _is_part(name, head)}
    if stem in state and state[stem].ndim == 4 and (state[stem].shape[1], own[stem].shape[1]) == (3, 1):
        state = {**state, stem: state[stem].sum(1, keepdim=True)}
    # Group norm has no statistics, and these weights were trained with them.
    has, takes = (
        any(name.endswith(".running_mean") and not _is_part(name, SCORE_NORM) for name in tensors)
        for tensors in (state, own)
    )
    refused = f'{path} holds a network with batch norm, which group norm cannot take; set norm = "batch"'
    require(takes or not has, refused)
    _check_shapes(state, own, head, stem, path)
    model.load_state_dict({**own, **state})
    return model


def read_tensors(path: Path) -> State:
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
        dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
        plain = dense and not tensor.is_meta and not tensor.is_complex()
        require(plain, f"{path}: '{name}' must be a plain dense tensor, as state_dict() gives it")
    return found  # type: ignore[no-any-return]


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
        told = f"{path}: '{name}' must be {list(tensor.shape)} for this network, not {list(found.shape)}"
        more = "; its stem or its channels are others" if name == stem else ""
        require(found.shape == tensor.shape, told + more)


def _is_part(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")

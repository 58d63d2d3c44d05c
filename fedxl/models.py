"""Networks, and how a network becomes a pure function of named tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedxl.errors import UserError, require


class Weights(NamedTuple):
    params: dict[str, Tensor]  # what is trained
    buffers: dict[str, Tensor]  # what is merely kept: BatchNorm statistics


# (weights, x [B, ...]) -> (scores [B] or [B, d], the buffers after the call)
Score = Callable[[Weights, Tensor], tuple[Tensor, dict[str, Tensor]]]


def weights_of(model: nn.Module) -> Weights:
    """A copy of what changes in training. Frozen parameters are not part of it: they stay in the model."""
    params = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return Weights(params, {name: b.detach().clone() for name, b in model.named_buffers()})


def load(model: nn.Module, weights: Weights) -> nn.Module:
    """The model with these weights written into it."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, tensor in {**weights.params, **weights.buffers}.items():
            own[name].copy_(tensor)
    return model


def scorer(model: nn.Module, training: bool) -> Score:
    """The model as a pure function. A private copy is called, so that its mode cannot be changed from outside."""
    network = copy.deepcopy(model).train(training)

    def score(weights: Weights, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        # BatchNorm writes to its buffers in place; it gets copies, and the copies are the result.
        buffers = {name: b.clone() for name, b in weights.buffers.items()} if training else weights.buffers
        h: Tensor = torch.func.functional_call(network, (weights.params, buffers), (x,))
        return (h.squeeze(-1) if h.ndim == 2 and h.shape[-1] == 1 else h), buffers

    return score


def check_output(model: nn.Module, x: Tensor, score_shape: tuple[int, ...]) -> None:
    """One line if the model cannot score these examples, or scores them in another shape than the risk pairs."""
    require(any(p.requires_grad for p in model.parameters()), "the model has no parameter to train")
    wanted = f"[{', '.join(map(str, (len(x), *score_shape)))}]"
    try:
        with torch.no_grad():
            h, _ = scorer(model, training=False)(weights_of(model), x)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"the model cannot score examples of shape {list(x.shape[1:])}: {reason}") from error
    require(isinstance(h, Tensor), f"the model must return a tensor of scores {wanted}, not {type(h).__name__}")
    require(
        tuple(h.shape) == (len(x), *score_shape),
        f"the model returned scores of shape {list(h.shape)} for {len(x)} examples; this risk needs {wanted}",
    )


def linear(shape: tuple[int, ...], outputs: int = 1) -> nn.Module:
    """A linear model of the flattened example."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs))


def mlp(shape: tuple[int, ...], outputs: int = 1, hidden: tuple[int, ...] = (64,)) -> nn.Module:
    """A multi-layer perceptron with ReLU, hidden layers of the given sizes."""
    require(all(size > 0 for size in hidden), f"hidden sizes must be positive, got {list(hidden)}")
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(shape)
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def cnn(shape: tuple[int, ...], outputs: int = 1, channels: int = 16, norm: str = "batch") -> nn.Module:
    """A small convolutional network for images [channels, height, width]; norm = batch, group or none."""
    require(
        len(shape) == 3,
        f"the cnn needs images [channels, height, width], not examples of shape {list(shape)}",
    )
    norms: Mapping[str, Callable[[int], nn.Module]] = {
        "batch": nn.BatchNorm2d,
        "group": lambda width: nn.GroupNorm(math.gcd(8, width), width),
        "none": lambda width: nn.Identity(),
    }
    require(channels > 0, f"channels must be positive, got {channels}")
    require(norm in norms, f"norm must be one of {', '.join(norms)}, not '{norm}'")
    first, second = channels, 2 * channels
    return nn.Sequential(
        nn.Conv2d(shape[0], first, 3, padding=1, bias=norm == "none"),
        norms[norm](first),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1, bias=norm == "none"),
        norms[norm](second),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(second, outputs),
    )


class TwoViews(nn.Module):
    """An encoder applied to both views of an example [B, 2, ...]: their embeddings side by side, [B, 2 d]."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        views: Tensor = self.encoder(x.flatten(0, 1))  # [2 B, d]
        return views.reshape(len(x), -1)


MODELS: Mapping[str, Callable[..., nn.Module]] = {"linear": linear, "mlp": mlp, "cnn": cnn}

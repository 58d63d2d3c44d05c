"""Networks by name, and how a network becomes a pure function. A line in MODELS enrols one in configs and tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from fedxl.models.densenet import densenet121
from fedxl.models.functional import Score, Weights, check_buffers, check_output, load, scorer, takes, weights_of
from fedxl.models.pretrained import load_file
from fedxl.models.resnet import resnet18, resnet20
from fedxl.models.small import TwoViews, cnn, linear, mlp, simple_cnn

__all__ = [
    "MODELS",
    "Score",
    "TwoViews",
    "Weights",
    "check_buffers",
    "check_output",
    "cnn",
    "densenet121",
    "linear",
    "load",
    "load_file",
    "mlp",
    "resnet18",
    "resnet20",
    "scorer",
    "simple_cnn",
    "takes",
    "weights_of",
]

MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "linear": linear,
    "mlp": mlp,
    "cnn": cnn,
    "simple_cnn": simple_cnn,
    "resnet18": resnet18,
    "resnet20": resnet20,
    "densenet121": densenet121,
}

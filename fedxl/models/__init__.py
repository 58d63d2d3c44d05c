"""Networks by name, and how a network becomes a pure function. MODELS enrols them in configs and tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from fedxl.models.functional import Score, Weights, check_buffers, check_output, load, scorer, takes, weights_of
from fedxl.models.layers import load_file
from fedxl.models.networks import TwoViews, cnn, densenet121, linear, mlp, resnet18, resnet20, simple_cnn

__all__ = [
    "MODELS", "Score", "TwoViews", "Weights", "check_buffers", "check_output", "cnn", "densenet121", "linear", "load",
    "load_file", "mlp", "resnet18", "resnet20", "scorer", "simple_cnn", "takes", "weights_of",
]  # fmt: skip
MODELS: Mapping[str, Callable[..., nn.Module]] = {
    network.__name__: network for network in (linear, mlp, cnn, simple_cnn, resnet18, resnet20, densenet121)
}

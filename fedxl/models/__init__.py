"""Networks by name, and how a network becomes a pure function. MODELS enrols them in configs and tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from fedxl.models.functional import (
    Score,
    Weights,
    check_buffers,
    check_output,
    check_training,
    load,
    operations,
    scorer,
    takes,
    uncompiled,
    weights_of,
)
from fedxl.models.layers import load_file
from fedxl.models.libraries import LIBRARIES
from fedxl.models.networks import TwoViews, cnn, densenet121, linear, mlp, resnet18, resnet20, simple_cnn
from fedxl.models.parts import adapt, digest, frozen_tensors, train_only, with_parts

__all__ = [
    "LIBRARIES", "MODELS", "Score", "TwoViews", "Weights", "adapt", "check_buffers", "check_output", "check_training",
    "cnn", "densenet121", "digest", "frozen_tensors", "linear", "load", "load_file", "mlp", "operations", "resnet18",
    "resnet20", "scorer", "simple_cnn", "takes", "train_only", "uncompiled", "weights_of", "with_parts",
]  # fmt: skip
MODELS: Mapping[str, Callable[..., nn.Module]] = {
    network.__name__: network for network in (linear, mlp, cnn, simple_cnn, resnet18, resnet20, densenet121)
}

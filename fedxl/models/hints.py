"""Why a network may not take some examples, guessed from its first layer and their shape."""

from __future__ import annotations

import math

from torch import Tensor, nn

IMAGES = "images must be [channels, height, width]"


def hint(model: nn.Module, x: Tensor) -> str:
    """What would be right, or nothing if the shapes say nothing.

    >>> import torch
    >>> hint(nn.Conv2d(3, 8, 3), torch.zeros(2, 32, 32, 3))
    'images must be [channels, height, width], these are [height, width, channels]: give x.permute(0, 3, 1, 2)'
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            return _images(layer.in_channels, x)
        if isinstance(layer, nn.Linear):
            return _rows(layer.in_features, x)
    return ""


def _images(channels: int, x: Tensor) -> str:
    if x.ndim == 3 and channels == 1:
        return f"{IMAGES}, these have no channels: give x.unsqueeze(1)"
    if x.ndim != 4:
        return f"{IMAGES}, these have the shape {list(x.shape[1:])}"
    if x.shape[1] != channels and x.shape[3] == channels:
        return f"{IMAGES}, these are [height, width, channels]: give x.permute(0, 3, 1, 2)"
    if x.shape[1] != channels:
        return f"its first convolution takes {channels} channels, these images have {x.shape[1]}"
    return ""


def _rows(wanted: int, x: Tensor) -> str:
    if x.ndim > 2 and math.prod(x.shape[1:]) == wanted:
        return "its first layer takes flat rows: begin the model with nn.Flatten()"
    if x.ndim == 2 and x.shape[1] != wanted:
        return f"its first layer takes {wanted} features, these examples have {x.shape[1]}"
    return ""

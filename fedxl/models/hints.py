"""Why a network cannot take some examples, from its first layers, their shape, and what torch said."""

from __future__ import annotations

import math

from torch import Tensor, nn

IMAGES = "images must be [channels, height, width]"


def hint(model: nn.Module, x: Tensor, error: str) -> str:
    """What would be right; nothing if it is not clear that the first layer was to blame.

    >>> import torch
    >>> error = "expected input[2, 32, 32, 3] to have 3 channels, but got 32 channels instead"
    >>> hint(nn.Conv2d(3, 8, 3), torch.zeros(2, 32, 32, 3), error)
    'images must be [channels, height, width], these are [height, width, channels]: give x.permute(0, 3, 1, 2)'
    """
    for layer in model.modules():
        if isinstance(layer, nn.Embedding) and not x.is_floating_point() and "out of range" in error:
            return f"its embedding takes 0 to {layer.num_embeddings - 1}, these examples hold {int(x.max())}"
        if isinstance(layer, nn.Embedding):
            return ""
        if isinstance(layer, nn.Conv2d):
            return _images(layer.in_channels, x, error)
        if isinstance(layer, nn.Linear):
            return _rows(layer.in_features, x, error)
    return ""


def _images(channels: int, x: Tensor, error: str) -> str:
    if x.ndim == 3 and channels == 1:
        return f"{IMAGES}, these have no channels: give x.unsqueeze(1)"
    if x.ndim != 4:
        return f"{IMAGES}, these have the shape {list(x.shape[1:])}"
    if x.shape[1] == channels or str(list(x.shape)) not in error:
        return ""
    if x.shape[3] == channels:
        return f"{IMAGES}, these are [height, width, channels]: give x.permute(0, 3, 1, 2)"
    return f"its first convolution takes {channels} channels, these images have {x.shape[1]}"


def _rows(wanted: int, x: Tensor, error: str) -> str:
    if x.ndim > 2 and math.prod(x.shape[1:]) == wanted:
        return "its first layer takes flat rows: begin the model with nn.Flatten()"
    if x.ndim == 2 and x.shape[1] != wanted and f"x{x.shape[1]} and {wanted}x" in error:
        return f"its first layer takes {wanted} features, these examples have {x.shape[1]}"
    return ""

"""Small networks, and one encoder for two views."""

from __future__ import annotations

import itertools
import math

from torch import Tensor, nn

from fedxl.errors import require
from fedxl.models.layers import image_channels, norm_layer

MOST_WEIGHTS = 10**9  # of a small network: 4 GB, and as much for every copy
MOST_CHANNELS = 4096
MOST_LAYERS = 1000  # a million of them, in a hostile description, take minutes to build


def linear(shape: tuple[int, ...], outputs: int = 1) -> nn.Module:
    """A linear model of the flattened example."""
    _require_small(math.prod(shape), outputs)
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs))


def mlp(shape: tuple[int, ...], outputs: int = 1, hidden: tuple[int, ...] = (64,)) -> nn.Module:
    """A multi-layer perceptron with ReLU, hidden layers of the given sizes."""
    count = len(hidden)
    require(count <= MOST_LAYERS, f"a perceptron has at most {MOST_LAYERS:,} hidden layers, not {count:,}")
    require(all(size > 0 for size in hidden), f"hidden sizes must be positive, got {list(hidden)}")
    _require_small(math.prod(shape), *hidden, outputs)
    layers: list[nn.Module] = [nn.Flatten()]
    for width, size in itertools.pairwise((math.prod(shape), *hidden, outputs)):
        layers += [nn.Linear(width, size), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _require_small(*widths: int) -> None:
    """Check the size before allocating: torch's own error is unclear, or the system kills the process."""
    count = sum(before * after for before, after in itertools.pairwise(widths))
    require(count <= MOST_WEIGHTS, f"the network would have {count:,} weights; at most {MOST_WEIGHTS:,} are allowed")


def cnn(shape: tuple[int, ...], outputs: int = 1, channels: int = 16, norm: str = "batch") -> nn.Module:
    """A small convolutional network for images [channels, height, width]; norm = batch, group or none."""
    colours, normed = image_channels(shape, "cnn"), norm_layer(norm)
    require(0 < channels <= MOST_CHANNELS, f"channels must lie between 1 and {MOST_CHANNELS}, got {channels}")
    first, second = channels, 2 * channels
    return nn.Sequential(
        nn.Conv2d(colours, first, 3, padding=1, bias=norm == "none"),
        normed(first),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1, bias=norm == "none"),
        normed(second),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(second, outputs),
    )


def simple_cnn(shape: tuple[int, ...], outputs: int = 1, dropout: tuple[float, float] = (0.25, 0.5)) -> nn.Module:
    """The convolutional network of federated benchmarks: Reddi et al., Adaptive Federated Optimization (ICLR 2021).

    dropout: the rates after the pooling and after the hidden layer.
    """
    colours = image_channels(shape, "simple_cnn")
    require(min(shape[1:]) >= 6, f"the simple_cnn needs images of 6 x 6 pixels or more, not {shape[1]} x {shape[2]}")
    right = len(dropout) == 2 and all(0 <= rate < 1 for rate in dropout)
    require(right, f"dropout must be two rates in [0, 1), got {list(dropout)}")
    height, width = ((size - 4) // 2 for size in shape[1:])  # two convolutions without padding, then the pooling
    return nn.Sequential(
        nn.Conv2d(colours, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(dropout[0]),
        nn.Flatten(),
        nn.Linear(64 * height * width, 128),
        nn.ReLU(),
        nn.Dropout(dropout[1]),
        nn.Linear(128, outputs),
    )


class TwoViews(nn.Module):
    """An encoder applied to both views of an example [B, 2, ...]: their embeddings side by side, [B, 2 d]."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        views: Tensor = self.encoder(x.flatten(0, 1))  # [2 B, d]
        return views.reshape(x.shape[0], -1)  # not len(x), which would fix the size of batches in an exported model

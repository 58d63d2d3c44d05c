"""Networks, small and deep, and one encoder for two views.

Residual networks: He et al., Deep Residual Learning for Image Recognition (CVPR 2016). Densely connected ones: Huang
et al., Densely Connected Convolutional Networks (CVPR 2017). Parameters of both are named as torchvision names them,
so that its files fit.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, pad, relu

from fedxl.errors import require
from fedxl.models.layers import DEEP, Norm, image_channels, kaiming, norm_layer, with_first_weights

# For images of 32 x 32 pixels, which keep their size, and of 224 x 224, which shrink to a quarter each way.
STEMS = ("3x3", "7x7")


def resnet18(
    shape: tuple[int, ...],
    outputs: int = 1,
    stem: str = "3x3",
    norm: str = "batch",
    weights: str = "",
    score_norm: bool = False,
) -> nn.Module:
    """ResNet-18, Table 1 of the paper, with projections as shortcuts (option B).

    stem: 7x7 is the paper's, for large images, and 3x3 for small ones; norm: batch or group;
    weights: a file to begin with, from torchvision (stem 7x7) for example; score_norm: batch norm of the scores, too.
    """
    colours, normed = image_channels(shape, "resnet18"), norm_layer(norm, DEEP)
    require(stem in STEMS, f"stem must be one of {', '.join(STEMS)}, not '{stem}'")
    model = _resnet(colours, outputs, stem, (64, 128, 256, 512), 2, projection, normed)
    return with_first_weights(model, outputs, weights, "fc", score_norm)


def resnet20(
    shape: tuple[int, ...], outputs: int = 1, norm: str = "batch", weights: str = "", score_norm: bool = False
) -> nn.Module:
    """ResNet-20 for CIFAR, section 4.2 of the paper, n = 3, with shortcuts that have no parameters (option A).

    norm: batch or group; weights: a file to begin with; score_norm: batch norm of the scores, too.
    """
    colours, normed = image_channels(shape, "resnet20"), norm_layer(norm, DEEP)
    model = _resnet(colours, outputs, "3x3", (16, 32, 64), 3, Subsample, normed)
    return with_first_weights(model, outputs, weights, "fc", score_norm)


Shortcut = Callable[[int, int, int, Norm], nn.Module]  # (width, wider, stride, norm)


def projection(width: int, wider: int, stride: int, norm: Norm) -> nn.Module:
    """Option B: a 1 x 1 convolution with this stride."""
    return nn.Sequential(nn.Conv2d(width, wider, 1, stride, bias=False), norm(wider))


class Subsample(nn.Module):
    """Option A: every other pixel, and zeros for the new channels."""

    def __init__(self, width: int, wider: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.stride, self.extra = stride, wider - width

    def forward(self, x: Tensor) -> Tensor:
        return pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))


class BasicBlock(nn.Module):
    """relu(F(x) + x), F being two 3 x 3 convolutions, each with its norm (Figure 2 of the paper)."""

    def __init__(self, width: int, wider: int, stride: int, shortcut: Shortcut, norm: Norm) -> None:
        super().__init__()
        self.conv1 = _conv3x3(width, wider, stride)
        self.bn1 = norm(wider)
        self.conv2 = _conv3x3(wider, wider)
        self.bn2 = norm(wider)
        same = width == wider and stride == 1
        self.downsample = nn.Identity() if same else shortcut(width, wider, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        h = relu(self.bn1(self.conv1(x)))
        return relu(self.bn2(self.conv2(h)) + self.downsample(x))


def _resnet(
    colours: int, outputs: int, stem: str, widths: Sequence[int], blocks: int, shortcut: Shortcut, norm: Norm
) -> nn.Sequential:
    """Stem, one stage per width, the mean over the image, and a linear head."""
    before = (widths[0], *widths)
    stages = {}
    for i, wider in enumerate(widths):  # the first block of a stage shrinks the image by its stride
        first = BasicBlock(before[i], wider, 1 if i == 0 else 2, shortcut, norm)
        rest = (BasicBlock(wider, wider, 1, shortcut, norm) for _ in range(blocks - 1))
        stages[f"layer{i + 1}"] = nn.Sequential(first, *rest)
    large = stem == "7x7"
    conv = nn.Conv2d(colours, widths[0], 7, 2, padding=3, bias=False) if large else _conv3x3(colours, widths[0])
    model = nn.Sequential(
        OrderedDict(
            conv1=conv,
            bn1=norm(widths[0]),
            relu=nn.ReLU(),
            maxpool=nn.MaxPool2d(3, 2, padding=1) if large else nn.Identity(),
            **stages,
            avgpool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(widths[-1], outputs),
        )
    )
    kaiming(model, "fan_out")
    return model


def _conv3x3(width: int, wider: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(width, wider, 3, stride, padding=1, bias=False)


GROWTH = 32  # k of the paper: channels that each layer adds
BOTTLENECK = 4  # a layer's 1 x 1 convolution has so many times k channels
FIRST = 64  # channels before the first block


def densenet121(
    shape: tuple[int, ...], outputs: int = 1, norm: str = "batch", weights: str = "", score_norm: bool = False
) -> nn.Module:
    """DenseNet-121 (the DenseNet-BC of the paper's Table 1, compression 1/2), for images of any size.

    norm: batch or group; weights: a file to begin with, torchvision's for example; score_norm: batch norm of the
    scores, too.
    """
    colours, normed = image_channels(shape, "densenet121"), norm_layer(norm, DEEP)
    model = _densenet(colours, outputs, (6, 12, 24, 16), normed)
    return with_first_weights(model, outputs, weights, "classifier", score_norm)


class DenseLayer(nn.Module):
    """[x, H(x)]: appends the k new channels of equation 2 of the paper to those that they are computed from."""

    def __init__(self, width: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = norm(width)
        self.conv1 = nn.Conv2d(width, BOTTLENECK * GROWTH, 1, bias=False)
        self.norm2 = norm(BOTTLENECK * GROWTH)
        self.conv2 = nn.Conv2d(BOTTLENECK * GROWTH, GROWTH, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(relu(self.norm1(x)))
        h = self.conv2(relu(self.norm2(h)))
        return torch.cat([x, h], 1)  # [B, width + k, height, width]


class Halve(nn.Module):
    """The mean of each 2 x 2 pixels. A single pixel stays: for 28 x 28 images, blocks see sizes 7, 3, 1 and 1."""

    def forward(self, x: Tensor) -> Tensor:
        return avg_pool2d(x, tuple(min(2, size) for size in x.shape[-2:]))


def _densenet(colours: int, outputs: int, blocks: tuple[int, ...], norm: Norm) -> nn.Sequential:
    """Stem, dense blocks with transitions between them, the mean over the image, and a linear head."""
    features: OrderedDict[str, nn.Module] = OrderedDict(
        conv0=nn.Conv2d(colours, FIRST, 7, stride=2, padding=3, bias=False),
        norm0=norm(FIRST),
        relu0=nn.ReLU(),
        pool0=nn.MaxPool2d(3, stride=2, padding=1),
    )
    width = FIRST
    for i, layers in enumerate(blocks, 1):
        # Layers are numbered from 1. Each adds k channels to the input of the next.
        named = {f"denselayer{n + 1}": DenseLayer(width + n * GROWTH, norm) for n in range(layers)}
        features[f"denseblock{i}"] = nn.Sequential(OrderedDict(named))
        width += layers * GROWTH
        if i < len(blocks):
            conv = nn.Conv2d(width, width // 2, 1, bias=False)
            transition = OrderedDict(norm=norm(width), relu=nn.ReLU(), conv=conv, pool=Halve())
            features[f"transition{i}"] = nn.Sequential(transition)
            width //= 2
    features["norm5"] = norm(width)
    head = nn.Linear(width, outputs)
    nn.init.zeros_(head.bias)
    parts = {"relu": nn.ReLU(), "avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "classifier": head}
    model = nn.Sequential(OrderedDict(features=nn.Sequential(features), **parts))
    kaiming(model, "fan_in")
    return model


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

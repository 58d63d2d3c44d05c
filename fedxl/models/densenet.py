"""Densely connected networks: Huang et al., Densely Connected Convolutional Networks (CVPR 2017).

Parameters are named as torchvision names them, so that its files fit.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, relu

from fedxl.models.layers import DEEP, Norm, image_channels, kaiming, norm_layer
from fedxl.models.pretrained import with_first_weights

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
        features[f"denseblock{i}"] = _block(width, layers, norm)
        width += layers * GROWTH
        if i < len(blocks):
            features[f"transition{i}"] = _transition(width, norm)
            width //= 2
    features["norm5"] = norm(width)
    head = nn.Linear(width, outputs)
    nn.init.zeros_(head.bias)
    parts = {"relu": nn.ReLU(), "avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "classifier": head}
    model = nn.Sequential(OrderedDict(features=nn.Sequential(features), **parts))
    kaiming(model, "fan_in")
    return model


def _block(width: int, layers: int, norm: Norm) -> nn.Module:
    """Dense layers, numbered from 1. Each layer adds k channels to the input of the next."""
    named = {f"denselayer{i + 1}": DenseLayer(width + i * GROWTH, norm) for i in range(layers)}
    return nn.Sequential(OrderedDict(named))


def _transition(width: int, norm: Norm) -> nn.Module:
    """Halves the number of channels and the size of the image."""
    conv = nn.Conv2d(width, width // 2, 1, bias=False)
    return nn.Sequential(OrderedDict(norm=norm(width), relu=nn.ReLU(), conv=conv, pool=Halve()))

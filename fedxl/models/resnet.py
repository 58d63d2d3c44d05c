"""Residual networks: He et al., Deep Residual Learning for Image Recognition (CVPR 2016).

Parameters are named as torchvision names them, so that its files fit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn.functional import pad, relu

from fedxl.errors import require
from fedxl.models.layers import DEEP, Norm, image_channels, kaiming, norm_layer
from fedxl.models.pretrained import with_first_weights

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
    model = _resnet(colours, outputs, "3x3", (16, 32, 64), 3, subsampled, normed)
    return with_first_weights(model, outputs, weights, "fc", score_norm)


Shortcut = Callable[[int, int, int, Norm], nn.Module]  # (width, wider, stride, norm)


def projection(width: int, wider: int, stride: int, norm: Norm) -> nn.Module:
    """Option B: a 1 x 1 convolution with this stride."""
    return nn.Sequential(nn.Conv2d(width, wider, 1, stride, bias=False), norm(wider))


def subsampled(width: int, wider: int, stride: int, norm: Norm) -> nn.Module:
    """Option A: every other pixel, and zeros for the new channels."""
    return Subsample(stride, wider - width)


class Subsample(nn.Module):
    def __init__(self, stride: int, extra: int) -> None:
        super().__init__()
        self.stride, self.extra = stride, extra

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
    stages = {
        f"layer{i + 1}": _stage(before[i], wider, 1 if i == 0 else 2, blocks, shortcut, norm)
        for i, wider in enumerate(widths)
    }
    large = stem == "7x7"
    first = nn.Conv2d(colours, widths[0], 7, 2, padding=3, bias=False) if large else _conv3x3(colours, widths[0])
    model = nn.Sequential(
        OrderedDict(
            conv1=first,
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


def _stage(width: int, wider: int, stride: int, blocks: int, shortcut: Shortcut, norm: Norm) -> nn.Module:
    """Blocks of one width. The first shrinks the image by its stride."""
    first = BasicBlock(width, wider, stride, shortcut, norm)
    return nn.Sequential(first, *(BasicBlock(wider, wider, 1, shortcut, norm) for _ in range(blocks - 1)))


def _conv3x3(width: int, wider: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(width, wider, 3, stride, padding=1, bias=False)

"""Convolutions of many clients as batched matrix products.

Under `vmap` the convolutions of C clients, each with weights of its own, become one convolution in C groups, and the
libraries are slow at those: their kernels are made for groups of a few channels. With the windows laid out side by
side ("im2col") the same numbers are a product of C pairs of matrices, which the libraries are best at. The layout
costs memory traffic, so this pays where feature maps are small.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.nn import functional as nnf

aten = torch.ops.aten


def as_products(module: fx.GraphModule, clients: int) -> None:
    """Replace a record's convolutions in `clients` groups, forward and backward, where the product says the same."""
    for node in module.graph.nodes:
        if node.target is aten.convolution.default and _plain(node.args[1], node.args[5:9], clients):
            node.target = convolution
        elif node.target is aten.convolution_backward.default and _plain(node.args[2], node.args[6:10], clients):
            node.target = convolution_backward
    module.recompile()


def _plain(weight: fx.Node, geometry: tuple[object, ...], clients: int) -> bool:
    dilation, transposed, _, groups = geometry
    return weight.meta["val"].ndim == 4 and list(dilation) == [1, 1] and not transposed and groups == clients  # type: ignore[call-overload]


Pair = tuple[int, int]


def windows(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, groups: int) -> Tensor:
    """[B, G c, H, W] -> [G, B, H', W', kh, kw, c]: what each output pixel of each group looks at.

    Channels come last, as they do in memory behind a product, so that copies run along both.
    """
    x = nnf.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    x = x.unflatten(1, (groups, -1)).unfold(3, kernel[0], stride[0]).unfold(4, kernel[1], stride[1])
    return x.permute(1, 0, 3, 4, 5, 6, 2)


def matrices(weight: Tensor, groups: int) -> Tensor:
    """[G o, c, kh, kw] -> [G, o, kh kw c]: the weights in the order of the windows."""
    return weight.permute(0, 2, 3, 1).reshape(groups, -1, weight[0].numel())


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    transposed: bool,
    output_padding: Pair,
    groups: int,
) -> Tensor:
    """`aten.convolution` for 2-D convolutions without dilation."""
    seen = windows(x, _pair(weight.shape[2:]), stride, padding, groups)
    out = torch.bmm(seen.reshape(groups, -1, weight[0].numel()), matrices(weight, groups).mT)
    images: Tensor = out.unflatten(1, seen.shape[1:4]).permute(1, 0, 4, 2, 3).flatten(1, 2)  # [B, G o, H', W']
    return images if bias is None else images + bias[:, None, None]


def convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    transposed: bool,
    output_padding: Pair,
    groups: int,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`aten.convolution_backward` for the same: gradients by x, weight and bias, where wanted."""
    kernel, by_x, by_weight = _pair(weight.shape[2:]), None, None
    out = gradient.unflatten(1, (groups, -1)).permute(1, 0, 3, 4, 2)  # [G, B, H', W', o]
    rows = out.reshape(groups, -1, out.shape[-1])
    if wanted[1]:
        seen = windows(x, kernel, stride, padding, groups)
        by_weight = torch.bmm(rows.mT, seen.reshape(groups, rows.shape[1], -1))
        by_weight = by_weight.view(-1, *kernel, weight.shape[1]).permute(0, 3, 1, 2)
    if wanted[0]:
        spread = torch.bmm(rows, matrices(weight, groups)).view(*out.shape[:4], *kernel, -1)
        by_x = _gather(spread, _pair(x.shape[2:]), stride, padding)
    return by_x, by_weight, gradient.sum((0, 2, 3)) if wanted[2] else None


def _gather(spread: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """The transpose of `windows`: [G, B, H', W', kh, kw, c] -> [B, G c, H, W], summed where windows overlap."""
    kernel = _pair(spread.shape[4:6])
    if tuple(stride) == (1, 1):  # shifted sums: the compiler makes them one kernel
        (high, wide), (top, left) = kernel, padding
        total = spread.new_zeros(())
        for i in range(high):
            for j in range(wide):
                total = total + nnf.pad(spread[..., i, j, :], (0, 0, j, wide - 1 - j, i, high - 1 - i))
        cut = total[:, :, top : top + size[0], left : left + size[1]]
        return cut.permute(1, 0, 4, 2, 3).flatten(1, 2)
    columns = spread.permute(1, 0, 6, 4, 5, 2, 3).flatten(5).flatten(2, 4).flatten(0, 1)  # [B G, c kh kw, H' W']
    folded: Tensor = nnf.fold(columns, size, kernel, padding=padding, stride=stride)
    return folded.unflatten(0, (-1, spread.shape[0])).flatten(1, 2)  # type: ignore[no-any-return]


def _pair(sizes: torch.Size | tuple[int, ...]) -> Pair:
    return int(sizes[0]), int(sizes[1])

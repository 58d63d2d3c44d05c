"""Convolutions of many clients as batched matrix products.

Under `vmap` the convolutions of C clients become one convolution in C groups, at which the libraries are slow. With
the windows laid out side by side ("im2col") they are a product of C pairs of matrices. The layout costs memory
traffic, so this pays where feature maps are small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as nnf

aten = torch.ops.aten
Pair = tuple[int, int]

MOVES = {move.default for move in (aten.permute, aten.clone, aten.view, aten._unsafe_view, aten.reshape)}


def as_products(module: fx.GraphModule, clients: int, pixels: float = math.inf) -> None:
    """Replace a trace's convolutions in `clients` groups, forward and backward, where the product says the same.

    The windows that the forward product reads are kept for the backward one. Maps of more pixels are left alone.
    """
    kept: dict[Any, fx.Node] = {}

    def windows_of(before: fx.Node, x: Any, weight: Any, stride: Any, padding: Any) -> fx.Node:
        kernel = _image(weight.meta["val"])
        key = (_origin(x), kernel, *stride, *padding)
        if key not in kept:
            with module.graph.inserting_before(before):
                kept[key] = module.graph.call_function(windows, (x, kernel, tuple(stride), tuple(padding), clients))
        return kept[key]

    for node in list(module.graph.nodes):
        if node.target is aten.convolution.default and _plain(node.args[1], node.args[5:9], clients):
            if math.prod(_image(node.meta["val"])) > pixels:
                continue
            x, weight, bias, stride, padding = node.args[:5]
            seen = windows_of(node, x, weight, stride, padding)
            node.target, node.args = convolution, (seen, weight, bias, _image(node.meta["val"]))
        elif node.target is aten.convolution_backward.default and _plain(node.args[2], node.args[6:10], clients):
            gradient, x, weight, _, stride, padding = node.args[:6]
            if math.prod(_image(gradient.meta["val"])) > pixels:
                continue
            seen = windows_of(node, x, weight, stride, padding)
            size, wanted = _image(x.meta["val"]), node.args[10]
            node.target, node.args = convolution_backward, (gradient, seen, weight, size, stride, padding, wanted)
    module.graph.eliminate_dead_code()
    module.recompile()


def _plain(weight: fx.Node, geometry: tuple[Any, ...], clients: int) -> bool:
    dilation, transposed, _, groups = geometry
    flat = weight.meta["val"].ndim == 4
    return flat and list(dilation) == [1, 1] and not transposed and groups == clients


def _origin(node: fx.Node) -> tuple[Any, ...]:
    """Where numbers come from and how they were moved. Autograd lets nobody write to them in between."""
    moves: list[Any] = []
    while node.target in MOVES:
        moves.append((node.target, str(node.args[1:])))
        node = node.args[0]  # type: ignore[assignment]
    return node, *moves


def _image(tensor: Tensor) -> Pair:
    return int(tensor.shape[2]), int(tensor.shape[3])


def windows(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, groups: int) -> Tensor:
    """[B, G c, H, W] -> [G, B H' W', kh kw c]: what each output pixel of each group looks at."""
    if any(padding):
        x = nnf.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    seen = x.unflatten(1, (groups, -1)).unfold(3, kernel[0], stride[0]).unfold(4, kernel[1], stride[1])
    pixels = seen.shape[0] * seen.shape[3] * seen.shape[4]
    rows: Tensor = seen.permute(1, 0, 3, 4, 5, 6, 2).reshape(groups, pixels, -1)
    return rows


def matrices(weight: Tensor, groups: int) -> Tensor:
    """[G o, c, kh, kw] -> [G, o, kh kw c]: the weights in the order of the windows."""
    return weight.permute(0, 2, 3, 1).reshape(groups, -1, weight[0].numel())


def convolution(seen: Tensor, weight: Tensor, bias: Tensor | None, size: Pair) -> Tensor:
    """`aten.convolution` of the windows, for 2-D convolutions without dilation: [B, G o, H', W']."""
    out = _images(torch.bmm(seen, matrices(weight, len(seen)).mT), size)
    return out if bias is None else out + bias[:, None, None]


def _images(rows: Tensor, size: Pair) -> Tensor:
    """[G, B H W, o] -> [B, G o, H, W]"""
    images: Tensor = rows.unflatten(1, (-1, *size)).permute(1, 0, 4, 2, 3).flatten(1, 2)
    return images


def convolution_backward(
    gradient: Tensor, seen: Tensor, weight: Tensor, size: Pair, stride: Pair, padding: Pair, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`aten.convolution_backward` for the same: gradients by x, weight and bias, where wanted."""
    groups, kernel, by_x, by_weight = len(seen), _image(weight), None, None
    out = gradient.unflatten(1, (groups, -1)).permute(1, 0, 3, 4, 2)  # [G, B, H', W', o]
    rows = out.reshape(groups, -1, out.shape[-1])
    if wanted[1]:
        by_weight = torch.bmm(rows.mT, seen).view(-1, *kernel, weight.shape[1]).permute(0, 3, 1, 2)
    # Where outputs have fewer channels than inputs, their windows are the smaller ones to lay out.
    fewer = len(weight) // groups < weight.shape[1] and math.prod(kernel) > 1
    if wanted[0] and fewer and tuple(stride) == (1, 1):
        by_x = _seen_from_outputs(gradient, weight, size, padding, groups)
    elif wanted[0]:
        spread = torch.bmm(rows, matrices(weight, groups)).view(*out.shape[:4], *kernel, -1)
        by_x = _gather(spread, size, stride, padding)
    return by_x, by_weight, gradient.sum((0, 2, 3)) if wanted[2] else None


def _seen_from_outputs(gradient: Tensor, weight: Tensor, size: Pair, padding: Pair, groups: int) -> Tensor:
    """The gradient by x as a convolution of that by the output. A margin below zero is cut off."""
    (high, wide), (top, left) = _image(weight), padding
    seen = windows(gradient, (high, wide), (1, 1), (high - 1 - top, wide - 1 - left), groups)  # [G, B H W, kh kw o]
    turned = weight.flip((2, 3)).unflatten(0, (groups, -1)).permute(0, 3, 4, 1, 2)  # [G, kh, kw, o, c]
    return _images(torch.bmm(seen, turned.flatten(1, 3)), size)


def _gather(spread: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """The transpose of `windows`: [G, B, H', W', kh, kw, c] -> [B, G c, H, W], summed where windows overlap.

    Written as shifted sums, which the compiler makes one kernel; its col2im wrote out of bounds (torch 2.11).
    """
    kernel, (top, left) = spread.shape[4:6], padding
    if (*kernel, *stride, top, left) == (1, 1, 1, 1, 0, 0):
        return spread[:, :, :, :, 0, 0].permute(1, 0, 4, 2, 3).flatten(1, 2)
    high, wide = size[0] + 2 * top, size[1] + 2 * left
    total = spread.new_zeros(())
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            part = _spaced(spread[..., i, j, :], stride)
            below, right = high - i - part.shape[2], wide - j - part.shape[3]
            total = total + nnf.pad(part, (0, 0, j, right, i, below))
    images: Tensor = total[:, :, top : top + size[0], left : left + size[1]].permute(1, 0, 4, 2, 3).flatten(1, 2)
    return images


def _spaced(x: Tensor, stride: Pair) -> Tensor:
    """[G, B, H', W', c] with zeros in between, so that neighbours are a stride apart."""
    if tuple(stride) == (1, 1):
        return x
    x = nnf.pad(x[:, :, :, None, :, None], (0, 0, 0, stride[1] - 1, 0, 0, 0, stride[0] - 1))
    return x.flatten(4, 5).flatten(2, 3)

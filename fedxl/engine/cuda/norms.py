"""BatchNorm of all clients in a few operations, for a step that is captured without being compiled.

Vectorised, torch lays the clients' channels side by side, normalises, lays them out again and scales them apart, and
each way takes a dozen small operations more: forty kernels for one layer, of which a DenseNet has 121. But channels
know nothing of each other, so the norms of C clients are one norm of C times as many channels, which the library
has kernels for, weights, statistics and all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp
from torch.nn import functional
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
Dims = tuple[int | None, ...]  # where each argument has its clients, if it has any


class Normalised(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias; the batch's mean and 1 / sqrt(var + eps); the new statistics."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float
    ) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = aten._native_batch_norm_legit_functional(
            x, weight, bias, mean, var, True, momentum, eps
        )
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, *_, ctx.eps = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, weight, *output[1:3])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *of_moments: Any) -> tuple[Tensor | None, ...]:
        slopes: tuple[Tensor, ...] = Slopes.apply(dy, *ctx.saved_tensors, ctx.eps)  # type: ignore[no-untyped-call]
        return *slopes, None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Dims, *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _side_by_side(Normalised, info.batch_size, dims, arguments, images=1)


class Slopes(torch.autograd.Function):
    """The gradients of `Normalised` by x, weight and bias."""

    @staticmethod
    def forward(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, eps: float) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = norm_slopes(dy, x, weight, mean, rstd, eps)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *_, ctx.eps = inputs
        ctx.save_for_backward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """By the formula, with the moments computed anew: they depend on x, too."""
        back = vjp(lambda dy, x, weight: _slopes(dy, x, weight, ctx.eps), *ctx.saved_tensors)[1]
        return *back(upstream), None, None, None

    @staticmethod
    def vmap(info: Any, dims: Dims, *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _side_by_side(Slopes, info.batch_size, dims, arguments, images=2)


@torch.library.custom_op("fedxl::norm_slopes", mutates_args=())
def norm_slopes(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The library's kernel by a name of our own: by its own, a trace of many clients has it taken to pieces."""
    wanted = [True, True, True]
    dx, by_weight, by_bias = aten.native_batch_norm_backward(dy, x, weight, None, None, mean, rstd, True, eps, wanted)
    return dx, by_weight, by_bias


@norm_slopes.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


def _side_by_side(
    norm: Any, clients: int, dims: Dims, arguments: Sequence[Any], images: int
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """A function of `images` tensors [B, c, ...] first and of vectors [c], for all clients as one with C c channels.

    Of what it returns the first is like the images, the others like the vectors.
    """
    merged = list(arguments)
    for i, (given, dim) in enumerate(zip(arguments, dims, strict=True)):
        if isinstance(given, Tensor):
            place = 1 if i < images else 0  # of the channels
            each = given if dim == place else _clients_at(place, given, dim, clients)
            merged[i] = each.flatten(place, place + 1)
    first, *others = norm.apply(*merged)
    apart = (first.unflatten(1, (clients, -1)), *(leaf.unflatten(0, (clients, -1)) for leaf in others))
    return apart, (1, *[0] * len(others))


def _clients_at(place: int, given: Tensor, dim: int | None, clients: int) -> Tensor:
    if dim is None:
        return given.unsqueeze(place).expand(*given.shape[:place], clients, *given.shape[place:])
    return given.movedim(dim, place)


def _slopes(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """What `Slopes` computes, in operations that can be differentiated."""
    dims = _all_but_channels(x)
    var, mean = torch.var_mean(x.to(weight.dtype), dims, correction=0, keepdim=True)
    rstd = (var + eps).rsqrt()
    wide, normal = dy.to(weight.dtype), (x - mean) * rstd
    total, along = wide.sum(dims, keepdim=True), (wide * normal).sum(dims, keepdim=True)
    dx = rstd * _channels(weight, x) * (wide - (total + normal * along) / _count(x))
    return dx.to(x.dtype), along.reshape(weight.shape), total.reshape(weight.shape)


class Norms(TorchFunctionMode):
    """Takes `Normalised` for BatchNorm in training."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.batch_norm:
            return batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """What functional.batch_norm computes; and whatever is not for us, it does itself."""
    statistics = [leaf for leaf in (running_mean, running_var) if leaf is not None]
    if not training or weight is None or bias is None or not _regular(x, weight, bias, statistics):
        return functional.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    before = statistics or [torch.zeros_like(weight), torch.zeros_like(weight)]
    found: tuple[Tensor, ...] = Normalised.apply(x, weight, bias, *before, momentum, eps)  # type: ignore[no-untyped-call]
    for leaf, new in zip(statistics, found[3:], strict=False):
        leaf.copy_(new.detach())
    return found[0]


def _regular(x: Tensor, weight: Tensor, bias: Tensor, statistics: Sequence[Tensor]) -> bool:
    """Whether there is more than one value a channel, and all else is of one type that has room for their sums."""
    wide, vectors = weight.dtype, [weight, bias, *statistics]
    alike = all(leaf.dtype == wide and leaf.shape == x.shape[1:2] for leaf in vectors)
    room = wide in (torch.float32, torch.float64) and torch.promote_types(wide, x.dtype) == wide
    return alike and room and len(statistics) != 1 and _count(x) > 1


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _count(x: Tensor) -> int:
    """Values of a channel."""
    return math.prod(x.shape[dim] for dim in _all_but_channels(x))


def _channels(vector: Tensor, x: Tensor) -> Tensor:
    return vector.reshape(-1, *[1] * (x.ndim - 2))

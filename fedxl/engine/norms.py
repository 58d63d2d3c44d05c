"""BatchNorm of all clients in a few operations, for a step that is recorded as it is.

Vectorised, torch lays the clients' channels side by side, normalises, lays them out again and scales them apart, and
each way takes a dozen small operations more: forty kernels for one layer, of which a DenseNet has 121. Here it is
written out for one client, forward and backward, in operations that vectorise as they are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Normalised(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias with the batch's own mean and variance; and these two."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        var, mean, rstd = _moments(x.to(weight.dtype), eps)
        y = torch.addcmul(_channels(bias, x), x - mean, rstd * _channels(weight, x))
        return y.to(x.dtype), mean, var

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, eps = inputs
        ctx.eps = eps
        ctx.mark_non_differentiable(*output[1:])
        # Not the moments: whoever differentiates `backward` would take them for constants.
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *of_moments: Any) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dims, count = _all_but_channels(x), _count(x)
        _, mean, rstd = _moments(x.to(weight.dtype), ctx.eps)
        dy, centred = dy.to(weight.dtype), x - mean  # in the wider type of the two
        total = dy.sum(dims, keepdim=True)
        along = (dy * centred).sum(dims, keepdim=True) * rstd
        scale = rstd * _channels(weight, x)
        part = scale * (-1 / count)
        dx = torch.addcmul(torch.addcmul(part * total, centred, part * rstd * along), dy, scale)
        return dx.to(x.dtype), along.reshape(weight.shape), total.reshape(weight.shape), None


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
    if not training or weight is None or bias is None or _count(x) < 2 or not _holds(weight.dtype, x.dtype):
        return functional.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    found: tuple[Tensor, ...] = Normalised.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    y, mean, var = found
    if running_mean is not None and running_var is not None:
        unbiased = var * (_count(x) / (_count(x) - 1))
        for running, new in (running_mean, mean), (running_var, unbiased):
            running.copy_(torch.lerp(running, new.detach().reshape(running.shape), momentum))
    return y


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether sums of squares of the one have room in the other."""
    return wide in (torch.float32, torch.float64) and torch.promote_types(wide, narrow) == wide


def _moments(wide: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Variance, mean and one over the standard deviation of each channel."""
    var, mean = torch.var_mean(wide, _all_but_channels(wide), correction=0, keepdim=True)
    return var, mean, (var + eps).rsqrt()


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _count(x: Tensor) -> int:
    """Values of a channel."""
    return math.prod(x.shape[dim] for dim in _all_but_channels(x))


def _channels(vector: Tensor, x: Tensor) -> Tensor:
    return vector.reshape(-1, *[1] * (x.ndim - 2))

"""How a network becomes a pure function of named tensors, in full single precision or faster on tensor cores."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fedxl.errors import UserError, first_line, kind_of, refuse, require
from fedxl.models.parts import frozen, frozen_tensors

T = TypeVar("T")


class Precision(NamedTuple):
    tf32: bool  # products of float32 with 10 bits of mantissa; sums in full precision
    autocast: torch.dtype | None  # dtype of the network's products and activations

    def casting(self, device: torch.device) -> AbstractContextManager[object]:
        """Inside, a network computes in this precision. Without the cache, which a recorded graph cannot have."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, self.autocast, cache_enabled=False)


PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision(False, None),
    "tf32": Precision(True, None),
    "bf16": Precision(True, torch.bfloat16),
}


@contextmanager
def temporarily(change: Callable[[T], object], before: T, inside: T) -> Iterator[None]:
    """Inside, a setting of a library has another value than before."""
    change(inside)
    try:
        yield
    finally:
        change(before)


def products(precision: Precision) -> AbstractContextManager[None]:
    """Set the precision of matrix products and convolutions; torch's defaults differ between the two.

    torch has an old and a new interface for it, and raises an error if both are used. This uses the caller's.
    """
    before = switched()
    old = "high" if precision.tf32 else "highest", precision.tf32
    new = ("tf32" if precision.tf32 else "ieee",) * 2
    return temporarily(_switch, before, old if isinstance(before[1], bool) else new)


def switched() -> tuple[Any, ...]:
    """The current precision of matrix products and of convolutions, as the caller's interface of torch names it."""
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        backends: Any = torch.backends
        return backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision


def _switch(values: tuple[Any, ...]) -> None:
    backends: Any = torch.backends
    if isinstance(values[1], bool):
        torch.set_float32_matmul_precision(values[0])
        backends.cudnn.allow_tf32 = values[1]
    else:
        backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision = values


def _stepwise_attention() -> AbstractContextManager[None]:
    """Inside, torch's encoder layers in evaluation mode compute as in training.

    Their fused kernel has no rule for vmap, and gives 0 where an example is padded, which training does not.
    """
    return temporarily(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled(), False)


class Weights(NamedTuple):
    params: dict[str, Tensor]  # trained
    buffers: dict[str, Tensor]  # kept, but not trained: BatchNorm statistics


# What networks raise for examples that they cannot score.
CANNOT = (RuntimeError, ValueError, TypeError, AttributeError, IndexError)
IMAGES = "images must be [channels, height, width]"
NEVER_NEGATIVE = ("running_var", "num_batches_tracked")  # buffers of torch's norm layers, whose roots are taken

# (weights, x [B, ...]) -> (scores [B] or [B, d], the buffers after the call)
Score = Callable[[Weights, Tensor], tuple[Tensor, dict[str, Tensor]]]


def uncompiled(model: Any) -> Any:
    """What torch.compile was given: the weights of what it returns have other names."""
    return getattr(model, "_orig_mod", model)


def weights_of(model: nn.Module) -> Weights:
    """A copy of everything that training changes. What is frozen stays in the model."""
    still = frozen_tensors(model)
    params, buffers = (
        {name: leaf.detach().clone() for name, leaf in leaves if name not in still}
        for leaves in (model.named_parameters(), model.named_buffers())
    )
    return Weights(params, buffers)


def check_buffers(buffers: Mapping[str, Tensor]) -> None:
    """Refuse impossible statistics: one negative variance makes every score NaN."""
    for name, leaf in buffers.items():
        refuse(name.endswith(NEVER_NEGATIVE) and bool((leaf < 0).any()), f"its buffer {name} is negative")


def load(model: nn.Module, weights: Weights) -> nn.Module:
    """Write these weights into the model, and return it."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, tensor in {**weights.params, **weights.buffers}.items():
            own[name].copy_(tensor)
    return model


def scorer(model: nn.Module, training: bool, precision: str = "fp32", score_shape: tuple[int, ...] = ()) -> Score:
    """The model as a pure function. It calls a private copy, whose mode nobody else can change.

    The copy shares what is frozen. Frozen modules run as in evaluation: BatchNorm stays, and dropout is off.

    score_shape: of an example's scores; (): one number, which a model may give as [B, 1], too.
    """
    shared = dict[str, Tensor](model.named_parameters()) | dict(model.named_buffers())
    memo = {id(shared[name]): shared[name] for name in frozen_tensors(model)}
    network, exact = copy.deepcopy(model, memo).train(training), PRECISIONS[precision]
    for module in frozen(network).values():
        module.eval()

    def score(weights: Weights, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        # BatchNorm writes to its buffers in place. It gets copies, which we return.
        buffers = {name: b.clone() for name, b in weights.buffers.items()} if training else weights.buffers
        with exact.casting(x.device), _stepwise_attention():
            h: Tensor = torch.func.functional_call(network, (weights.params, buffers), (x,))
        require(isinstance(h, Tensor), f"the model must return a tensor of scores, not {kind_of(h)}")
        h = h if exact.autocast is None else h.float()
        return (h.squeeze(-1) if h.ndim == 2 and h.shape[-1] == 1 and not score_shape else h), buffers

    return score


def takes(model: nn.Module, x: Tensor) -> bool:
    """Whether the model can score these examples."""
    with suppress(*CANNOT), torch.no_grad():
        scorer(model, training=False)(weights_of(model), x)
        return True
    return False


def operations(model: nn.Module, probe: Tensor) -> float:
    """Multiplications and additions of a forward pass in training per example."""
    from torch.utils.flop_counter import FlopCounterMode

    def recurrent(x: tuple[int, ...], first: tuple[int, ...], second: tuple[int, ...], *_: Any, **more: Any) -> int:
        return 2 * math.prod(x[:2]) * (math.prod(first) + math.prod(second))

    x = torch.cat([probe, probe])  # BatchNorm takes no single example
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.mkldnn_rnn_layer: recurrent})
    with torch.random.fork_rng([x.device] if x.is_cuda else []), counter:
        scorer(model, training=True)(weights_of(model), x)
    return float(counter.get_total_flops()) / len(x)


def check_training(model: nn.Module, score: Score, weights: Weights, x: Tensor) -> None:
    """Raises UserError if torch cannot differentiate the model, as a function of its weights."""
    hooked = any(module._backward_hooks or module._backward_pre_hooks for module in model.modules())
    hooked |= any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    require(not hooked, "the model has backward hooks, which its pure function never calls; remove them")
    x = torch.cat([x, x])  # BatchNorm takes no single example
    try:
        with torch.random.fork_rng([x.device] if x.is_cuda else []):
            h, back, *_ = torch.func.vjp(lambda params: score(weights._replace(params=params), x)[0], weights.params)
            back(torch.ones_like(h))
    except UserError:
        raise
    except CANNOT as error:
        how = "its forward must be of torch's differentiable functions, without .numpy()"
        raise UserError(f"the model cannot be trained: {first_line(error)}; {how}") from error


def check_output(model: nn.Module, x: Tensor, score_shape: tuple[int, ...]) -> None:
    """Raises UserError if the model cannot score these examples, or returns a shape that the risk does not take."""
    require(any(p.requires_grad for p in model.parameters()), "the model has no parameter to train")
    wanted = f"[{', '.join(map(str, (len(x), *score_shape)))}]"
    try:
        with torch.no_grad():
            h, _ = scorer(model, training=False, score_shape=score_shape)(weights_of(model), x)
    except UserError:
        raise
    except CANNOT as error:
        why = hint(model, x, str(error)) or first_line(error)
        raise UserError(f"the model cannot score examples of shape {list(x.shape[1:])}: {why}") from error
    end = "; end the model with one output, as nn.Linear(..., 1) does" if h.ndim == 2 and not score_shape else ""
    told = f"the model returned scores of shape {list(h.shape)} for {len(x)} examples; this risk needs {wanted}{end}"
    require(tuple(h.shape) == (len(x), *score_shape), told)


def hint(model: nn.Module, x: Tensor, error: str) -> str:
    """What would be right; nothing if it is not clear that the first layer was to blame.

    >>> import torch
    >>> error = "expected input[2, 32, 32, 3] to have 3 channels, but got 32 channels instead"
    >>> hint(nn.Conv2d(3, 8, 3), torch.zeros(2, 32, 32, 3), error)
    'images must be [channels, height, width], these are [height, width, channels]: give x.permute(0, 3, 1, 2)'
    """
    for layer in model.modules():
        if isinstance(layer, nn.Embedding):
            beyond = not x.is_floating_point() and "out of range" in error
            most = layer.num_embeddings - 1
            return f"its embedding takes 0 to {most}, these examples hold {int(x.max())}" if beyond else ""
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

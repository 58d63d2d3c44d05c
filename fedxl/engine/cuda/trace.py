"""A step as one flat list of tensor operations, forward, backward and update together, for a compiler to fuse."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from fedxl import tree
from fedxl.engine.cuda.tidy import SETTING, lift_numbers, tidy
from fedxl.errors import first_line
from fedxl.models.functional import switched

aten = torch.ops.aten
BATCH_NORMS = [
    *(aten.native_batch_norm, aten._native_batch_norm_legit, aten.cudnn_batch_norm),
    *(aten.native_batch_norm_backward, aten.cudnn_batch_norm_backward),
]

# Before, Inductor may fuse the reading of u with writing it in place: an example that stands twice in a batch reads
# what was just written for it (seen with 2.6; 2.7 to 2.10 were not tried).
COMPILES_FROM = (2, 11)
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

MOST_PROGRAMS = 16  # that are kept for the next run in this process

Flat = Callable[..., Any]  # tensors in; what comes out is written into some of them
_compiled: dict[Any, Flat] = {}
T = TypeVar("T")


class TraceError(Exception):
    """Why a step cannot be traced or captured, in words for its author."""


@contextmanager
def explained() -> Iterator[None]:
    """What goes wrong inside comes out as a TraceError; a lack of memory, not the step's fault, as it is."""
    try:
        yield
    except (TraceError, torch.OutOfMemoryError):
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise TraceError(f"what it does depends on the numbers it sees ({error})") from error
    except Exception as error:  # whatever a model of the user's may raise
        cause = error.__context__
        if isinstance(cause, torch.OutOfMemoryError):  # of which the end of a capture made another error
            raise cause from None
        raise TraceError(first_line(error)) from error


class Traced(NamedTuple):
    """A trace, and the tensors that it reads besides its arguments (the data, frozen weights)."""

    module: fx.GraphModule
    reads: list[int]  # which of the arguments it has any use for
    constants: list[Tensor]

    def inputs(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """What the module takes, for all arguments of the function that was traced."""
        return [*(arguments[i] for i in self.reads), *self.constants]


def trace(
    function: Callable[..., None], arguments: Sequence[Tensor], vectorised: bool = False, compiled: bool = True
) -> Traced:
    """The trace of a function that writes its results into its arguments."""
    # Under vmap BatchNorm asks for kernels of mixed precision that the libraries lack; in small pieces it does not
    # (torch 2.11; tests/engine/cuda/test_workarounds.py).
    pieces: Any = get_decompositions(BATCH_NORMS) if vectorised else None

    def flat(*arguments: Tensor) -> tuple[()]:
        function(*arguments)
        return ()

    with torch.no_grad(), explained(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vmap, about layers that it does client by client
        module = make_fx(flat, pieces, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)
        _drop_restriding(module)
        if compiled:
            _spell_out_scaling(module)
        for node in module.graph.nodes:  # a view of channels first may need a copy where they come last
            node.target = aten.reshape.default if node.target is aten.view.default else node.target
        # Runs share programs alone. Not compiled, numbers as tensors would make DenseNet121 a seventh slower.
        numbers = lift_numbers(module) if compiled else []
        constants = [*numbers, *_lift_constants(module)]
        # Take arguments out that nothing reads, such as a pool whose size changes from round to round.
        places = [node for node in module.graph.nodes if node.op == "placeholder"][: len(arguments)]
        reads = [i for i, node in enumerate(places) if node.users]
        for node in places:
            if not node.users:
                module.graph.erase_node(node)
        if not compiled:  # a compiler does both itself
            tidy(module)
        module.recompile()
    return Traced(module, reads, constants)


def outline(function: Callable[..., T], arguments: Any) -> T:
    """What a function of trees returns, computed without numbers: shapes and types alone."""
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*tree.map(mode.from_tensor, arguments))


class Census(TorchDispatchMode):
    """Counts convolutions of more than one pixel, and the numbers in their windows if these were laid out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.convolutions = self.windows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is aten.convolution.default and math.prod(args[1].shape[2:]) > 1:
            self.convolutions += 1
            self.windows += out.shape[0] * math.prod(out.shape[2:]) * math.prod(args[1].shape[1:]) * args[8]
        return out


def _drop_restriding(module: fx.GraphModule) -> None:
    """Pooling of one pixel restrides its result; under vmap, a temporary (2.6 to 2.15; test_workarounds.py)."""
    for node in list(module.graph.nodes):
        if node.target is aten.as_strided_.default and not node.users:
            module.graph.erase_node(node)


def _spell_out_scaling(module: fx.GraphModule) -> None:
    """a + alpha b with the product written out: Inductor may forget alpha (2.11 to 2.14; test_workarounds.py)."""
    for node in list(module.graph.nodes):
        if node.target in (aten.add.Tensor, aten.sub.Tensor) and "alpha" in node.kwargs:
            a, b = node.args
            with module.graph.inserting_before(node):
                scaled = module.graph.call_function(aten.mul.Tensor, (b, node.kwargs["alpha"]))
            scaled.meta = {**node.meta, SETTING: True}  # a learning rate, or weight decay
            node.args, node.kwargs = (a, scaled), {}


def _lift_constants(module: fx.GraphModule) -> list[Tensor]:
    """Make inputs of the tensors that were closed over: a compiler would copy the whole data set into its cache."""
    tensors: dict[str, Tensor] = {}
    inputs: dict[str, fx.Node] = {}
    last = next(node for node in reversed(module.graph.nodes) if node.op == "placeholder")
    for node in list(module.graph.nodes):
        if node.op != "get_attr":
            continue
        name = str(node.target)
        if name not in inputs:
            tensors[name] = getattr(module, name)
            with module.graph.inserting_after(last):
                last = inputs[name] = module.graph.placeholder(f"constant{len(inputs)}")
                last.meta = dict(node.meta)
        node.replace_all_uses_with(inputs[name])
        module.graph.erase_node(node)
    for name in tensors:
        delattr(module, name)  # or whoever keeps the program keeps the data
    return list(tensors.values())


def refused_compiler() -> str:
    """Why this torch must not compile the step; empty if it may."""
    wanted = ".".join(map(str, COMPILES_FROM))
    return (
        ""
        if VERSION >= COMPILES_FROM
        else f"torch {torch.__version__} may compile it wrongly, from {wanted} on it does not"
    )


def fuse(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Flat:
    """The program that Inductor makes of a trace, or the one it made of the same trace before: it takes a minute."""
    tensors = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in inputs)
    key = module.code, tensors, switched(), torch.are_deterministic_algorithms_enabled()
    if key not in _compiled:
        while len(_compiled) >= MOST_PROGRAMS:
            del _compiled[next(iter(_compiled))]  # the oldest
        _compiled[key] = _compile(module, inputs)
    return _compiled[key]


def _compile(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Flat:
    """By Inductor, which merges chains of small operations into single kernels."""
    import torch._inductor as inductor

    # What it has compiled once the compiler finds on disk again, but only where it is told of sizes. Ours are fixed:
    # of tensors with numbers it would make variables of them, and work for minutes on what it can prove of those.
    fixed = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with torch.no_grad(), warnings.catch_warnings(), tracing(TracingContext(fixed)):
        warnings.simplefilter("ignore")  # the compiler's advice is not for our users
        examples: list[Any] = [fixed.from_tensor(tensor) for tensor in inputs]
        # Combined kernels: the update of sixty small tensors is a few launches instead of sixty. They are for GPUs;
        # asked for them on a CPU, torch 2.6 fails.
        options = {"combo_kernels": any(tensor.is_cuda for tensor in inputs)}
        program: Flat = inductor.compile(module, examples, options=options)
    return program

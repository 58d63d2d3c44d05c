"""What is done to a trace: settings become its inputs for a compiler, and without one it is tidied.

They stand in the trace as constants; the operation that takes a constant tells whether it is one of them. One that is
missed costs a compilation, a minute. docs/notes/compiler.md says why they are not tensors from the beginning.

Without a compiler copies that nobody needs are dropped, and small operations of one kind merged. A model's statistics
are cloned, because layers write to them, and vmap lays a tensor out anew for the backward pass. A step writes a
thousand tensors of a DenseNet back to where the next one reads them, each in a kernel of its own.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
LAYOUTS = {aten.permute.default, aten.clone.default, aten.reshape.default, aten._unsafe_view.default}
Writers = dict[fx.Node, list[fx.Node]]  # by the memory that they write to
# Which arguments are written to though the schema does not say so: the statistics.
HIDDEN = {aten.native_batch_norm.default: (3, 4), aten.cudnn_batch_norm.default: (3, 4)}
SETTING = "setting"  # marks an operation of ours whose number is one

# The learning rate at a step begins as a tensor filled with it. One for each client is small; masks are not.
FILLED = (aten.full.default, aten.full_like.default)
MOST_NUMBERS = 2**16
# What is done to the number of a step: when the rate falls, and when a stage ends.
OF_STEPS = {aten.ge.Scalar: aten.ge.Tensor, aten.floor_divide.default: aten.floor_divide.default}
# l / lam, the weight beta of a moving average, and log gamma added to an estimate: where the number stands.
OF_FLOATS = {
    aten.div.Tensor: (1, aten.div.Tensor),
    aten.lerp.Scalar: (2, aten.lerp.Tensor),
    aten.add.Tensor: (1, aten.add.Tensor),
}


def memory(node: Any) -> fx.Node:
    """Whose memory a tensor shows: its own, or that of what it is a view of."""
    maker: fx.Node = node.args[0] if node.target is operator.getitem else node  # one of several views
    original = shown(maker)
    found: fx.Node = node
    return found if original is None else memory(original)


def shown(node: fx.Node) -> fx.Node | None:
    """The argument whose memory an operation's result shows, a view or the argument itself, written to."""
    if node.target is aten._unsafe_view.default:  # which is one, and does not say so
        return node.args[0]  # type: ignore[return-value]
    schema = getattr(node.target, "_schema", None)
    results = [result for result in (schema.returns if schema else ()) if result.alias_info]
    if not results:
        return None
    sets = {name for result in results for name in result.alias_info.before_set}  # none, of a list of views
    shared = [(argument, value) for argument, value in _arguments(node) if argument.alias_info]
    found: fx.Node = next((value for it, value in shared if it.alias_info.before_set & sets), shared[0][1])
    return found


def _arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    schema = getattr(node.target, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema else ()):
        if place < len(node.args):
            yield argument, node.args[place]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def writers_of(module: fx.GraphModule) -> Writers:
    """Whatever writes to a tensor, by any of its names."""
    found: Writers = {}
    for node in module.graph.nodes:
        places = [value for argument, value in _arguments(node) if argument.is_write]
        places += [node.args[i] for i in HIDDEN.get(node.target, ())]
        for value in places:
            for place in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(place, fx.Node):
                    found.setdefault(memory(place), []).append(node)
    return found


def tidy(module: fx.GraphModule) -> None:
    """Drop clones that are there to be written to, lay nothing out twice, and merge copies and averages."""
    _drop_clones(module)
    _share_layouts(module)
    _merge(module)


def _drop_clones(module: fx.GraphModule) -> None:
    """Of a clone of an input that is written to once: read the input before, and what was written after."""
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    writers = writers_of(module)
    for clone in module.graph.find_nodes(op="call_function", target=aten.clone.default):
        source, found = clone.args[0], writers.get(clone, [])
        if source.op != "placeholder" or len(found) != 1 or not _computes(found[0], clone, writers):
            continue
        (writer,) = found
        changes = min((order[node] for node in writers.get(source, [])), default=len(order))
        before = max(map(order.__getitem__, _readers(clone, writer)), default=0)
        if not before < order[writer] < changes:
            continue
        if writer.target is aten.copy_.default:
            result: Any = writer.args[1]
        else:
            with module.graph.inserting_before(writer):
                result = module.graph.call_function(aten.add.Tensor, (source, *writer.args[1:]), writer.kwargs)
            result.meta = dict(writer.meta)
        order.setdefault(result, order[writer])
        writer.replace_all_uses_with(result)
        module.graph.erase_node(writer)
        clone.replace_all_uses_with(source)
        module.graph.erase_node(clone)


def _readers(tensor: fx.Node, but: fx.Node) -> Iterator[fx.Node]:
    """Who reads a tensor, or looks at a view of it, but for one."""
    for user in tensor.users:
        if user is not but:
            yield user
            if shown(user) is tensor or user.target is operator.getitem:
                yield from _readers(user, but)


def _computes(writer: fx.Node, clone: fx.Node, writers: Writers) -> bool:
    """Whether what is written to the whole of a clone could be a tensor of its own, to which nobody writes."""
    if not writer.args or writer.args[0] is not clone:
        return False
    if writer.target is aten.add_.Tensor:
        return isinstance(writer.args[1], int)  # a count of batches; the sum is of the same type
    if writer.target is not aten.copy_.default:
        return False
    old, new = (argument.meta["val"] for argument in writer.args[:2])  # type: ignore[union-attr]
    alike = (old.shape, old.stride(), old.dtype) == (new.shape, new.stride(), new.dtype)
    return alike and memory(writer.args[1]) not in writers


def _share_layouts(module: fx.GraphModule) -> None:
    """Where numbers are laid out again in the same way, and nobody writes to them, take the first."""
    writers = writers_of(module)
    kept: dict[Any, fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.target not in LAYOUTS or memory(node) in writers or memory(node.args[0]) in writers:
            continue
        first = kept.setdefault((node.target, str(node.args), str(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            module.graph.erase_node(node)


def _merge(module: fx.GraphModule) -> None:
    """Copies that follow each other (what is kept for the next step), and averages that do (G), as one each."""
    for run in list(_runs(module, aten.copy_.default)):
        if _independent(run):
            for copies in _alike(run, lambda node: _types(node.args)):
                _merge_copies(module, copies)
    for run in list(_runs(module, aten.lerp.Scalar)):
        if not {argument for node in run for argument in node.args[:2]} & set(run):  # none is made of another
            for averages in _alike(run, lambda node: (_types(node.args), node.args[2])):
                _merge_averages(module, averages)


def _runs(module: fx.GraphModule, target: Any) -> Iterator[list[fx.Node]]:
    for found, nodes in groupby(list(module.graph.nodes), lambda node: node.target is target):
        if found:
            yield list(nodes)


def _alike(nodes: Sequence[fx.Node], kind: Callable[[fx.Node], Hashable]) -> list[list[fx.Node]]:
    kinds: dict[Hashable, list[fx.Node]] = {}
    for node in nodes:
        kinds.setdefault(kind(node), []).append(node)
    return [members for members in kinds.values() if len(members) > 1]


def _types(arguments: Sequence[Any]) -> Hashable:
    return tuple((tensor.meta["val"].dtype, tensor.meta["val"].device) for tensor in arguments[:2])


def _independent(copies: Sequence[fx.Node]) -> bool:
    """Whether none reads or writes what another one writes, so that their order does not matter."""
    written = [memory(node.args[0]) for node in copies]
    read = [memory(node.args[1]) for node in copies]
    ours = set(written)
    crossed = any(source in ours and source is not to for to, source in zip(written, read, strict=True))
    return len(ours) == len(written) and not crossed and not any(node.users for node in copies)


def _merge_copies(module: fx.GraphModule, copies: Sequence[fx.Node]) -> None:
    moving = [node for node in copies if node.args[0] is not node.args[1]]
    if moving:
        to, source = ([node.args[i] for node in moving] for i in (0, 1))
        with module.graph.inserting_before(moving[0]):
            module.graph.call_function(aten._foreach_copy_.default, (to, source))
    for node in copies:
        module.graph.erase_node(node)


def _merge_averages(module: fx.GraphModule, averages: Sequence[fx.Node]) -> None:
    old, new = ([node.args[i] for node in averages] for i in (0, 1))
    with module.graph.inserting_before(averages[0]):
        together = module.graph.call_function(aten._foreach_lerp.Scalar, (old, new, averages[0].args[2]))
        for place, node in enumerate(averages):
            one = module.graph.call_function(operator.getitem, (together, place))
            one.meta = dict(node.meta)
            node.replace_all_uses_with(one)
    for node in averages:
        module.graph.erase_node(node)


def lift_numbers(module: fx.GraphModule) -> list[Tensor]:
    """Make inputs of learning rates and weight decay, of when they change, of lam, beta and gamma; their values."""
    inputs = _Inputs(module)
    writers = writers_of(module)  # what is written to would, as an input, keep that for the next step
    for node in list(module.graph.nodes):
        if node.target in FILLED and _is_a_rate(node) and node not in writers:
            value = torch.full_like(node.meta["val"], node.args[1], device="meta")
            node.replace_all_uses_with(inputs.add(node, node.args[1], value.shape, value.dtype))
            module.graph.erase_node(node)
        elif node.target in OF_STEPS and not _is_float(node.args[0]) and isinstance(node.args[1], int):
            node.args = (node.args[0], inputs.add(node, node.args[1], (), torch.int64))
            node.target = OF_STEPS[node.target]
        elif node.target is aten.mul.Tensor and _scales_a_rate(node):
            node.args = (node.args[0], inputs.add(node, node.args[1], (), node.meta["val"].dtype))
        elif node.target in OF_FLOATS and _is_float(node):
            place, target = OF_FLOATS[node.target]
            if isinstance(node.args[place], float) and not node.kwargs:
                number = inputs.add(node, node.args[place], (), node.meta["val"].dtype)
                node.args = (*node.args[:place], number, *node.args[place + 1 :])
                node.target = target
    return inputs.values


class _Inputs:
    """Inputs behind those that a trace has already, one for each number that an operation takes."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.graph = module.graph
        self.values: list[Tensor] = []
        self._last = next(node for node in reversed(module.graph.nodes) if node.op == "placeholder")
        self._known: dict[Any, fx.Node] = {}

    def add(self, node: fx.Node, number: float, shape: Any, dtype: torch.dtype) -> fx.Node:
        like = node.meta["val"]
        key = (node.target, number, tuple(shape), dtype, like.device)
        if key not in self._known:
            with self.graph.inserting_after(self._last):
                self._last = self._known[key] = self.graph.placeholder(f"number{len(self.values)}")
            self._last.meta = {"val": like.new_empty(shape, dtype=dtype)}
            self.values.append(torch.full(shape, number, dtype=dtype, device=like.device))
        return self._known[key]


def _is_a_rate(node: fx.Node) -> bool:
    """Zeros and ones are mostly no settings, except that a rate is a float like a whole number, the step."""
    number = node.args[1]
    if not isinstance(number, float) or math.prod(node.meta["val"].shape) > MOST_NUMBERS:
        return False
    of_a_step = node.target is aten.full_like.default and not _is_float(node.args[0])
    return number not in (0.0, 1.0) or of_a_step


def _scales_a_rate(node: fx.Node) -> bool:
    """Whether a product is with a rate: of ours, or of one number for each client (a rate that falls by itself)."""
    if not isinstance(node.args[1], float) or not _is_float(node):
        return False
    return SETTING in node.meta or node.meta["val"].ndim <= 1


def _is_float(node: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()

"""Copies that nobody needs, in a record that no compiler will tidy.

A model's statistics are cloned, because layers write to them, and vmap lays a tensor out anew for the backward pass.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
LAYOUTS = {aten.permute.default, aten.clone.default, aten.reshape.default, aten._unsafe_view.default}


def tidy(module: fx.GraphModule) -> None:
    """Drop clones that are there to be written to, and lay nothing out twice."""
    _drop_clones(module)
    _share_layouts(module)


def memory(node: Any) -> fx.Node:
    """Whose memory a tensor shows: its own, or that of what it is a view of."""
    maker: fx.Node = node.args[0] if node.target is operator.getitem else node  # one of several views
    if _is_view(maker):
        return memory(maker.args[0])
    found: fx.Node = node
    return found


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info for result in schema.returns)


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The memory that an operation writes to."""
    schema = getattr(node.target, "_schema", None)
    for argument, value in zip(schema.arguments if schema else (), node.args, strict=False):
        if argument.is_write:
            yield from map(memory, value if isinstance(value, list) else [value])


def _drop_clones(module: fx.GraphModule) -> None:
    """Of a clone of an input that is written to once: read the input before, and what was written after."""
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    writers = _writers(module)
    for clone in module.graph.find_nodes(op="call_function", target=aten.clone.default):
        source, found = clone.args[0], writers.get(clone, [])
        if source.op != "placeholder" or len(found) != 1 or not _can_be_computed(found[0], clone, writers):
            continue
        (writer,) = found
        changes = min((order[node] for node in writers.get(source, [])), default=len(order))
        before, after = ([node for node in clone.users if (order[node] > order[writer]) == late] for late in (0, 1))
        before.remove(writer)
        if not max((_last_reading(node, order) for node in before), default=0) < order[writer] < changes:
            continue
        for node in before:
            node.replace_input_with(clone, source)
        result = _computed(module, writer, source)
        for node in after:
            node.replace_input_with(clone, result)
        writer.replace_all_uses_with(result)
        module.graph.erase_node(writer)
        module.graph.erase_node(clone)


def _writers(module: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """Who writes to which memory."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for argument, value in zip(schema.arguments if schema else (), node.args, strict=False):
            if argument.is_write:
                for place in value if isinstance(value, list) else [value]:
                    found.setdefault(memory(place), []).append(node)
    return found


def _last_reading(node: fx.Node, order: dict[fx.Node, int]) -> int:
    """When an operation reads its arguments for the last time: a view is read whenever it is looked at."""
    looks = node.users if _is_view(node) or node.target is operator.getitem else ()
    return max([order[node], *(_last_reading(look, order) for look in looks)])


def _can_be_computed(writer: fx.Node, clone: fx.Node, writers: dict[fx.Node, list[fx.Node]]) -> bool:
    """Whether what is written to the whole of a clone could be a tensor of its own, to which nobody writes."""
    if writer.target is aten.add_.Tensor:
        return writer.args[0] is clone
    if writer.target is not aten.copy_.default or writer.args[0] is not clone:
        return False
    old, new = (argument.meta["val"] for argument in writer.args[:2])  # type: ignore[union-attr]
    return old.shape == new.shape and old.dtype == new.dtype and memory(writer.args[1]) not in writers


def _computed(module: fx.GraphModule, writer: fx.Node, source: fx.Node) -> fx.Node:
    if writer.target is aten.copy_.default:
        new: fx.Node = writer.args[1]  # type: ignore[assignment]
        return new
    with module.graph.inserting_before(writer):
        result = module.graph.call_function(aten.add.Tensor, (source, *writer.args[1:]), writer.kwargs)
    result.meta = dict(writer.meta)
    return result


def _share_layouts(module: fx.GraphModule) -> None:
    """Where what was computed in this step is laid out again in the same way, take the first."""
    writers = _writers(module)
    kept: dict[Any, fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.target not in LAYOUTS or memory(node.args[0]).op == "placeholder":
            continue
        if memory(node) in writers or memory(node.args[0]) in writers:
            continue
        key = node.target, str(node.args), str(node.kwargs)
        if key in kept:
            node.replace_all_uses_with(kept[key])
            module.graph.erase_node(node)
        else:
            kept[key] = node

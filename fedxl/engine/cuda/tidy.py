"""Copies that nobody needs, in a trace that no compiler will tidy.

A model's statistics are cloned, because layers write to them, and vmap lays a tensor out anew for the backward pass.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fedxl.engine.cuda.aliasing import Writers, memory, shown, writers_of

aten = torch.ops.aten
LAYOUTS = {aten.permute.default, aten.clone.default, aten.reshape.default, aten._unsafe_view.default}


def tidy(module: fx.GraphModule) -> None:
    """Drop clones that are there to be written to, and lay nothing out twice."""
    _drop_clones(module)
    _share_layouts(module)


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
        result = _computed(module, writer, source)
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


def _computed(module: fx.GraphModule, writer: fx.Node, source: fx.Node) -> fx.Node:
    if writer.target is aten.copy_.default:
        new: fx.Node = writer.args[1]  # type: ignore[assignment]
        return new
    with module.graph.inserting_before(writer):
        result = module.graph.call_function(aten.add.Tensor, (source, *writer.args[1:]), writer.kwargs)
    result.meta = dict(writer.meta)
    return result


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

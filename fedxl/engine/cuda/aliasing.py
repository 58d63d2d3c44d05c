"""Who shares memory with whom in a trace, and who writes to it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
Writers = dict[fx.Node, list[fx.Node]]  # by the memory that they write to

# Which arguments are written to though the schema does not say so: the statistics.
HIDDEN = {aten.native_batch_norm.default: (3, 4), aten.cudnn_batch_norm.default: (3, 4)}


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

"""Many small operations of one kind as one, in a trace that no compiler will fuse.

A step writes a thousand tensors of a DenseNet back to where the next one reads them, each in a kernel of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import fx

from fedxl.engine.cuda.aliasing import memory

aten = torch.ops.aten


def merge(module: fx.GraphModule) -> None:
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

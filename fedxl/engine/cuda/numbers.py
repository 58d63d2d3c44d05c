"""Hyper-parameters as inputs of a trace, so that runs that differ in them share a program.

They stand in the trace as constants; the operation that takes a constant tells whether it is one of them. One that is
missed costs a compilation, a minute. docs/notes/compiler.md says why they are not tensors from the beginning.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from fedxl.engine.cuda.tidy import writers_of

aten = torch.ops.aten
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

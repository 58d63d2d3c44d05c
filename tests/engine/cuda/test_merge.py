"""Small operations of one kind as one: the same numbers in fewer operations, or none merged where order matters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedxl.engine.cuda.trace import trace
from tests.engine.cuda.traces import assert_same, replayed

aten = torch.ops.aten


def tensors(count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(i + 1, 3).double() for i in range(count)]


def averages(*leaves: Tensor) -> None:
    """A moving average of each of the second half, written over the first."""
    half = len(leaves) // 2
    old, new = leaves[:half], [2 * leaf for leaf in leaves[half:]]
    results = [torch.lerp(a, b, 0.25) for a, b in zip(old, new, strict=True)]
    for leaf, result in zip(old, results, strict=True):
        leaf.copy_(result)


def chain(a: Tensor, b: Tensor, c: Tensor) -> None:
    """Each is read after it was written: the order of the copies is all there is."""
    b.copy_(a)
    c.copy_(b)


def views(a: Tensor, b: Tensor, c: Tensor) -> None:
    """The second copy reads what the first has written, by another name."""
    first = a[0]
    a.copy_(b)
    c[0].copy_(first)


def named_before(a: Tensor, b: Tensor, c: Tensor) -> None:
    first, second = a[0], c[0]
    a.copy_(b)
    second.copy_(first)


def pieces(a: Tensor, b: Tensor, c: Tensor) -> None:
    """Views of which one operation makes several."""
    (first, _), (second, _) = a.unbind(0), c.split(1)
    a.copy_(b)
    second[0].copy_(first)


def all_pieces(a: Tensor, b: Tensor, c: Tensor) -> None:
    (first, _), target = a.unbind(0), c[0]
    a.copy_(b)
    target.copy_(first)


def nested(a: Tensor, b: Tensor, c: Tensor) -> None:
    """An average of an average."""
    c.copy_(torch.lerp(a, torch.lerp(a, b, 0.5), 0.5))


@pytest.mark.parametrize(
    ("function", "examples", "left"),
    [
        (averages, tensors(3) + tensors(3), 0),
        (chain, [torch.randn(2, 3) for _ in range(3)], 2),
        (views, [torch.randn(2, 3) for _ in range(3)], 2),
        (named_before, [torch.randn(2, 3) for _ in range(3)], 2),
        (pieces, [torch.randn(2, 3) for _ in range(3)], 2),
        (all_pieces, [torch.randn(2, 3) for _ in range(3)], 2),
        (nested, [torch.randn(2, 3) for _ in range(3)], 1),
    ],
)
def test_what_is_merged_comes_to_the_same(function, examples, left):
    targets = assert_same(function, examples)
    assert targets.count(aten.copy_.default) == left
    assert targets.count(aten._foreach_copy_.default) == (function is averages)
    assert targets.count(aten._foreach_lerp.Scalar) == (function is averages)
    assert targets.count(aten.lerp.Scalar) == (2 if function is nested else 0)


def test_copies_of_several_types_are_merged_by_type():
    def function(a: Tensor, b: Tensor, n: Tensor, m: Tensor) -> None:
        results = a + 1, b + 2, n + 3, m + 4
        for leaf, result in zip((a, n, b, m), (results[0], results[2], results[1], results[3]), strict=True):
            leaf.copy_(result)

    found = [torch.zeros(2), torch.zeros(3), torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)]
    targets = [node.target for node in replayed(function, found)]
    assert [leaf.flatten()[0].item() for leaf in found] == [1, 2, 3, 4]
    assert targets.count(aten._foreach_copy_.default) == 2


def test_a_compiler_gets_the_trace_as_it_is():
    traced = trace(averages, tensors(3) + tensors(3))
    assert aten._foreach_copy_.default not in [node.target for node in traced.module.graph.nodes]

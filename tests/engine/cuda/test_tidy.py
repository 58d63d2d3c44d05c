"""Copies that nobody needs are not made; where one is needed, because somebody writes, it is."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.engine.cuda.traces import assert_same, replayed

aten = torch.ops.aten


def statistics(a: Tensor, b: Tensor, c: Tensor) -> None:
    """As a layer does that keeps some: cloned, read, written to, kept."""
    kept = a.clone()
    mean = b * kept
    kept.copy_(mean + c)
    c.copy_(mean)
    a.copy_(kept)


def counted(a: Tensor, b: Tensor, c: Tensor) -> None:
    kept = a.clone()
    kept.add_(1)
    c.copy_(kept * b)
    a.copy_(kept)


def looked_at_later(a: Tensor, b: Tensor, c: Tensor) -> None:
    """By a view from before the writing, which shows what was written."""
    kept = a.clone()
    view = kept.view(-1)
    kept.copy_(b + 1)
    c.copy_(view.view(2, 3))


def viewed_by_pieces(a: Tensor, b: Tensor, c: Tensor) -> None:
    kept = a.clone()
    first, _ = kept.unbind(0)
    kept.copy_(b + 1)
    c.copy_(c + first)


def written_twice(a: Tensor, b: Tensor, c: Tensor) -> None:
    kept = a.clone()
    kept.copy_(b)
    kept.add_(1)
    c.copy_(kept)


def written_in_part(a: Tensor, b: Tensor, c: Tensor) -> None:
    kept = a.clone()
    kept[0].copy_(b[1])
    c.copy_(kept)


def broadcast(a: Tensor, b: Tensor, c: Tensor) -> None:
    kept = a.clone()
    kept.copy_(b[0] + 1)
    c.copy_(kept.view(-1).flip(0).view(2, 3))


def original_changes_first(a: Tensor, b: Tensor, c: Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    kept.add_(1)
    c.copy_(kept)


def source_changes_later(a: Tensor, b: Tensor, c: Tensor) -> None:
    """What was copied is written to afterwards: the copy is not."""
    kept, other = a.clone(), b + 1
    kept.copy_(other)
    other.add_(5)
    c.copy_(kept * other)


def written_in_part_by_adding(a: Tensor, b: Tensor, c: Tensor) -> None:
    kept = a.clone()
    kept[0].add_(1)
    c.copy_(kept)


def read_by_another_that_is_counted(a: Tensor, b: Tensor, c: Tensor) -> None:
    """Two clones, of which one is read by what writes to the other, and then counted up itself."""
    total, count = a.clone(), b.clone()
    total.add_(count)
    count.add_(1)
    a.copy_(total)
    b.copy_(count)


def doubled(a: Tensor, b: Tensor, c: Tensor) -> None:
    kept = a.clone()
    kept.add_(kept)
    a.copy_(kept)


def of_a_wider_type(a: Tensor, b: Tensor, c: Tensor) -> None:
    """What is written is rounded on the way."""
    added, copied = a.clone(), b.clone()
    added.add_(b.double() * 1e-9)
    copied.copy_(a.double() / 3)
    c.copy_(added.double() + copied.double() * 1e9)


def laid_out_otherwise(a: Tensor, b: Tensor, c: Tensor) -> None:
    """Who asks for strides gets those of the clone."""
    kept = a.clone()
    kept.copy_((b * 2).view(3, 2).t())
    c.copy_(kept.as_strided((2, 3), (1, 2)))


def written_by_name(a: Tensor, b: Tensor, c: Tensor) -> None:
    """What was copied is written to as the `out` of an operation."""
    kept = a.clone()
    kept.copy_(b)
    torch.mul(b, 2, out=b)
    c.copy_(kept)


CASES = {
    statistics: 0,
    counted: 0,
    looked_at_later: 1,
    viewed_by_pieces: 1,
    written_twice: 1,
    written_in_part: 1,
    broadcast: 1,
    original_changes_first: 1,
    source_changes_later: 1,
    written_in_part_by_adding: 1,
    read_by_another_that_is_counted: 1,
    doubled: 1,
    of_a_wider_type: 2,
    laid_out_otherwise: 1,
    written_by_name: 1,
}


@pytest.mark.parametrize(("function", "clones"), CASES.items(), ids=[function.__name__ for function in CASES])
def test_a_clone_is_dropped_where_it_makes_no_difference(function, clones):
    torch.manual_seed(0)
    targets = assert_same(function, [torch.randn(2, 3) for _ in range(3)])
    assert targets.count(aten.clone.default) == clones


def test_a_tensor_is_laid_out_once():
    def function(x: Tensor, out: Tensor) -> None:
        seen = x * 2
        first = seen.permute(1, 0).clone(memory_format=torch.contiguous_format)
        second = seen.permute(1, 0).clone(memory_format=torch.contiguous_format)
        other = seen.permute(1, 0).clone()
        out.copy_(first * second + other)

    found = [torch.randn(4, 3), torch.zeros(3, 4)]
    wanted = (2 * found[0].mT) ** 2 + 2 * found[0].mT
    targets = [node.target for node in replayed(function, found)]
    torch.testing.assert_close(found[1], wanted)
    assert targets.count(aten.clone.default) == 2, "of two kinds"


def test_what_is_written_to_is_laid_out_for_each():
    def function(x: Tensor, out: Tensor) -> None:
        seen = x * 2
        first, second = seen.permute(1, 0).clone(), seen.permute(1, 0).clone()
        first.mul_(3)
        out.copy_(first + second)

    found = [torch.ones(4, 3), torch.zeros(3, 4)]
    replayed(function, found)
    torch.testing.assert_close(found[1], torch.full((3, 4), 8.0))


def test_what_is_written_to_by_another_shape_is_laid_out_for_each():
    def function(x: Tensor, out: Tensor) -> None:
        seen = x * 2
        first, second = seen.permute(1, 0).reshape(-1), seen.permute(1, 0).reshape(-1)
        first.mul_(3)
        out.copy_((first + 10 * second).view(3, 4))

    found = [torch.ones(4, 3), torch.zeros(3, 4)]
    replayed(function, found)
    torch.testing.assert_close(found[1], torch.full((3, 4), 26.0))


def test_statistics_that_a_norm_writes_to_are_its_own():
    """The library's norm does not say that it writes."""

    def function(x: Tensor, mean: Tensor, out: Tensor) -> None:
        seen = mean * 1
        for row in out:
            kept = seen.clone()
            torch.nn.functional.batch_norm(x, kept, torch.ones(3), training=True)
            row.copy_(kept)

    torch.manual_seed(0)
    found = [torch.randn(5, 3), torch.zeros(3), torch.zeros(2, 3)]
    replayed(function, found)
    torch.testing.assert_close(found[2], (0.1 * found[0].mean(0)).expand(2, 3))


def some_program(seed: int) -> Callable[..., None]:
    """A dozen operations at random on what there is so far, views, clones and writing among them."""

    def function(*leaves: Tensor) -> None:
        draw = random.Random(seed)
        there = [*leaves, leaves[0] * 2]
        for _ in range(14):
            x, y = draw.choice(there), draw.choice(there)
            kind = draw.choice(["clone", "clone", "turn", "flat", "row", "sum", "count", "add", "copy", "scale"])
            match kind:
                case "clone":
                    there.append(x.clone())
                case "turn":
                    there.append(x.permute(1, 0).reshape(2, 3))
                case "flat":
                    there.append(x.view(-1).view(2, 3) if x.is_contiguous() else x.reshape(2, 3))
                case "row":
                    x.unbind(0)[0].add_(1)
                case "sum":
                    there.append(x + y)
                case "count":
                    x.add_(1)
                case "add":
                    x.add_(y)
                case "copy":
                    x.copy_(y)
                case "scale":
                    torch.mul(x, 0.5, out=x)
        for leaf, result in zip(leaves, there[-len(leaves) :], strict=True):
            leaf.copy_(result.clone())

    return function


@pytest.mark.parametrize("seed", range(60))
def test_any_program_comes_to_the_same(seed):
    torch.manual_seed(seed)
    assert_same(some_program(seed), [torch.randn(2, 3).double() for _ in range(3)])


def test_what_is_laid_out_before_and_after_a_change_is_not_the_same():
    def function(x: Tensor, out: Tensor) -> None:
        seen = x * 2
        first, turned = seen.clone(), seen.permute(1, 0).clone()
        seen[0].add_(1)
        out.copy_((first + seen.clone()).mT * (turned + seen.permute(1, 0).clone()))

    found = [torch.ones(4, 3), torch.zeros(3, 4)]
    replayed(function, found)
    torch.testing.assert_close(found[1], torch.tensor([25.0, 16.0, 16.0, 16.0]).expand(3, 4))

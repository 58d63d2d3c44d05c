"""Trees of tensors: dicts, tuples and NamedTuples with tensors at the leaves. Only this module handles nesting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")


def map(fn: Callable[..., Tensor], tree: T, *rest: T) -> T:
    """Apply `fn` leaf by leaf to trees of the same structure.

    >>> map(lambda a, b: a + b, {"w": torch.ones(2)}, {"w": torch.ones(2)})
    {'w': tensor([2., 2.])}
    """
    if isinstance(tree, Tensor):
        return cast(T, fn(tree, *rest))
    others: tuple[Any, ...] = rest
    if isinstance(tree, dict):
        return cast(T, {key: map(fn, value, *(other[key] for other in others)) for key, value in tree.items()})
    assert isinstance(tree, tuple), f"not a tree: {type(tree).__name__}"
    values = [map(fn, value, *(other[i] for other in others)) for i, value in enumerate(tree)]
    return cast(T, type(tree)(*values) if hasattr(tree, "_fields") else tuple(values))


def pack(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    """Every leaf under its dotted path: the form of state on disk and in messages.

    >>> sorted(pack({"w": {"bias": torch.zeros(1)}, "pools": (torch.zeros(2),)}))
    ['pools.0', 'w.bias']
    """
    if isinstance(tree, Tensor):
        return {prefix: tree}
    items: Sequence[tuple[str, Any]]
    if isinstance(tree, dict):
        items = list(tree.items())
    else:
        names = getattr(tree, "_fields", None) or [str(i) for i in range(len(tree))]
        items = list(zip(names, tree, strict=True))
    packed: dict[str, Tensor] = {}
    for name, value in items:
        packed |= pack(value, f"{prefix}.{name}" if prefix else name)
    return packed


def unpack(like: T, tensors: Mapping[str, Tensor]) -> T:
    """The inverse of `pack`: a tree with `like`'s structure and the leaves in `tensors`, of any shape."""
    return rebuild(like, (tensors[name] for name in pack(like)))


def rebuild(like: T, leaves: Iterable[Tensor]) -> T:
    """A tree with the structure of `like` and these leaves, in the order of `leaves(like)`."""
    each = iter(leaves)
    return map(lambda _: next(each), like)


def leaves(tree: Any) -> list[Tensor]:
    return list(pack(tree).values())


def stack(trees: Sequence[T]) -> T:
    return map(lambda *leaves: torch.stack(leaves), *trees)


def concat(trees: Sequence[T]) -> T:
    return map(lambda *leaves: torch.cat(leaves), *trees)


def unstack(tree: T, size: int) -> list[T]:
    """The inverse of `stack`: one tree per index of the first dimension."""
    return [map(lambda leaf, i=i: leaf[i], tree) for i in range(size)]


def stack_ragged(trees: Sequence[T], largest_state: T | None = None) -> T:
    """Stack trees whose leaves may differ in their first dimension. Pads shorter leaves with NaN (integers with 0).

    All leaves become as long as the longest one, or as those of `largest_state`.
    """

    def pad_and_stack(*leaves: Tensor) -> Tensor:
        if len({leaf.shape for leaf in leaves}) == 1:
            return torch.stack(leaves[:count])
        longest = max(leaf.shape[0] for leaf in leaves)
        blank = float("nan") if leaves[0].is_floating_point() else 0
        out = leaves[0].new_full((count, longest, *leaves[0].shape[1:]), blank)
        for row, leaf in zip(out, leaves, strict=False):
            row[: leaf.shape[0]] = leaf
        return out

    count = len(trees)
    return map(pad_and_stack, *trees, *([] if largest_state is None else [largest_state]))


def unstack_ragged(tree: T, like: Sequence[T]) -> list[T]:
    """The inverse of `stack_ragged`: each tree is cut to the lengths of its tree in `like`.

    It copies leaves, so that one client's state does not keep the memory of all the others alive.
    """

    def cut(leaf: Tensor, original: Tensor) -> Tensor:
        return (leaf[: original.shape[0]] if original.ndim else leaf).clone()

    if not leaves(tree):
        return list(like)
    return [map(cut, one, original) for one, original in zip(unstack(tree, len(like)), like, strict=True)]


def to(tree: T, device: torch.device | str) -> T:
    return map(lambda leaf: leaf.to(device), tree)


def finite(tree: Any) -> bool:
    """Whether all floating-point leaves are finite."""
    return all(bool(torch.isfinite(leaf).all()) for leaf in leaves(tree) if leaf.is_floating_point())


def norm(tree: Any) -> Tensor:
    """The Euclidean norm of all leaves together, in double precision; 0 for a tree without leaves."""
    each = [torch.linalg.vector_norm(leaf.double()) for leaf in leaves(tree)]
    return torch.stack(each).norm() if each else torch.zeros((), dtype=torch.float64)


def inner(one: Any, other: Any) -> Tensor:
    """The inner product of two trees of the same structure, in double precision."""
    pairs = zip(leaves(one), leaves(other), strict=True)
    return sum(((a.double() * b.double()).sum() for a, b in pairs), torch.zeros((), dtype=torch.float64))


def nbytes(tree: Any) -> int:
    """The bytes of a message with these tensors. A tensor that occurs several times counts once."""
    places = {(leaf.data_ptr(), leaf.shape): leaf.numel() * leaf.element_size() for leaf in leaves(tree)}
    return sum(places.values())

"""Trees of tensors: dicts, tuples and NamedTuples with tensors at the leaves. Only this module handles nesting."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")
SORTING_STEPS = 2.0**20  # in a unit of a number; far above rounding, far below what scores differ by


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
    packed: dict[str, Tensor] = {}
    for name, value in children(tree):
        packed |= pack(value, f"{prefix}.{name}" if prefix else name)
    return packed


def children(tree: Any) -> list[tuple[str, Any]]:
    """What a dict, tuple or NamedTuple holds, by name."""
    if isinstance(tree, dict):
        return list(tree.items())
    names = getattr(tree, "_fields", None) or [str(i) for i in range(len(tree))]
    return list(zip(names, tree, strict=True))


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
    """Stack trees whose leaves may differ in their first dimension: pads them to the longest, or to `largest_state`.

    The padding is NaN, of integers 0.
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
    """The inverse of `stack_ragged`: copies, each cut to the lengths of its tree in `like`."""

    def cut(leaf: Tensor, original: Tensor) -> Tensor:
        # A view would keep the memory of all clients alive.
        return (leaf[: original.shape[0]] if original.ndim else leaf).clone()

    if not leaves(tree):
        return list(like)
    return [map(cut, one, original) for one, original in zip(unstack(tree, len(like)), like, strict=True)]


def to(tree: T, device: torch.device | str) -> T:
    return map(lambda leaf: leaf.to(device), tree)


def finite(tree: Any) -> bool:
    """Whether all floating-point leaves are finite."""
    floats = [leaf for leaf in leaves(tree) if leaf.is_floating_point() and leaf.numel()]
    # The extremes are NaN if any number is; they are found in a thirtieth of the time of looking at each number.
    return all(bool(torch.stack(leaf.aminmax()).isfinite().all()) for leaf in floats)


CACHED = 2**15  # numbers that stay in a processor's cache while they are turned into doubles


def pieces(leaf: Tensor, rows: int = 1) -> Sequence[Tensor]:
    """A leaf as a table with so many rows, in pieces that stay in the cache; a GPU needs no pieces."""
    table = leaf.reshape(rows, -1)
    return torch.split(table, max(1, CACHED // rows if leaf.is_cpu else table.shape[1]), 1)


def inner(one: Any, other: Any) -> Tensor:
    """The inner product of two trees of the same structure, in double precision."""
    pairs = zip(leaves(one), leaves(other), strict=True)
    both = (zip(pieces(a), pieces(b), strict=True) for a, b in pairs)
    each = (torch.dot(a[0].double(), b[0].double()) for pair in both for a, b in pair)
    return sum(each, torch.zeros((), dtype=torch.float64))


def norm(tree: Any) -> Tensor:
    """The Euclidean norm of all leaves together, in double precision; 0 for a tree without leaves."""
    return inner(tree, tree).sqrt()


def distance(one: Any, other: Any) -> Tensor:
    """The norm of the difference of two trees of the same structure."""
    pairs = zip(leaves(one), leaves(other), strict=True)
    both = (zip(pieces(a), pieces(b), strict=True) for a, b in pairs)
    gaps = ((a[0] - b[0]).double() for pair in both for a, b in pair)
    return sum((torch.dot(gap, gap) for gap in gaps), torch.zeros((), dtype=torch.float64)).sqrt()


def nbytes(tree: Any) -> int:
    """The bytes of a message with these tensors. A tensor that occurs several times counts once."""
    places = {(leaf.data_ptr(), leaf.shape): leaf.numel() * leaf.element_size() for leaf in leaves(tree)}
    return sum(places.values())


def sort_rows(rows: T) -> T:
    """Leaves [n, ...] that belong together, sorted by all that they hold: the first column counts most.

    Scores in the order of their draws tell which example each is of, to whoever knows the seed. A sorted list is a
    multiset and nothing else.

    >>> sort_rows((torch.tensor([2.0, 1.0, 2.0]), torch.tensor([5, 4, 3])))
    (tensor([1., 2., 2.]), tensor([4, 3, 5]))
    """
    exact = [column for leaf in leaves(rows) for column in columns_of(leaf)]
    # Executors differ in the last bits. If scores are equal but for these, what belongs to them decides first.
    rounded = [torch.round(column * SORTING_STEPS) if column.is_floating_point() else column for column in exact]
    order = sorting_order([*rounded, *exact])
    return map(lambda leaf: leaf[order], rows)


def sorting_order(keys: Sequence[Tensor]) -> Tensor:
    """The indices [n] that sort by the first key, then by the next. Rows that differ nowhere look the same."""
    last, *others = reversed(keys)
    rows = torch.sort(last, stable=True).indices
    for key in others:
        rows = rows[torch.sort(key[rows], stable=True).indices]
    return rows


def columns_of(leaf: Tensor) -> Sequence[Tensor]:
    """What sorts the rows of [n, ...]: n numbers each."""
    return leaf.flatten(1).unbind(1) if leaf.ndim > 1 else (leaf,)


PIECE = 2**24  # bytes that are digested at a time


def add_tensor(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    """Digest a tensor, name, type, shape and bytes, a piece at a time: one mapped from a file is never held whole."""
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
    rows = tensor if tensor.ndim else tensor[None]
    size = max(1, rows[:1].numel() * rows.element_size())
    for piece in rows.split(max(1, PIECE // size)):
        # Seen as bytes, because numpy knows no bfloat16.
        digest.update(piece.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())

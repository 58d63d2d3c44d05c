"""Trees as messages: a network's tensors are sent as one vector, which is fast, all others by name.

The receiver takes names and shapes from a tree that it builds itself, so a message cannot introduce others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedxl import tree
from fedxl.errors import RefusedError as RefusedError  # part of what this module offers
from fedxl.errors import printable
from fedxl.wire_precisions import HALF as HALF
from fedxl.wire_precisions import PRECISIONS as PRECISIONS

T = TypeVar("T")


def flatten(message: Any, precision: str = "float32") -> dict[str, Tensor]:
    """The tensors to send."""
    sent: dict[str, Tensor] = {}
    for path, part in parts(message):
        if isinstance(part, Tensor):
            sent[path] = part.detach().cpu().contiguous()
            continue
        for kind, group in _by_kind(part).items():
            flat = torch.cat([leaf.detach().cpu().flatten() for leaf in group.values()])
            half = precision == HALF and flat.dtype == torch.float32
            # Sent as integers with the same bits, because numpy has no bfloat16.
            sent[f"{path}:{HALF if half else kind}"] = flat.to(torch.bfloat16).view(torch.int16) if half else flat
    return sent


def restore(like: T, received: Mapping[str, Tensor], longest: int = 0, may_be_nan: Collection[str] = ()) -> T:
    """The tree that was sent, with `like`'s structure, types and shapes, and finite values.

    longest: up to which arrays outside a network may have any length. may_be_nan: names of leaves that may hold NaN.
    """
    left = dict(received)
    leaves: dict[str, Tensor] = {}
    for path, part in parts(like):
        if isinstance(part, Tensor):
            leaves[path] = _checked(path, part, _take(left, path), longest, path.rpartition(".")[2] in may_be_nan)
            continue
        for kind, group in _by_kind(part).items():
            leaves |= _split(path, group, left, kind)
    _require_nothing(left)
    return tree.unpack(like, leaves)


def fitted(like: T, packed: Mapping[str, Tensor], ragged: bool = False) -> T:
    """The inverse of `tree.pack`, checked: names, types and shapes must be those of `like`, and nothing may be left.

    ragged: arrays outside a network, such as a score pool, may have any length; all arrays of a tuple have the same.
    """
    left, leaves = dict(packed), dict[str, Tensor]()
    networks = tree.pack({path: part for path, part in parts(like) if isinstance(part, dict)})
    lengths: dict[str, int] = {}
    for path, leaf in tree.pack(like).items():
        found, shape = _take(left, path), tuple(leaf.shape)
        if ragged and path not in networks and leaf.ndim and found.ndim:
            shape = (lengths.setdefault(path.rpartition(".")[0], len(found)), *shape[1:])
        leaves[path] = _like(path, found, leaf.dtype, shape)
    _require_nothing(left)
    return tree.unpack(like, leaves)


def parts(message: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The networks (dicts of tensors) and the other tensors of a tree, with their paths."""
    if isinstance(message, (Tensor, dict)):
        yield path, message
        return
    for name, value in tree.children(message):
        yield from parts(value, f"{path}.{name}" if path else name)


def _by_kind(network: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors of a network, grouped by dtype."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, leaf in network.items():
        found.setdefault(str(leaf.dtype).removeprefix("torch."), {})[name] = leaf
    return found


def _require_nothing(left: Mapping[str, Tensor]) -> None:
    if left:
        raise RefusedError(f"it holds {printable(', '.join(sorted(left)[:3]))}, which is unexpected")


def _take(left: dict[str, Tensor], name: str) -> Tensor:
    if name not in left:
        raise RefusedError(f"it lacks {name}")
    return left.pop(name)


def _split(path: str, group: Mapping[str, Tensor], left: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    total = sum(leaf.numel() for leaf in group.values())
    half = f"{path}:{HALF}"
    if half in left and kind == "float32":
        flat = _like(half, left.pop(half), torch.int16, (total,)).view(torch.bfloat16).float()
    else:
        dtype = next(iter(group.values())).dtype
        flat = _like(f"{path}:{kind}", _take(left, f"{path}:{kind}"), dtype, (total,))
    _require_finite(path, flat)
    pieces = zip(group.items(), flat.split([leaf.numel() for leaf in group.values()]), strict=True)
    return {(f"{path}.{name}" if path else name): piece.view(leaf.shape) for (name, leaf), piece in pieces}


def _checked(path: str, like: Tensor, found: Tensor, longest: int, may_be_nan: bool) -> Tensor:
    shape = (len(found), *like.shape[1:]) if longest and like.ndim and found.ndim else like.shape
    found = _like(path, found, like.dtype, tuple(shape))
    if longest and like.ndim and not 1 <= len(found) <= longest:
        raise RefusedError(f"{path} has {len(found)} entries; between 1 and {longest} are allowed")
    if not may_be_nan:
        _require_finite(path, found)
    return found


def _like(path: str, found: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if found.dtype != dtype or tuple(found.shape) != shape:
        got = f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
        wanted = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
        raise RefusedError(f"{path} is {got} instead of {wanted}")
    return found


def _require_finite(path: str, found: Tensor) -> None:
    if not tree.finite(found):
        raise RefusedError(f"{path} holds NaN or infinity")

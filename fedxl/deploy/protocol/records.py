"""Envelopes as Flower's records and back, and the pieces in which Flower moves them. Limits come before decoding.

An array travels as pieces of 5 MiB, and a list says which piece comes where. The list may name one piece a thousand
times, so the size of a message is counted from the lists before anything is put together.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedxl.deploy.flower.common import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    RecordDict,
    get_object_body,
    get_object_head_values_from_object_content,
    inflate_object_from_contents,
    iterate_object_tree,
    pull_objects,
)
from fedxl.deploy.flower.protobuf import ObjectTree
from fedxl.deploy.protocol.envelope import Envelope, Kind
from fedxl.errors import RefusedError, first_line

KINDS: Mapping[Kind, str] = {
    "hello": MessageType.QUERY,
    "train": MessageType.TRAIN,
    "evaluate": MessageType.EVALUATE,
}
NUMPY = "numpy.ndarray"
MOST_HEADER = 4096  # bytes that say what an array is


def sealed(letter: Envelope, known: dict[int, Array] | None = None) -> RecordDict:
    """An envelope as Flower's records. Tensors that several letters share are packed once, and noted in `known`."""
    known = {} if known is None else known
    for tensor in letter.tensors.values():
        if id(tensor) not in known:
            known[id(tensor)] = Array(tensor.numpy())
    arrays = ArrayRecord({name: known[id(tensor)] for name, tensor in letter.tensors.items()})
    return RecordDict({"tensors": arrays, "facts": ConfigRecord(dict(letter.facts))})


def opened(content: RecordDict, megabytes: float) -> Envelope:
    """An envelope out of Flower's records; only plain arrays are taken, and not too many bytes of them."""
    arrays = content.array_records["tensors"]
    facts: dict[str, Any] = dict(content.config_records["facts"].items())
    size = sum(len(array.data) for array in arrays.values()) + sum(len(str(fact)) for fact in facts.values())
    require_small(size, megabytes)
    return Envelope(facts, {name: _tensor(name, array) for name, array in arrays.items()})


def _tensor(name: str, array: Array) -> Tensor:
    """The numbers of an array in numpy's own format, whose head must tell exactly as many bytes as there are."""
    if array.stype != NUMPY:
        raise RefusedError(f"{name} is no array of numbers")
    file = io.BytesIO(array.data)
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("not in numpy's format 1.0")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=MOST_HEADER)
        numbers = np.frombuffer(array.data, dtype, offset=file.tell())
        if dtype.hasobject or (fortran and len(shape) > 1):
            raise ValueError("not plain numbers in rows")
        return torch.from_numpy(numbers.reshape(shape).copy())
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise RefusedError(f"{name} is no array of numbers: {first_line(error)}") from None


def pulled(tree: ObjectTree, pull: Callable[[str], bytes], megabytes: float) -> Message:
    """A message out of its objects. It is refused as soon as they are, or would become, too many bytes."""
    taken = 0

    def counted(name: str) -> bytes:
        nonlocal taken
        content = pull(name)
        taken += len(content)
        require_small(taken, megabytes * 1.1 + 1)  # heads and names are extra
        return content

    return assembled(tree.object_id, pull_objects(named(tree), counted), megabytes)


def named(tree: ObjectTree) -> list[str]:
    """The objects of a message."""
    return [each.object_id for each in iterate_object_tree(tree)]


def assembled(root: str, contents: dict[str, bytes], megabytes: float) -> Message:
    """A message out of all of its objects, unless it would become too large."""
    require_small(_inflated(contents), megabytes)
    message = inflate_object_from_contents(root, contents)
    if not isinstance(message, Message):
        raise RefusedError("it is no message")
    message.metadata.__dict__["_message_id"] = root  # Flower's own way of saying which one it is
    return message


def _inflated(contents: Mapping[str, bytes]) -> int:
    """Bytes of all arrays once their pieces are put together, as often as the lists name them."""
    total = 0
    for content in contents.values():
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind == Array.__name__:
            pieces = json.loads(get_object_body(content, Array))["arraychunk_ids"]
            total += sum(len(contents[children[piece]]) for piece in pieces)
    return total


def require_small(size: float, megabytes: float) -> None:
    if size > megabytes * 1e6:
        raise RefusedError(f"a message of {size / 1e6:.0f} MB is larger than what is taken here, {megabytes:g} MB")

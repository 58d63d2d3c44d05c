"""Envelopes as Flower's records and back, and the objects in which Flower sends them. Limits apply before decoding.

Flower splits an array into objects of 5 MiB and a list of their ids. A hostile list may name one object a thousand
times, so we compute the size of a message from these lists before we assemble it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedxl.deploy.flower import common
from fedxl.deploy.flower.protobuf import ObjectTree
from fedxl.deploy.protocol.envelope import Envelope, Kind
from fedxl.errors import RefusedError, first_line

KINDS: Mapping[Kind, str] = {
    "hello": common.MessageType.QUERY,
    "train": common.MessageType.TRAIN,
    "evaluate": common.MessageType.EVALUATE,
    "secure": f"{common.MessageType.QUERY}.secure",  # the steps of a secure sum besides the training
}
NUMPY = "numpy.ndarray"
MAX_HEADER = 4096  # bytes of numpy's header


def to_records(envelope: Envelope, packed: dict[int, common.Array] | None = None) -> common.RecordDict:
    """An envelope as Flower's records. `packed` caches tensors by id, so that requests which share them pack once."""
    packed = {} if packed is None else packed
    for tensor in envelope.tensors.values():
        if id(tensor) not in packed:
            packed[id(tensor)] = common.Array(tensor.numpy())
    arrays = common.ArrayRecord({name: packed[id(tensor)] for name, tensor in envelope.tensors.items()})
    return common.RecordDict({"tensors": arrays, "facts": common.ConfigRecord(dict(envelope.facts))})


def from_records(content: common.RecordDict, megabytes: float) -> Envelope:
    """An envelope from Flower's records. Refuses anything but plain arrays, and too many bytes."""
    arrays = content.array_records["tensors"]
    facts: dict[str, Any] = dict(content.config_records["facts"].items())
    size = sum(len(array.data) for array in arrays.values()) + sum(len(str(fact)) for fact in facts.values())
    require_small(size, megabytes)
    return Envelope(facts, {name: _tensor(name, array) for name, array in arrays.items()})


def _tensor(name: str, array: common.Array) -> Tensor:
    """The numbers of an array in numpy's own format. Its header must match the number of bytes exactly."""
    if array.stype != NUMPY:
        raise RefusedError(f"{name} is not an array of numbers")
    file = io.BytesIO(array.data)
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("not in numpy's format 1.0")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=MAX_HEADER)
        numbers = np.frombuffer(array.data, dtype, offset=file.tell())
        if dtype.hasobject or (fortran and len(shape) > 1):
            raise ValueError("not plain numbers in row-major order")
        return torch.from_numpy(numbers.reshape(shape).copy())
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise RefusedError(f"{name} is not an array of numbers: {first_line(error)}") from None


def pull_message(tree: ObjectTree, pull: Callable[[str], bytes], megabytes: float) -> common.Message:
    """Download a message. Refuses it as soon as its objects have, or would expand to, too many bytes."""
    received = 0

    def counted(name: str) -> bytes:
        nonlocal received
        content = pull(name)
        received += len(content)
        require_small(received, megabytes * 1.1 + 1)  # leaves room for headers and ids
        return content

    return assemble(tree.object_id, common.pull_objects(object_ids(tree), counted), megabytes)


def object_ids(tree: ObjectTree) -> list[str]:
    """The ids of a message's objects."""
    return [each.object_id for each in common.iterate_object_tree(tree)]


def assemble(root: str, contents: dict[str, bytes], megabytes: float) -> common.Message:
    """A message from all of its objects. Refuses it if it would expand to too many bytes."""
    require_small(_inflated_size(contents), megabytes)
    message = common.inflate_object_from_contents(root, contents)
    if not isinstance(message, common.Message):
        raise RefusedError("it is not a message")
    message.metadata.__dict__["_message_id"] = root  # as Flower sets it
    return message


def _inflated_size(contents: Mapping[str, bytes]) -> int:
    """Bytes of all arrays once assembled, counting each object as often as the lists name it."""
    total = 0
    for content in contents.values():
        kind, children, _ = common.get_object_head_values_from_object_content(content)
        if kind == common.Array.__name__:
            pieces = json.loads(common.get_object_body(content, common.Array))["arraychunk_ids"]
            total += sum(len(contents[children[piece]]) for piece in pieces)
    return total


def require_small(size: float, megabytes: float) -> None:
    if size > megabytes * 1e6:
        raise RefusedError(f"a message of {size / 1e6:.0f} MB is over the limit of {megabytes:g} MB")

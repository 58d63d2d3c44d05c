"""Envelopes as bytes, for every transport. Limits are checked on the sizes that a message declares, before decoding.

    4 bytes: length of the head | head: JSON, facts and the tensors' names, types and shapes | their numbers

Each tensor starts at a multiple of 8 bytes. Nothing in a message is code, and nothing in it is executed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedxl.deploy.protocol.envelope import Envelope, Failure
from fedxl.errors import RefusedError, first_line, printable, refuse

Piece = bytes | memoryview
Bytes = bytes | bytearray | memoryview

NAMES = ("float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in NAMES}
LENGTH = 4  # bytes that hold the length of the head
ALIGNED = 8
MAX_HEAD = 2**23  # bytes
FACTS_ALONE = LENGTH + MAX_HEAD  # bytes of a message without tensors, at most
MAX_TENSORS = 100_000
MAX_DIMENSIONS = 16
FAILURE = "failure"  # the fact that stands for a reply: why there is none


def encode(envelope: Envelope) -> list[Piece]:
    """The bytes of a message, in pieces: the tensors' own memory is not copied."""
    pieces, table = list[Piece](), []
    for name, tensor in envelope.tensors.items():
        numbers = tensor.detach().cpu().contiguous()
        table.append([name, str(numbers.dtype).removeprefix("torch."), list(numbers.shape)])
        content = numbers.numpy().data.cast("B") if numbers.numel() else memoryview(b"")
        pieces += [content, bytes(-len(content) % ALIGNED)]
    head = json.dumps({"facts": dict(envelope.facts), "tensors": table}).encode()
    head += b" " * (-(LENGTH + len(head)) % ALIGNED)
    refuse(len(head) > MAX_HEAD, f"its facts have {len(head):,} bytes; at most {MAX_HEAD:,} can be sent")
    return [len(head).to_bytes(LENGTH, "big") + head, *(piece for piece in pieces if len(piece))]


def encode_failure(reason: str) -> list[Piece]:
    return encode(Envelope({FAILURE: reason}, {}))


def size(pieces: Sequence[Piece]) -> int:
    return sum(map(len, pieces))


def decode(content: Bytes, megabytes: float) -> Envelope:
    """The envelope in these bytes; its tensors use their memory. RefusedError if they are anything else."""
    require_small(len(content), megabytes)
    view = memoryview(content)
    length = int.from_bytes(view[:LENGTH], "big")
    refuse(not 0 < length <= MAX_HEAD or LENGTH + length > len(view), "it has no head")
    try:
        head = json.loads(bytes(view[LENGTH : LENGTH + length]))
        facts = dict(head["facts"])
        table = [(str(name), *_form(kind, shape)) for name, kind, shape in head["tensors"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RefusedError(f"its head cannot be read: {printable(first_line(error))}") from None
    refuse(len(table) > MAX_TENSORS, f"it holds more than {MAX_TENSORS:,} tensors")
    refuse(len({name for name, *_ in table}) < len(table), "it holds two tensors of one name")
    # Read-only memory cannot be shared with tensors.
    body = view[LENGTH + length :]
    if body.readonly:
        body = memoryview(bytearray(body))
    tensors, place = dict[str, Tensor](), 0
    for name, dtype, shape in table:
        count = math.prod(shape)
        end = place + count * dtype.itemsize
        refuse(end > len(body), f"{printable(name)} is longer than the message")
        found = torch.frombuffer(body[place:end], dtype=dtype) if count else torch.zeros(0, dtype=dtype)
        refuse(dtype == torch.bool and bool((found.view(torch.uint8) > 1).any()), f"{printable(name)} is not boolean")
        tensors[name] = found.reshape(shape)
        place = end + -end % ALIGNED
    refuse(place != len(body), "it is longer than its tensors")
    return Envelope(facts, tensors)


def _form(kind: Any, shape: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """The type and the shape of a tensor, as another party declares them."""
    refuse(kind not in DTYPES, f"it holds a tensor of type {printable(kind, 40)}")
    whole = isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS and all(type(n) is int and n >= 0 for n in shape)
    # No single length may be beyond any message: products of Python's numbers could grow without bound.
    refuse(not whole or any(n > 2**48 for n in shape), "it holds a tensor of no valid shape")
    return DTYPES[kind], tuple(shape)


def read_reply(content: Bytes, megabytes: float) -> Envelope | Failure:
    """A site's reply, or why it cannot be used."""
    try:
        reply = decode(content, megabytes)
    except Exception as error:  # a damaged or hostile reply may raise anything
        return Failure(f"its reply cannot be read: {printable(first_line(error))}")
    return Failure(printable(reply.facts[FAILURE])) if FAILURE in reply.facts else reply


def require_small(size: float, megabytes: float) -> None:
    if size > megabytes * 1e6:
        raise RefusedError(f"a message of {size / 1e6:.0f} MB is over the limit of {megabytes:g} MB (megabytes)")

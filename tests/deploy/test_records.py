"""Envelopes in Flower's records: what goes in comes out, and what is too large is refused before it is decoded."""

from __future__ import annotations

import io
import resource

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs fedxl[flower]")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.protocol.records import from_records, pull_message, to_records
from fedxl.errors import RefusedError


@pytest.fixture(autouse=True)
def identity():
    """Without one, Flower makes no message."""
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


def sent(content: RecordDict):
    """A message's tree and its objects, as they lie at SuperLink."""
    message = Message(content=content, dst_node_id=2, message_type="train", ttl=60.0)
    objects = {name: each.deflate() for name, each in get_all_nested_objects(message).items()}
    return get_object_tree(message), objects


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.tensor(1.5, dtype=torch.float64),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.arange(5, dtype=torch.uint8),
        torch.arange(7),
        torch.randn(3_000_000, generator=torch.Generator().manual_seed(0)),  # several pieces
        torch.zeros(3_000_000),  # several pieces that are the same
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_what_goes_in_comes_out(tensor):
    tree, objects = sent(to_records(Envelope({"round": 3}, {"x": tensor})))
    envelope = from_records(pull_message(tree, objects.__getitem__, 100).content, 100)
    assert envelope.facts == {"round": 3}
    assert envelope.tensors["x"].dtype == tensor.dtype
    assert torch.equal(envelope.tensors["x"], tensor)


def test_a_message_that_is_too_large_is_refused_while_it_comes():
    tree, objects = sent(to_records(Envelope({}, {"x": torch.randn(10_000_000)})))
    taken = []

    def pull(name: str) -> bytes:
        taken.append(name)
        return objects[name]

    with pytest.raises(RefusedError, match=r"over the limit of"):
        pull_message(tree, pull, 8)
    assert len(taken) < len(objects), "the rest was left where it was"


def test_a_small_piece_that_is_named_a_thousand_times_is_refused_before_it_is_put_together():
    """Zeros: one piece of 5 MiB stands for 4.5 GB. The process may not grow by as much as a tenth of that."""
    whole, inflated = sent(to_records(Envelope({}, {"x": torch.zeros(4_000_000)})))
    names = [name for name, content in inflated.items() if content.startswith(b"Array ")]
    assert len(names) == 1
    content = inflated[names[0]]
    pieces = content[content.index(b'"arraychunk_ids"') :]
    many = content.replace(pieces, b'"arraychunk_ids": [' + b"0, " * 900 + b"0]}")
    head, body = many.split(b"\0", 1)
    inflated[names[0]] = b" ".join([*head.split(b" ")[:-1], str(len(body)).encode()]) + b"\0" + body
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RefusedError, match=r"a message of 47\d\d MB is over the limit of 50 MB"):
        pull_message(whole, inflated.__getitem__, 50)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 450_000  # kilobytes


def npy(array: np.ndarray, **header: object) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    content = file.getvalue()
    for old, new in header.items():
        content = content.replace(old.encode(), str(new).encode())
    return content


GOOD = npy(np.zeros(8, np.float32))
SPOILT = {
    "nothing": b"",
    "noise": b"\x93NUMPY\x01\x00" + bytes(100),
    "too short": GOOD[:-4],
    "too long": GOOD + b"\0\0\0\0",
    "a head that claims more": GOOD.replace(b"(8,), }     ", b"(80000,), } "),
    "an absurd shape": GOOD.replace(b"(8,), }              ", b"(9000000000000,), }  "),
    "objects": GOOD.replace(b"'<f4'", b"'|O'").replace(b"|O',", b"|O', "),
    "version 2": b"\x93NUMPY\x02\x00" + GOOD[8:],
    "a zip": b"PK\x03\x04" + bytes(100),
    "text": npy(np.array(["a", "b"])),
    "big-endian": npy(np.zeros(8, ">f4")),
}


@pytest.mark.parametrize("kind", list(SPOILT))
def test_only_plain_arrays_are_taken(kind):
    array = Array(dtype="float32", shape=(8,), stype="numpy.ndarray", data=SPOILT[kind])
    content = RecordDict({"tensors": ArrayRecord({"x": array}), "facts": ConfigRecord({})})
    with pytest.raises(RefusedError, match="x is not an array of numbers"):
        from_records(content, 1)
    other = Array(dtype="float32", shape=(8,), stype="pickle", data=GOOD)
    with pytest.raises(RefusedError, match="x is not an array of numbers"):
        from_records(RecordDict({"tensors": ArrayRecord({"x": other}), "facts": ConfigRecord({})}), 1)


def test_one_array_under_many_names_counts_as_often(tmp_path):
    shared = Array(np.zeros(250_000, np.float32))
    content = RecordDict({"tensors": ArrayRecord({str(n): shared for n in range(100)}), "facts": ConfigRecord({})})
    with pytest.raises(RefusedError, match="a message of 100 MB is over the limit of 50 MB"):
        from_records(content, 50)

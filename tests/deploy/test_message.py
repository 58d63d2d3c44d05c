"""Envelopes as bytes: what goes in comes out, and anything else is refused in one line, before it takes memory."""

from __future__ import annotations

import json
import random
import resource

import pytest
import torch

from fedxl.deploy.protocol.envelope import Envelope, Failure
from fedxl.deploy.protocol.message import FAILURE, MAX_HEAD, decode, encode, read_reply
from fedxl.errors import RefusedError


def content(envelope: Envelope) -> bytes:
    return b"".join(encode(envelope))


def message(head: object, body: bytes = b"") -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return len(text).to_bytes(4, "big") + text + body


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor(1.5, dtype=torch.float64),
        torch.tensor([float("nan"), float("inf")]),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.arange(5, dtype=torch.uint8),
        torch.arange(7),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_what_goes_in_comes_out(tensor):
    odd = torch.tensor([1, 2, 3], dtype=torch.int8)  # so that the next tensor needs padding
    envelope = decode(content(Envelope({"round": 3, "text": "ä"}, {"odd": odd, "x": tensor})), 100)
    assert envelope.facts == {"round": 3, "text": "ä"}
    assert envelope.tensors["x"].dtype == tensor.dtype
    torch.testing.assert_close(envelope.tensors["x"], tensor, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(envelope.tensors["odd"], odd)


def test_tensors_are_neither_copied_when_sent_nor_when_read():
    tensor = torch.arange(1000.0)
    views = [piece for piece in encode(Envelope({}, {"x": tensor})) if isinstance(piece, memoryview)]
    assert [len(view) for view in views] == [4000]
    tensor[0] = 7.0
    assert bytes(views[0][:4]) == tensor[:1].numpy().tobytes()
    received = bytearray(content(Envelope({}, {"x": tensor})))
    found = decode(received, 1).tensors["x"]
    received[-4:] = bytes(4)
    assert float(found[-1]) == 0.0


GOOD = content(Envelope({"a": 1}, {"x": torch.zeros(4)}))
SPOILT = {
    "nothing": (b"", "it has no head"),
    "a length alone": (b"\0\0\0\5", "it has no head"),
    "a head beyond the message": ((MAX_HEAD - 1).to_bytes(4, "big") + b"{}", "it has no head"),
    "no JSON": (message(b"pickle"), "its head cannot be read"),
    "nested without end": (message(b"[" * 100_000), "its head cannot be read"),
    "another shape of head": (message([1, 2]), "its head cannot be read"),
    "no tensors": (message({"facts": {}}), "its head cannot be read"),
    "too short": (GOOD[:-8], "x is longer than the message"),
    "too long": (GOOD + bytes(8), "it is longer than its tensors"),
    "objects": (message({"facts": {}, "tensors": [["x", "object", [1]]]}, bytes(8)), "of type object"),
    "an absurd shape": (message({"facts": {}, "tensors": [["x", "int8", [2**60]]]}), "of no valid shape"),
    "absurd together": (
        message({"facts": {}, "tensors": [["x", "int8", [2**40, 2**40]]]}), "x is longer than the message"),
    "a negative length": (message({"facts": {}, "tensors": [["x", "int8", [-1]]]}), "of no valid shape"),
    "a length of true": (message({"facts": {}, "tensors": [["x", "int8", [True]]]}), "of no valid shape"),
    "many dimensions": (message({"facts": {}, "tensors": [["x", "int8", [1] * 17]]}), "of no valid shape"),
    "a name twice": (message({"facts": {}, "tensors": [["x", "int8", [0]]] * 2}), "two tensors of one name"),
    "many tensors": (
        message({"facts": {}, "tensors": [[str(n), "int8", [0]] for n in range(100_001)]}), "more than 100,000"),
    "no boolean": (message({"facts": {}, "tensors": [["x", "bool", [8]]]}, b"\2" * 8), "x is not boolean"),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(SPOILT))
def test_anything_else_is_refused_in_one_line(kind):
    spoilt, why = SPOILT[kind]
    with pytest.raises(RefusedError, match=why) as error:
        decode(spoilt, 100)
    assert "\n" not in str(error.value)
    failure = read_reply(spoilt, 100)
    assert isinstance(failure, Failure)
    assert why in failure.reason


def test_a_message_that_is_too_large_is_refused_before_it_is_opened():
    large = content(Envelope({"a": 1}, {"x": torch.zeros(1000)}))
    assert torch.equal(decode(large, 0.01).tensors["x"], torch.zeros(1000))
    with pytest.raises(RefusedError, match=r"over the limit of 0\.001 MB"):
        decode(large, 0.001)


def test_facts_that_are_too_long_are_not_sent():
    with pytest.raises(RefusedError, match="its facts have"):
        encode(Envelope({"text": "x" * MAX_HEAD}, {}))


def test_noise_is_refused_and_takes_no_memory():
    """Bytes of good messages flipped at random: an envelope, or one line. Nothing else, whatever they declare."""
    rng, before = random.Random(0), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    good = content(Envelope({"round": 3}, {"x": torch.arange(9.0), "y": torch.tensor([True])}))
    for _ in range(3000):
        spoilt = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
        found = read_reply(spoilt, 100)
        assert isinstance(found, Envelope) or "\n" not in found.reason
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


def test_a_failure_is_a_reply_whose_reason_is_printable():
    found = read_reply(content(Envelope({FAILURE: "no\x1b[31m disk"}, {})), 1)
    assert isinstance(found, Failure)
    assert found.reason.startswith("no")
    assert "\x1b" not in found.reason

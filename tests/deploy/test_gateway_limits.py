"""The gateway's limits: replies, connections, request rates, slow and malformed requests."""

from __future__ import annotations

import random
import socket
import ssl
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs fedxl[flower]")

from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Message,
    Metadata,
    ObjectTree,
    PullObjectRequest,
)
from flwr.proto.node_pb2 import Node

from fedxl.deploy.provision.connection import tls_for_site
from fedxl.deploy.server import fleet
from fedxl.deploy.server.gateway import Limits
from tests.deploy.gateways import CLOSED, PULL, open_gateway, send, signed

PUSH, OBJECT = "/v1/fleet/push-messages", "/v1/fleet/push-object"


def message(number: int, reply_to: str = "", source: int = 7) -> Message:
    return Message(metadata=Metadata(message_id=f"m{number}", reply_to_message_id=reply_to, src_node_id=source))


def pushed(number: int, reply_to: str, source: int = 7, objects: int = 1) -> bytes:
    tree = ObjectTree(object_id=f"m{number}", children=[ObjectTree(object_id=str(n)) for n in range(objects - 1)])
    return PushMessagesRequest(
        node=Node(node_id=7), messages_list=[message(number, reply_to, source)], message_object_trees=[tree]
    ).SerializeToString()


def tree(name: str, *children: ObjectTree) -> ObjectTree:
    return ObjectTree(object_id=name, children=children)


def doubled(depth: int) -> ObjectTree:
    """Each level holds the one below it, and names it once more: SuperLink would see 2^depth objects."""
    return tree(f"o{depth}", doubled(depth - 1), tree(f"o{depth - 1}")) if depth else tree("o0")


def replying(objects: ObjectTree) -> bytes:
    request = PushMessagesRequest.FromString(pushed(1, "m0"))
    request.message_object_trees[0].CopyFrom(objects)
    return request.SerializeToString()


TREES = {
    "another reply's objects": tree("m2"),
    "an object with its parts twice": tree("m1", tree("a", tree("b")), tree("a", tree("b"))),
    "an object once without its parts": tree("m1", tree("a", tree("b")), tree("a")),
    "itself": tree("m1", tree("m1")),
    "what it was sent, without its parts": tree("m1", tree("m0")),
    "a tree that would double at each level": tree("m1", doubled(3)),
    "a deep one": tree("m1", tree("a", tree("b", tree("c", tree("d", tree("e")))))),
}


def handed_out(number: int) -> bytes:
    """What SuperLink answers when there is a message for a site, in two parts."""
    parts = tree(f"m{number}", tree("part"))
    return PullMessagesResponse(messages_list=[message(number)], message_object_trees=[parts]).SerializeToString()


def test_a_site_fetches_and_confirms_what_it_was_sent_and_nothing_of_others(out):
    fetch, confirm = "/v1/fleet/pull-object", "/v1/fleet/confirm-message-received"
    part = PullObjectRequest(object_id="part").SerializeToString()
    done = ConfirmMessageReceivedRequest(message_object_id="m0").SerializeToString()
    with open_gateway(out) as gate:
        a, b = (out / "sites" / name for name in "ab")
        for path, body in ((fetch, part), (confirm, done), (fetch, b"\xff"), (confirm, b"\xff")):
            assert send(gate.connection(a), path, signed(a), body)[0] == 403
        gate.link.responses[PULL] = handed_out(0)
        assert send(gate.connection(a), PULL, signed(a))[0] == 200
        for path, body in ((fetch, part), (confirm, done)):
            assert send(gate.connection(a), path, signed(a), body)[0] == 200
            assert send(gate.connection(b), path, signed(b), body)[0] == 403
        assert [path for path, _, _ in gate.link.seen] == [PULL, fetch, confirm]


def test_a_site_replies_once_to_what_it_was_sent_and_in_its_own_name(out):
    with open_gateway(out) as gate:
        a, b = (out / "sites" / name for name in "ab")
        connection, headers = gate.connection(a), signed(a)
        assert send(connection, PUSH, headers, pushed(1, "m0"))[0] == 403, "it has been sent nothing"
        gate.link.responses[PULL] = handed_out(0)
        assert send(connection, PULL, headers)[0] == 200
        refused = {
            "to another's message": pushed(1, "m9"),
            "in another's name": pushed(1, "m0", source=8),
            "too many objects": pushed(1, "m0", objects=fleet.MAX_OBJECTS + 1),
            "several": pushed(1, "m0") + pushed(2, "m0"),  # which protobuf reads as one with two of each
            "nonsense": b"\xff\xff\xff",
            **{kind: replying(tree) for kind, tree in TREES.items()},
        }
        for kind, body in refused.items():
            assert send(connection, PUSH, headers, body)[0] == 403, kind
        assert send(gate.connection(b), PUSH, signed(b), pushed(1, "m0"))[0] == 403, "the other site was not asked"
        before = len(gate.link.seen)
        assert send(connection, PUSH, headers, pushed(1, "m0"))[0] == 200
        assert send(connection, PUSH, headers, pushed(1, "m0"))[0] == 200, "the same again, after a lost connection"
        assert send(connection, PUSH, headers, pushed(2, "m0"))[0] == 403, "another reply to the same message"
        assert send(connection, PUSH, headers, pushed(1, "m0", objects=3))[0] == 403, "the same with other objects"
        assert len(gate.link.seen) == before + 2
        for _ in range(fleet.MAX_REPEATS - 1):
            assert send(connection, PUSH, headers, pushed(1, "m0"))[0] == 200
        assert send(connection, PUSH, headers, pushed(1, "m0"))[0] == 403, "and not without end"


def test_a_reply_has_no_more_bytes_than_it_may(out):
    with open_gateway(out, reply_bytes=100_000) as gate:
        site = out / "sites" / "a"
        connection, headers, piece = gate.connection(site), signed(site), bytes(30_000)
        assert send(connection, OBJECT, headers, piece)[0] == 403, "nothing was asked of it"
        gate.link.responses[PULL] = handed_out(0)
        send(connection, PULL, headers)
        send(connection, PUSH, headers, pushed(1, "m0"))
        send(connection, PUSH, headers, pushed(1, "m0"))  # which grants nothing more
        statuses = [send(connection, OBJECT, headers, piece)[0] for _ in range(10)]
        assert statuses == [200] * 5 + [403] * 5  # 100,000 and a tenth, and 64 KiB for heads
        large = signed(site) | {"content-length": str(7 * 2**20)}
        assert send(gate.connection(site), OBJECT, large)[0] == 413, "by what it says, before it is read"


SHORT = Limits(
    handshake=0.3, head=0.3, idle=0.6, slowest=1e6, of_an_address=40, of_a_site=3, requests_a_second=0, burst=8
)


def test_slow_and_half_open_connections_are_closed_and_too_many_refused(out):
    site = out / "sites" / "a"
    with open_gateway(out, SHORT) as gate:
        context = tls_for_site(site)
        started = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\n"
        key = f"flwr-public-key: {signed(site)['flwr-public-key']}\r\n".encode()
        stalled = {
            "no handshake": (None, b""),
            "half a handshake": (None, b"\x16\x03\x01\x02\x00\x01"),
            "nothing": (context, b""),
            "half a head": (context, started),
            "half a body": (context, started + key + b"content-length: 1000\r\n\r\nhalf"),
        }
        for kind, (how, sent) in stalled.items():
            peer = gate.raw(how)
            peer.sendall(sent)
            try:
                assert peer.recv(100) == b"", kind  # which waits until the other side closes
            except (ConnectionError, ssl.SSLError):
                continue
        assert not gate.link.seen
        crowd = [gate.raw() for _ in range(60)]
        for peer in crowd:  # some are refused at once, the others when they have said nothing for a while
            try:
                assert peer.recv(1) == b""
            except ConnectionError:
                continue
        assert any("too many connections" in line for line in gate.lines)


def test_a_site_has_so_many_connections_and_no_more(out):
    site, limits = out / "sites" / "a", Limits(of_a_site=3)
    with open_gateway(out, limits) as gate:
        for _ in range(3):
            assert send(gate.connection(site), PULL, signed(site))[0] == 200
        with pytest.raises(CLOSED):
            send(gate.connection(site), PULL, signed(site))


def test_a_site_that_asks_without_end_is_slowed_down(out):
    site = out / "sites" / "a"
    with open_gateway(out, Limits(requests_a_second=0, burst=8)) as gate:
        connection = gate.connection(site)
        statuses = [send(connection, PULL, signed(site))[0] for _ in range(12)]
        assert statuses == [200] * 8 + [429] * 4
        assert send(gate.connection(out / "sites" / "b"), PULL, signed(out / "sites" / "b"))[0] == 200, "alone"


LINE, LENGTH, KEY = 0, 2, 3  # of a good request's head
LENGTHS = [b"-1", b"0x4", b"99999999999", b"4000", b"", b"four"]
ENCODINGS = [b"transfer-encoding: chunked", b"content-encoding: gzip", b"expect: 100-continue", b"upgrade: h2c"]
LINES = [b"POST", b"", b"POST / HTTP/9.9", b"GET /docs HTTP/1.1", b"POST /v1/control/x HTTP/1.1"]
SPOIL = {
    "length": lambda rng, head: head.__setitem__(LENGTH, b"content-length: " + rng.choice(LENGTHS)),
    "two lengths": lambda rng, head: head.append(b"content-length: 5"),
    "encoding": lambda rng, head: head.append(rng.choice(ENCODINGS)),
    "noise": lambda rng, head: head.insert(rng.randrange(5), rng.randbytes(rng.randrange(1, 60)) + b"\0"),
    "long": lambda rng, head: head.append(b"x: " + b"a" * rng.randrange(16_384, 40_000)),
    "line": lambda rng, head: head.__setitem__(LINE, rng.choice(LINES)),
    "cut": lambda rng, head: head.__delitem__(slice(rng.randrange(1, 4), None)),
    "key": lambda rng, head: head.__setitem__(KEY, b"flwr-public-key: " + rng.randbytes(20).hex().encode()),
    "zeros": lambda rng, head: head.__setitem__(slice(None), [line + b"\0" for line in head]),
}


def malformed(rng: random.Random, key: str) -> bytes:
    """A request that is not one: a good one with something wrong, or nothing of the kind."""
    if rng.random() < 0.2:
        return rng.choice([rng.randbytes(rng.randrange(1, 5000)), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
    signature = f"flwr-public-key: {key}".encode()
    head = [b"POST /v1/fleet/pull-messages HTTP/1.1", b"host: x", b"content-length: 4", signature]
    SPOIL[rng.choice(list(SPOIL))](rng, head)
    return b"\r\n".join(head) + b"\r\n\r\nabcd"


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_thousand_malformed_requests_reach_nobody_and_leave_nothing_behind(out):
    """Half of them over TLS with a good certificate; memory stays flat, and the other site is served meanwhile."""
    site, other = out / "sites" / "a", out / "sites" / "b"
    rng, key = random.Random(0), signed(site)["flwr-public-key"]
    with open_gateway(out, Limits(burst=1e6)) as gate:
        context, served = tls_for_site(site), gate.connection(other)
        for _ in range(20):
            gate.raw()  # half open, all the time
        size = 0
        for number in range(1000):
            if number == 200:
                size = resident()
            try:
                with gate.raw(context if number % 2 else None) as peer:
                    peer.sendall(malformed(rng, key))
                    peer.shutdown(socket.SHUT_WR)
                    while peer.recv(65536):
                        pass
            except (OSError, ssl.SSLError):
                pass
            if number % 100 == 0:
                assert send(served, PULL, signed(other))[0] == 200
        reached = {headers["flwr-public-key"] for _, headers, _ in gate.link.seen}
        assert reached == {signed(other)["flwr-public-key"]}, "nothing of the others"
        assert resident() - size < 16e6
        assert gate.gateway.bytes == 0
    assert not gate.gateway.addresses, "nobody is counted as connected any more"

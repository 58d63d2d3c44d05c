"""The gateway: who is let in, what is passed on, and what neither numbers nor nonsense can do to it."""

from __future__ import annotations

import http.client
import random
import shutil
import socket
import ssl
import time
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs fedxl[flower]")

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from flwr.proto.fleet_pb2 import ActivateNodeResponse, PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Message,
    Metadata,
    ObjectTree,
    PullObjectRequest,
)
from flwr.proto.node_pb2 import Node

from fedxl.deploy.provision import approval, folders, keys, members, tls
from fedxl.deploy.server import door, fleet
from fedxl.deploy.server.gateway import Limits
from fedxl.deploy.site import node
from tests.deploy.doors import PULL, asked, opened, signed

PUSH, OBJECT = "/v1/fleet/push-messages", "/v1/fleet/push-object"
CLOSED = (OSError, ssl.SSLError, http.client.HTTPException)


@pytest.fixture(scope="module")
def federation(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("f") / "x"
    folders.init(["a", "b"], place)
    return place


@pytest.fixture
def out(federation, tmp_path) -> Path:
    """A copy, to spoil."""
    return Path(shutil.copytree(federation, tmp_path / "f"))


def test_a_sites_request_is_passed_on_as_it_is_without_what_is_not_flowers(out):
    with opened(out) as gate:
        connection = gate.connection(out / "sites" / "a")
        more = {"cookie": "mine", "content-type": "x" * 10_000, "x-forwarded-for": "1.2.3.4", "flwr-timestamp": "now"}
        headers = signed(out / "sites" / "a") | more
        for _ in range(3):  # on one connection
            assert asked(connection, PULL, headers, b"\0\1body") == (200, b"")
        path, passed, body = gate.link.seen[-1]
        assert (path, body, len(gate.link.seen)) == (PULL, b"\0\1body", 3)
        ours = {"host", "content-length", "content-type", "accept"}
        assert passed.keys() == ours | {"flwr-public-key", "flwr-timestamp"}
        assert passed["content-type"] == "application/protobuf", "whatever the site says: SuperLink would log it"
        connection.request("POST", PULL, b"", headers)
        answer = connection.getresponse()
        assert answer.headers["server"] is None, "it does not tell what stands behind it"


def strangers(out: Path, place: Path) -> dict[str, ssl.SSLContext | None]:
    """Ways to knock for somebody who does not belong."""
    plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    plain.load_verify_locations(out / "server" / "ca.crt")

    def showing(name: str, key: keys.Key, certificate) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(out / "server" / "ca.crt")
        (place / f"{name}.key").write_bytes(keys.private_pem(key))
        (place / f"{name}.crt").write_bytes(keys.certificate_pem(certificate))
        context.load_cert_chain(place / f"{name}.crt", place / f"{name}.key")
        return context

    key, (other_key, other) = keys.new_key(), keys.authority()
    mine = key.public_key()
    ours = keys.read_key(out / "authority" / "ca.key"), keys.read_certificate(out / "authority" / "ca.crt")
    server_key = keys.read_key(out / "server" / "server.key")
    return {
        "no TLS": None,
        "no certificate": plain,
        "another authority": showing("other", key, keys.site_certificate("a", mine, other_key, other)),
        "of our authority, never approved": showing("new", key, keys.site_certificate("a", mine, *ours)),
        "expired": showing("old", key, expired(mine, *ours)),
        "the server's own": showing("server", server_key, keys.read_certificate(out / "server" / "server.crt")),
    }


def expired(key, issuer_key: keys.Key, issuer: x509.Certificate) -> x509.Certificate:
    """As a site's certificate was, a year and a day ago."""
    good = keys.site_certificate("a", key, issuer_key, issuer)
    ago = timedelta(days=keys.DAYS + 1)
    builder = x509.CertificateBuilder(
        issuer_name=good.issuer,
        subject_name=good.subject,
        public_key=key,
        serial_number=good.serial_number,
        not_valid_before=good.not_valid_before_utc - ago,
        not_valid_after=good.not_valid_after_utc - ago,
        extensions=list(good.extensions),
    )
    return builder.sign(issuer_key, hashes.SHA384())


def test_nobody_gets_in_who_does_not_belong(out, tmp_path):
    with opened(out) as gate:
        for kind, context in strangers(out, tmp_path).items():
            with pytest.raises(CLOSED):  # noqa: PT012
                peer = gate.raw(context)
                peer.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
                if not peer.recv(100):
                    raise ConnectionError(kind)
        assert not gate.link.seen
        assert any("expired" in line for line in gate.lines), gate.lines
        assert asked(gate.connection(out / "sites" / "b"), PULL, signed(out / "sites" / "b"))[0] == 200


ELSEWHERE = [
    "/", "/docs", "/openapi.json", "/health", "/v1/control/list-runs", "/v1/control/start-run",
    "/v1/control/register-node", "/v1/control/stream-logs", "/v1/runtime/acquire-task", "/v1/runtime/pull-task-input",
    "/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "//v1/fleet/pull-messages",
    "/v1/fleet/pull-messages/", "/v1/fleet/pull-messages?x=1", "/V1/FLEET/PULL-MESSAGES",
    "http://superlink/v1/control/list-runs", "/v1/fleet/pull-messages/../../control/list-runs",
    "/v1/fleet/get-fab", "/v1/fleet/register-node", "/v1/fleet/unregister-node", "/v1/fleet/get-run", "*",
]  # fmt: skip


def test_a_site_with_a_valid_key_reaches_nothing_but_what_it_needs(out):
    with opened(out) as gate:
        site = out / "sites" / "a"
        for path in ELSEWHERE:
            assert asked(gate.connection(site), path, signed(site))[0] == 404, path
            gate.peers.close()
        for how in ("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"):
            assert asked(gate.connection(site), PULL, signed(site), how=how)[0] == 404, how
            gate.peers.close()
        assert not gate.link.seen


def test_every_path_that_flower_serves_is_known():
    """If a new version of Flower opens a path for nodes, somebody has to decide whether sites need it."""
    from flwr.superlink.routers.fleet.router import router

    assert {route.path for route in router.routes} == fleet.ALLOWED.keys() | fleet.WITHHELD


def test_a_request_is_signed_with_the_key_of_its_connection(out):
    with opened(out) as gate:
        a, b = out / "sites" / "a", out / "sites" / "b"
        assert asked(gate.connection(a), PULL, signed(b))[0] == 401
        assert asked(gate.connection(a), PULL, {**signed(a), "flwr-public-key": "%%%"})[0] == 401
        assert asked(gate.connection(a), PULL, {})[0] == 401
        assert not gate.link.seen


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
    with opened(out) as gate:
        a, b = (out / "sites" / name for name in "ab")
        for path, body in ((fetch, part), (confirm, done), (fetch, b"\xff"), (confirm, b"\xff")):
            assert asked(gate.connection(a), path, signed(a), body)[0] == 403
        gate.link.answers[PULL] = handed_out(0)
        assert asked(gate.connection(a), PULL, signed(a))[0] == 200
        for path, body in ((fetch, part), (confirm, done)):
            assert asked(gate.connection(a), path, signed(a), body)[0] == 200
            assert asked(gate.connection(b), path, signed(b), body)[0] == 403
        assert [path for path, _, _ in gate.link.seen] == [PULL, fetch, confirm]


def test_a_site_replies_once_to_what_it_was_sent_and_in_its_own_name(out):
    with opened(out) as gate:
        a, b = (out / "sites" / name for name in "ab")
        connection, headers = gate.connection(a), signed(a)
        assert asked(connection, PUSH, headers, pushed(1, "m0"))[0] == 403, "it has been sent nothing"
        gate.link.answers[PULL] = handed_out(0)
        assert asked(connection, PULL, headers)[0] == 200
        refused = {
            "to another's message": pushed(1, "m9"),
            "in another's name": pushed(1, "m0", source=8),
            "too many objects": pushed(1, "m0", objects=fleet.MOST_OBJECTS + 1),
            "several": pushed(1, "m0") + pushed(2, "m0"),  # which protobuf reads as one with two of each
            "nonsense": b"\xff\xff\xff",
            **{kind: replying(tree) for kind, tree in TREES.items()},
        }
        for kind, body in refused.items():
            assert asked(connection, PUSH, headers, body)[0] == 403, kind
        assert asked(gate.connection(b), PUSH, signed(b), pushed(1, "m0"))[0] == 403, "the other site was not asked"
        before = len(gate.link.seen)
        assert asked(connection, PUSH, headers, pushed(1, "m0"))[0] == 200
        assert asked(connection, PUSH, headers, pushed(1, "m0"))[0] == 200, "the same again, after a lost connection"
        assert asked(connection, PUSH, headers, pushed(2, "m0"))[0] == 403, "another reply to the same message"
        assert asked(connection, PUSH, headers, pushed(1, "m0", objects=3))[0] == 403, "the same with other objects"
        assert len(gate.link.seen) == before + 2
        for _ in range(fleet.MOST_REPEATS - 1):
            assert asked(connection, PUSH, headers, pushed(1, "m0"))[0] == 200
        assert asked(connection, PUSH, headers, pushed(1, "m0"))[0] == 403, "and not without end"


def test_a_reply_has_no_more_bytes_than_it_may(out):
    with opened(out, reply_bytes=100_000) as gate:
        site = out / "sites" / "a"
        connection, headers, piece = gate.connection(site), signed(site), bytes(30_000)
        assert asked(connection, OBJECT, headers, piece)[0] == 403, "nothing was asked of it"
        gate.link.answers[PULL] = handed_out(0)
        asked(connection, PULL, headers)
        asked(connection, PUSH, headers, pushed(1, "m0"))
        asked(connection, PUSH, headers, pushed(1, "m0"))  # which grants nothing more
        statuses = [asked(connection, OBJECT, headers, piece)[0] for _ in range(10)]
        assert statuses == [200] * 5 + [403] * 5  # 100,000 and a tenth, and 64 KiB for heads
        large = signed(site) | {"content-length": str(7 * 2**20)}
        assert asked(gate.connection(site), OBJECT, large)[0] == 413, "by what it says, before it is read"


def test_a_revoked_site_is_out_at_once_and_an_approved_one_in(out):
    with opened(out) as gate:
        site = out / "sites" / "a"
        connection, headers = gate.connection(site), signed(site)
        assert asked(connection, PULL, headers)[0] == 200
        approval.revoke(out, "a")
        assert asked(connection, PULL, headers)[0] == 403, "on the connection that it has"
        with pytest.raises(CLOSED):
            asked(gate.connection(site), PULL, headers)
        file, shown = approval.request(site)
        approval.accept(site, approval.approve(out, file, 100, lambda name, found: found == shown))
        assert asked(gate.connection(site), PULL, headers)[0] == 200


def test_a_body_that_takes_its_time_does_not_outlast_a_revocation(out):
    site = out / "sites" / "a"
    with opened(out) as gate:
        peer = gate.raw(tls.for_site(site))
        key = signed(site)["flwr-public-key"]
        head = f"POST {PULL} HTTP/1.1\r\nhost: x\r\ncontent-length: 8\r\nflwr-public-key: {key}\r\n\r\nhalf"
        peer.sendall(head.encode())
        while not gate.gateway.bytes:  # until the gateway waits for the other half
            time.sleep(0.01)
        approval.revoke(out, "a")
        peer.sendall(b"half")
        assert peer.recv(12) == b"HTTP/1.1 403"
        assert not gate.link.seen


def test_an_entry_that_cannot_be_read_lets_nobody_in_and_disturbs_nobody_else(out):
    with opened(out) as gate:
        (out / "server" / members.FOLDER / "a.json").write_text("{")
        with pytest.raises(CLOSED):
            asked(gate.connection(out / "sites" / "a"), PULL, signed(out / "sites" / "a"))
        assert asked(gate.connection(out / "sites" / "b"), PULL, signed(out / "sites" / "b"))[0] == 200
        assert any("cannot read" in line and "approve the site again" in line for line in gate.lines)


def test_a_renewed_certificate_of_the_server_is_used_without_a_restart(out, monkeypatch):
    monkeypatch.setattr(door, "WATCH", 0.05)
    with opened(out) as gate:
        context = tls.for_site(out / "sites" / "a")

        def shown() -> bytes | None:
            with gate.raw(context) as peer:
                return peer.getpeercert(True)

        before = shown()
        renewed = approval.renew(out, days=20)
        while (now := shown()) == before:
            time.sleep(0.05)
        assert now == renewed.public_bytes(Encoding.DER)


SHORT = Limits(
    handshake=0.3, head=0.3, idle=0.6, slowest=1e6, of_an_address=40, of_a_site=3, requests_a_second=0, burst=8
)


def test_slow_and_half_open_connections_are_closed_and_too_many_refused(out):
    site = out / "sites" / "a"
    with opened(out, SHORT) as gate:
        context = tls.for_site(site)
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
    with opened(out, limits) as gate:
        for _ in range(3):
            assert asked(gate.connection(site), PULL, signed(site))[0] == 200
        with pytest.raises(CLOSED):
            asked(gate.connection(site), PULL, signed(site))


def test_a_site_that_asks_without_end_is_slowed_down(out):
    site = out / "sites" / "a"
    with opened(out, Limits(requests_a_second=0, burst=8)) as gate:
        connection = gate.connection(site)
        statuses = [asked(connection, PULL, signed(site))[0] for _ in range(12)]
        assert statuses == [200] * 8 + [429] * 4
        assert asked(gate.connection(out / "sites" / "b"), PULL, signed(out / "sites" / "b"))[0] == 200, "alone"


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
    with opened(out, Limits(burst=1e6)) as gate:
        context, served = tls.for_site(site), gate.connection(other)
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
                assert asked(served, PULL, signed(other))[0] == 200
        reached = {headers["flwr-public-key"] for _, headers, _ in gate.link.seen}
        assert reached == {signed(other)["flwr-public-key"]}, "nothing of the others"
        assert resident() - size < 16e6
        assert gate.gateway.bytes == 0
    assert not gate.gateway.addresses, "nobody is counted as connected any more"


def test_a_server_that_is_starting_says_so(out):
    with opened(out) as gate:
        gate.gateway.link = out / "nowhere.sock"
        status, said = asked(gate.connection(out / "sites" / "a"), PULL, signed(out / "sites" / "a"))
        assert (status, said) == (503, b"fedxl: the server is starting, or busy\n")


def test_certificates_end(out):
    certificate = keys.read_certificate(out / "sites" / "a" / "site.crt")
    end = certificate.not_valid_after_utc
    assert keys.check_dates(certificate, "site a", "renew", end - timedelta(days=40)) is None
    soon = keys.check_dates(certificate, "site a", "renew", end - timedelta(days=29, hours=-1))
    assert soon == f"the certificate of site a expires on {end:%Y-%m-%d}, in 28 day(s); renew"
    with pytest.raises(ValueError, match=f"site a expired on {end:%Y-%m-%d}; renew"):
        keys.check_dates(certificate, "site a", "renew", end)


def test_a_site_takes_the_pinned_key_alone_for_the_servers(out):
    """Whoever has stolen the authority's key can sign a certificate for the server's name, but not with its key."""
    site = out / "sites" / "a"
    with opened(out) as gate:
        address = ("127.0.0.1", gate.port)
        gate.link.answers["/v1/fleet/activate-node"] = ActivateNodeResponse(node_id=7).SerializeToString()
        (site / "flower").mkdir()
        with node.connected(site, *address) as link:
            assert link.node.node_id == 7
        thief = keys.new_key()
        issuer = keys.read_key(out / "authority" / "ca.key"), keys.read_certificate(out / "authority" / "ca.crt")
        forged = keys.server_certificate(thief.public_key(), *issuer, ["127.0.0.1"])
        (out / "server" / "server.crt").write_bytes(keys.certificate_pem(forged))
        (out / "server" / "server.key").write_bytes(keys.private_pem(thief))
    pinned = r"another one than connection\.toml has pinned"
    with (
        opened(out) as gate,
        pytest.raises(ssl.SSLError, match=pinned),
        node.connected(site, "127.0.0.1", gate.port),
    ):
        pass

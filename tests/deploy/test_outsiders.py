"""What outsiders can do to the server's one port, over real TLS connections: they keep no site out."""

from __future__ import annotations

import itertools
import os
import random
import socket
import ssl
from contextlib import suppress
from pathlib import Path

import pytest
import torch

pytest.importorskip("cryptography", reason="needs fedxl[deploy]")

from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.provision import approval, keys
from fedxl.deploy.provision.connection import tls_for_site
from fedxl.deploy.transport.tls import listener
from fedxl.deploy.transport.tls.frames import HEAD, Head, chunks
from fedxl.deploy.transport.tls.listener import Limits
from tests.conftest import Clock, until
from tests.deploy.hubs import CLOSED, Peer, resident, serving

ANSWER = Envelope({"ok": True}, {"y": torch.ones(2)})
SHORT = Limits(handshake=0.3, head=0.3, min_bytes_per_second=1e6)


def test_slow_and_half_open_connections_are_closed(out):
    with serving(out, SHORT) as server:
        for sent in (b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n", os.urandom(300)):
            with server.raw() as peer:
                peer.sendall(sent)
                assert Peer(peer).closed(), sent
        for part in (HEAD.size // 2, HEAD.size + 10):
            peer = server.connect("a")
            server.send("a")
            head, _ = peer.request()
            whole = b"".join(chunks(head.ticket, head.kind, [bytes(1000)]))
            peer.socket.sendall(whole[:part])
            assert peer.closed(), "it stopped in the middle of its head, or of its message"


def test_too_many_connections_are_refused_before_the_handshake_and_others_are_served(out):
    with serving(out, Limits(connections=8, handshakes_per_address=4, burst=1e6)) as server:
        peer = server.connect("a")
        crowd = [server.raw() for _ in range(30)]
        assert until(lambda: any("opens too many connections" in line for line in server.lines))
        ticket = server.send("a")
        head, _ = peer.request()
        peer.answer(head, ANSWER)
        assert server.reply(ticket).facts == ANSWER.facts
        for each in crowd:
            each.close()
        assert until(lambda: not server.hub.listener.handshakes)
        server.connect("b")


def test_silent_outsiders_keep_no_approved_site_out(out, monkeypatch):
    """They take each other's places, one address those of another, and sites have places of their own."""
    addresses = itertools.cycle(f"2001:db8:0:{number}::1" for number in range(4))
    monkeypatch.setattr(listener, "_origin", lambda address, origin=listener._origin: origin(next(addresses)))
    with serving(out, Limits(connections=2, handshakes=8, handshakes_per_address=4, burst=1e6)) as server:
        crowd = [server.raw() for _ in range(16)]
        assert until(lambda: any("/64 opens too many connections" in line for line in server.lines))
        monkeypatch.setattr(listener, "_origin", lambda address: "a site's")
        server.connect("a")
        server.connect("b")
        assert len(server.hub.listener.handshakes) <= 8
        for each in crowd:
            each.close()


@pytest.mark.parametrize(
    ("address", "origin"),
    [("192.0.2.7", "192.0.2.7"), ("::ffff:192.0.2.7", "192.0.2.7"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
     ("fe80::1%eth0", "fe80::/64"), ("", "")],
)  # fmt: skip
def test_what_counts_as_one_address(address, origin):
    assert listener._origin(address) == origin


def test_addresses_are_forgotten_in_one_pass_per_second(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(listener, "time", clock)
    many = listener.Listener(None, None, None, Limits(), lambda line: None)
    many.buckets = {str(number): listener.Bucket(1.0, -100.0) for number in range(10_001)}
    assert many._has_room("x")
    assert len(many.buckets) == 10_002, "the last pass was less than a second ago"
    clock.sleep(2)
    assert many._has_room("x")
    assert len(many.buckets) == 1


def test_an_address_that_connects_without_end_is_slowed_down(out):
    with serving(out, Limits(burst=5, connections_per_second=0)) as server:
        for _ in range(5):
            server.raw(tls_for_site(server.site("a"))).close()
        with pytest.raises(CLOSED):
            server.raw(tls_for_site(server.site("a")))


def strangers(out: Path) -> dict[str, ssl.SSLContext]:
    """Contexts with everything but an approved key."""
    site = out / "sites" / "a"
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    old = tls_for_site(site)
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    found = {"no certificate": anybody, "TLS 1.2": old}
    key, issuer = keys.new_key(), approval.read_authority(out / "authority")
    for name, signed in {
        "another authority's": keys.site_certificate("a", key.public_key(), keys.new_authority()),
        "a key that is not approved": keys.site_certificate("a", key.public_key(), issuer),
        "an expired one": keys.site_certificate("a", key.public_key(), issuer, days=0),
    }.items():
        place = out / name
        place.mkdir()
        (place / "site.key").write_bytes(keys.private_pem(key))
        (place / "site.crt").write_bytes(keys.certificate_pem(signed))
        (place / "ca.crt").write_bytes((site / "ca.crt").read_bytes())
        found[name] = tls_for_site(place)
    server = out / "as the server"
    server.mkdir()
    for name in ("key", "crt"):
        (server / f"site.{name}").write_bytes((out / "server" / f"server.{name}").read_bytes())
    (server / "ca.crt").write_bytes((site / "ca.crt").read_bytes())
    found["the server's own certificate"] = tls_for_site(server)
    return found


def test_only_approved_keys_get_in(out):
    with serving(out) as server:
        for name, context in strangers(out).items():
            with suppress(*CLOSED), server.raw(context) as peer:
                peer.sendall(b"\0" * HEAD.size)  # which ends the connection of whoever got in
                assert Peer(peer).closed()  # with TLS 1.3 a client is refused after its handshake
            assert not server.hub.connected, name
        server.connect("a")


def noise(rng: random.Random, head: Head) -> bytes:
    """Something that is no reply to this request, or hardly one."""
    declared = rng.choice([0, 1, 100, 2**20, 2**63])
    return rng.choice([
        rng.randbytes(rng.randrange(1, 400)),
        HEAD.pack(rng.randbytes(16), head.kind, declared) + rng.randbytes(50),
        HEAD.pack(head.ticket, head.kind, 60) + rng.randbytes(60),
        HEAD.pack(head.ticket, rng.randrange(256), declared) + rng.randbytes(20),
        HEAD.pack(head.ticket, head.kind, declared)[: rng.randrange(HEAD.size)],
    ])  # fmt: skip


def test_a_thousand_malformed_replies_harm_nobody_and_leave_nothing_behind(out):
    """A third of them by an approved site, the others without TLS or without a certificate; b is served meanwhile."""
    rng = random.Random(0)
    with serving(out, Limits(burst=1e6, handshakes_per_address=200)) as server:
        other, stranger = server.connect("b"), next(iter(strangers(out).values()))
        half_open = [server.raw() for _ in range(20)]
        size = 0
        for number in range(1000):
            if number == 200:
                size = resident()
            try:
                if number % 3 == 0:
                    peer = server.connect("a")
                    ticket = server.send("a")
                    head, _ = peer.request()
                    peer.socket.sendall(noise(rng, head))
                    peer.socket.shutdown(socket.SHUT_RDWR)
                    server.hub.forget([ticket])
                else:
                    with server.raw(stranger if number % 3 == 1 else None) as plain:
                        plain.sendall(rng.randbytes(rng.randrange(1, 5000)))
                        plain.shutdown(socket.SHUT_RDWR)
            except CLOSED:
                pass
            if number % 100 == 0:
                ticket = server.send("b")
                head, _ = other.request()
                other.answer(head, ANSWER)
                assert server.reply(ticket).facts == ANSWER.facts
        assert resident() - size < 32e6
        for each in half_open:
            each.close()
        assert until(lambda: not server.hub.listener.handshakes), "nobody is counted as connecting any more"
        assert not server.hub.requests
        assert len(server.lines) < 400, "the log is bounded"

"""The server's end of the default transport, over real TLS connections."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cryptography", reason="needs fedxl[deploy]")

from fedxl.deploy.protocol.envelope import KINDS, Envelope, Failure
from fedxl.deploy.protocol.message import encode
from fedxl.deploy.provision import approval, keys
from fedxl.deploy.provision.connection import tls_for_site
from fedxl.deploy.transport.tls.frames import HEAD, Head
from fedxl.deploy.transport.tls.hub import Hub, Link, Request
from fedxl.deploy.transport.tls.listener import Limits
from fedxl.deploy.transport.tls.listener import Peer as BarePeer
from tests.conftest import PATIENCE, until
from tests.deploy.hubs import CLOSED, Peer, resident, serving

ANSWER = Envelope({"ok": True}, {"y": torch.ones(2)})


def test_requests_go_to_their_sites_and_replies_come_back(out):
    with serving(out) as server:
        a, b = server.connect("a"), server.connect("b")
        tickets = {name: server.send(name) for name in "ab"}
        for name, peer in (("b", b), ("a", a)):
            head, request = peer.request()
            assert request.facts == {"to": name}
            peer.answer(head, Envelope({"from": name}, {"y": torch.ones(2)}))
        for name in "ab":
            assert server.reply(tickets[name]).facts == {"from": name}
        assert not list(server.hub.replies(list(tickets.values()))), "each reply is returned once"


def test_a_lost_connection_gets_its_request_again_under_the_same_ticket(out):
    with serving(out) as server:
        first = server.connect("a")
        ticket = server.send("a")
        head, _ = first.request()
        first.socket.close()
        second = server.connect("a")
        again, _ = second.request()
        assert again == head
        second.answer(again, ANSWER)
        assert server.reply(ticket).facts == ANSWER.facts


def test_a_hello_is_not_sent_to_the_next_connection(out):
    with serving(out) as server:
        first = server.connect("a")
        server.send("a", kind="hello")
        first.request()
        first.socket.close()
        second = server.connect("a")
        server.send("a")
        head, _ = second.request()
        assert KINDS[head.kind] == "train"


def test_a_site_that_comes_back_is_another_node_and_takes_the_place_of_the_old_connection(out):
    with serving(out) as server:
        old = server.connect("a")
        node = server.node("a")
        server.connect("a")
        assert server.node("a") != node
        assert old.closed()


def test_a_site_that_does_not_come_back_in_time_is_a_failure(out):
    with serving(out) as server:
        peer = server.connect("a")
        ticket = server.send("a", seconds=0.4)
        peer.request()
        peer.socket.close()
        found = server.reply(ticket)
        assert isinstance(found, Failure)
        assert "it lost its connection and was not back within 0.2 s" in found.reason
        assert any("a has lost its connection" in line for line in server.lines)


def test_a_site_that_works_on_a_forgotten_request_is_away_until_it_has_replied(out):
    """Or each round would wait for it anew."""
    with serving(out) as server:
        peer = server.connect("a")
        late = server.send("a")
        head, _ = peer.request()
        assert server.node("a")
        server.hub.forget([late])
        assert server.node("a") is None
        peer.answer(head, ANSWER)
        assert until(lambda: server.node("a") is not None)
        assert not list(server.hub.replies([late])), "nobody waits for that reply any more"
        ticket = server.send("a")
        head, _ = peer.request()
        peer.answer(head, ANSWER)
        assert server.reply(ticket).facts == ANSWER.facts


def test_a_site_replies_once_to_what_it_was_sent_and_under_no_other_ticket(out):
    def answer_twice(peer: Peer, head: Head) -> None:
        peer.answer(head, ANSWER)
        peer.answer(head, ANSWER)

    lies = {
        "to what it was not sent": lambda peer, head: peer.answer(head._replace(ticket=bytes(16)), ANSWER),
        "of another kind": lambda peer, head: peer.answer(head._replace(kind=0), ANSWER),
        "twice": answer_twice,
        "of an unknown kind": lambda peer, head: peer.socket.sendall(HEAD.pack(head.ticket, 200, 0)),
    }
    with serving(out) as server:
        for lie, tell in lies.items():
            peer = server.connect("a")
            server.send("a")
            head, _ = peer.request()
            with suppress(*CLOSED):  # it may be cut off while it speaks
                tell(peer, head)
            assert peer.closed(), lie
        unasked = server.connect("b")
        unasked.answer(head, ANSWER)
        assert unasked.closed(), "the other site was not asked"
        assert any("a sends a reply to what it was not sent" in line for line in server.lines)
        assert any("b sends a reply to what it was not sent" in line for line in server.lines)


def test_a_reply_that_is_too_large_is_refused_by_what_it_declares(out):
    with serving(out, megabytes=1.0) as server:
        peer = server.connect("a")
        ticket = server.send("a")
        head, _ = peer.request()
        peer.socket.sendall(HEAD.pack(head.ticket, head.kind, 2**40))
        found = server.reply(ticket)
        assert isinstance(found, Failure)
        assert "over the limit of 1 MB" in found.reason
        assert peer.closed()


def test_a_reply_is_no_larger_than_its_request_lets_it_be(out):
    """A hello of 1 GB is refused where a reply of 1 GB to `train` may be right."""
    with serving(out, megabytes=100.0) as server:
        peer = server.connect("a")
        ticket = server.send("a", most=2e6)
        head, _ = peer.request()
        peer.socket.sendall(HEAD.pack(head.ticket, head.kind, 2_000_001))
        assert "over the limit of 2 MB" in server.reply(ticket).reason
        assert peer.closed()


def test_replies_that_wait_take_so_much_memory_together_and_the_next_is_read_when_one_is_taken(out):
    with serving(out, megabytes=0.3) as server:  # 1.2 MB for replies together
        peers, tickets = {name: server.connect(name) for name in "ab"}, {}
        other = Request(b"taken", "b", 1, (), 1.0, 1.0, 0.0, reserved=900_000, reply=Failure("not taken yet"))
        server.hub.requests[other.ticket] = other
        for name, peer in peers.items():
            tickets[name] = server.send(name)
            head, _ = peer.request()
            peer.answer(head, Envelope({"from": name}, {"x": torch.zeros(50_000)}))
            if name == "a":
                assert until(lambda: server.request(tickets["a"]).reply is not None)
        assert until(lambda: len(server.hub.freed._waiters) == 1), "b's reply finds no place"
        assert not server.request(tickets["b"]).reserved
        assert server.reply(tickets["a"]).facts == {"from": "a"}
        assert server.reply(tickets["b"]).facts == {"from": "b"}


def test_a_reply_is_read_until_its_request_is_over_and_no_longer(out):
    """Or 1 GB might come in within 14 h."""
    with serving(out, Limits(head=0.2, min_bytes_per_second=1e-3)) as server:
        peer = server.connect("a")
        ticket = server.send("a", seconds=0.2)
        head, _ = peer.request()
        peer.socket.sendall(HEAD.pack(head.ticket, head.kind, 1_000_000) + bytes(1000))
        assert peer.closed()
        assert not server.request(ticket).reserved


def test_a_reply_that_is_forgotten_while_it_is_read_takes_no_memory_any_more(out):
    with serving(out, megabytes=100.0) as server:
        peer = server.connect("a")
        ticket = server.send("a")
        head, _ = peer.request()
        before = resident()
        peer.socket.sendall(HEAD.pack(head.ticket, head.kind, 80_000_000) + bytes(40_000_000))
        assert until(lambda: resident() > before + 30e6)
        server.hub.forget([ticket])
        peer.socket.sendall(bytes(5_000_000))
        assert until(lambda: resident() < before + 20e6)
        peer.socket.sendall(bytes(35_000_000))
        assert until(lambda: server.node("a") is not None), "it is free again"


def test_a_site_that_does_not_read_is_cut_off(out):
    with serving(out, megabytes=100.0) as server:
        peer = server.connect("a")
        ticket = server.send("a", seconds=1.0, size=20_000_000)  # more than the system keeps for us
        found = server.reply(ticket)
        assert isinstance(found, Failure)
        peer.socket.close()


def test_a_revoked_site_is_cut_off_and_what_it_was_sent_has_failed(out):
    with serving(out) as server:
        peer, other = server.connect("a"), server.connect("b")
        ticket, goes_on = server.send("a"), server.send("b")
        peer.request()
        approval.revoke(out, "a")
        assert peer.closed()
        found = server.reply(ticket)
        assert isinstance(found, Failure)
        assert found.reason == "it is no longer approved"
        assert "a" not in server.hub.approved()
        head, _ = other.request()
        other.answer(head, ANSWER)
        assert server.reply(goes_on).facts == ANSWER.facts
        with pytest.raises(CLOSED):
            Peer(server.raw(tls_for_site(server.site("a")))).read(1)


def test_one_look_at_who_is_approved_serves_all_connections(out, monkeypatch):
    """A look for each connection took 43 ms with 50 sites: with 500, revocation would have missed its second."""
    hub, looks, closed = Hub(out / "server", 10.0, say=lambda line: None), list[int](), list[str]()
    names = [f"s{number}" for number in range(60)]

    def connection(name: str) -> Link:
        writer = SimpleNamespace(transport=SimpleNamespace(abort=lambda: closed.append(name)))
        return Link(f"{name}/1", BarePeer(name, name.encode(), datetime.max.replace(tzinfo=UTC), None, writer))

    hub.connections = {name: connection(name) for name in names}
    hub.members.by_key = {name.encode(): name for name in names if name != "s7"}
    monkeypatch.setattr(hub.members, "refresh", lambda: looks.append(1))
    hub._drop_revoked()
    hub.loop.close()
    assert (closed, looks) == (["s7"], [1])


def fail(*args: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("broken", ["iterdir", "stat", "read_text"])
def test_a_failing_disk_drops_nobody_and_does_not_end_the_run(out, monkeypatch, broken):
    lines: list[str] = []
    hub = Hub(out / "server", 10.0, say=lines.append)
    hub.loop.close()
    file = out / "server" / "members" / "a.json"
    before = dict(hub.members.by_key)
    with monkeypatch.context() as patch:
        if broken == "read_text":
            file.write_text(file.read_text() + " ")  # or nothing would be read
        patch.setattr(Path, broken, fail)
        hub._drop_revoked()
        assert hub.members.by_key == before
        assert sorted(hub.approved()) == ["a", "b"]
        assert any("cannot read" in line and "Input/output error" in line for line in lines)
    file.unlink()
    hub._drop_revoked()
    assert sorted(hub.approved()) == ["b"], "once the disk works again"


def test_a_folder_of_members_that_has_gone_is_a_failing_disk_and_one_that_never_was_holds_nobody(out):
    members = approval.Members(out / "server")
    members.refresh()
    (out / "server" / "members").rename(out / "elsewhere")
    with pytest.raises(FileNotFoundError):
        members.refresh()
    assert sorted(members.approved) == ["a", "b"]
    fresh = approval.Members(out / "server")
    fresh.refresh()
    assert not fresh.approved


def test_a_site_that_was_back_has_the_whole_time_to_come_back_again(out):
    """The timer of the first loss must not end the second."""
    with serving(out) as server:
        peer = server.connect("a")
        server.send("a")
        peer.socket.close()
        assert until(lambda: "a" in server.hub.waiting)
        first = server.hub.waiting["a"]
        peer = server.connect("a")
        assert first.cancelled()
        assert not server.hub.waiting
        peer.socket.close()
        assert until(lambda: "a" in server.hub.waiting)
        assert server.hub.waiting["a"] is not first


def test_a_settled_request_of_a_revoked_site_wakes_nobody_again(out):
    with serving(out) as server:
        server.connect("a")
        server.send("a")
        approval.revoke(out, "a")
        assert until(lambda: any(each.reply for each in server.hub.requests.values()) and not server.node("a"))
        server.hub.news = False
        server.hub._drop_revoked()
        assert not server.hub.news


def test_other_threads_may_use_the_hub_while_requests_are_encoded(out, monkeypatch):
    free = []

    def look(envelope: Envelope) -> list[bytes]:
        with ThreadPoolExecutor(1) as other:
            free.append(other.submit(server.hub.changed.acquire, False).result())
            other.submit(server.hub.changed.release).result()
        return encode(envelope)

    monkeypatch.setattr("fedxl.deploy.transport.tls.hub.encode", look)
    with serving(out) as server:
        server.connect("a")
        server.send("a")
    assert free == [True]


@pytest.mark.parametrize("direction", ["while it sends", "while it receives"])
def test_revocation_cuts_a_stream_in_the_middle(out, direction):
    with serving(out, megabytes=1000.0) as server:
        peer = server.connect("a")
        ticket = server.send("a", size=10 if direction == "while it sends" else 20_000_000)
        head = Head.parse(peer.read(HEAD.size))
        if direction == "while it sends":
            peer.read(head.length)
            peer.socket.sendall(HEAD.pack(head.ticket, head.kind, 500_000_000) + bytes(100_000))
        approval.revoke(out, "a")
        found = server.reply(ticket)
        assert isinstance(found, Failure)
        assert found.reason == "it is no longer approved"
        assert peer.closed()


def test_a_renewed_certificate_is_used_without_a_restart(out):
    def serial(server) -> int:
        with server.raw(tls_for_site(server.site("a"))) as peer:
            return keys.x509.load_der_x509_certificate(peer.getpeercert(binary_form=True)).serial_number

    with serving(out) as server:
        before = serial(server)
        approval.renew(out)
        assert until(lambda: serial(server) != before)


def test_a_hub_that_stops_working_ends_the_run_and_does_not_hang(out):
    with serving(out) as server:
        server.hub.members.folder = None  # a bug
        with pytest.raises(RuntimeError, match="the listener has stopped"):
            server.hub.wait(PATIENCE)
        with pytest.raises(RuntimeError, match="the listener has stopped"):
            server.hub.nodes()

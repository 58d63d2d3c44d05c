"""Attacks on a real deployment: by an outsider, a site with a valid key, another local user, a hostile server."""

from __future__ import annotations

import os
import pickle
import ssl
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("cryptography", reason="needs fedxl[deploy]")

from fedxl import UserError
from fedxl.deploy import processes
from fedxl.deploy.protocol.envelope import KINDS, Envelope, Failure
from fedxl.deploy.protocol.message import FAILURE
from fedxl.deploy.provision import approval, folders, keys
from fedxl.deploy.provision.connection import read_connection, tls_for_site
from fedxl.deploy.provision.settings import read_site
from fedxl.deploy.site import requests
from fedxl.deploy.transport.tls.frames import HEAD
from fedxl.deploy.transport.tls.site import Site, explain
from tests.conftest import until
from tests.deploy.deployment import Deployment
from tests.deploy.federated import SITES, assert_equals_simulator, config
from tests.deploy.hubs import CLOSED, Peer, Server, serving

# Run by another user of the machine: every secret and every state of the server and of a site.
OTHER_USER = """
import os, pathlib, sys
os.setgid(65534); os.setuid(65534)
folder = pathlib.Path(sys.argv[1])
server, site = folder / "server", folder / "sites" / "a"
reached = []
for path in [server / "server.key", server / "server.toml", server / "members" / "a.json",
             server / "run" / "sites.json", site / "site.key", site / "site.toml", site / "cache", site / "state"]:
    try:
        path.stat(); reached.append(str(path))
    except PermissionError:
        pass
print(reached)
"""


def attempts(federation: Deployment, context: ssl.SSLContext) -> list[bytes]:
    """What a connection is answered to several things that it might say."""
    server, answers = Server(None, federation.folder, federation.port), list[bytes]()
    for said in (
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        HEAD.pack(bytes(16), 0, 10) + bytes(10),
        HEAD.pack(bytes(16), 1, 2**62),
        pickle.dumps({"site": "a"}),
        bytes(100_000),
    ):
        with suppress(*CLOSED), server.raw(context) as peer:
            peer.sendall(said)
            while piece := peer.recv(65536):
                answers.append(piece)
    return answers


@pytest.mark.deploy
def test_an_outsider_a_site_and_another_user_get_nowhere_and_the_run_goes_on(tmp_path):
    experiment = config("fedxl2", rounds=3)
    tmp_path.chmod(0o755)
    with Deployment(tmp_path / "f", SITES, experiment) as federation:
        for name in ("server", *SITES):
            federation.start(name)
        federation.until(lambda: federation.round() >= 0, "the first round")
        anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
        assert not attempts(federation, anybody), "an outsider"
        if os.getuid() == 0:
            os.chmod(tmp_path.parent, 0o755)
            code = [sys.executable, "-I", "-c", OTHER_USER, str(tmp_path / "f")]
            found = subprocess.run(code, capture_output=True, text=True, cwd="/")
            assert found.stdout.strip() == "[]", f"another user: {found.stdout} {found.stderr}"
        assert listeners(federation) == {federation.port}, "the server's port and no other"
        federation.finished()
        assert_equals_simulator(federation.folder, experiment)
        assert federation.dropped() == []


def test_a_site_with_a_valid_key_is_told_nothing_that_it_was_not_sent(out):
    """Whatever it says first ends its connection. It sees no request of another site, and is sent none by asking."""
    with serving(out) as server:
        other = server.connect("b")
        ticket = server.send("b")
        head, _ = other.request()
        for said in (HEAD.pack(head.ticket, head.kind, 0), HEAD.pack(bytes(16), 0, 0), b"GET / HTTP/1.1\r\n\r\n" * 9):
            peer = server.connect("a")
            peer.socket.sendall(said)
            with pytest.raises(CLOSED):
                peer.read(1)
        other.answer(head, Envelope({"from": "b"}, {}))
        assert server.reply(ticket).facts == {"from": "b"}


def listeners(federation: Deployment) -> set[int]:
    """TCP ports on which any process of the federation listens, as /proc tells."""
    inodes = set()
    for process in federation.processes.values():
        for file in Path(f"/proc/{process.pid}/fd").glob("*"):
            with suppress(OSError):
                inodes.add(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                found.add(int(columns[1].rpartition(":")[2], 16))
    return found


class Mark:
    """Unpickled, it leaves a mark on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.deploy
def test_nothing_runs_at_a_site_of_what_a_hostile_server_sends(tmp_path):
    """A server of the right federation, with keys and all, that asks for code of its own to be run."""
    mark = tmp_path / "mark"
    with Deployment(tmp_path / "f", SITES[:1], config("fedxl2", cohort=0)) as federation:
        file = tmp_path / "f" / "server" / "connection.toml"
        with serving(tmp_path / "f", port=int(file.read_text().split("port = ")[1])) as server:
            federation.start("a")
            assert until(lambda: server.node("a") is not None, lambda: federation.processes["a"].poll() is None)
            code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
            facts = {"version": "0", "code": code, "config": f'{{"model": {{"name": "os:system"}}, "x": "{code}"}}'}
            tensor = torch.frombuffer(bytearray(pickle.dumps(Mark(mark))), dtype=torch.uint8)
            said = {}
            for kind in KINDS:
                [ticket] = server.hub.send({server.node("a"): Envelope(facts, {"x": tensor})}, kind, 3600.0)
                said[kind] = server.reply(ticket)
        assert said.pop("hello").facts["site"] == "a", "it says hello, and that is all"
        assert all(isinstance(reply, Failure) and reply.reason for reply in said.values()), said
        assert "they must be the same" in said["train"].reason
    assert not mark.exists(), "no code that was sent has run"


def test_a_kind_of_request_that_there_is_not_is_refused(out):
    """By the site, too: it trusts no server."""
    with serving(out) as server, server.raw(tls_for_site(server.site("a"))) as connection:
        site = Site(server.site("a"))
        answered = site.answer_all(connection)
        next(answered)
        assert until(lambda: server.node("a") is not None)
        peer = server.hub.connections["a"].peer
        server.hub.loop.call_soon_threadsafe(peer.writer.write, HEAD.pack(bytes(16), len(KINDS), 0))
        with pytest.raises(ValueError, match="a frame of an unknown kind"):
            next(answered)


def test_a_message_that_is_too_large_is_not_kept_by_a_site(out):
    file = out / "sites" / "a" / "site.toml"
    file.write_text(file.read_text().replace("[site]\n", "[site]\nmegabytes = 0.5\n"))
    with serving(out) as server:
        with server.raw(tls_for_site(server.site("a"))) as connection:
            answered = Site(server.site("a")).answer_all(connection)
            next(answered)
            assert until(lambda: server.node("a") is not None)
            ticket = server.send("a", size=10**6)
            next(answered)
            found = server.reply(ticket)
        assert isinstance(found, Failure)
        assert "a message of 4 MB is over the limit of 0.5 MB (megabytes)" in found.reason


def test_a_site_answers_the_same_request_once_and_repeats_what_it_said(out, monkeypatch):
    """The connection was lost on the reply's way: it is sent again, and not worked out again."""
    from fedxl.deploy.protocol.message import encode

    asked = []

    def work(file, kind, content):
        asked.append(kind)
        return encode(Envelope({FAILURE: f"answer {len(asked)}"}, {}))

    monkeypatch.setattr(requests, "answer", work)
    site = Site(out / "sites" / "a")
    with serving(out) as server:
        with server.raw(tls_for_site(server.site("a"))) as connection:
            answered = site.answer_all(connection)
            next(answered)
            assert until(lambda: server.node("a") is not None)
            ticket = server.send("a")
            Peer(connection).request()  # read by hand, and lost
        with server.raw(tls_for_site(server.site("a"))) as connection:
            answered = site.answer_all(connection)
            next(answered), next(answered)
            assert server.reply(ticket).reason == "answer 1"
            first = site.last[0]
            with server.hub.changed:  # or it could be sent before it has the old ticket
                again = server.send("a")
                server.hub.requests[first] = server.hub.requests.pop(bytes.fromhex(again))
                server.hub.requests[first].ticket = first
            next(answered)
            assert server.reply(first.hex()).reason == "answer 1"
    assert asked == ["train"]


def test_a_server_whose_key_is_not_the_pinned_one_is_refused(out):
    """Even with a certificate of the federation's authority: its key may have been stolen."""
    from fedxl.deploy.transport.tls.site import connect

    key = keys.new_key()
    signed = keys.server_certificate("127.0.0.1", key.public_key(), approval.read_authority(out / "authority"))
    (out / "server" / "server.crt").write_bytes(keys.certificate_pem(signed))
    (out / "server" / "server.key").write_bytes(keys.private_pem(key))
    with serving(out) as server:
        with (
            pytest.raises(OSError, match="not the one pinned") as error,
            connect(server.site("a"), replace(read_connection(server.site("a")), port=server.port)),
        ):
            pass
        assert "ask its operator" in explain(error.value)


def test_a_request_with_code_in_its_settings_is_refused(tmp_path):
    folders.init(["a"], tmp_path / "f", config=config("fedxl2"))
    mine = read_site(tmp_path / "f" / "sites" / "a" / "site.toml")
    facts = {"version": requests.__version__, "run": "0123456789abcdef", "config": '{"model": {"name": "os:system"}}'}
    with pytest.raises(UserError, match=r"does not allow the model 'os:system'; its site\.toml allows: mlp"):
        requests.train(mine, Envelope(facts, {}))


@pytest.mark.parametrize(
    ("open_to_others", "mode", "why"),
    [("server", 0o777, "others can write to"), ("server/members", 0o777, "others can write to"),
     ("server/server.key", 0o644, "server.key: chmod 600"), ("sites/a", 0o777, "others can write to"),
     ("sites/a/site.key", 0o640, "site.key: chmod 600")],
)  # fmt: skip
def test_a_party_whose_folder_was_opened_by_copying_does_not_start(tmp_path, open_to_others, mode, why):
    folders.init(["a"], tmp_path / "f")
    (tmp_path / "f" / open_to_others).chmod(mode)
    server = open_to_others.startswith("server")
    start, place = (processes.serve, "server") if server else (processes.join, "sites/a")
    with pytest.raises(UserError, match=why):
        start(tmp_path / "f" / place, print)


def test_a_party_runs_once_per_folder(tmp_path):
    refused = pytest.raises(UserError, match="is already running; stop it first")
    with processes.only_process(tmp_path), refused, processes.only_process(tmp_path):
        pass
    with processes.only_process(tmp_path):
        pass


def test_members_are_read_anew(tmp_path):
    folders.init(["a", "b"], tmp_path / "f")
    known = approval.Members(tmp_path / "f" / "server")
    assert known.refresh()
    assert not known.refresh()
    assert sorted(known.approved) == ["a", "b"]
    approval.revoke(tmp_path / "f", "a")
    assert known.refresh()
    assert sorted(known.by_key.values()) == ["b"]

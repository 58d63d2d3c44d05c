"""A hub on a port of its own for tests, and sites that speak to it over real TLS connections."""

from __future__ import annotations

import math
import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedxl.cli.processes import free_port
from fedxl.deploy.protocol.envelope import Envelope, Failure
from fedxl.deploy.protocol.message import decode, encode
from fedxl.deploy.provision.connection import tls_for_site
from fedxl.deploy.transport.tls.frames import HEAD, Head, chunks
from fedxl.deploy.transport.tls.hub import Hub, Request, open_hub
from fedxl.deploy.transport.tls.listener import Limits, listen
from tests.conftest import PATIENCE, until

CLOSED = (OSError, EOFError)


@dataclass
class Server:
    hub: Hub
    folder: Path  # of the federation
    port: int
    lines: list[str] = field(default_factory=list)  # its log
    opened: list[socket.socket] = field(default_factory=list)

    def site(self, name: str) -> Path:
        return self.folder / "sites" / name

    def raw(self, context: ssl.SSLContext | None = None) -> socket.socket:
        """A connection with TLS, or without if there is no context."""
        self.opened.append(socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE))
        if context is not None:
            self.opened.append(context.wrap_socket(self.opened[-1], server_hostname="127.0.0.1"))
        return self.opened[-1]

    def connect(self, name: str) -> Peer:
        """A connection of a site, once the hub knows of it."""
        before = self.node(name)
        peer = Peer(self.raw(tls_for_site(self.site(name))))
        assert until(lambda: self.node(name) not in (None, before)), self.lines
        return peer

    def node(self, name: str) -> str | None:
        return {site: node for node, site in self.hub.nodes().items()}.get(name)

    def send(
        self, name: str, kind: Any = "train", seconds: float = PATIENCE, size: int = 3, most: float = math.inf
    ) -> str:
        node = self.node(name)
        assert node
        [ticket] = self.hub.send({node: Envelope({"to": name}, {"x": torch.zeros(size)}, most)}, kind, seconds)
        return ticket

    def request(self, ticket: str) -> Request:
        return self.hub.requests[bytes.fromhex(ticket)]

    def reply(self, ticket: str) -> Envelope | Failure:
        found: Mapping[str, Envelope | Failure] = {}

        def arrived() -> bool:
            nonlocal found
            found = dict(self.hub.replies([ticket]))
            return bool(found)

        assert until(arrived), self.lines
        return found[ticket]


@dataclass
class Peer:
    """A site's end of a connection, spoken by hand."""

    socket: socket.socket

    def read(self, length: int) -> bytes:
        found = b""
        while len(found) < length:
            piece = self.receive(length - len(found))
            if not piece:
                raise EOFError
            found += piece
        return found

    def receive(self, most: int) -> bytes:
        """What has arrived, "" at the end. Silence is no end: `CLOSED` would hold it for one."""
        try:
            return self.socket.recv(most)
        except TimeoutError:
            raise AssertionError("the other side neither spoke nor closed") from None

    def request(self) -> tuple[Head, Envelope]:
        head = Head.parse(self.read(HEAD.size))
        return head, decode(self.read(head.length), 1000)

    def answer(self, head: Head, envelope: Envelope) -> None:
        for chunk in chunks(head.ticket, head.kind, encode(envelope)):
            self.socket.sendall(chunk)

    def closed(self) -> bool:
        """Wait until the other side closes."""
        with suppress(*CLOSED):
            while self.receive(65536):
                pass
        return True


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def serving(folder: Path, limits: Limits | None = None, megabytes: float = 10.0, port: int = 0) -> Iterator[Server]:
    port, lines = port or free_port(), list[str]()
    hub = Hub(folder / "server", megabytes, limits, lines.append)
    server = Server(hub, folder, port, lines)
    try:
        with listen("127.0.0.1", port) as listening, open_hub(hub, listening):
            yield server
    finally:
        for each in server.opened:
            each.close()

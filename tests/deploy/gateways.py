"""A gateway for tests: in this process, in front of a SuperLink that only writes down what reaches it."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import threading
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import h11

from fedxl.deploy.provision import keys
from fedxl.deploy.provision.connection import tls_for_site
from fedxl.deploy.provision.members import Members
from fedxl.deploy.server import gateway_process
from fedxl.deploy.server.gateway import Gateway, Limits

PULL = "/v1/fleet/pull-messages"
CLOSED = (OSError, ssl.SSLError, http.client.HTTPException)


@dataclass
class FakeLink:
    """Answers every request with 200 and, by path, a body."""

    responses: dict[str, bytes] = field(default_factory=dict)
    seen: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link, body = h11.Connection(h11.SERVER), b""
        head: h11.Request | None = None
        while True:
            event = link.next_event()
            if event is h11.NEED_DATA:
                link.receive_data(await reader.read(65536))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            else:
                break
        assert head is not None
        path = head.target.decode()
        self.seen.append((path, {n.decode(): v.decode() for n, v in head.headers}, body))
        answer = self.responses.get(path, b"")
        headers = [("content-length", str(len(answer))), ("server", "uvicorn"), ("content-type", "application/x")]
        writer.write(link.send(h11.Response(status_code=200, headers=headers)) or b"")
        writer.write((link.send(h11.Data(data=answer)) or b"") + (link.send(h11.EndOfMessage()) or b""))
        await writer.drain()
        writer.close()


@dataclass
class OpenGateway:
    """An open gateway."""

    server: Path  # the server's folder
    port: int
    gateway: Gateway
    link: FakeLink
    lines: list[str]
    peers: ExitStack  # closed with it

    def connection(self, site: Path) -> http.client.HTTPSConnection:
        made = http.client.HTTPSConnection("127.0.0.1", self.port, context=tls_for_site(site), timeout=600)
        self.peers.callback(made.close)
        return made

    def raw(self, context: ssl.SSLContext | None = None) -> socket.socket:
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=600)
        self.peers.callback(plain.close)
        if context is None:
            return plain
        made = context.wrap_socket(plain, server_hostname="127.0.0.1")
        self.peers.callback(made.close)
        return made


def signed(site: Path) -> dict[str, str]:
    """The headers of a site's request."""
    key = keys.public_pem(keys.read_key(site / "site.key").public_key())
    return {"content-type": "application/protobuf", "flwr-public-key": b64encode(key).decode()}


def send(
    connection: http.client.HTTPSConnection,
    path: str,
    headers: Mapping[str, str],
    body: bytes = b"",
    how: str = "POST",
) -> tuple[int, bytes]:
    connection.request(how, path, body, dict(headers))
    answer = connection.getresponse()
    return answer.status, answer.read()


@contextmanager
def open_gateway(out: Path, limits: Limits | None = None, reply_bytes: int = 10**6) -> Iterator[OpenGateway]:
    """Of a federation in this folder, for as long as this lasts."""
    link, lines, ready = FakeLink(), list[str](), threading.Event()
    server, place = out / "server", out / "l.sock"
    gateway = Gateway(Members(server), place, reply_bytes, limits, lines.append)
    listening = gateway_process.listener("127.0.0.1", 0)
    loop = asyncio.new_event_loop()
    tasks: list[asyncio.Task[None]] = []

    async def run() -> None:
        upstream = await asyncio.start_unix_server(link.serve, str(place))
        async with upstream:
            tasks.append(asyncio.ensure_future(gateway_process.serve(gateway, server, listening)))
            ready.set()
            await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    ready.wait()
    try:
        with ExitStack() as peers:
            yield OpenGateway(server, listening.getsockname()[1], gateway, link, lines, peers)
    finally:
        loop.call_soon_threadsafe(tasks[0].cancel)
        thread.join()
        loop.close()
        listening.close()

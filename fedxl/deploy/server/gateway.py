"""The server's only open port: mutual TLS, a short list of allowed requests, and limits on everything.

It accepts a connection with a certificate of the federation's authority whose key is approved (`members.py`). It
forwards a request to SuperLink's Unix socket if its path is allowed (`fleet.py`) and it is signed with the same key,
and reads it whole first: malformed, slow or incomplete requests never reach SuperLink.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import time
from base64 import b64decode
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import h11
from cryptography import x509

from fedxl.deploy import Say
from fedxl.deploy.provision import keys
from fedxl.deploy.provision.members import Members
from fedxl.deploy.server.fleet import ALLOWED, Ledger, RefusedRequestError
from fedxl.errors import first_line, printable

CHUNK = 2**18  # bytes
FORWARDED = re.compile(rb"flwr-[a-z0-9-]{1,40}")  # headers that we forward; we drop all others
# Sent to SuperLink in place of the site's own, which it would log.
FIXED_HEADERS = [(b"content-type", b"application/protobuf"), (b"accept", b"application/protobuf")]
PUBLIC_KEY = b"flwr-public-key"


@dataclass(frozen=True)
class Limits:
    """What one peer, and all peers together, may use. Times are in seconds."""

    connections: int = 512  # open at the same time
    of_an_address: int = 64
    of_a_site: int = 16
    handshake: float = 20.0  # until a peer has shown its certificate
    head: float = 20.0  # from a request's first byte to the end of its headers
    idle: float = 120.0  # between two requests
    slowest: float = 20_000.0  # bytes a second of a body, in addition to the time for the headers
    response: float = 120.0  # for SuperLink
    head_bytes: int = 16_384
    body_bytes: int = 2**28  # of all bodies in memory
    body_bytes_of_a_site: int = 2**26
    requests_a_second: float = 100.0  # of a site, on average
    burst: float = 1000.0


class Request(NamedTuple):
    path: str
    headers: list[tuple[bytes, bytes]]
    length: int


class Response(NamedTuple):
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class HttpError(Exception):
    """A response of the gateway itself, instead of SuperLink's."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class SiteTraffic:
    """What one approved site uses: its messages, its open connections, its memory and its request rate."""

    ledger: Ledger
    connections: int = 0
    bytes: int = 0  # of bodies in memory
    tokens: float = 0.0  # requests that it may still make
    refilled: float = field(default_factory=time.monotonic)

    def spend(self, limits: Limits) -> bool:
        """Count one request; False if the site has made too many (token bucket)."""
        now = time.monotonic()
        self.tokens = min(limits.burst, self.tokens + (now - self.refilled) * limits.requests_a_second)
        self.refilled = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


class Gateway:
    """Forwards allowed requests of approved sites to the socket at `link`, and nothing else."""

    def __init__(
        self, members: Members, link: Path, reply_bytes: int, limits: Limits | None = None, say: Say = print
    ) -> None:
        self.members, self.link, self.reply_bytes, self.say = members, link, reply_bytes, say
        self.limits = limits or Limits()
        self.traffic: dict[str, SiteTraffic] = {}  # by site
        self.addresses: Counter[str] = Counter()  # connections by IP address
        self.parents: dict[str, None] = {}  # ids of objects with children, see Ledger
        self.bytes = 0  # of bodies in memory
        self._logged: dict[str, float] = {}  # lines, and when they were logged

    async def serve(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        """Accept connections until cancelled. Close excess connections before the TLS handshake."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                try:
                    peer, address = await loop.sock_accept(listener)
                except OSError as error:  # too many open files, for example
                    self._log(f"cannot accept connections: {first_line(error)}")
                    await asyncio.sleep(0.5)
                    continue
                host = str(address[0])
                if len(tasks) >= self.limits.connections or self.addresses[host] >= self.limits.of_an_address:
                    self._log(f"{host} has too many connections open")
                    peer.close()
                    continue
                self.addresses[host] += 1
                task = loop.create_task(self._connection(peer, host, context))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, peer: socket.socket, host: str, context: ssl.SSLContext) -> None:
        """Handle one connection, and release everything it holds however it ends."""
        try:
            reader, writer = await _handshake(peer, context, self.limits.handshake)
            try:
                await self._serve_requests(reader, writer, host)
            finally:
                writer.transport.abort()  # an orderly close would wait for a peer that may never respond
        except (OSError, ssl.SSLError, h11.ProtocolError, EOFError) as error:
            self._log(f"connection from {host} closed: {printable(first_line(error))}")
        except Exception as error:  # a bug ends this connection only
            self._log(f"connection from {host} closed by a bug: {error!r}")
        finally:
            peer.close()
            self.addresses[host] -= 1
            if not self.addresses[host]:
                del self.addresses[host]

    async def _serve_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        """Handle the requests of one connection, one after the other."""
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        certificate = x509.load_der_x509_certificate(shown)
        name = self._approved_site(certificate)
        if name is None:
            self._log(f"{host} shows a certificate that is not approved")
            return
        site = self.traffic.setdefault(
            name, SiteTraffic(Ledger(self.reply_bytes, parents=self.parents), tokens=self.limits.burst)
        )
        if site.connections >= self.limits.of_a_site:
            self._log(f"{name} has too many connections open")
            return
        site.connections += 1
        try:
            peer = h11.Connection(h11.SERVER, max_incomplete_event_size=self.limits.head_bytes)
            while await self._exchange(peer, reader, writer, certificate, site):
                peer.start_next_cycle()
        finally:
            site.connections -= 1

    def _approved_site(self, certificate: x509.Certificate) -> str | None:
        """The site that owns this key; None if it is not approved now, or its certificate has expired."""
        if self.members.refresh():
            for problem in self.members.problems:
                self._log(problem)
        if certificate.not_valid_after_utc <= datetime.now(UTC):
            return None
        try:
            return self.members.by_key.get(keys.public_pem(keys.public_key(certificate)))
        except (AssertionError, ValueError):
            return None

    def _require_approved(self, certificate: x509.Certificate) -> None:
        if self._approved_site(certificate) is None:
            raise HttpError(403, "this site is no longer approved")

    async def _exchange(
        self,
        peer: h11.Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        certificate: x509.Certificate,
        site: SiteTraffic,
    ) -> bool:
        """Handle one request. Returns whether another may follow on this connection."""
        head = await _event(peer, reader, self.limits.idle, self.limits.head)
        if not isinstance(head, h11.Request):
            return False
        try:
            request = self._checked(head, certificate, site)
            async with self._memory(site, request.length):
                body = await _body(peer, reader, request.length, self.limits)
                self._require_approved(certificate)  # again: the site may have been revoked while it sent the body
                site.ledger.check_request(request.path, body)
                response = await forward(self.link, request, body, self.limits.response)
                if response.status == 200:
                    site.ledger.note_response(request.path, response.body)
        except RefusedRequestError as error:
            response = _refusal(403, str(error))
            self._log(f"refused a request of {keys.common_name(certificate.subject)}: {error}")
        except HttpError as error:
            response = _refusal(error.status, str(error))
        # Close the connection if we did not read the body: its bytes would look like the next request.
        last = peer.their_state is not h11.DONE
        headers = [*response.headers, (b"content-length", str(len(response.body)).encode())]
        if last:
            headers.append((b"connection", b"close"))
        _write(writer, peer, h11.Response(status_code=response.status, headers=headers), response.body)
        async with asyncio.timeout(self.limits.head + len(response.body) / self.limits.slowest):
            await writer.drain()
        return not last and peer.our_state is h11.DONE

    def _checked(self, head: h11.Request, certificate: x509.Certificate, site: SiteTraffic) -> Request:
        """Check a request's headers: site still approved, path allowed, signed with the connection's key, length."""
        self._require_approved(certificate)
        if not site.spend(self.limits):
            raise HttpError(429, "too many requests")
        path = head.target.decode("ascii", "replace")
        if head.method != b"POST" or path not in ALLOWED:
            raise HttpError(404, "not found")
        headers = [(bytes(name), bytes(value)) for name, value in head.headers]
        if any(name in (b"transfer-encoding", b"content-encoding", b"expect", b"upgrade") for name, _ in headers):
            raise HttpError(400, "only plain bodies with a content-length are accepted")
        if sum(len(name) + len(value) for name, value in headers) > self.limits.head_bytes:
            raise HttpError(431, "the headers are too large")  # the parser accepts them if they arrive all at once
        lengths = [value for name, value in headers if name == b"content-length"]
        if len(lengths) != 1 or not lengths[0].isdigit():
            raise HttpError(411, "a request needs one content-length")
        if int(lengths[0]) > ALLOWED[path]:
            raise HttpError(413, f"a request to {path} has at most {ALLOWED[path]} bytes")
        signed = [value for name, value in headers if name == PUBLIC_KEY]
        if len(signed) != 1 or not _same_key(signed[0], certificate):
            raise HttpError(401, "a request must be signed with the key of its connection")
        return Request(path, _forwarded(headers), int(lengths[0]))

    @contextlib.asynccontextmanager
    async def _memory(self, site: SiteTraffic, length: int) -> AsyncIterator[None]:
        """Reserve memory for a body. If there is too little, the site must retry."""
        full = self.bytes + length > self.limits.body_bytes
        if full or site.bytes + length > self.limits.body_bytes_of_a_site:
            raise HttpError(503, "too much at once; try again")
        self.bytes += length
        site.bytes += length
        try:
            yield
        finally:
            self.bytes -= length
            site.bytes -= length

    def _log(self, line: str) -> None:
        """Log each line at most once a minute, and at most 100 lines a minute: an attacker must not fill the disk."""
        now = time.monotonic()
        self._logged = {logged: since for logged, since in self._logged.items() if now - since < 60.0}
        if line not in self._logged and len(self._logged) < 100:
            self._logged[line] = now
            self.say(line)


async def forward(link: Path, request: Request, body: bytes, seconds: float) -> Response:
    """SuperLink's response. Each request opens its own connection, which is cheap for a Unix socket."""
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_unix_connection(str(link), limit=CHUNK)
            try:
                return await _forward_on(reader, writer, request, body)
            finally:
                writer.transport.abort()
    except (OSError, h11.ProtocolError, EOFError):
        raise HttpError(503, "the server is starting, or busy") from None


async def _forward_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Request, body: bytes
) -> Response:
    link = h11.Connection(h11.CLIENT)
    length = (b"content-length", str(len(body)).encode())
    headers = [(b"host", b"superlink"), length, *FIXED_HEADERS, *request.headers]
    _write(writer, link, h11.Request(method="POST", target=request.path, headers=headers), body)
    await writer.drain()
    chunks: list[bytes] = []
    response: h11.Response | None = None
    while True:
        event = link.next_event()
        if event is h11.NEED_DATA:
            link.receive_data(await reader.read(CHUNK))
        elif isinstance(event, h11.Response):
            response = event
        elif isinstance(event, h11.Data):
            chunks.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage) and response is not None:
            kinds = [(bytes(name), bytes(value)) for name, value in response.headers if name == b"content-type"]
            return Response(response.status_code, [*kinds, *_forwarded(response.headers)], b"".join(chunks))
        elif isinstance(event, h11.ConnectionClosed):
            raise EOFError("SuperLink has closed the connection")


def _write(writer: asyncio.StreamWriter, http: h11.Connection, head: h11.Event, body: bytes) -> None:
    for event in (head, h11.Data(data=body), h11.EndOfMessage()):
        writer.write(http.send(event) or b"")


def _forwarded(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(bytes(name), bytes(value)) for name, value in headers if FORWARDED.fullmatch(bytes(name))]


def _refusal(status: int, reason: str) -> Response:
    return Response(status, [(b"content-type", b"text/plain; charset=utf-8")], f"fedxl: {reason}\n".encode())


def _same_key(shown: bytes, certificate: x509.Certificate) -> bool:
    try:
        return b64decode(shown, validate=True) == keys.public_pem(keys.public_key(certificate))
    except (ValueError, AssertionError):
        return False


async def _handshake(
    peer: socket.socket, context: ssl.SSLContext, seconds: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reader = asyncio.StreamReader(limit=CHUNK)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, peer, ssl=context, ssl_handshake_timeout=seconds, ssl_shutdown_timeout=1.0
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def _event(peer: h11.Connection, reader: asyncio.StreamReader, idle: float, head: float) -> object:
    """The next event of a peer: `idle` seconds for its first byte, then `head` seconds for the rest."""
    event = peer.next_event()
    if event is not h11.NEED_DATA:
        return event
    async with asyncio.timeout(idle):
        peer.receive_data(await reader.read(CHUNK))
    async with asyncio.timeout(head):
        while (event := peer.next_event()) is h11.NEED_DATA:
            peer.receive_data(await reader.read(CHUNK))
    return event


async def _body(peer: h11.Connection, reader: asyncio.StreamReader, length: int, limits: Limits) -> bytes:
    chunks: list[bytes] = []
    async with asyncio.timeout(limits.head + length / limits.slowest):
        while True:
            event = peer.next_event()
            if event is h11.NEED_DATA:
                peer.receive_data(await reader.read(CHUNK))
            elif isinstance(event, h11.Data):
                chunks.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                return b"".join(chunks)
            else:
                raise EOFError("the request ended before its body was complete")

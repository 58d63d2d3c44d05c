"""The one door of a server: TLS on both sides, a short list of requests, and limits on everything.

A connection is let in if it shows a certificate of the federation's authority whose key the server's operator has
approved (`members.py`). A request is passed on to SuperLink, which listens on a Unix socket that only its owner can
open, if its path is on the list (`fleet.py`) and it is signed with the same key. It is read whole before a byte of it
is passed on, so that nothing malformed, slow or half sent ever reaches SuperLink.
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
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import h11
from cryptography import x509

from fedxl.deploy.provision import keys
from fedxl.deploy.provision.members import Members
from fedxl.deploy.server.fleet import ALLOWED, Ledger, RefusedRequestError
from fedxl.errors import first_line, printable

Say = Callable[[str], None]
PIECE = 2**18
PASSED = re.compile(rb"flwr-[a-z0-9-]{1,40}")  # headers that are passed on; all others are dropped
PLAIN = [(b"content-type", b"application/protobuf"), (b"accept", b"application/protobuf")]  # whatever a site says
PUBLIC_KEY = b"flwr-public-key"


@dataclass(frozen=True)
class Limits:
    """What one peer, and all of them together, may take. S2Scores, bytes and numbers of things."""

    connections: int = 512  # open at a time
    of_an_address: int = 64
    of_a_site: int = 16
    handshake: float = 20.0  # until a peer has shown its certificate
    head: float = 20.0  # from a request's first byte to the end of its head
    idle: float = 120.0  # between two requests
    slowest: float = 20_000.0  # bytes a second of a body, after the time for the head
    answer: float = 120.0  # for SuperLink
    head_bytes: int = 16_384
    body_bytes: int = 2**28  # of all bodies that are being read or passed on
    body_bytes_of_a_site: int = 2**26
    requests_a_second: float = 100.0  # of a site, on average
    burst: float = 1000.0


class Request(NamedTuple):
    path: str
    headers: list[tuple[bytes, bytes]]
    length: int


class Answer(NamedTuple):
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Refused(Exception):  # noqa: N818
    """An answer other than SuperLink's."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class Visitor:
    """What is known of one approved site: its ledger, its open connections, and how much it has asked lately."""

    ledger: Ledger
    connections: int = 0
    bytes: int = 0  # of bodies in memory
    tokens: float = 0.0
    since: float = field(default_factory=time.monotonic)

    def spend(self, limits: Limits) -> bool:
        """One request, if there is any left."""
        now = time.monotonic()
        self.tokens = min(limits.burst, self.tokens + (now - self.since) * limits.requests_a_second)
        self.since = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


class Gateway:
    """Passes requests of approved sites on to the socket at `link`, and nothing else."""

    def __init__(
        self, members: Members, link: Path, reply_bytes: int, limits: Limits | None = None, say: Say = print
    ) -> None:
        self.members, self.link, self.reply_bytes, self.say = members, link, reply_bytes, say
        self.limits = limits or Limits()
        self.visitors: dict[str, Visitor] = {}
        self.addresses: Counter[str] = Counter()
        self.inner: dict[str, None] = {}  # objects with parts that have been seen
        self.bytes = 0
        self._said: dict[str, float] = {}

    async def serve(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        """Accept connections until cancelled. Too many are closed before they cost anything."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                try:
                    peer, address = await loop.sock_accept(listener)
                except OSError as error:  # no more files may be open, say
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
        """From the handshake to the end, whatever that is: nothing of a connection is left behind."""
        try:
            reader, writer = await _shaken_hands(peer, context, self.limits.handshake)
            try:
                await self._visit(reader, writer, host)
            finally:
                writer.transport.abort()  # an orderly farewell would wait for a peer who may never answer
        except (OSError, ssl.SSLError, h11.ProtocolError, EOFError) as error:
            self._log(f"connection of {host} closed: {printable(first_line(error))}")
        except Exception as error:  # a fault of ours ends this connection, and no other
            self._log(f"connection of {host} closed by an error of the program: {error!r}")
        finally:
            peer.close()
            self.addresses[host] -= 1
            if not self.addresses[host]:
                del self.addresses[host]

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        """Requests of one connection, one after the other."""
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        certificate = x509.load_der_x509_certificate(shown)
        name = self._known(certificate)
        if name is None:
            self._log(f"{host} shows a certificate that is not approved")
            return
        visitor = self.visitors.setdefault(
            name, Visitor(Ledger(self.reply_bytes, inner=self.inner), tokens=self.limits.burst)
        )
        if visitor.connections >= self.limits.of_a_site:
            self._log(f"{name} has too many connections open")
            return
        visitor.connections += 1
        try:
            peer = h11.Connection(h11.SERVER, max_incomplete_event_size=self.limits.head_bytes)
            while await self._exchange(peer, reader, writer, certificate, visitor):
                peer.start_next_cycle()
        finally:
            visitor.connections -= 1

    def _known(self, certificate: x509.Certificate) -> str | None:
        """The site whose key this is, if it is approved at this moment, and the certificate has not expired since."""
        if self.members.refresh():
            for complaint in self.members.complaints:
                self._log(complaint)
        if certificate.not_valid_after_utc <= datetime.now(UTC):
            return None
        try:
            return self.members.by_key.get(keys.public_pem(keys.public_key(certificate)))
        except (AssertionError, ValueError):
            return None

    def _require_approved(self, certificate: x509.Certificate) -> None:
        if self._known(certificate) is None:
            raise Refused(403, "this site is no longer approved")

    async def _exchange(
        self,
        peer: h11.Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        certificate: x509.Certificate,
        visitor: Visitor,
    ) -> bool:
        """One request and its answer; whether another may follow on this connection."""
        begun = await _event(peer, reader, self.limits.idle, self.limits.head)
        if not isinstance(begun, h11.Request):
            return False
        try:
            request = self._checked(begun, certificate, visitor)
            async with self._room(visitor, request.length):
                body = await _body(peer, reader, request.length, self.limits)
                self._require_approved(certificate)  # still: a body may take its time
                visitor.ledger.before(request.path, body)
                answer = await ask(self.link, request, body, self.limits.answer)
                if answer.status == 200:
                    visitor.ledger.after(request.path, answer.body)
        except RefusedRequestError as error:
            answer = _refusal(403, str(error))
            self._log(f"a request of {keys.common_name(certificate.subject)} is refused: {error}")
        except Refused as error:
            answer = _refusal(error.status, str(error))
        # A body that was not read would be taken for the next request.
        last = peer.their_state is not h11.DONE
        headers = [*answer.headers, (b"content-length", str(len(answer.body)).encode())]
        if last:
            headers.append((b"connection", b"close"))
        head = peer.send(h11.Response(status_code=answer.status, headers=headers))
        writer.write(head or b"")
        writer.write(peer.send(h11.Data(data=answer.body)) or b"")
        writer.write(peer.send(h11.EndOfMessage()) or b"")
        async with asyncio.timeout(self.limits.head + len(answer.body) / self.limits.slowest):
            await writer.drain()
        return not last and peer.our_state is h11.DONE

    def _checked(self, begun: h11.Request, certificate: x509.Certificate, visitor: Visitor) -> Request:
        """A request by its head: approved still, on the list, signed with the key of the connection, not too long."""
        self._require_approved(certificate)
        if not visitor.spend(self.limits):
            raise Refused(429, "too many requests")
        path = begun.target.decode("ascii", "replace")
        if begun.method != b"POST" or path not in ALLOWED:
            raise Refused(404, "there is nothing here")
        headers = [(bytes(name), bytes(value)) for name, value in begun.headers]
        if any(name in (b"transfer-encoding", b"content-encoding", b"expect", b"upgrade") for name, _ in headers):
            raise Refused(400, "only plain bodies of a known length are taken")
        if sum(len(name) + len(value) for name, value in headers) > self.limits.head_bytes:
            raise Refused(431, "its head is too large")  # one that comes all at once is not refused by the parser
        lengths = [value for name, value in headers if name == b"content-length"]
        if len(lengths) != 1 or not lengths[0].isdigit():
            raise Refused(411, "a request says how long it is")
        if int(lengths[0]) > ALLOWED[path]:
            raise Refused(413, f"a request to {path} has at most {ALLOWED[path]} bytes")
        signed = [value for name, value in headers if name == PUBLIC_KEY]
        if len(signed) != 1 or not _same_key(signed[0], certificate):
            raise Refused(401, "a request is signed with the key of its connection")
        return Request(path, _passed(headers), int(lengths[0]))

    @contextlib.asynccontextmanager
    async def _room(self, visitor: Visitor, length: int) -> AsyncIterator[None]:
        """Memory for a body; whoever asks for more than there is has to ask again."""
        full = self.bytes + length > self.limits.body_bytes
        if full or visitor.bytes + length > self.limits.body_bytes_of_a_site:
            raise Refused(503, "too much at once; try again")
        self.bytes += length
        visitor.bytes += length
        try:
            yield
        finally:
            self.bytes -= length
            visitor.bytes -= length

    def _log(self, line: str) -> None:
        """Each line at most once in a minute, and few of them: whoever knocks all night must not fill the disk."""
        now = time.monotonic()
        self._said = {said: since for said, since in self._said.items() if now - since < 60.0}
        if line not in self._said and len(self._said) < 100:
            self._said[line] = now
            self.say(line)


async def ask(link: Path, request: Request, body: bytes, seconds: float) -> Answer:
    """SuperLink's answer. Each request has a connection of its own: a Unix socket's costs next to nothing."""
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_unix_connection(str(link), limit=PIECE)
            try:
                return await _asked(reader, writer, request, body)
            finally:
                writer.transport.abort()
    except (OSError, h11.ProtocolError, EOFError):
        raise Refused(503, "the server is starting, or busy") from None


async def _asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Request, body: bytes) -> Answer:
    link = h11.Connection(h11.CLIENT)
    headers = [(b"host", b"superlink"), (b"content-length", str(len(body)).encode()), *PLAIN, *request.headers]
    writer.write(link.send(h11.Request(method="POST", target=request.path, headers=headers)) or b"")
    writer.write(link.send(h11.Data(data=body)) or b"")
    writer.write(link.send(h11.EndOfMessage()) or b"")
    await writer.drain()
    pieces: list[bytes] = []
    response: h11.Response | None = None
    while True:
        event = link.next_event()
        if event is h11.NEED_DATA:
            link.receive_data(await reader.read(PIECE))
        elif isinstance(event, h11.Response):
            response = event
        elif isinstance(event, h11.Data):
            pieces.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage) and response is not None:
            kinds = [(bytes(name), bytes(value)) for name, value in response.headers if name == b"content-type"]
            return Answer(response.status_code, [*kinds, *_passed(response.headers)], b"".join(pieces))
        elif isinstance(event, h11.ConnectionClosed):
            raise EOFError("SuperLink has closed the connection")


def _passed(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(bytes(name), bytes(value)) for name, value in headers if PASSED.fullmatch(bytes(name))]


def _refusal(status: int, reason: str) -> Answer:
    return Answer(status, [(b"content-type", b"text/plain; charset=utf-8")], f"fedxl: {reason}\n".encode())


def _same_key(shown: bytes, certificate: x509.Certificate) -> bool:
    try:
        return b64decode(shown, validate=True) == keys.public_pem(keys.public_key(certificate))
    except (ValueError, AssertionError):
        return False


async def _shaken_hands(
    peer: socket.socket, context: ssl.SSLContext, seconds: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reader = asyncio.StreamReader(limit=PIECE)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, peer, ssl=context, ssl_handshake_timeout=seconds, ssl_shutdown_timeout=1.0
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def _event(peer: h11.Connection, reader: asyncio.StreamReader, idle: float, head: float) -> object:
    """The next event of a peer: `idle` seconds until its first byte, then `head` seconds until it is whole."""
    event = peer.next_event()
    if event is not h11.NEED_DATA:
        return event
    async with asyncio.timeout(idle):
        peer.receive_data(await reader.read(PIECE))
    async with asyncio.timeout(head):
        while (event := peer.next_event()) is h11.NEED_DATA:
            peer.receive_data(await reader.read(PIECE))
    return event


async def _body(peer: h11.Connection, reader: asyncio.StreamReader, length: int, limits: Limits) -> bytes:
    pieces: list[bytes] = []
    async with asyncio.timeout(limits.head + length / limits.slowest):
        while True:
            event = peer.next_event()
            if event is h11.NEED_DATA:
                peer.receive_data(await reader.read(PIECE))
            elif isinstance(event, h11.Data):
                pieces.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                return b"".join(pieces)
            else:
                raise EOFError("the request ended before its body did")

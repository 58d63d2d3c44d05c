"""The server's end: which sites are connected, what each was sent, and what it has replied.

The hub is a `Carrier`. Its connections run on an event loop in a thread of its own; training, in the main thread,
calls `nodes`, `send`, `replies`, `forget` and `wait`. A site replies to what it was sent, once, in its own name. If a
connection is lost, its requests are sent again as soon as the site is back: the site replies with the same bits.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedxl.deploy import Say, Throttle
from fedxl.deploy.protocol.envelope import KINDS, Envelope, Failure, Kind, grace
from fedxl.deploy.protocol.message import Piece, encode, read_reply, require_small
from fedxl.deploy.provision.approval import Members
from fedxl.deploy.provision.connection import tls_for_server
from fedxl.deploy.transport.tls.frames import CHUNK, HEAD, TICKET, Head, chunks
from fedxl.deploy.transport.tls.listener import Limits, Listener, Peer
from fedxl.errors import RefusedError, refuse

HELLO = KINDS.index("hello")
TOGETHER = 4  # replies of the largest size for which there is memory at a time
WATCH = 0.25  # seconds between two looks at who is approved, and at the server's certificate


@dataclass(eq=False)
class Request:
    """A request to a site, until its reply is taken or it is forgotten."""

    ticket: bytes
    site: str
    kind: int
    pieces: Sequence[Piece]
    seconds: float  # to reply
    most: float  # megabytes of the reply
    deadline: float  # when the seconds are over
    reserved: int = 0  # bytes of memory for the reply, from when it is first read
    sent_to: str = ""  # the node that it was sent to last
    reply: memoryview | Failure | None = None


@dataclass(eq=False)
class Link:
    """The connection of a site. A newer one takes the place of an older one.

    One request is under way at a time: a site that computes for long does not read the next one meanwhile.
    """

    node: str
    peer: Peer
    unanswered: bytes = b""  # the ticket of the request that is under way
    work: asyncio.Event = field(default_factory=asyncio.Event)  # set when there may be something to send

    def close(self) -> None:
        self.peer.writer.transport.abort()


class Hub:
    def __init__(self, folder: Path, megabytes: float, limits: Limits | None = None, say: Say = print) -> None:
        self.folder, self.megabytes, self.say = folder, megabytes, Throttle(say)
        self.members = Members(folder)
        self.context = tls_for_server(folder)
        self.listener = Listener(self.members, self.context, self._serve, limits, say)
        self.loop = asyncio.new_event_loop()
        self.changed = threading.Condition()  # guards everything below
        self.news = False  # whether something has changed since the last `wait`
        self.admitted: Mapping[str, int] = {}
        self.requests: dict[bytes, Request] = {}  # in the order in which they are sent
        self.connections: dict[str, Link] = {}  # by site
        self.connected = 0  # connections so far
        self.freed = asyncio.Event()  # set when there may be memory for another reply
        self.waiting: dict[str, asyncio.TimerHandle] = {}  # by site that has lost its connection
        self.stopped: BaseException | None = None  # why the hub no longer works
        self._drop_revoked()

    # Called by the main thread.

    def nodes(self) -> Mapping[str, str]:
        """A site that still works on a forgotten request counts as away: another request would wait behind it."""
        with self.changed:
            self._require_working()
            free = {b"", *self.requests}
            return {each.node: site for site, each in self.connections.items() if each.unanswered in free}

    def approved(self) -> Mapping[str, int]:
        return self.admitted

    def send(self, requests: Mapping[str, Envelope], kind: Kind, seconds: float) -> Mapping[str, str]:
        made, deadline = {}, time.monotonic() + seconds
        for node, envelope in requests.items():  # before the lock is taken: connections need it
            ticket, site = secrets.token_bytes(TICKET), node.rpartition("/")[0]
            most = min(self.megabytes, envelope.most / 1e6)
            made[node] = Request(ticket, site, KINDS.index(kind), encode(envelope), seconds, most, deadline)
        with self.changed:
            self.requests |= {request.ticket: request for request in made.values()}
        self.loop.call_soon_threadsafe(self._wake, {request.site for request in made.values()})
        return {request.ticket.hex(): node for node, request in made.items()}

    def replies(self, tickets: Sequence[str]) -> Iterator[tuple[str, Envelope | Failure]]:
        for ticket in tickets:
            key = bytes.fromhex(ticket)
            with self.changed:
                request = self.requests.get(key)
                if request is None or request.reply is None:
                    continue
                del self.requests[key]
            self.loop.call_soon_threadsafe(self.freed.set)
            # Read one at a time: each is as large as the network.
            found = request.reply
            yield ticket, found if isinstance(found, Failure) else read_reply(found, self.megabytes)

    def forget(self, tickets: Sequence[str]) -> None:
        with self.changed:
            for key in map(bytes.fromhex, tickets):
                self.requests.pop(key, None)
        self.loop.call_soon_threadsafe(self.freed.set)

    def wait(self, seconds: float) -> None:
        with self.changed:
            if not self.news:
                self.changed.wait(seconds)
            self.news = False
            self._require_working()

    def _require_working(self) -> None:
        if self.stopped is not None:
            raise RuntimeError("the listener has stopped") from self.stopped

    # Run by the event loop.

    async def run(self, listening: socket.socket) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self.listener.accept(listening))
            parts.create_task(self._watch())

    async def _watch(self) -> None:
        """Drop sites that are no longer approved, and use a renewed certificate for new connections."""
        certificate, used = self.folder / "server.crt", 0
        while True:
            with suppress(OSError, ssl.SSLError):  # it cannot be read now, or does not match the key yet: retry
                changed = certificate.stat().st_mtime_ns
                if used not in (0, changed):
                    self.context.load_cert_chain(certificate, self.folder / "server.key")
                    self.say("using the server's renewed certificate")
                used = changed
            self._drop_revoked()
            await asyncio.sleep(WATCH)

    def _drop_revoked(self) -> None:
        self.listener.refresh()
        with self.changed:
            self.admitted = {name: member.examples for name, member in self.members.approved.items()}
            for site, connection in self.connections.items():
                if self.listener.owner(connection.peer.key, connection.peer.expires) != site:
                    self.say(f"{site} is no longer approved: its connection is closed")
                    connection.close()
            for request in self.requests.values():
                if request.site not in self.admitted:
                    self._settle(request, Failure("it is no longer approved"))

    async def _serve(self, peer: Peer) -> None:
        """Send a site its requests and take its replies, until the connection ends."""
        self.connected += 1
        connection = Link(f"{peer.site}/{self.connected}", peer)
        with self.changed:
            before = self.connections.get(peer.site)
            self.connections[peer.site] = connection
            self._note_news()
        if before is not None:
            before.close()
        if peer.site in self.waiting:
            self.waiting.pop(peer.site).cancel()
        work = [asyncio.ensure_future(part) for part in (self._send_all(connection), self._take_all(connection))]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            for each in work:
                each.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            with self.changed:
                if self.connections.get(peer.site) is connection:
                    del self.connections[peer.site]
                self._note_news()
            self._wake({peer.site})

    async def _send_all(self, connection: Link) -> None:
        writer = connection.peer.writer
        while True:
            connection.work.clear()
            request = self._next(connection)
            if request is None:
                await connection.work.wait()
                continue
            async with asyncio.timeout(request.seconds):  # a site that never reads its requests is of no use
                for chunk in chunks(request.ticket, request.kind, request.pieces):
                    writer.write(chunk)
                    await writer.drain()

    def _next(self, connection: Link) -> Request | None:
        """The next request of this site that was not sent on this connection; None while one is under way."""
        with self.changed:
            for request in self.requests.values():
                mine = request.site == connection.peer.site and not connection.unanswered
                # A hello is meant for one connection: the directory sends the next one another.
                unsent = not request.sent_to if request.kind == HELLO else request.sent_to != connection.node
                if mine and unsent and request.reply is None:
                    request.sent_to, connection.unanswered = connection.node, request.ticket
                    return request
        return None

    async def _take_all(self, connection: Link) -> None:
        reader, limits = connection.peer.reader, self.listener.limits
        while True:
            first = await reader.readexactly(1)  # a site that has nothing to do is silent
            async with asyncio.timeout(limits.head):
                head = Head.parse(first + await reader.readexactly(HEAD.size - 1))
            request = self._expected(connection, head)
            try:
                async with asyncio.timeout(max(request.deadline - time.monotonic(), 0) + limits.head):
                    content = await self._content(reader, head.length, request)
            except BaseException:
                request.reserved = 0
                self.freed.set()
                raise
            with self.changed:
                connection.unanswered = b""
                self._note_news()
            if content is not None:
                self._settle(request, content)
            connection.work.set()

    def _expected(self, connection: Link, head: Head) -> Request:
        """The request to which a frame replies, or one that takes its place if it was forgotten. Refuses others."""
        site = connection.peer.site
        refuse(head.ticket != connection.unanswered, f"{site} sends a reply to what it was not sent")
        forgotten = Request(head.ticket, site, head.kind, (), 0.0, self.megabytes, deadline=math.inf)
        with self.changed:
            request = self.requests.get(head.ticket, forgotten)
        try:
            require_small(head.length, request.most)
        except RefusedError as error:
            self._settle(request, Failure(str(error)))
            raise RefusedError(f"{site}: {error}") from None
        refuse(request.kind != head.kind, f"{site} sends a reply of another kind")
        return request

    async def _content(self, reader: asyncio.StreamReader, length: int, request: Request) -> memoryview | None:
        """A message, if its request is still open at its end. Its memory is used as its bytes arrive."""
        limits = self.listener.limits
        found = np.empty(length, np.uint8).data if await self._reserve(request, length) else None
        received = 0
        async with asyncio.timeout(limits.head + length / limits.min_bytes_per_second):
            while received < length:
                piece = await reader.read(min(CHUNK, length - received))
                if not piece:
                    raise EOFError("it ended in the middle of a message")
                if found is not None and not self._is_open(request):  # release its memory, and read on
                    found = None
                if found is not None:
                    found[received : received + len(piece)] = piece
                received += len(piece)
        return found

    async def _reserve(self, request: Request, length: int) -> bool:
        """Wait until there is memory for a reply; meanwhile TCP slows its sender down. False if it was forgotten."""
        while self._is_open(request):
            self.freed.clear()
            with self.changed:
                held = sum(each.reserved for each in self.requests.values())
                if not held or held + length <= TOGETHER * self.megabytes * 1e6:
                    request.reserved = length
                    return True
            await self.freed.wait()
        return False

    def _is_open(self, request: Request) -> bool:
        with self.changed:
            return request.ticket in self.requests and request.reply is None

    def _settle(self, request: Request, reply: memoryview | Failure) -> None:
        with self.changed:
            if request.reply is None:
                request.reply, request.pieces = reply, ()
                self._note_news()

    def _wake(self, sites: set[str]) -> None:
        """Have these sites' connections look for requests. A site that has lost its own has time to come back."""
        for site in sites:
            connection = self.connections.get(site)
            if connection is not None:
                connection.work.set()
                continue
            lost = self._unanswered(site)
            if lost and site in self.admitted and site not in self.waiting:
                seconds = grace(max(each.seconds for each in lost))
                self.say(f"{site} has lost its connection; it has {seconds:g} s to come back")
                self.waiting[site] = self.loop.call_later(seconds, self._give_up, site, seconds)

    def _give_up(self, site: str, seconds: float) -> None:
        del self.waiting[site]
        for request in self._unanswered(site):
            self._settle(request, Failure(f"it lost its connection and was not back within {seconds:g} s"))

    def _unanswered(self, site: str) -> list[Request]:
        with self.changed:
            return [each for each in self.requests.values() if each.site == site and each.reply is None]

    def _note_news(self) -> None:
        self.news = True
        self.changed.notify_all()


@contextmanager
def open_hub(hub: Hub, listening: socket.socket) -> Iterator[Hub]:
    """Run a hub in a thread of its own, until exit."""
    serving = hub.loop.create_task(hub.run(listening))

    def work() -> None:
        asyncio.set_event_loop(hub.loop)
        try:
            hub.loop.run_until_complete(serving)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            hub.stopped = error
            with hub.changed:
                hub._note_news()

    thread = threading.Thread(target=work, name="hub", daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        with suppress(RuntimeError):  # it has stopped already
            hub.loop.call_soon_threadsafe(serving.cancel)
        thread.join()
        hub.loop.close()

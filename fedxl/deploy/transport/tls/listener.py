"""The server's only open port: who may connect, and how much anybody may use before they have shown who they are."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from cryptography import x509

from fedxl.deploy import Say, Throttle
from fedxl.deploy.provision import keys
from fedxl.deploy.provision.approval import Members
from fedxl.deploy.transport.tls.frames import CHUNK, keep_alive
from fedxl.errors import RefusedError, UserError, first_line, printable


@dataclass(frozen=True)
class Limits:
    """What peers may use. Times are in seconds."""

    connections: int = 512  # of approved sites, at the same time
    handshakes: int = 256  # at the same time; the oldest of the busiest address gives way
    handshakes_per_address: int = 32  # at the same time
    connections_per_second: float = 20.0  # new ones of an address, on average
    burst: float = 200.0
    handshake: float = 20.0  # until a peer has shown its certificate
    head: float = 20.0  # from a frame's first byte to the end of its head
    min_bytes_per_second: float = 20_000.0  # of a message, in addition to the time for its head


@dataclass
class Bucket:
    """A token bucket: so many connections per second on average, and more for a short time."""

    tokens: float
    filled: float  # when

    def spend(self, limits: Limits, now: float) -> bool:
        """Count one connection; False if there were too many."""
        self.tokens = min(limits.burst, self.tokens + (now - self.filled) * limits.connections_per_second)
        self.filled = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


@dataclass(frozen=True)
class Peer:
    """A connection of an approved site."""

    site: str
    key: bytes  # as in `Members.by_key`
    expires: datetime
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Listener:
    """Accepts connections, and passes those of approved sites on to `serve`, until it is cancelled."""

    def __init__(
        self, members: Members, context: ssl.SSLContext, serve: Callable[[Peer], Awaitable[None]],
        limits: Limits | None = None, say: Say = print,
    ) -> None:  # fmt: skip
        self.members, self.context, self.serve, self.log = members, context, serve, Throttle(say)
        self.limits = limits or Limits()
        self.handshakes: dict[socket.socket, str] = {}  # under way, with their addresses; the oldest first
        self.admitted = 0  # connections of approved sites that are open
        self.buckets: dict[str, Bucket] = {}  # by address
        self._purged = time.monotonic()

    async def accept(self, listening: socket.socket) -> None:
        """Accept connections until cancelled. Excess ones are closed before the TLS handshake, which costs most."""
        listening.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as connections:
            while True:
                try:
                    peer, address = await loop.sock_accept(listening)
                except OSError as error:  # too many open files, for example
                    self.log(f"cannot accept connections: {first_line(error)}")
                    await asyncio.sleep(0.5)
                    continue
                host = _origin(str(address[0]))
                if not self._has_room(host):
                    self.log(f"{host} opens too many connections")
                    peer.close()
                    continue
                self.handshakes[peer] = host
                task = connections.create_task(self._connection(peer, host))
                task.add_done_callback(partial(self._end, peer))

    def _has_room(self, host: str) -> bool:
        """Whether an address may connect once more. If all places are taken, it may take that of a busier address."""
        limits, now = self.limits, time.monotonic()
        if len(self.buckets) > 10_000 and now - self._purged > 1:  # addresses are remembered only while they matter
            self.buckets = {each: found for each, found in self.buckets.items() if found.filled > now - 60}
            self._purged = now
        if not self.buckets.setdefault(host, Bucket(limits.burst, now)).spend(limits, now):
            return False
        counts = Counter(self.handshakes.values())
        if counts[host] >= limits.handshakes_per_address:
            return False
        if len(self.handshakes) < limits.handshakes:
            return True
        [(busiest, most)] = counts.most_common(1)
        if counts[host] >= most:
            return False
        oldest = next(peer for peer, address in self.handshakes.items() if address == busiest)
        with suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)  # which ends its task
        del self.handshakes[oldest]
        self.log(f"{busiest} opens too many connections")
        return True

    def _end(self, peer: socket.socket, task: asyncio.Task[None]) -> None:
        """Release what a connection holds, even if its task was cancelled before it began."""
        self.handshakes.pop(peer, None)
        peer.close()

    async def _connection(self, peer: socket.socket, host: str) -> None:
        """Handle one connection, however it ends."""
        try:
            known = await self._admit(peer, host)
            if known is None:
                return
            self.admitted += 1
            try:
                await self.serve(known)
            finally:
                self.admitted -= 1
                known.writer.transport.abort()  # an orderly close would wait for a peer that may never respond
        except RefusedError as error:
            self.log(f"connection from {host} closed: {printable(first_line(error))}")
        except asyncio.IncompleteReadError:
            self.log(f"connection from {host} ended: it closed the connection")
        except (OSError, EOFError, TimeoutError) as error:
            self.log(f"connection from {host} ended: {printable(first_line(error))}")
        except Exception as error:  # a bug ends this connection only
            self.log(f"connection from {host} closed by a bug: {error!r}")

    async def _admit(self, peer: socket.socket, host: str) -> Peer | None:
        """The TLS handshake. None unless the peer shows the certificate of an approved key."""
        reader, writer = await _handshake(peer, self.context, self.limits.handshake)
        self.handshakes.pop(peer, None)
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        certificate = x509.load_der_x509_certificate(shown)
        key, expires = _key_of(certificate), certificate.not_valid_after_utc
        self.refresh()
        name = self.owner(key, expires)
        if name is None or self.admitted >= self.limits.connections:
            self.log(f"{name} finds no place" if name else f"{host} shows a certificate that is not approved")
            writer.transport.abort()
            return None
        return Peer(name, key, expires, reader, writer)

    def refresh(self) -> None:
        """Look up who is approved now. If the disk fails, those who were approved before still are."""
        try:
            if self.members.refresh():
                for problem in self.members.problems:
                    self.log(problem)
        except OSError as error:
            self.log(f"cannot read {self.members.folder}: {first_line(error)}; the sites approved before stay")

    def owner(self, key: bytes, expires: datetime) -> str | None:
        """The site that owns this key; None if it is not approved, or its certificate has expired."""
        return self.members.by_key.get(key) if expires > datetime.now(UTC) else None


def _origin(address: str) -> str:
    """What counts as one address: of IPv6 a network of 64 bits, as a customer of a provider has one."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return address
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))


def _key_of(certificate: x509.Certificate) -> bytes:
    """The public key as `Members.by_key` has it; b"" if it is of a kind that no site has."""
    try:
        return keys.public_pem(keys.public_key(certificate))
    except (AssertionError, ValueError):
        return b""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on all addresses, or on the loopback address if all parties run on this machine."""
    local = host in ("127.0.0.1", "localhost")
    try:
        if not local and socket.has_dualstack_ipv6():
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
        return socket.create_server(("127.0.0.1" if local else "0.0.0.0", port), backlog=256)
    except OSError as error:
        raise UserError(
            f"cannot listen on port {port}: {os.strerror(error.errno or 0)}; stop what "
            "uses it, or change the port in connection.toml here and at every site"
        ) from None


async def _handshake(
    peer: socket.socket, context: ssl.SSLContext, seconds: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        keep_alive(peer)
    reader = asyncio.StreamReader(limit=CHUNK)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, peer, ssl=context, ssl_handshake_timeout=seconds, ssl_shutdown_timeout=1.0
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

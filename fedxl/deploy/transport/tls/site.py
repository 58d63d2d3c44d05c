"""A site's end: it connects to the server, and answers one request after the other. It listens on nothing."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from cryptography import x509

from fedxl.deploy import Say
from fedxl.deploy.protocol.envelope import KINDS
from fedxl.deploy.protocol.message import Piece, encode_failure, require_small
from fedxl.deploy.provision import keys
from fedxl.deploy.provision.connection import Connection, read_connection, tls_for_site
from fedxl.deploy.provision.settings import read_site
from fedxl.deploy.transport.tls.frames import CHUNK, HEAD, Head, chunks, keep_alive
from fedxl.errors import RefusedError, UserError, first_line, for_others, printable

PATIENCE = 20.0  # seconds to connect and to exchange certificates
PAUSES = (0.5, 30.0)  # seconds between two attempts to connect: the first, and the longest


def work(folder: Path, say: Say, done: Callable[[], bool] = lambda: False) -> None:
    """Stay connected and answer requests until this process is stopped, or `done` after an answer."""
    server = read_connection(folder)
    site, pause, told = Site(folder, say), PAUSES[0], ""
    while True:
        try:
            with connect(folder, server) as connection:
                answered = site.answer_all(connection)
                next(answered)
                # Said with the first request: a server closes the connection of a site that is not approved.
                site.greeting = f"connected to {server.host}:{server.port}"
                for _ in answered:
                    pause, told = PAUSES[0], ""
                    if done():
                        return
        except (OSError, EOFError, RefusedError, UserError) as error:  # certificates may be being replaced
            ended = site.kind == "model" and isinstance(error, (EOFError, ConnectionError, ssl.SSLEOFError))
            reason = DONE if ended else f"not connected: {explain(error)}; retrying"
            if reason != told:
                say(reason)
                pause, told = PAUSES[0], reason
            time.sleep(pause)
            pause = min(2 * pause, PAUSES[1])


class Site:
    """Answers requests. The last answer is kept: if the connection is lost on its way, the server asks again."""

    def __init__(self, folder: Path, say: Say = print) -> None:
        self.file, self.say = folder / "site.toml", say
        self.greeting, self.kind = "", ""  # what to say at the next request; of the last one, its kind
        self.last: tuple[bytes, Sequence[Piece]] = (b"", ())

    def answer_all(self, connection: ssl.SSLSocket) -> Iterator[None]:
        """Answer requests until the connection ends. Yields once before the first, then after each."""
        yield
        while True:
            head = Head.parse(_read(connection, HEAD.size))
            if self.greeting:
                self.say(self.greeting)
            self.greeting, self.kind = "", KINDS[head.kind]
            try:
                require_small(head.length, read_site(self.file).settings.megabytes)
            except (RefusedError, UserError) as error:  # its owner may be editing site.toml
                _discard(connection, head.length)
                self.say(f"refused: {error}")
                self.last = head.ticket, encode_failure(for_others(error))
            else:
                content = _read(connection, head.length)
                if head.ticket != self.last[0]:
                    # Loads torch: a site that nobody asks anything does without.
                    from fedxl.deploy.site.requests import answer

                    self.last = head.ticket, answer(self.file, KINDS[head.kind], content)
            for chunk in chunks(head.ticket, head.kind, self.last[1]):
                connection.sendall(chunk)
            yield


@contextmanager
def connect(folder: Path, server: Connection) -> Iterator[ssl.SSLSocket]:
    """A connection to the server, whose key is the pinned one."""
    with socket.create_connection((server.host, server.port), timeout=PATIENCE) as plain:
        keep_alive(plain)
        with tls_for_site(folder).wrap_socket(plain, server_hostname=server.host) as connection:
            _require_pinned(connection, server.server_key)
            connection.settimeout(None)
            yield connection


def _require_pinned(connection: ssl.SSLSocket, pinned: str) -> None:
    """Refuse a server whose key is not the pinned one, even if the authority signed it: that key may be stolen."""
    shown = connection.getpeercert(binary_form=True)
    assert shown
    found = keys.fingerprint(keys.public_key(x509.load_der_x509_certificate(shown)))
    if pinned and found != pinned:
        raise ssl.SSLError("the server's key is not the one pinned in connection.toml; ask its operator")


def _read(connection: ssl.SSLSocket, length: int) -> memoryview:
    """So many bytes. Memory is used as they arrive."""
    found, received = np.empty(length, np.uint8).data, 0
    while received < length:
        count = connection.recv_into(found[received : received + CHUNK])
        if not count:
            raise EOFError(CLOSED)
        received += count
    return found


def _discard(connection: ssl.SSLSocket, length: int) -> None:
    while length > 0:
        length -= len(_read(connection, min(length, CHUNK)))


CLOSED = "the server closed the connection"
DONE = "the run is done; waiting for the next one (Ctrl-C ends)"  # after the model has come
REASONS = {
    "certificate has expired": "the server's certificate has expired; its operator must renew it",
    "self-signed certificate in certificate chain": "the server's certificate is from another federation's authority",
    "unable to get local issuer certificate": "the server's certificate is from another federation's authority",
    "alert certificate expired": "this site's certificate has expired; request a new one: fedxl deploy request",
    "alert unknown ca": "the server does not know the authority of this site's certificate",
    "Connection refused": "connection refused; is the server running, and is connection.toml right?",
    "Name or service not known": "there is no such host; see connection.toml",
    "WRONG_VERSION_NUMBER": "the server does not use TLS; see connection.toml",
    "timed out": "the server does not answer; is connection.toml right, and is there a firewall between?",
    "EOF occurred in violation of protocol": f"{CLOSED}: it may have stopped, or this site's key is not approved",
    "Connection reset by peer": f"{CLOSED}: it may have stopped, or this site's key is not approved",
    CLOSED: f"{CLOSED}: it may have stopped, or this site's key is not approved",
}


def explain(error: Exception) -> str:
    """Why there is no connection, and what to do."""
    known = (meaning for sign, meaning in REASONS.items() if sign in str(error))
    return next(known, printable(first_line(error)))

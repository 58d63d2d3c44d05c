"""What a connection carries: frames in both directions, each a request or a reply.

    16 bytes: ticket | 1 byte: kind, the same in a reply | 8 bytes: length | a message (protocol/message.py)

The receiver checks ticket and length before it reads the message.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from fedxl.deploy.protocol.envelope import KINDS
from fedxl.deploy.protocol.message import Piece, size
from fedxl.errors import refuse

HEAD = struct.Struct("!16sBQ")
TICKET = 16  # bytes
CHUNK = 2**20  # bytes
SILENCE = 60  # seconds after which a peer that does not even acknowledge packets is gone


class Head(NamedTuple):
    ticket: bytes
    kind: int  # a place in KINDS
    length: int

    @classmethod
    def parse(cls, content: bytes | memoryview) -> Head:
        head = cls(*HEAD.unpack(content))
        refuse(head.kind >= len(KINDS), "it sends a frame of an unknown kind")
        return head


def chunks(ticket: bytes, kind: int, pieces: Sequence[Piece]) -> Iterator[Piece]:
    """A frame, in pieces that are small enough to be sent one by one."""
    yield HEAD.pack(ticket, kind, size(pieces))
    for piece in pieces:
        view = memoryview(piece)
        yield from (view[start : start + CHUNK] for start in range(0, len(view), CHUNK))


def keep_alive(connection: socket.socket) -> None:
    """Notice a peer that has vanished without a word: its machine lost power, or a firewall forgot the connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": SILENCE // 3, "TCP_KEEPINTVL": SILENCE // 6, "TCP_KEEPCNT": 4}
    for name, value in {**options, "TCP_USER_TIMEOUT": SILENCE * 1000}.items():
        with suppress(AttributeError, OSError):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

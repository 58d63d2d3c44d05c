"""Flower's Grid as a Carrier, and fedxl's messages as Flower's records."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedxl.deploy.protocol.envelope import Envelope, Failure, Kind
from fedxl.deploy.protocol.message import Piece, encode, read_reply
from fedxl.errors import first_line, printable

RECORD = "fedxl"
POLL = 0.25  # seconds between two looks for replies
UNSENT = "not sent to "  # begins what takes the place of a ticket


def pack(kind: str, pieces: Sequence[Piece]) -> RecordDict:
    """A message as one array of bytes: Flower sends arrays in pieces of 5 MB, and other records much more slowly."""
    content = b"".join(pieces)
    return RecordDict({RECORD: ArrayRecord({kind: Array("uint8", (len(content),), "bytes", content)})})


def unpack(content: RecordDict) -> tuple[str, bytes]:
    """The kind of a message, and its bytes."""
    ((kind, array),) = content.array_records[RECORD].items()
    return kind, array.data


class GridCarrier:
    def __init__(self, grid: Grid, megabytes: float) -> None:
        self.grid, self.megabytes = grid, megabytes

    def nodes(self) -> Mapping[str, str]:
        return dict.fromkeys(map(str, self.grid.get_node_ids()), "")

    def approved(self) -> None:
        return None

    def send(self, requests: Mapping[str, Envelope], kind: Kind, seconds: float) -> Mapping[str, str]:
        """Messages go out one at a time, as each is as large as the network."""
        tickets = dict[str, str]()
        for node, envelope in requests.items():
            content = pack(kind, encode(envelope))
            message = Message(content, int(node), MessageType.QUERY, ttl=seconds)
            # Flower returns None in place of the ticket of a message that it does not take.
            ticket = next(iter(self.grid.push_messages([message])), None)
            tickets[ticket or UNSENT + node] = node
        return tickets

    def replies(self, tickets: Sequence[str]) -> Iterator[tuple[str, Envelope | Failure]]:
        """A reply belongs to the ticket that we ask for. What it says of itself was written by its sender."""
        for ticket in tickets:
            if ticket.startswith(UNSENT):
                yield ticket, Failure("Flower did not take the message")
                continue
            try:
                found = [self._read(message) for message in self.grid.pull_messages([ticket])]
            except Exception as error:  # a damaged or hostile reply may raise anything
                found = [Failure(f"its reply cannot be fetched: {printable(first_line(error))}")]
            for reply in found[:1]:
                yield ticket, reply

    def _read(self, message: Message) -> Envelope | Failure:
        if message.has_error():
            error = message.error
            return Failure(f"Flower reports error {error.code}: {printable(error.reason or 'no reason')}")
        return read_reply(unpack(message.content)[1], self.megabytes)

    def forget(self, tickets: Sequence[str]) -> None:
        """Nothing to do: a request expires with its deadline, and SuperLink discards what comes later."""

    def wait(self, seconds: float) -> None:
        time.sleep(min(seconds, POLL))

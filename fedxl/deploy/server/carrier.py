"""Flower's grid as a carrier of envelopes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from fedxl.deploy.flower.common import Array, Grid, Message
from fedxl.deploy.protocol.envelope import Envelope, Failure, Kind
from fedxl.deploy.protocol.records import KINDS, opened, sealed
from fedxl.errors import first_line, printable, require

UNSENT = "not sent to"  # in place of a ticket
REFUSED = 1000  # the code of an error that is ours: a reply that was not taken


class GridCarrier:
    """Flower's grid as a carrier of envelopes."""

    def __init__(self, grid: Grid, megabytes: float) -> None:
        self.grid, self.megabytes = grid, megabytes

    def nodes(self) -> Sequence[int]:
        return sorted(self.grid.get_node_ids())

    def send(self, letters: Mapping[int, Envelope], kind: Kind, seconds: float) -> Mapping[str, int]:
        nodes, known = sorted(letters), dict[int, Array]()
        messages = [
            Message(content=sealed(letters[node], known), dst_node_id=node, message_type=KINDS[kind], ttl=seconds)
            for node in nodes
        ]
        tickets = list(self.grid.push_messages(messages))
        require(len(tickets) == len(nodes), "Flower takes no messages of this size; see its log")
        return {ticket or f"{UNSENT} {node}": node for ticket, node in zip(tickets, nodes, strict=True)}

    def answers(self, tickets: Sequence[str]) -> Iterator[tuple[str, Envelope | Failure]]:
        # One by one, however many are here: each is as large as the network.
        for ticket in tickets:
            if ticket.startswith(UNSENT):
                yield ticket, Failure("Flower has not taken the message")
                continue
            for message in islice(self.grid.pull_messages([ticket]), 1):
                # Whose it is, the ticket that we asked with says: a reply holds what its sender has written.
                yield ticket, _read(message, self.megabytes)

    def forget(self, tickets: Sequence[str]) -> None:
        """Flower's own grid keeps nothing."""


def _read(message: Message, megabytes: float) -> Envelope | Failure:
    if message.has_error() and message.error.code == REFUSED:
        return Failure(f"its answer is not taken: {printable(message.error.reason)}")
    if message.has_error():
        return Failure(f"Flower reports error {message.error.code}: {printable(message.error.reason or 'no reason')}")
    try:
        letter = opened(message.content, megabytes)
    except Exception as error:  # whatever a damaged or hostile answer may raise
        return Failure(f"its answer cannot be read: {printable(first_line(error))}")
    reason = letter.facts.get("failure")
    return Failure(printable(reason)) if reason else letter

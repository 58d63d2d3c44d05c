"""Flower's grid as a carrier of requests and replies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from fedxl.deploy.flower.common import Array, Grid, Message
from fedxl.deploy.protocol.envelope import Envelope, Failure, Kind
from fedxl.deploy.protocol.records import KINDS, from_records, to_records
from fedxl.errors import first_line, printable, require

UNSENT = "not sent to"  # in place of a ticket
REFUSED = 1000  # our own error code: we refused the reply


class GridCarrier:
    def __init__(self, grid: Grid, megabytes: float) -> None:
        self.grid, self.megabytes = grid, megabytes

    def nodes(self) -> Sequence[int]:
        return sorted(self.grid.get_node_ids())

    def send(self, requests: Mapping[int, Envelope], kind: Kind, seconds: float) -> Mapping[str, int]:
        nodes, packed = sorted(requests), dict[int, Array]()
        messages = [
            Message(
                content=to_records(requests[node], packed), dst_node_id=node, message_type=KINDS[kind], ttl=seconds
            )
            for node in nodes
        ]
        tickets = list(self.grid.push_messages(messages))
        require(len(tickets) == len(nodes), "Flower refuses messages of this size; see its log")
        return {ticket or f"{UNSENT} {node}": node for ticket, node in zip(tickets, nodes, strict=True)}

    def replies(self, tickets: Sequence[str]) -> Iterator[tuple[str, Envelope | Failure]]:
        # One at a time, even if many have arrived: each is as large as the network.
        for ticket in tickets:
            if ticket.startswith(UNSENT):
                yield ticket, Failure("Flower did not accept the message")
                continue
            for message in islice(self.grid.pull_messages([ticket]), 1):
                # The ticket tells which site replied. The reply itself holds whatever its sender wrote.
                yield ticket, _read(message, self.megabytes)

    def forget(self, tickets: Sequence[str]) -> None:
        """Flower's own grid keeps nothing."""


def _read(message: Message, megabytes: float) -> Envelope | Failure:
    if message.has_error() and message.error.code == REFUSED:
        return Failure(f"its reply was refused: {printable(message.error.reason)}")
    if message.has_error():
        return Failure(f"Flower reports error {message.error.code}: {printable(message.error.reason or 'no reason')}")
    try:
        reply = from_records(message.content, megabytes)
    except Exception as error:  # a damaged or hostile reply may raise anything
        return Failure(f"its reply cannot be read: {printable(first_line(error))}")
    reason = reply.facts.get("failure")
    return Failure(printable(reason)) if reason else reply

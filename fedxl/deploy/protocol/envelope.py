"""The messages between server and sites, independent of what transports them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from fedxl import __version__
from fedxl.errors import RefusedError, printable
from fedxl.risks.pairing import Share

Kind = Literal["hello", "train", "evaluate", "secure"]
POLL = 0.5  # seconds
DIVERGED = "diverged: "  # prefix of a site's failure when its numbers are not finite or out of range


class Envelope(NamedTuple):
    """A message: plain values and named tensors."""

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def size(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class RunHeader(NamedTuple):
    """What every request of a run contains."""

    run: str  # the run id, under which a site stores its state
    config: str  # the experiment, as far as sites need it, as JSON
    facts_of_all: str  # what an algorithm may know about the data of all sites together, as JSON
    preparation: str = ""  # how all sites make examples of their tables, as JSON; "": their data need none

    @property
    def facts(self) -> dict[str, Any]:
        return {"version": __version__, **self._asdict()}


class TrainRequest(NamedTuple):
    """The tensors of a request to train."""

    server: Any  # the server's state, without the score pool
    share: Share  # the weight of this site
    passive: Any  # what this site reads of the score pool


class ScoreReply(NamedTuple):
    """The tensors of a reply to `evaluate`, if the site discloses its scores."""

    scores: Tensor  # [n, *d], sorted, so that the order identifies no example
    y: Tensor  # [n, L] bytes: 0, 1 or -1


class CurveReply(NamedTuple):
    """The tensors of a reply to `evaluate`, if the site discloses a curve."""

    positives: Tensor  # [L, bins], from the lowest bin up; with noise, any whole numbers
    negatives: Tensor  # as positives


class Failure(NamedTuple):
    """Why there is no reply."""

    reason: str


class Carrier(Protocol):
    """Transports requests to nodes and replies back: Flower's grid or, in tests, a few lines of Python."""

    def nodes(self) -> Sequence[int]:
        """The nodes that are connected now."""

    def send(self, requests: Mapping[int, Envelope], kind: Kind, seconds: float) -> Mapping[str, int]:
        """Send each node its request. Returns the node of each ticket. Requests expire after so many seconds."""

    def replies(self, tickets: Sequence[str]) -> Iterable[tuple[str, Envelope | Failure]]:
        """The replies that have arrived, by ticket. Each is returned once."""

    def forget(self, tickets: Sequence[str]) -> None:
        """Discard the replies to these tickets, now and when they arrive."""


def pause() -> None:
    """Wait before polling again."""
    time.sleep(POLL)


def exchange(
    carrier: Carrier, requests: Mapping[int, Envelope], kind: Kind, seconds: float
) -> Iterator[tuple[int, Envelope | Failure]]:
    """Send requests and yield each node with its reply as it arrives; at the deadline, a Failure for the others."""
    deadline = time.monotonic() + seconds
    waiting = dict(carrier.send(requests, kind, seconds)) if requests else {}
    late = False
    while waiting and not late:
        late = time.monotonic() > deadline  # then poll once more: replies may have arrived while we processed others
        for ticket, reply in carrier.replies(list(waiting)):
            if not (late and isinstance(reply, Failure)):  # past the deadline, Flower reports an expired request
                yield waiting.pop(ticket), reply
        if waiting and not late:
            pause()
    carrier.forget(list(waiting))
    for node in waiting.values():
        yield node, Failure(f"no reply within {seconds:g} s")


def whole(value: Any, what: str) -> int:
    """A count that another party reports. A fraction would be a mistake or an attack."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RefusedError(f"its {what} is {printable(value)}, which is not an integer")
    return value

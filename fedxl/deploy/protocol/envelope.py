"""The messages between server and sites, independent of what transports them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

from torch import Tensor

from fedxl import __version__
from fedxl.errors import RefusedError, printable
from fedxl.risks.pairing import Share

Kind = Literal["hello", "train", "evaluate", "secure", "frozen", "model"]
KINDS: tuple[Kind, ...] = get_args(Kind)
POLL = 1.0  # seconds between two looks at what has changed, at most
GRACE = 60.0  # seconds that a round waits for a site that is gone, at most
NO_EVALUATION = "it discloses no evaluation"
DIVERGED = "diverged: "  # prefix of a site's failure when its numbers are not finite or out of range


class Envelope(NamedTuple):
    """A message: plain values and named tensors."""

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    most: float = math.inf  # bytes of the reply to this request, if it is one; not part of what is sent

    @property
    def size(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class RunHeader(NamedTuple):
    """What every request of a run contains."""

    run: str  # the run id, under which a site stores its state
    config: str  # the experiment, as far as sites need it, as JSON
    facts_of_all: str  # what an algorithm may know about the data of all sites together, as JSON
    preparation: str = ""  # how all sites make examples of their tables, as JSON; "": their data need none
    frozen: str = ""  # digest of the weights that do not train, which sites get once; "": all train

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
    """Takes requests to sites and brings replies back: a transport (deploy/transport/), or a few lines in tests.

    A node is one connection of a site. A site that comes back is another node, or has been away in between.
    """

    def nodes(self) -> Mapping[str, str]:
        """The nodes that are connected now, with the site whose key each has shown; "" if nodes show no keys."""

    def approved(self) -> Mapping[str, int] | None:
        """The sites that may connect, with the most examples that each may claim; None: all, with any number."""

    def send(self, requests: Mapping[str, Envelope], kind: Kind, seconds: float) -> Mapping[str, str]:
        """Send each node its request. Returns the node of each ticket. Requests expire after so many seconds."""

    def replies(self, tickets: Sequence[str]) -> Iterable[tuple[str, Envelope | Failure]]:
        """The replies that have arrived, by ticket. Each is returned once."""

    def forget(self, tickets: Sequence[str]) -> None:
        """Discard the replies to these tickets, now and when they arrive."""

    def wait(self, seconds: float) -> None:
        """Return as soon as a reply has arrived or nodes have changed, and after so many seconds at the latest."""


def grace(seconds: float) -> float:
    """How long a site that is gone is waited for, of the seconds that it has to reply."""
    return min(GRACE, seconds / 2)


def exchange(
    carrier: Carrier, requests: Mapping[str, Envelope], kind: Kind, seconds: float,
    look: Callable[[Collection[str]], None] = lambda unanswered: None,
) -> Iterator[tuple[str, Envelope | Failure]]:  # fmt: skip
    """Send requests and yield each node with its reply as it arrives; at the deadline, a Failure for the others.

    look: called with the nodes whose replies are awaited, as often as there may be news.
    """
    deadline = time.monotonic() + seconds
    waiting = dict(carrier.send(requests, kind, seconds)) if requests else {}
    late = False
    while waiting and not late:
        late = time.monotonic() >= deadline  # then look once more: replies may have arrived while we processed others
        for ticket, reply in carrier.replies(list(waiting)):
            expired = late and isinstance(reply, Failure)  # which some transports report
            if not expired:
                yield waiting.pop(ticket), reply
        if waiting and not late:
            look(waiting.values())
            carrier.wait(min(POLL, max(deadline - time.monotonic(), 0)))
    carrier.forget(list(waiting))
    for node in waiting.values():
        yield node, Failure(f"no reply within {seconds:g} s")


def whole(value: Any, what: str) -> int:
    """A count that another party reports. A fraction would be a mistake or an attack."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RefusedError(f"its {what} is {printable(value)}, which is not an integer")
    return value

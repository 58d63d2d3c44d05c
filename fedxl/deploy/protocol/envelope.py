"""What goes between server and sites, whatever carries it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from fedxl import __version__
from fedxl.algorithms.protocol import Share
from fedxl.errors import WORDS as WORDS  # part of what this module offers

Kind = Literal["hello", "train", "evaluate"]
POLL = 0.5  # seconds
DIVERGED = "diverged: "  # what the failure of a site begins with whose numbers are of no use


class Envelope(NamedTuple):
    """Plain facts, and named tensors."""

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def size(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class Letterhead(NamedTuple):
    """What every letter of a run begins with."""

    run: str  # its number, by which a site keeps its state
    config: str  # what sites are told of the experiment
    facts_of_all: str  # what an algorithm may know of all sites' data together

    @property
    def facts(self) -> dict[str, Any]:
        return {"version": __version__, **self._asdict()}


class Order(NamedTuple):
    """The tensors of a round's letter."""

    server: Any  # the state, without the pool
    share: Share  # how much this site counts
    passive: Any  # what this site reads of the pool


class Scored(NamedTuple):
    """The tensors of an evaluation's answer, where a site lets all of it go."""

    scores: Tensor  # [n, *d], in no order that would tell one example from another
    labels: Tensor  # [n], bytes


class Failure(NamedTuple):
    """Why there is no answer."""

    reason: str


class Carrier(Protocol):
    """Brings envelopes to nodes and answers back; Flower's grid, or in tests a few lines of Python."""

    def nodes(self) -> Sequence[int]:
        """Those that can be reached now."""

    def send(self, letters: Mapping[int, Envelope], kind: Kind, seconds: float) -> Mapping[str, int]:
        """Sends each node its envelope: tickets, and whose they are. Nothing is delivered after so many seconds."""

    def answers(self, tickets: Sequence[str]) -> Iterable[tuple[str, Envelope | Failure]]:
        """The answers that are here by now, by ticket; each is handed out once."""

    def forget(self, tickets: Sequence[str]) -> None:
        """Nobody will ask for these answers any more: what there is of them need not be kept."""


def pause() -> None:
    """Until it is worth looking again."""
    time.sleep(POLL)


def asked(
    carrier: Carrier, letters: Mapping[int, Envelope], kind: Kind, seconds: float
) -> Iterator[tuple[int, Envelope | Failure]]:
    """Each node with its answer, as answers come in; after so many seconds the others' is that there is none."""
    deadline = time.monotonic() + seconds
    waiting = dict(carrier.send(letters, kind, seconds)) if letters else {}
    late = False
    while waiting and not late:
        late = time.monotonic() > deadline  # then this is a last look, for what came while an answer was worked on
        for ticket, answer in carrier.answers(list(waiting)):
            if not (late and isinstance(answer, Failure)):  # by now a message that nobody answered has expired
                yield waiting.pop(ticket), answer
        if waiting and not late:
            pause()
    carrier.forget(list(waiting))
    for node in waiting.values():
        yield node, Failure(f"no answer within {seconds:g} s")

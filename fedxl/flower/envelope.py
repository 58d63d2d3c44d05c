"""What goes between server and sites, whatever carries it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from fedxl.algorithm import Share

Kind = Literal["hello", "train"]


class Envelope(NamedTuple):
    """Plain facts, and named tensors."""

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def size(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class Order(NamedTuple):
    """The tensors of a round's letter: the server's state, and how much this site counts."""

    server: Any
    share: Share


class Failure(NamedTuple):
    """Why there is no answer."""

    reason: str


class Carrier(Protocol):
    """Brings envelopes to nodes and answers back; Flower's grid, or in tests a few lines of Python."""

    def nodes(self) -> Sequence[int]:
        """Those that can be reached now."""

    def send(self, letters: Mapping[int, Envelope], kind: Kind, seconds: float) -> Mapping[str, int]:
        """Sends each node its envelope: tickets, and whose they are. Nothing is delivered after so many seconds."""

    def answers(self, tickets: Sequence[str]) -> Mapping[str, Envelope | Failure]:
        """The answers that are here by now; each is handed out once."""

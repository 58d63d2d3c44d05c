"""The clients' private side of a run: what each remembers between its rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fedxl import tree
from fedxl.wire import RefusedError, fitted


class ClientStates(NamedTuple):
    """What a checkpoint must hold besides the server."""

    rounds: dict[str, Tensor]  # by client number: in how many rounds it took part
    states: dict[str, object]


@dataclass
class ClientStore:
    """Private states, and how often each client took part. Clients that never did cost nothing."""

    num_clients: int
    _visits: dict[int, int] = field(default_factory=dict)
    _states: dict[int, object] = field(default_factory=dict)

    def visits(self, client: int) -> int:
        return self._visits.get(client, 0)

    def state(self, client: int, init: Callable[[int], object]) -> object:
        """The client's state, or what `init` makes of a client that never took part."""
        state = self._states.get(client)
        return init(client) if state is None else state

    def put(self, states: Mapping[int, object]) -> None:
        """The states after a round in which these clients took part."""
        self.count(states)
        self._states.update(states)

    def count(self, clients: Iterable[int]) -> None:
        """These clients took part in a round, here or in another process."""
        self._visits.update({client: self.visits(client) + 1 for client in clients})

    @property
    def known(self) -> set[int]:
        """The clients whose states are here."""
        return set(self._states)

    def take(self, client: int) -> object:
        """The state of a client that goes on elsewhere; how often it took part stays known."""
        return self._states.pop(client)

    def bring(self, states: Mapping[int, object]) -> None:
        """The states of clients that were elsewhere."""
        self._states.update(states)

    @property
    def packed(self) -> ClientStates:
        rounds = {str(client): torch.tensor(number) for client, number in self._visits.items()}
        return ClientStates(rounds, {str(client): state for client, state in self._states.items()})

    def restore(self, tensors: Mapping[str, Tensor], init: Callable[[int], object], device: torch.device) -> None:
        """Take the states back from a checkpoint; RefusedError if they are not those of these clients."""
        members = [name.removeprefix("rounds.") for name in tensors if name.startswith("rounds.")]
        self._require_known(members)
        like = {name: init(int(name)) for name in members}
        none = torch.zeros((), dtype=torch.int64)
        rounds, states = fitted(ClientStates(dict.fromkeys(members, none), like), tensors)
        self._visits = {int(name): int(number) for name, number in rounds.items()}
        self._states = {int(name): tree.to(state, device) for name, state in states.items()}

    def _require_known(self, members: Iterable[str]) -> None:
        if not {str(client) for client in range(self.num_clients)}.issuperset(members):
            raise RefusedError(f"it holds clients that are not among these {self.num_clients}")

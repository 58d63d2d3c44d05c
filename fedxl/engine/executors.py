"""How the simulator runs the clients of a wave: one after another, or all at once as one vectorised program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedxl import tree
from fedxl.algorithm import Batch, ClientRound, Share, local_round
from fedxl.models import Score, weights_of


class Wave(NamedTuple):
    """The clients that run together, with their draws: everything an executor needs, already on the device."""

    clients: Sequence[Any]  # their private states
    shares: Share  # [C]
    batches: Callable[[Any], Iterable[Batch]]  # the steps of one client (an int) or of all of them (a slice)
    seed: Callable[[int], int]  # of a client, for the layers that draw inside the model (dropout)


class Executor(Protocol):
    def __call__(self, algorithm: ClientRound, server: Any, wave: Wave) -> tuple[list[Any], Any]:
        """(clients, stacked updates)."""


def loop(algorithm: ClientRound, server: Any, wave: Wave) -> tuple[list[Any], Any]:
    """One client after another."""
    clients, updates = [], []
    for i, client in enumerate(wave.clients):
        with _seeded(wave.seed(i), wave.shares.model.device):
            share = tree.map(lambda leaf, i=i: leaf[i], wave.shares)
            client, update = local_round(algorithm, server, client, share, wave.batches(i))
        clients.append(client)
        updates.append(update)
    return clients, tree.stack(updates)


def vectorised(algorithm: ClientRound, server: Any, wave: Wave) -> tuple[list[Any], Any]:
    """All clients at once under `vmap`. Ragged states are padded; indices never reach the padding."""
    with _seeded(wave.seed(0), wave.shares.model.device):
        stacked, updates = local_round(
            _Vectorised(algorithm),
            server,
            tree.stack_ragged(wave.clients),
            wave.shares,
            wave.batches(slice(None)),
        )
    return tree.unstack_ragged(stacked, wave.clients), updates


class _Vectorised:
    """An algorithm's round for many clients: the server's state is shared, everything else has a row a client."""

    def __init__(self, algorithm: ClientRound) -> None:
        self.start = vmap(algorithm.start, in_dims=(None, 0, 0))
        self.step = vmap(algorithm.step, in_dims=(None, 0, 0), randomness="different")
        # Traces arrive stacked over steps first, then over clients.
        self.finish = vmap(algorithm.finish, in_dims=(None, 0, 0, 1))


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout and the like draw from a stream of their own; the caller's is left as it was."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


EXECUTORS: Mapping[str, Executor] = {"loop": loop, "vmap": vectorised}

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def choose(model: nn.Module, score: Score, probe: Tensor, clients_at_once: int) -> tuple[str, str]:
    """What `auto` runs, and why (measured in docs/benchmarks.md)."""
    if clients_at_once < 2:
        return "loop", "one client at a time"
    if not probe.is_cuda and any(isinstance(module, CONVOLUTIONS) for module in model.modules()):
        return "loop", "grouped convolutions gain nothing on a CPU"
    try:
        with _seeded(0, probe.device):
            vmap(score, randomness="different")(tree.stack([weights_of(model)] * 2), torch.stack([probe] * 2))
    except Exception as error:  # whatever a model of the user's may raise: then it is not for vmap
        return "loop", f"the model cannot be vectorised: {str(error).strip().splitlines()[0]}"
    return "vmap", f"{clients_at_once} clients as one program"

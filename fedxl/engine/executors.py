"""How the simulator runs the clients of a wave: one after another, or all at once as one vectorised program.

The third way, captured once and replayed on a GPU, is in `cuda/graph.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.func import vmap

from fedxl import tree
from fedxl.algorithms.protocol import ClientRound, local_round
from fedxl.engine.wave import Wave


def loop(algorithm: ClientRound, server: Any, wave: Wave) -> tuple[list[Any], Any]:
    """One client after another."""
    clients, updates = [], []
    for i, client in enumerate(wave.clients):
        share, feed = tree.map(lambda leaf, i=i: leaf[i], (wave.shares, wave.feed))
        batches = (wave.batch(tree.map(lambda leaf, k=k: leaf[k], feed)) for k in range(wave.steps))
        with seeded(wave.seed(i), wave.device):
            client, update = local_round(algorithm, server, client, share, batches)
        clients.append(client)
        updates.append(update)
    return clients, tree.stack(updates)


def vectorised(algorithm: ClientRound, server: Any, wave: Wave) -> tuple[list[Any], Any]:
    """All clients at once under `vmap`. Ragged states are padded; indices never reach the padding."""
    steps = (wave.batch(tree.map(lambda leaf, k=k: leaf[:, k], wave.feed)) for k in range(wave.steps))
    with seeded(wave.seed(0), wave.device):
        stacked = tree.stack_ragged(wave.clients)
        stacked, updates = local_round(Vectorised(algorithm), server, stacked, wave.shares, steps)
    return tree.unstack_ragged(stacked, wave.clients), updates


class Vectorised:
    """An algorithm's round for many clients: the server's state is shared, everything else has a row a client."""

    def __init__(self, algorithm: ClientRound) -> None:
        self.start = vmap(algorithm.start, in_dims=(None, 0, 0))
        self.step = vmap(algorithm.step, in_dims=(None, 0, 0), randomness="different")
        # Traces arrive stacked over steps first, then over clients.
        self.finish = vmap(algorithm.finish, in_dims=(None, 0, 0, 1))


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout and the like draw from a stream of their own; the caller's is left as it was."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield

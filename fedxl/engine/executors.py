"""How the simulator runs the clients of a group: one after another, or all at once as one vectorised program.

The third way, captured once and replayed on a GPU, is in `cuda/graph.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.func import vmap

from fedxl import tree
from fedxl.algorithms.protocol import ClientUpdate, ServerState
from fedxl.engine.group import ClientRound, Group, local_round


def loop(running: ClientRound, server: ServerState, group: Group) -> tuple[list[object], ClientUpdate]:
    """One client after another."""
    clients, updates = [], []
    for i, client in enumerate(group.clients):
        share, feed = tree.map(lambda leaf, i=i: leaf[i], (group.shares, group.feed))
        batches = (group.batch(tree.map(lambda leaf, k=k: leaf[k], feed)) for k in range(group.steps))
        with seeded(group.seed(i), group.device):
            client, update = local_round(running, server, client, share, batches)
        clients.append(client)
        updates.append(update)
    return clients, tree.stack(updates)


def vectorised(running: ClientRound, server: ServerState, group: Group) -> tuple[list[object], ClientUpdate]:
    """All clients at once under `vmap`. Ragged states are padded; indices never reach the padding."""
    steps = (group.batch(tree.map(lambda leaf, k=k: leaf[:, k], group.feed)) for k in range(group.steps))
    with seeded(group.seed(0), group.device):
        stacked = tree.stack_ragged(group.clients)
        stacked, updates = local_round(Vectorised(running), server, stacked, group.shares, steps)
    return tree.unstack_ragged(stacked, group.clients), updates


class Vectorised:
    """A round for many clients: the server's state is shared, everything else has a row a client."""

    def __init__(self, running: ClientRound) -> None:
        self.start = vmap(running.start, in_dims=(None, 0, 0))
        self.step = vmap(running.step, in_dims=(None, 0, 0), randomness="different")
        # Traces arrive stacked over steps first, then over clients.
        self.finish = vmap(running.finish, in_dims=(None, 0, 0, 1))


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout and the like draw from a stream of their own; the caller's is left as it was."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield

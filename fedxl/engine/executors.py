"""How the simulator runs a group of clients: one by one, as one vectorised program, or captured (`cuda/graph.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from fedxl import tree
from fedxl.algorithms.protocol import ClientUpdate, ServerState
from fedxl.engine.group import ClientRound, Executor, Group, local_round
from fedxl.errors import first_line
from fedxl.models import Score, Weights, weights_of


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
    """A round for many clients: the server's state is shared, everything else has one row per client."""

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


EXECUTORS = ("loop", "vmap", "graph")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def executor(
    name: str, compiled: bool = True, say: Callable[[str], None] = lambda line: None, **graph: Any
) -> Executor:
    """An executor; `graph` (with options of its own) keeps the step it has captured, so each engine has its own."""
    plain: dict[str, Executor] = {"loop": loop, "vmap": vectorised}
    if name in plain:
        return plain[name]
    try:
        # Not before it is needed: it builds on private modules of torch, which the next torch may not have.
        from fedxl.engine.cuda.graph import GraphExecutor
    except Exception as error:  # whatever a module raises that was written for another torch
        say(f"executor: loop, because graph does not work with torch {torch.__version__}: {first_line(error)}")
        return loop
    return GraphExecutor(compiled=compiled, say=say, **graph)


def choose(model: nn.Module, score: Score, probe: Tensor, clients_at_once: int) -> tuple[str, str]:
    """What `auto` runs, and why (measured in docs/benchmarks.md and docs/performance.md)."""
    if probe.is_cuda:
        return "graph", f"steps of {clients_at_once} clients, captured once and replayed on the GPU"
    if clients_at_once < 2:
        return "loop", "one client at a time"
    if any(isinstance(module, CONVOLUTIONS) for module in model.modules()):
        return "loop", "grouped convolutions gain nothing on a CPU"
    if why := not_for_vmap(model, score, probe):
        return "loop", why
    return "vmap", f"{clients_at_once} clients as one program"


def not_for_vmap(model: nn.Module, score: Score, probe: Tensor) -> str:
    """Why clients with this model cannot run as one program; empty if they can."""

    def gradient(weights: Weights, x: Tensor) -> Any:
        found: Any = vjp(lambda params: score(weights._replace(params=params), x)[0], weights.params)
        h, backward = found
        return backward(h)

    probe = torch.cat([probe, probe]) if len(probe) == 1 else probe  # BatchNorm takes no single example
    try:
        with seeded(0, probe.device):
            vmap(gradient, randomness="different")(tree.stack([weights_of(model)] * 2), torch.stack([probe] * 2))
    except Exception as error:  # whatever a model of the user's may raise
        return f"the model cannot be vectorised: {first_line(error)}"
    return ""

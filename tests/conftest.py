"""What the tests share: small federations in float64, with ragged and one-class clients."""

from __future__ import annotations

import os
import pty
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedxl.data.examples import Examples
from fedxl.data.inputs import from_arrays
from fedxl.deploy.protocol import envelope
from fedxl.deploy.server import directory
from fedxl.engine.executors import Executor, executor, loop, vectorised
from tests.running import again

Clients = list[tuple[Tensor, Tensor]]
PATIENCE = 1800.0  # seconds after which something hangs: far more than it takes on the busiest machine


def seen_at_a_terminal(command: list[str], **environment: str) -> bytes:
    """All that a process shows when it runs at a terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update({"TERM": "xterm", **environment})
        os.execv(command[0], command)
    shown = b""
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    os.waitpid(pid, 0)
    return shown


def until(condition: Callable[[], bool], going_on: Callable[[], bool] = lambda: True) -> bool:
    """Wait for something to happen as long as what would bring it about goes on; whether it has happened.

    A limit is there for what would otherwise hang for ever, and for nothing else.
    """
    deadline = time.monotonic() + PATIENCE
    while going_on() and time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def never_falls_back(line: str) -> None:
    expected = ("executor: graph", "executor: compiling")
    assert line.startswith(expected), f"nothing may fall back here: {line}"


def replaying(layout: str) -> Any:
    """The graph executor with its stand-in for CUDA: the same program in the same memory, called step by step."""
    return executor("graph", compiled=False, say=never_falls_back, capture=again, layout=layout)


EXECUTORS: dict[str, Callable[[], Executor]] = {
    "loop": lambda: loop,
    "vmap": lambda: vectorised,
    "graph with streams": lambda: replaying("streams"),
    "graph vectorised": lambda: replaying("vectorised"),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_clients(sizes: list[tuple[int, int]], dim: int = 5, seed: int = 0) -> Clients:
    """Clients with so many positives and negatives each, in float64."""
    generator = torch.Generator().manual_seed(seed)
    clients = []
    for positives, negatives in sizes:
        y = torch.cat([torch.ones(positives), torch.zeros(negatives)]).long()
        x = torch.randn(len(y), dim, generator=generator, dtype=torch.float64) + y[:, None]
        clients.append((x, y))
    return clients


RAGGED = [(6, 14), (7, 0), (0, 9), (3, 28), (5, 7), (1, 1)]  # (positives, negatives); two clients have one class


@pytest.fixture
def ragged() -> Examples:
    return from_arrays(make_clients(RAGGED))


@pytest.fixture
def network() -> Callable[[int], nn.Module]:
    """A small smooth network with the given number of outputs, always with the same weights."""

    def build(outputs: int = 1) -> nn.Module:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, outputs)).double()

    return build


class Clock:
    """Time that passes only while somebody waits: work takes none of it, however busy the machine."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def impatient(monkeypatch) -> Clock:
    """Servers that ask for answers all the time, and whose deadlines are for waiting alone."""
    clock = Clock()
    monkeypatch.setattr(envelope, "POLL", 0.01)
    for module in (envelope, directory):
        monkeypatch.setattr(module, "time", clock)
    return clock

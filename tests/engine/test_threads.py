"""How many threads a run gets: as many as its steps occupy, unless the user has chosen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedxl import FeDXL2, auroc, fit
from fedxl.engine import threads
from fedxl.models import operations
from fedxl.training.settings import Hooks
from tests.conftest import make_clients

BEFORE = 4


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """One with four cores, where nobody has chosen."""
    before = torch.get_num_threads()
    for name in threads.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_default", lambda: BEFORE)
    torch.set_num_threads(BEFORE)
    yield
    torch.set_num_threads(before)


def while_fitting(executor: str = "loop") -> tuple[set[int], list[str], torch.Tensor]:
    """The threads that torch used in a small run, what the run said, and what it came to."""
    clients = [(x.float(), y) for x, y in make_clients([(4, 4)] * 2)]
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 1))
    used, lines = set[int](), list[str]()
    hooks = Hooks(on_progress=lambda now: used.add(torch.get_num_threads()), say=lines.append)
    settings = {"rounds": 2, "local_steps": 2, "batch_size": 4, "device": "cpu", "executor": executor}
    found = fit(model, clients, FeDXL2(auroc(), lr=0.1), hooks=hooks, **settings)
    return used, [line for line in lines if line.startswith("threads")], found.weights.params["0.weight"]


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_small_program_gets_one_thread_and_says_so_and_the_callers_number_comes_back(executor):
    used, lines, weights = while_fitting(executor)
    assert used == {1}
    assert lines == ["threads: 1 of 4, as many as steps of this size occupy (OMP_NUM_THREADS sets another number)"]
    assert torch.get_num_threads() == BEFORE
    threads.EACH, each = 1, threads.EACH
    try:
        used, lines, with_all = while_fitting(executor)
    finally:
        threads.EACH = each
    assert (used, lines) == ({BEFORE}, [])
    torch.testing.assert_close(with_all, weights, rtol=0, atol=1e-6)


def test_a_number_that_the_user_has_chosen_stays(monkeypatch):
    torch.set_num_threads(3)
    assert while_fitting()[:2] == ({3}, [])
    torch.set_num_threads(BEFORE)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert while_fitting()[:2] == ({BEFORE}, [])


@pytest.mark.parametrize(("shares", "wanted"), [(0, 1), (0.9, 1), (1.9, 1), (3.1, 3), (100, 4)])
def test_each_thread_has_enough_to_do(shares, wanted):
    with threads.threads_for(shares * threads.EACH, lambda line: None):
        assert torch.get_num_threads() == wanted


class Last(nn.Module):
    def __init__(self, layer: nn.Module, wide: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(wide, 1)

    def forward(self, x):
        found = self.layer(x)
        return self.head((found[0] if isinstance(found, tuple) else found)[:, -1])


@pytest.mark.parametrize(
    ("layer", "least"),
    [
        (nn.LSTM(8, 16, batch_first=True), 2 * 10 * 4 * (8 + 16) * 16),
        (nn.GRU(8, 16, batch_first=True), 2 * 10 * 3 * (8 + 16) * 16),
        (nn.TransformerEncoderLayer(8, 2, 32, batch_first=True), 2 * 10 * (4 * 8 * 8 + 2 * 8 * 32)),
    ],
    ids=["lstm", "gru", "attention"],
)
def test_operations_of_fused_layers_are_counted(layer, least):
    found = operations(Last(layer, 8 if isinstance(layer, nn.TransformerEncoderLayer) else 16), torch.zeros(1, 10, 8))
    assert least <= found <= 1.5 * least

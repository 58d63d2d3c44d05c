"""A finished run for tests of what comes after it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedxl.config.experiment import Config, execute
from fedxl.data.digits import digits
from fedxl.data.federation import Split
from fedxl.training.trainer import Hooks

QUIET = Hooks(say=lambda line: None)
CONFIG = Config(
    data={"name": "digits", "clients": 4},
    model={"name": "cnn", "channels": 4},
    risk={"name": "pauc"},
    algorithm={"name": "fedxl2", "lr": 0.1},
    run={"rounds": 4, "local_steps": 4, "eval_every": 2, "batch1": 8, "batch2": 8, "device": "cpu"},
)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run as `fedxl train` writes it. Tests that change it copy it."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    execute(CONFIG, folder, hooks=QUIET)
    return folder


@pytest.fixture(scope="session")
def held_back() -> Split:
    """The test data of that run."""
    test = digits(clients=4).test
    assert test is not None
    return test


@pytest.fixture
def npz(tmp_path: Path, held_back: Split) -> Path:
    path = tmp_path / "new.npz"
    np.savez(path, x=held_back.x.numpy())
    return path


def own_network() -> nn.Module:
    """A network that fedxl does not have."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 1))

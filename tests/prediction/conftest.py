"""A finished run for tests of what comes after it."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedxl.config.experiment import Config, execute
from fedxl.data.examples import Examples
from fedxl.data.sets.digits import digits
from fedxl.training.settings import Hooks

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
def held_back() -> Examples:
    """The test data of that run."""
    test = digits(clients=4).test
    assert test is not None
    return test


@pytest.fixture
def npz(tmp_path: Path, held_back: Examples) -> Path:
    path = tmp_path / "new.npz"
    np.savez(path, x=held_back.x.numpy())
    return path


def own_network() -> nn.Module:
    """A network that fedxl does not have."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 1))


def compiled_network() -> nn.Module:
    return torch.compile(own_network(), backend="eager")  # type: ignore[return-value]


COLUMNS = ("number", "age", "pressure", "sex", "hospital", "outcome")


def patients(count: int, seed: int) -> list[dict[str, object]]:
    """Patients of three hospitals, with missing values; the sick are older."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        sick = rng.random() < 0.4
        values = (
            f"P{number:03}",
            round(50 + 10 * rng.normal() + 8 * sick, 1),
            "" if rng.random() < 0.1 else round(120 + 20 * rng.normal() + 10 * sick),
            rng.choice(["f", "m"]),
            rng.choice(["north", "south", "east"]),
            "sick" if sick else "well",
        )
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with patients.csv and the run that was trained on it."""
    folder = tmp_path_factory.mktemp("table")
    write(folder / "patients.csv", patients(300, 0))
    table = {"name": "table", "path": str(folder / "patients.csv"), "label": "outcome", "positive": "sick"}
    config = Config(
        data={**table, "site": "hospital", "id": "number"},
        model={"name": "mlp", "hidden": [4]},
        risk={"name": "auroc"},
        algorithm={"name": "fedxl1", "lr": 0.1},
        run={"rounds": 4, "local_steps": 4, "eval_every": 2, "batch1": 8, "batch2": 8, "device": "cpu"},
    )
    execute(config, folder / "run", hooks=QUIET)
    return folder

"""Several rounds of an algorithm, and how its states compare between executors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedxl import sampling, tree
from fedxl.algorithms import Algorithm
from fedxl.algorithms.server_rules import begin
from fedxl.data.examples import Examples
from fedxl.models import weights_of
from tests.conftest import EXECUTORS
from tests.running import engine_for, play


def after_rounds(
    algorithm: Algorithm, model: nn.Module, federation: Examples, executor: str = "loop", rounds: int = 5,
    sizes: tuple[int, int, int] = (3, 4, 5), **settings: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Server and population after so many rounds (and the warm-up), by name. sizes: steps, batch1 and batch2."""
    federation = federation.pooled() if algorithm.centralized else federation
    engine = engine_for(algorithm, model, federation, EXECUTORS[executor](), *sizes, seed=1, **settings)
    server = begin(engine.algorithm, weights_of(model))
    for r in range(algorithm.first_round, rounds + 1):
        cohort = sampling.cohort(1, r, len(federation.parts), settings.get("cohort", 0), engine.chances)
        server = play(engine.algorithm, engine, server, r, cohort)
    return tree.pack({"server": server, "population": engine.population})


def assert_agree(first: dict[str, Tensor], *others: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    for other in others:
        assert first.keys() == other.keys()
        for key, value in first.items():
            torch.testing.assert_close(other[key], value, rtol=0, atol=tolerance, equal_nan=True, msg=key)

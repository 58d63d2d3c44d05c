"""How many operations a step of all clients takes, views left out: what a GPU must launch or fuse.

python -m benchmarks.operations
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedxl.algorithms import build
from fedxl.algorithms.server_rules import begin
from fedxl.data.examples import facts_about
from fedxl.data.inputs import from_arrays
from fedxl.engine.executors import vectorised
from fedxl.models import weights_of
from fedxl.risks import auroc, partial_auc
from fedxl.training.problem import assemble
from fedxl.training.rounds import play_round
from fedxl.training.settings import Settings
from fedxl.training.simulation import simulator

VIEWS = (
    *(
        "view",
        "reshape",
        "expand",
        "squeeze",
        "select",
        "slice",
        "alias",
        "detach",
        "permute",
        "transpose",
        "aten.t.",
    ),
    *("unbind", "split", "as_strided"),
)
METHODS = {"fedxl1": auroc, "fedxl2": partial_auc, "local_pair": partial_auc, "local_sgd": auroc}
CLIENTS = 4


class Counter(TorchDispatchMode):
    """Counts the operations that are not views."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not any(word in str(function) for word in VIEWS)
        return function(*args, **(kwargs or {}))


def operations(name: str, local_steps: int) -> int:
    """Of the second round of training with a linear model."""
    generator, algorithm = torch.Generator().manual_seed(0), build(name, METHODS[name](), lr=0.1)
    x, y = torch.randn(CLIENTS, 90, 5, generator=generator), torch.arange(90) % 3 == 0
    data = from_arrays([(each, y) for each in x])
    run = Settings(device="cpu", local_steps=local_steps, batch1=4, batch2=4)
    problem = assemble(nn.Linear(5, 1), algorithm, run, facts_about(data.holdings(), run.weighting))
    engine, everyone = simulator(problem, data, vectorised), np.arange(CLIENTS)
    server = begin(problem.algorithm, weights_of(problem.model))
    for round in range(algorithm.first_round, 2):
        server, _ = play_round(problem.algorithm, engine, server, round, everyone)
    with Counter() as counter:
        engine.run_round(server, 2, everyone)
    return counter.count


if __name__ == "__main__":
    for name in METHODS:
        few, many = (operations(name, steps) for steps in (4, 8))
        print(f"{name}: {(many - few) / 4:g} operations per step")

"""Which rank runs which client: the costliest first, each on the rank that has least to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedxl.sampling import Floats

# Nanoseconds on a CPU core, measured with `benchmarks/ranks.py`. Only their ratios matter, and they are the same at
# all ranks and in every run: a placement by clocks would not be repeated to the bit.
STEP = 1e5  # of a step, whatever the network
FLOP = 0.1  # of an operation
ROW = 1.0  # of an example of S1 in u, which a step copies
BACKWARD = 3  # a step's operations, over those of a forward pass


def costs(forward: float, batch: int, steps: int, num_first: Sequence[int], padded: bool = False) -> Floats:
    """What a round of each client costs; ragged clients differ in how many examples of S1 they have.

    forward: operations of a forward pass, one example. padded: all u have the length of the longest.
    """
    rows = np.asarray(num_first, np.float64)
    rows = np.full_like(rows, rows.max()) if padded else rows
    return steps * (STEP + BACKWARD * FLOP * forward * batch + ROW * rows)


def operations(model: nn.Module, probe: Tensor) -> float:
    """Multiplications and additions of a forward pass, one example."""
    from torch.utils.flop_counter import FlopCounterMode

    training = model.training
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(probe)
    model.train(training)
    return float(counter.get_total_flops()) / len(probe)


def longest_first(cost: Sequence[float], ranks: int, homes: Mapping[int, int] | None = None) -> list[int]:
    """The rank of each client: longest processing time first (Graham. SIAM J. Appl. Math. 17, 1969).

    The largest load is at most 4/3 of the least possible one. Among ranks that have equally little to do, a client
    goes to the one that holds its state.

    >>> longest_first([1, 1, 1, 3], 2)
    [1, 1, 1, 0]
    """
    loads, homes = [0.0] * ranks, homes or {}
    places = [0] * len(cost)
    for i in sorted(range(len(cost)), key=lambda i: (-cost[i], i)):
        least = min(loads)
        home = homes.get(i, -1)
        rank = home if home >= 0 and loads[home] <= least * (1 + 1e-12) else loads.index(least)
        places[i] = rank
        loads[rank] += cost[i]
    return places


def round_robin(clients: int, ranks: int) -> list[int]:
    """Clients dealt out in their order: what placement by cost is compared with."""
    return [i % ranks for i in range(clients)]

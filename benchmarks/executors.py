"""Ratios on one machine in one run: vmap against loop, and FeDXL2's step against Local SGD's.

python benchmarks/executors.py
"""

from __future__ import annotations

import numpy as np
import torch
from common import FEATURES, Job, compare, machine, population
from torch.nn import functional as nnf

from fedxl.models import mlp

BATCH = 16


def autograd_loop(num_clients: int, steps: int) -> None:
    """What one would write without this library: local cross-entropy steps with backward(), client after client."""
    x, y = torch.randn(2 * BATCH, FEATURES), (torch.arange(2 * BATCH) % 2).float()
    for _ in range(num_clients):
        model = mlp((FEATURES,), hidden=(64,))
        for _ in range(steps):
            loss = nnf.binary_cross_entropy_with_logits(model(x).squeeze(-1), y)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), gradients, strict=True):
                    p -= 0.01 * g


def main() -> None:
    print(machine())
    steps = 32
    for num_clients in (100, 1000):
        federation = population(num_clients)
        everyone = np.arange(num_clients)
        jobs = {
            (name, executor): Job(name, federation, executor, steps)
            for name in ("fedxl2", "local_sgd")
            for executor in ("loop", "vmap")
        }
        timed = {
            f"{name} {executor}": lambda job=job, all=everyone: job.run(all) for (name, executor), job in jobs.items()
        }
        timed["autograd"] = lambda n=num_clients: autograd_loop(n, steps)
        seconds = compare(timed, 5 if num_clients == 100 else 1)
        print(f"\n{num_clients} clients, MLP 64-64-1, batch 16+16, ms a step (rounds of {steps}):")
        for name, value in seconds.items():
            print(f"  {name:<16} {1000 * value / steps:9.2f}")
        for name in ("fedxl2", "local_sgd"):
            print(f"  {name}: vmap is {seconds[f'{name} loop'] / seconds[f'{name} vmap']:.1f} times as fast as loop")
        gain = seconds["autograd"] / seconds["local_sgd vmap"]
        print(f"  local_sgd: vmap is {gain:.1f} times as fast as plain autograd")
        for executor in ("loop", "vmap"):
            ratio = seconds[f"fedxl2 {executor}"] / seconds[f"local_sgd {executor}"]
            print(f"  {executor}: FeDXL2 costs {ratio:.2f} times Local SGD")


if __name__ == "__main__":
    main()

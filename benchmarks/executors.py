"""Ratios on one machine in one run: vmap against loop, and FeDXL2's step against Local SGD's.

python benchmarks/executors.py
"""

from __future__ import annotations

import torch
from common import BATCH, compare, job, machine, population
from torch.nn import functional as nnf

from fedxl.models import mlp

STEPS = 32


def autograd_loop(num_clients: int, features: int, hidden: tuple[int, ...]) -> None:
    """What one would write without this library: local cross-entropy steps with autograd, client after client."""
    x, y = torch.randn(2 * BATCH, features), (torch.arange(2 * BATCH) % 2).float()
    for _ in range(num_clients):
        model = mlp((features,), hidden=hidden)
        for _ in range(STEPS):
            loss = nnf.binary_cross_entropy_with_logits(model(x).squeeze(-1), y)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), gradients, strict=True):
                    p -= 0.01 * g


def measure(num_clients: int, features: int, hidden: tuple[int, ...], repeats: int) -> None:
    data = population(num_clients, features=features)
    timed = {"autograd": lambda: autograd_loop(num_clients, features, hidden)}
    for name in ("fedxl2", "local_sgd"):
        for executor in ("loop", "vmap"):
            timed[f"{name} {executor}"] = job(name, data, executor, STEPS, hidden).round
    seconds = compare(timed, repeats)
    layers = "-".join(map(str, (features, *hidden, 1)))
    print(f"\n{num_clients} clients, MLP {layers}, batch {BATCH}+{BATCH}, ms per step of all clients:")
    for name, value in seconds.items():
        print(f"  {name:<16} {1000 * value / STEPS:9.2f}")
    for name in ("fedxl2", "local_sgd"):
        print(f"  {name}: vmap is {seconds[f'{name} loop'] / seconds[f'{name} vmap']:.1f} times as fast as loop")
    gain = seconds["autograd"] / seconds["local_sgd vmap"]
    print(f"  local_sgd: vmap is {gain:.1f} times as fast as plain autograd")
    for executor in ("loop", "vmap"):
        ratio = seconds[f"fedxl2 {executor}"] / seconds[f"local_sgd {executor}"]
        print(f"  {executor}: FeDXL2 costs {ratio:.2f} times Local SGD")


def main() -> None:
    print(machine())
    measure(100, 64, (64,), repeats=5)
    measure(1000, 64, (64,), repeats=1)
    measure(50, 784, (256, 256), repeats=3)


if __name__ == "__main__":
    main()

"""Bytes that a client receives and sends in a round, in copies of the network: python benchmarks/traffic.py

python benchmarks/traffic.py parts: in bytes, by what trains; the ViT only where timm is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

import fedxl
from fedxl import tree
from fedxl.config.experiment import Config, build_network, execute
from fedxl.training.settings import Hooks

QUIET = Hooks(say=lambda line: None)

CASES = (
    ("fedxl1", "auroc", {}),
    ("fedxl2", "pauc", {}),
    ("local_pair", "auroc", {"beta": 1.0}),
    ("local_pair", "pauc", {}),
    ("local_sgd", "pauc", {}),
)

RESNET, VIT = {"name": "resnet18", "stem": "7x7"}, {"name": "timm:vit_tiny_patch16_224"}
PARTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("all", RESNET),
    ("head", {**RESNET, "train": ["fc"]}),
    ("all", VIT),
    ("head", {**VIT, "train": ["head"]}),
    ("head, adapters of rank 4", {**VIT, "train": ["head"], "adapter_rank": 4}),
)


def parts() -> None:
    """FeDXL2 on images of 3 x 224 x 224, one step of 2 + 2 examples: nearly all bytes are the network's."""
    clients = [(torch.randn(4, 3, 224, 224), torch.tensor([0, 1, 0, 1])) for _ in range(2)]
    print(f"{'network':<28}{'trains':<28}{'parameters':>12}{'down':>14}{'up':>14}")
    for trains, table in PARTS:
        if str(table["name"]).startswith("timm:") and not find_spec("timm"):
            continue
        model = build_network(dict(table), (3, 224, 224), ())
        algorithm = fedxl.FeDXL2(fedxl.partial_auc(), lr=0.01)
        result = fedxl.fit(
            model,
            clients,
            algorithm,
            batch_size=2,
            rounds=1,
            local_steps=1,
            executor="loop",
            device="cpu",
            hooks=QUIET,
        )
        assert result.traffic is not None
        count = sum(p.numel() for p in result.weights.params.values())
        down, up = result.traffic
        print(f"{table['name']:<28}{trains:<28}{count:>12,}{down:>14,}{up:>14,}")


def main() -> None:
    """The demo's network, 16 sites, 32 steps of 8 + 8 examples."""
    print(f"{'algorithm':<24}{'down':>8}{'up':>8}")
    for name, risk, options in CASES:
        config = Config(
            data={"name": "digits"}, model={"name": "mlp", "hidden": [64]}, risk={"name": risk},
            algorithm={"name": name, **options},
            run={"rounds": 1, "local_steps": 32, "batch1": 8, "batch2": 8, "device": "cpu"},
        )  # fmt: skip
        result = execute(config, hooks=QUIET)
        network, (down, up) = tree.nbytes(result.weights), result.traffic
        shown = ", ".join([name, *(f"{key} = {value:g}" for key, value in options.items())])
        print(f"{shown:<24}{down / network:>8.2f}{up / network:>8.2f}")


if __name__ == "__main__":
    parts() if "parts" in sys.argv[1:] else main()

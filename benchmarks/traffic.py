"""Bytes that a client receives and sends in a round, in copies of the network: python benchmarks/traffic.py"""

from __future__ import annotations

from fedxl import tree
from fedxl.config.experiment import Config, execute
from fedxl.training.settings import Hooks

CASES = (
    ("fedxl1", "auroc", {}),
    ("fedxl2", "pauc", {}),
    ("local_pair", "auroc", {"beta": 1.0}),
    ("local_pair", "pauc", {}),
    ("local_sgd", "pauc", {}),
)


def main() -> None:
    """The demo's network, 16 sites, 32 steps of 8 + 8 examples."""
    print(f"{'algorithm':<24}{'down':>8}{'up':>8}")
    for name, risk, options in CASES:
        config = Config(
            data={"name": "digits"}, model={"name": "mlp", "hidden": [64]}, risk={"name": risk},
            algorithm={"name": name, **options},
            run={"rounds": 1, "local_steps": 32, "batch1": 8, "batch2": 8, "device": "cpu"},
        )  # fmt: skip
        result = execute(config, hooks=Hooks(say=lambda line: None))
        network, (down, up) = tree.nbytes(result.weights), result.traffic
        shown = ", ".join([name, *(f"{key} = {value:g}" for key, value in options.items())])
        print(f"{shown:<24}{down / network:>8.2f}{up / network:>8.2f}")


if __name__ == "__main__":
    main()

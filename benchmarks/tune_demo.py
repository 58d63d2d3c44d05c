"""How the demo's settings were chosen: the same number of trials for every algorithm, validation data only.

    python benchmarks/tune_demo.py [ALGORITHM ...]

Each algorithm gets sixteen trials, drawn at random from its own space of settings. A trial is scored by the mean,
over three seeds none of which the demo uses, of the best validation partial AUC.
"""

from __future__ import annotations

import itertools
import math
import random
import sys

import numpy as np
import torch

from fedxl import UserError
from fedxl.config.experiment import execute
from fedxl.experiments.demo import MAX_FPR, Entry, experiment
from fedxl.training.hooks import Hooks

SEEDS = (100, 101, 102)
TRIALS = 16
PLAIN = {"lr": (0.03, 0.1, 0.3, 1.0, 3.0), "weight_decay": (0.0, 1e-4, 1e-3, 1e-2)}
PAIRS = {"lr": (0.1, 0.3, 1.0, 3.0), "weight_decay": (0.0, 1e-3), "gamma": (0.1, 0.5), "lam": (0.5, 1.0, 3.0)}
# FeDXL in the plain form of the paper: sites of the demo differ in their images, see docs/notes/skew.md.
SPACES = {
    "fedxl2": PAIRS | {"level": ("free",)},
    "local_pair": PAIRS,
    "sox": PAIRS,
    "local_sgd": PLAIN,
    "codasca": PLAIN,
}


def trials(space: dict[str, tuple[float, ...]]) -> list[dict[str, float]]:
    everything = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    return random.Random(0).sample(everything, TRIALS)


def validation(entry: Entry) -> float:
    """Mean best validation metric over the seeds; a trial that diverges counts for nothing."""
    try:
        results = [execute(experiment(entry, seed), hooks=Hooks(say=lambda line: None)) for seed in SEEDS]
    except UserError:
        return -math.inf
    return float(np.mean([result.metrics["validation"].get(f"pauc@{MAX_FPR:g}", -math.inf) for result in results]))


def main() -> None:
    torch.set_num_threads(1)  # the programs are small; run several algorithms side by side instead
    for name in sys.argv[1:] or SPACES:
        scored = []
        for settings in trials(SPACES[name]):
            risk = {key: value for key, value in settings.items() if key == "lam"}
            options = {"name": name} | {key: value for key, value in settings.items() if key != "lam"}
            scored.append((validation(Entry(name, options, risk)), settings))
            print(f"{name} {settings}: {scored[-1][0]:.4f}", flush=True)
        print(f"--> {name}: {max(scored, key=lambda trial: trial[0])}", flush=True)


if __name__ == "__main__":
    main()

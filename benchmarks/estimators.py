"""Estimators, optimisers and CVaR risks on the demo's task, tuned alike: estimators.json and estimators.md.

python benchmarks/estimators.py [FOLDER]

FeDXL2 with the demo's settings, one of them changed. Each variant has three learning rates; validation data of
seed 100 choose, the seeds 10 to 12 report.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import machine

from fedxl.config.experiment import execute
from fedxl.errors import DivergedError
from fedxl.experiments import demo
from fedxl.files import write_atomically, write_json
from fedxl.reporting.text import mean_with_spread
from fedxl.training.hooks import Hooks
from fedxl.training.result import Result

TUNED_ON, SEEDS = 100, (10, 11, 12)
METRICS = {"auroc": "AUROC", "pauc@0.3": "partial AUC (FPR <= 0.3)"}
SELECT = "pauc@0.3"
RATES, SMALLER, TINY = (0.1, 0.3, 1.0), (0.03, 0.1, 0.3), (0.003, 0.01, 0.03)


class Variant(NamedTuple):
    """FeDXL2 of the demo with other settings, and what is tried of one of them."""

    label: str
    algorithm: Mapping[str, Any] = {}
    risk: Mapping[str, Any] | None = None  # None: the demo's
    tuned: str = "lr"
    tried: Sequence[float] = RATES

    def entry(self, value: float) -> demo.Entry:
        base = demo.ENTRIES[0]
        return demo.Entry(self.label, {**base.algorithm, **self.algorithm, self.tuned: value}, base.risk)


VARIANTS = (
    Variant("FeDXL2, as in the demo"),
    Variant("MSVR, theta of its paper", {"estimator": "msvr"}, tried=SMALLER),
    Variant("local momentum", {"descent": "momentum"}, tried=SMALLER),
    Variant("local Adam", {"descent": "adam"}, tried=TINY),
    Variant("server momentum (FedAvgM)", {"server_update": "momentum"}, tried=SMALLER),
    Variant("server Adam (FedAdam)", {"server_update": "adam"}, tuned="server_lr", tried=TINY),
    Variant("CVaR one-way, FPR <= 0.3", risk={"name": "cvar_pauc", "fpr": 0.3}),
    Variant("CVaR two-way, TPR >= 0.3, FPR <= 0.3", risk={"name": "cvar_tpauc", "tpr": 0.3, "fpr": 0.3}),
)


def run(variant: Variant, value: float, seed: int) -> Result:
    experiment = demo.experiment(variant.entry(value), seed)
    if variant.risk is not None:
        experiment.risk.clear()
        experiment.risk.update(variant.risk)
    return execute(experiment, hooks=Hooks(say=lambda line: None))


def validated(variant: Variant, value: float) -> float:
    """The best validation metric of a run; one that diverges counts for nothing."""
    try:
        result = run(variant, value, TUNED_ON)
    except DivergedError:
        return -math.inf
    return max(float(record["validation"][SELECT]) for record in result.history)


def measure(variant: Variant) -> dict[str, Any]:
    scores = {}
    for value in variant.tried:
        scores[value] = validated(variant, value)
        print(f"{variant.label}, {variant.tuned} {value:g}: {scores[value]:.4f}", file=sys.stderr, flush=True)
    best = max(scores, key=scores.__getitem__)
    results = [run(variant, best, seed) for seed in SEEDS]
    return {
        "variant": variant.label,
        "tuned": variant.tuned,
        "validation": {f"{value:g}": score for value, score in scores.items()},
        "chosen": best,
        "test": {name: [result.metrics["test"][name] for result in results] for name in METRICS},
    }


def as_markdown(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    table = [
        f"| variant | chosen | {' | '.join(METRICS.values())} |",
        "|---|---|" + "---:|" * len(METRICS),
        *(
            f"| {row['variant']} | {row['tuned']} {row['chosen']:g} | "
            + " | ".join(mean_with_spread(row["test"][name]) for name in METRICS)
            + " |"
            for row in rows
        ),
    ]
    parts = [
        "# Estimators, optimisers and CVaR risks on the demo",
        "FeDXL2 with the demo's settings, one of them changed, on the demo's 16 sites of digits. Three values of the "
        f"learning rate for each, chosen by validation data of seed {TUNED_ON}. Test data, "
        f"mean and standard deviation over the seeds {', '.join(map(str, SEEDS))}.",
        ", ".join(f"{key} {value}" for key, value in facts.items()),
        "\n".join(table),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results")
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for variant in VARIANTS:
        rows.append(measure(variant))
        facts = {"processor time": f"{time.process_time():.0f} s", "on": machine()}
        write_json(folder / "estimators.json", {"facts": facts, "rows": rows})
        write_atomically(folder / "estimators.md", as_markdown(rows, facts).encode())
    print(f"estimators.json and estimators.md in {folder}")


if __name__ == "__main__":
    main()

"""The demo with four of 16 clients a round, chosen in four ways: participation.json, .md and .png.

python benchmarks/participation.py [FOLDER]

About five minutes of one core.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine

from fedxl.config.experiment import Config, execute
from fedxl.experiments import demo
from fedxl.files import write_atomically, write_json
from fedxl.reporting.plots import STYLES, require_matplotlib
from fedxl.reporting.text import as_markdown, mean_and_spread
from fedxl.training.hooks import Hooks

METRIC = f"pauc@{demo.MAX_FPR:g}"
SEEDS = range(10, 18)
CLIENTS, COHORT, ROUNDS = 16, 4, 48
HOURS, OFTEN, RARELY = 24, 12, 3
RARE = (0, 1, 2, 3)  # clients that hold positives, and are rarely there
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "FeDXL2": ("FeDXL2", {}),
    "FeDXL2, pool of 4 rounds": ("FeDXL2", {"pool_rounds": 4}),
    "Local Pair": ("Local Pair", {}),
}
WAYS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "cyclic": {"participation": "cyclic"},
    "reshuffled": {"participation": "reshuffled"},
    "trace": {"participation": "trace"},
    "trace, normalised": {"participation": "trace", "cohort_weights": "normalised"},
}


def day() -> dict[str, list[list[int]]]:
    """Who is awake in which hour: half of the day, one client after the other; the rare ones for three hours."""
    begins = [round(client * HOURS / CLIENTS) for client in range(CLIENTS)]
    lengths = [RARELY if client in RARE else OFTEN for client in range(CLIENTS)]
    awake = [
        [client for client in range(CLIENTS) if (hour - begins[client]) % HOURS < lengths[client]]
        for hour in range(HOURS)
    ]
    return {"rounds": awake}


def experiment(method: str, way: str, seed: int, trace: Path) -> Config:
    label, options = METHODS[method]
    entry = next(entry for entry in demo.ENTRIES if entry.label == label)
    config = demo.experiment(entry, seed)
    config.algorithm.update(options)
    config.run.update(cohort=COHORT, rounds=ROUNDS, **WAYS[way])
    if config.run.get("participation") == "trace":
        config.run["trace"] = str(trace)
    return config


def run(method: str, way: str, seed: int, trace: Path) -> dict[str, Any]:
    found = execute(experiment(method, way, seed, trace), hooks=Hooks(say=lambda line: None))
    curve = [[row["round"], row["validation"][METRIC]] for row in found.history]
    return {"method": method, "way": way, "seed": seed, "test": found.metrics["test"][METRIC], "curve": curve}


def cell(runs: Sequence[Mapping[str, Any]], method: str, way: str) -> list[float]:
    return [float(each["test"]) for each in runs if (each["method"], each["way"]) == (method, way)]


def with_error(values: Sequence[float], sign: str = "") -> str:
    mean, spread = mean_and_spread(list(values))
    return f"{mean:{sign}.4f} ± {spread / np.sqrt(len(values)):.4f}"


def as_text(runs: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for method in METHODS:
        for way in WAYS:
            own, uniform = cell(runs, method, way), cell(runs, method, "uniform")
            apart = with_error(np.subtract(own, uniform).tolist(), "+") if way != "uniform" else ""
            rows.append([method, way, with_error(own), apart])
    table = as_markdown(rows, ["method", "participation", "partial AUC (FPR <= 0.3)", "against uniform"])
    parts = [
        "# Who takes part",
        f"The demo (digits, {CLIENTS} clients, six of one class) with {COHORT} clients a round for {ROUNDS} rounds "
        "and the demo's hyper-parameters, which were tuned with all clients in every round: partial AUC on test data "
        "of the round that validation data choose, mean ± standard error over "
        f"{len(SEEDS)} seeds, and the difference to uniform cohorts of the same seeds.",
        f"The trace has {HOURS} rounds and begins again after the last. A client is available for {OFTEN} of them, "
        f"one client after the other; clients {RARE[0]} to {RARE[-1]}, who hold positives, for {RARELY}.",
        f"`python benchmarks/participation.py` on {machine()}.",
        table,
        "![validation metric by round](participation.png)",
    ]  # fmt: skip
    return "\n\n".join(part.strip() for part in parts) + "\n"


def picture(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    plt = require_matplotlib()
    figure, grid = plt.subplots(1, len(METHODS), figsize=(13, 4.6), layout="constrained", sharey=True)
    for axes, method in zip(grid, METHODS, strict=True):
        for way, (colour, style) in zip(WAYS, STYLES, strict=True):
            curves = np.array([each["curve"] for each in runs if (each["method"], each["way"]) == (method, way)])
            axes.plot(curves[0, :, 0], curves[:, :, 1].mean(0), color=colour, ls=style, lw=1.7, label=way)
        axes.set(title=method, xlabel="round")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylabel(f"partial AUC (FPR ≤ {demo.MAX_FPR:g}), validation")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(WAYS), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        trace = Path(place) / "trace.json"
        write_json(trace, day())
        runs = [run(method, way, seed, trace) for method in METHODS for way in WAYS for seed in SEEDS]
    write_json(folder / "participation.json", {"trace": day(), "runs": runs})
    write_atomically(folder / "participation.md", as_text(runs).encode())
    picture(runs, folder / "participation.png")
    print(f"participation.json, participation.md and participation.png in {folder}")


if __name__ == "__main__":
    main()

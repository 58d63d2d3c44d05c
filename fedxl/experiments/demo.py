"""The demo: FeDXL against the baselines on handwritten digits, 16 sites, three seeds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedxl.config.experiment import Config, execute
from fedxl.files import write_atomically, write_json
from fedxl.reporting import plots
from fedxl.reporting.report import as_markdown, as_text, mean_with_spread, over_seeds
from fedxl.training.trainer import Hooks, Result

MAX_FPR = 0.3
# Not those of the tuning (100 to 102), nor those on which the task was tried while it was written (0 to 2).
SEEDS = tuple(range(10, 20))
RUN = {
    "rounds": 40,
    "local_steps": 16,
    "batch1": 8,
    "batch2": 8,
    "eval_every": 2,
    "executor": "vmap",
    "device": "cpu",
}
RISK = {"name": "pauc", "scores": "sigmoid"}


class Entry(NamedTuple):
    """One row of the demo: its label, its algorithm and what the tuning chose for it."""

    label: str
    algorithm: Mapping[str, Any]
    risk: Mapping[str, Any] = {}


# Chosen by benchmarks/tune_demo.py: sixteen trials for each algorithm, three other seeds, validation data only.
ENTRIES = (
    Entry("FeDXL2", {"name": "fedxl2", "level": "free", "lr": 0.3, "weight_decay": 1e-3, "gamma": 0.1}, {"lam": 0.5}),
    Entry("Local SGD", {"name": "local_sgd", "lr": 0.3, "weight_decay": 0.0}),
    Entry("Local Pair", {"name": "local_pair", "lr": 3.0, "weight_decay": 1e-3, "gamma": 0.1}, {"lam": 1.0}),
    Entry("CODASCA", {"name": "codasca", "lr": 1.0, "weight_decay": 1e-4}),
    Entry("Centralised SOX", {"name": "sox", "lr": 0.3, "weight_decay": 1e-3, "gamma": 0.1}, {"lam": 0.5}),
)
COLUMNS = ("algorithm", "AUROC", f"partial AUC (FPR <= {MAX_FPR:g})", "seconds a run")


def experiment(entry: Entry, seed: int) -> Config:
    return Config(
        data={"name": "digits"},
        model={"name": "mlp", "hidden": [64]},
        risk={**RISK, **entry.risk},
        algorithm=dict(entry.algorithm),
        run={**RUN, "seed": seed},
    )


def run(seeds: Sequence[int], folder: Path, console: Console) -> None:
    """All entries, all seeds: a table on the console, and results.md, results.json and demo.png in the folder."""
    plots.require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # programs this small gain nothing from a second one, and lose much on a busy machine
    began = time.monotonic()
    console.print(
        "Sixteen sites want to find rare digits together. They see the world differently, and six of them have "
        "never seen one of the digits in question. No image leaves its site.\n"
    )
    outcomes: dict[str, list[Result]] = {}
    with Progress(
        TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, disable=not console.is_terminal, transient=True,
    ) as progress:  # fmt: skip
        for entry in ENTRIES:
            task = progress.add_task(entry.label, total=len(seeds))
            outcomes[entry.label] = []
            for seed in seeds:
                # Fifteen runs, one table: what each has to say goes nowhere.
                outcomes[entry.label].append(execute(experiment(entry, seed), hooks=Hooks(say=lambda line: None)))
                progress.advance(task)
    rows = [row(label, runs) for label, runs in outcomes.items()]
    console.print(as_text(rows, COLUMNS, f"Test data, {over_seeds(len(seeds))}"))
    save(folder, outcomes, rows)
    console.print(f"\nin {folder}: demo.png, results.md, results.json   ({time.monotonic() - began:.0f} s in all)")


def row(label: str, runs: Sequence[Result]) -> list[str]:
    def spread(name: str) -> str:
        return mean_with_spread([outcome.metrics["test"][name] for outcome in runs])

    seconds = np.mean([outcome.seconds for outcome in runs])
    return [label, spread("auroc"), spread(f"pauc@{MAX_FPR:g}"), f"{seconds:.1f}"]


def save(folder: Path, outcomes: Mapping[str, Sequence[Result]], rows: Sequence[Sequence[str]]) -> None:
    metric = f"pauc@{MAX_FPR:g}"
    plots.roc_and_convergence(
        folder / "demo.png",
        {label: [outcome.test_scores for outcome in runs if outcome.test_scores] for label, runs in outcomes.items()},
        {
            label: [[(r["round"], r["validation"][metric]) for r in outcome.history] for outcome in runs]
            for label, runs in outcomes.items()
        },
        MAX_FPR,
        f"partial AUC (FPR ≤ {MAX_FPR:g})",
    )
    write_atomically(folder / "results.md", as_markdown(rows, COLUMNS).encode())
    content = {
        label: [{"best_round": o.best_round, "test": o.metrics["test"], "seconds": o.seconds} for o in runs]
        for label, runs in outcomes.items()
    }
    write_json(folder / "results.json", content)

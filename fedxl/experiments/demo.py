"""The demo: FeDXL against the baselines on handwritten digits, 16 sites, three seeds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from fedxl.config.experiment import Config, execute
from fedxl.evaluation.compare import differences, seed_intervals
from fedxl.evaluation.intervals import Interval
from fedxl.experiments.compare import QUIET
from fedxl.files import write_atomically, write_json
from fedxl.progress import progress
from fedxl.reporting import document, plots
from fedxl.reporting.page import between, difference_text
from fedxl.reporting.runs import is_centralized, shared_examples
from fedxl.reporting.text import as_markdown, as_text, mean_with_spread, over_seeds
from fedxl.training.result import Result
from fedxl.training.run_folder import Run

MAX_FPR = 0.3
METRIC = f"pauc@{MAX_FPR:g}"
# Not those of the tuning (100 to 102), nor those on which the task was tried while it was written (0 to 2).
SEEDS = tuple(range(10, 20))
RUN = {
    "rounds": 80, "local_steps": 8, "batch1": 8, "batch2": 8, "eval_every": 4, "executor": "vmap", "device": "cpu",
}  # fmt: skip
RISK = {"name": "pauc", "scores": "sigmoid"}


class Entry(NamedTuple):
    """One row of the demo: its label, its algorithm and what the tuning chose for it."""

    label: str
    algorithm: Mapping[str, Any]
    risk: Mapping[str, Any] = {}


# Learning rates chosen by `python -m studies settings`: six for each algorithm, other seeds, validation data only.
ENTRIES = (
    Entry("FeDXL2", {"name": "fedxl2", "lr": 1.0}),
    Entry("Local SGD", {"name": "local_sgd", "lr": 0.3}),
    Entry("Local Pair", {"name": "local_pair", "lr": 1.0}),
    Entry("CODASCA", {"name": "codasca", "lr": 1.0}),
    Entry("Centralised SOX", {"name": "sox", "lr": 0.3}),
)
COLUMNS = ("algorithm", "AUROC", f"partial AUC (FPR <= {MAX_FPR:g})", "seconds per run")


def experiment(entry: Entry, seed: int) -> Config:
    return Config(
        data={"name": "digits"},
        model={"name": "mlp", "hidden": [64]},
        risk={**RISK, **entry.risk},
        algorithm=dict(entry.algorithm),
        run={**RUN, "seed": seed},
    )


def run(seeds: Sequence[int], folder: Path, console: Console) -> None:
    """All entries, all seeds: a table on the console; a report, a picture and the results in the folder."""
    plots.require_matplotlib()
    document.require_jinja2()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    console.print(
        "Sixteen sites want to find rare digits together. They see the world differently, and six of them have "
        "never seen one of the digits in question. No image leaves its site.\n"
    )
    outcomes: dict[str, list[Result]] = {}
    with progress("runs", len(ENTRIES) * len(seeds)) as advance:
        for entry in ENTRIES:
            outcomes[entry.label] = []
            for seed in seeds:
                outcomes[entry.label].append(execute(experiment(entry, seed), hooks=QUIET))
                advance(1)
    rows = [row(label, runs) for label, runs in outcomes.items()]
    console.print(as_text(rows, COLUMNS, f"Test data, {over_seeds(len(seeds))}"), crop=False)
    kept = {
        label: [outcome.as_run(f"{label}-{seed}", label) for seed, outcome in zip(seeds, found, strict=True)]
        for label, found in outcomes.items()
    }
    console.print(f"\n{save(folder, outcomes, kept, rows)}", highlight=False, soft_wrap=True)
    document.write(folder / "report.html", [run for runs in kept.values() for run in runs], ENTRIES[0].label)
    files = f"in {folder}: demo.png, results.md, results.json   ({time.monotonic() - began:.0f} s in all)"
    for line in (files, f"the report: {folder / 'report.html'}"):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def row(label: str, runs: Sequence[Result]) -> list[str]:
    def spread(name: str) -> str:
        return mean_with_spread([outcome.metrics["test"][name] for outcome in runs])

    seconds = np.mean([outcome.seconds for outcome in runs])
    return [label, spread("auroc"), spread(METRIC), f"{seconds:.1f}"]


def save(
    folder: Path,
    outcomes: Mapping[str, Sequence[Result]],
    kept: Mapping[str, Sequence[Run]],
    rows: Sequence[Sequence[str]],
) -> str:
    """Write the picture and the results; what they say, in one line."""
    measured = {label: measure(runs) for label, runs in kept.items()}
    told = message(measured, kept)
    lines = {
        label: plots.Line(
            [outcome.test_scores for outcome in runs if outcome.test_scores],
            [[(r["round"], r["validation"][METRIC]) for r in outcome.history] for outcome in runs],
            f"{measured[label].value:.3f} {between(measured[label])}",
        )
        for label, runs in outcomes.items()
    }
    plots.roc_and_convergence(folder / "demo.png", told, lines, MAX_FPR, f"partial AUC (FPR ≤ {MAX_FPR:g})")
    write_atomically(folder / "results.md", as_markdown(rows, COLUMNS).encode())
    content = {
        label: [{"best_round": o.best_round, "test": o.metrics["test"], "seconds": o.seconds} for o in runs]
        for label, runs in outcomes.items()
    }
    write_json(folder / "results.json", content)
    return told


def measure(runs: Sequence[Run]) -> Interval:
    """The partial AUC on test data as the report has it, with the seeds' variance."""
    return seed_intervals([METRIC], [run.scores["test"] for run in runs], shared_examples(runs))[METRIC]


def message(measured: Mapping[str, Interval], kept: Mapping[str, Sequence[Run]]) -> str:
    """Which federated method is ahead of which, by how much, and whether that may be chance."""
    federated = [entry.label for entry in ENTRIES if not is_centralized(str(entry.algorithm["name"]))]
    first, second = sorted(federated, key=lambda label: -measured[label].value)[:2]
    scores = [[run.scores["test"] for run in kept[label]] for label in (first, second)]
    apart = differences(*scores, same=shared_examples(kept[first]), names=[METRIC])[METRIC]
    gain = f"{difference_text(apart.value)} {between(apart)}"
    if apart.low > 0:
        return f"{first} is ahead of the next federated method, {second}, by {gain} of partial AUC"
    return f"{first} and {second} are level: {gain} of partial AUC"

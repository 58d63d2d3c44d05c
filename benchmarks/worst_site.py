"""The demo with the worst-site objective over lambdas, metrics by site: worst_site.json, .md and .png.

python benchmarks/worst_site.py [FOLDER]

About four minutes of one core.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine

from fedxl import metrics
from fedxl.config.experiment import Config, execute, simulate
from fedxl.experiments import demo
from fedxl.files import write_atomically, write_json
from fedxl.models import scorer
from fedxl.reporting.plots import STYLES, require_matplotlib
from fedxl.reporting.text import as_markdown, mean_and_spread
from fedxl.training.hooks import Hooks
from fedxl.training.trainer import train

SEEDS = range(10, 16)
OFF = 0.0
LAMBDAS = (OFF, 0.3, 0.1, 0.03)
METHODS = ("FeDXL2", "Local Pair")
SLOW = {"FeDXL2": 0.03, "Local Pair": 0.1}  # learning rates far below the demo's
FEW = (10, 11)  # seeds of the training risks
FIGURES = {"mean": "mean of sites", "worst": "worst site", "spread": "spread (standard deviation)"}


def experiment(method: str, lam: float, seed: int) -> Config:
    entry = next(entry for entry in demo.ENTRIES if entry.label == method)
    config = demo.experiment(entry, seed)
    config.data["everywhere"] = True
    config.algorithm["worst_site"] = lam
    config.run["eval_every"] = 4
    return config


def run(method: str, lam: float, seed: int) -> dict[str, Any]:
    """Partial AUC of each site on test data: the same images, as each of them sees them."""
    found = execute(experiment(method, lam, seed), hooks=Hooks(say=lambda line: None))
    sites = [
        metrics.partial_auc(each.scores, each.labels, demo.MAX_FPR)
        for each in found.scored["test"].by_site().values()
    ]
    return {
        "method": method,
        "lambda": lam,
        "seed": seed,
        "round": found.best_round,
        "sites": sorted(map(float, sites)),
    }


def training(method: str, lam: float, seed: int) -> dict[str, Any]:
    """What is optimised, at a low learning rate: the training risk of each site with positives, in the end."""
    config = experiment(method, lam, seed)
    config.data.pop("everywhere")
    config.algorithm["lr"] = SLOW[method]
    task = simulate(config, lambda line: None)
    found = train(task, Hooks(say=lambda line: None), None)
    assert found.server is not None
    risk, source = task.problem.risk, task.federation.source
    h = scorer(task.problem.model, False)(found.server.weights, source.fetch(torch.arange(len(source))))[0].detach()
    risks = []
    for part in task.federation.parts:
        own = torch.as_tensor(part)
        positives = own[source.labels[own] > 0]
        # FeDXL compares a site's positives with everybody's negatives.
        others = source.labels <= 0 if method == "FeDXL2" else own[source.labels[own] <= 0]
        if len(positives):
            both = torch.cat((h[positives], h[others]))
            risks.append(float(risk.value(both, (torch.arange(len(both)) < len(positives)).long())))
    return {"method": method, "lambda": lam, "seed": seed, "sites": sorted(risks)}


def trained_rows(slow: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    def numbers(run: Mapping[str, Any]) -> list[str]:
        return [f"{value:.3f}" for value in (np.mean(run["sites"]), max(run["sites"]), np.std(run["sites"], ddof=1))]

    return [
        [run["method"], f"{run['seed']}", f"{run['lambda']:g}" if run["lambda"] else "off", *numbers(run)]
        for run in slow
    ]


def summary(run: Mapping[str, Any]) -> dict[str, float]:
    return {"mean": np.mean(run["sites"]), "worst": run["sites"][0], "spread": np.std(run["sites"], ddof=1)}


def cell(runs: Sequence[Mapping[str, Any]], method: str, lam: float, what: str) -> list[float]:
    return [float(summary(each)[what]) for each in runs if (each["method"], each["lambda"]) == (method, lam)]


def with_error(values: Sequence[float], sign: str = "") -> str:
    mean, spread = mean_and_spread(list(values))
    return f"{mean:{sign}.4f} ± {spread / np.sqrt(len(values)):.4f}"


def as_text(runs: Sequence[Mapping[str, Any]], slow: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for method in METHODS:
        for lam in LAMBDAS:
            cells = [with_error(cell(runs, method, lam, what)) for what in FIGURES]
            apart = np.subtract(cell(runs, method, lam, "worst"), cell(runs, method, OFF, "worst")).tolist()
            rows.append([method, f"{lam:g}" if lam else "off", *cells, with_error(apart, "+") if lam else ""])
    columns = ["method", "lambda", *FIGURES.values(), "worst site, against off"]
    parts = [
        "# The worst site",
        "The demo (digits, 16 sites that differ in brightness and contrast, six without positives) with its "
        "hyper-parameters, and `worst_site` over lambdas. Every test image is judged as each site sees it "
        "(`data.everywhere`), so sites differ by what they see alone. Partial AUC (FPR <= 0.3) by site: its mean, "
        "its minimum and its standard deviation over the 16 sites; each is a mean ± standard error over "
        f"{len(SEEDS)} seeds. The last column compares the worst site with that of the same seed without it.",
        f"`python benchmarks/worst_site.py` on {machine()}.",
        as_markdown(rows, columns),
        "![partial AUC by site](worst_site.png)",
        "## What is optimised, at a low learning rate",
        f"Training risks L_i of the sites with positives after the last round, at lr = {SLOW['FeDXL2']:g} (FeDXL2) "
        f"and {SLOW['Local Pair']:g} (Local Pair); seeds {FEW[0]} and {FEW[1]}.",
        as_markdown(trained_rows(slow), ["method", "seed", "lambda", "mean", "highest", "spread"]),
    ]  # fmt: skip
    return "\n\n".join(part.strip() for part in parts) + "\n"


def picture(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Sites from the worst to the best, a line for each lambda."""
    plt = require_matplotlib()
    figure, grid = plt.subplots(1, len(METHODS), figsize=(11, 4.6), layout="constrained", sharey=True)
    for axes, method in zip(grid, METHODS, strict=True):
        for lam, (colour, style) in zip(LAMBDAS, STYLES, strict=False):
            sites = np.mean(
                [each["sites"] for each in runs if (each["method"], each["lambda"]) == (method, lam)], axis=0
            )
            label = f"lambda = {lam:g}" if lam else "off"
            axes.plot(range(1, len(sites) + 1), sites, color=colour, ls=style, lw=1.7, marker="o", ms=3, label=label)
        axes.set(title=method, xlabel="site, from the worst to the best")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylabel(f"partial AUC (FPR ≤ {demo.MAX_FPR:g}), test data, mean over seeds")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(LAMBDAS), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results")
    folder.mkdir(parents=True, exist_ok=True)
    runs = [run(method, lam, seed) for method in METHODS for lam in LAMBDAS for seed in SEEDS]
    slow = [training(method, lam, seed) for method in METHODS for seed in FEW for lam in LAMBDAS[:3]]
    write_json(folder / "worst_site.json", {"runs": runs, "training": slow})
    write_atomically(folder / "worst_site.md", as_text(runs, slow).encode())
    picture(runs, folder / "worst_site.png")
    print(f"worst_site.json, worst_site.md and worst_site.png in {folder}")


if __name__ == "__main__":
    main()

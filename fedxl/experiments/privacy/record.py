"""The study of differential privacy as Markdown and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedxl.experiments.privacy.study import COPIES, DELTA, EPSILONS, FEDERATIONS, METRIC
from fedxl.files import write_atomically
from fedxl.reporting.plots import STYLES, require_matplotlib
from fedxl.reporting.text import as_markdown, mean_and_spread, mean_with_spread

Runs = Sequence[Mapping[str, Any]]
Attacks = Sequence[Mapping[str, Any]]
NAMES = {"auroc": "AUROC", METRIC: "partial AUC (FPR ≤ 0.3)"}


def write(runs: Runs, attacks: Attacks, folder: Path, machine: str) -> None:
    """privacy.md and privacy.png in a folder."""
    write_atomically(folder / "privacy.md", as_text(runs, attacks, machine).encode())
    picture(runs, attacks, folder / "privacy.png")


def values(runs: Runs, federation: str, epsilon: float, name: str) -> list[float]:
    wanted = (federation, None if math.isinf(epsilon) else epsilon)
    return [float(run[name]) for run in runs if (run["federation"], run["epsilon"]) == wanted]


def as_text(runs: Runs, attacks: Attacks, machine: str) -> str:
    seeds = len({run["seed"] for run in runs})
    parts = [
        "# Differential privacy",
        "FeDXL2 with a linear network on the demo's images, test data, round chosen on validation data: mean ± "
        f"standard deviation over {seeds} seeds. Epsilon is at delta = {DELTA:g}, for one example; each image is "
        f"{COPIES} examples. The second column is for an example that is replaced by another, and holds for both "
        f"copies of an image, too: either moves sums by twice as much. On {machine}.",
    ]
    for federation in FEDERATIONS:
        parts += [f"## {federation}", table(runs, federation)]
    parts += [
        "## A membership attack",
        "Which examples of a random half was the model trained on? AUROC of the likelihood-ratio attack and of the "
        "threshold on how right the model is, mean over models with an interval of 95%; 0.5 is chance. The bound is "
        "what no attack exceeds.",
        attack_table(attacks),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def table(runs: Runs, federation: str) -> str:
    rows = []
    for epsilon in EPSILONS:
        found = [run for run in runs if run["federation"] == federation and run["epsilon"] == epsilon]
        told = [mean_with_spread(values(runs, federation, epsilon, name)) for name in NAMES]
        if not found:
            rows.append(["none", "", "", "", *told])
            continue
        run = found[0]
        noise = [f"{run['dp_noise']:.2f}", f"{run['dp_score_noise']:.2f}"]
        rows.append([f"{epsilon:g}", f"{run['spent']['epsilon_replaced']:.1f}", *noise, *told])
    return as_markdown(rows, ["epsilon", "replaced", "dp_noise", "dp_score_noise", *NAMES.values()])


def attack_table(attacks: Attacks) -> str:
    rows = []
    for each in attacks:
        told = [f"{each[name][0]:.3f} ± {each[name][1]:.3f}" for name in ("likelihood", "threshold")]
        private = each["epsilon"] is not None
        epsilon, bound = (f"{each['epsilon']:.1f}", f"{each['bound']:.3f}") if private else ("none", "1")
        rows.append([epsilon, *told, bound, f"{each['auroc']:.3f}", str(each["models"])])
    columns = ["epsilon", "likelihood ratio", "threshold", "bound", "the model's AUROC on test data", "models"]
    return as_markdown(rows, columns)


def picture(runs: Runs, attacks: Attacks, path: Path) -> None:
    """A panel for each metric, a line for each federation against epsilon; and the attack."""
    plt = require_matplotlib()
    figure, panels = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained", width_ratios=(1, 1, 0.7))
    finite = [epsilon for epsilon in EPSILONS if math.isfinite(epsilon)]
    for axes, (name, shown) in zip(panels, NAMES.items(), strict=False):
        for federation, (colour, style) in zip(FEDERATIONS, STYLES, strict=False):
            cells = [values(runs, federation, epsilon, name) for epsilon in finite]
            means, spreads = zip(*(mean_and_spread(cell) for cell in cells), strict=True)
            look = {"color": colour, "ls": style, "marker": "o", "ms": 4, "capsize": 2}
            axes.errorbar(finite, means, spreads, label=federation, **look)
            without = mean_and_spread(values(runs, federation, math.inf, name))[0]
            axes.axhline(without, color=colour, lw=0.9, ls=":")
        axes.set(xscale="log", xlabel=f"epsilon of an example, at delta = {DELTA:g}", ylabel=f"{shown}, test data")
        axes.set_xticks(finite, [f"{epsilon:g}" for epsilon in finite])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
    panels[0].legend(title="dotted: without privacy", loc="lower right", frameon=False)
    _attacks(panels[2], attacks)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _attacks(axes: Any, attacks: Attacks) -> None:
    """The attack with and without privacy, beside the bound."""
    for place, each in enumerate(attacks):
        mean, half = each["likelihood"]
        axes.errorbar([place], [mean], [half], color=STYLES[place][0], marker="o", capsize=4)
        axes.annotate(f"{mean:.3f}", (place, mean), xytext=(8, -3), textcoords="offset points")
        if each["bound"] is not None:
            axes.hlines(each["bound"], place - 0.25, place + 0.25, color="#555555", lw=1)
            axes.annotate("bound", (place, each["bound"]), xytext=(0, 4), textcoords="offset points", ha="center")
    axes.axhline(0.5, color="#999999", lw=0.9, ls=":")
    names = ["none" if each["epsilon"] is None else f"{each['epsilon']:.1f}" for each in attacks]
    axes.set_xticks(range(len(attacks)), names)
    axes.set(xlabel="epsilon", ylabel="AUROC of the membership attack", xlim=(-0.6, len(attacks) - 0.4))
    axes.grid(alpha=0.25, axis="y")

"""The measured sample complexities as JSON, as Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedxl.experiments.theory.complexity import BATCH, MACHINES, SAMPLES, TUNED_ON, Curve
from fedxl.experiments.theory.testbed import EXAMPLES, FEATURES
from fedxl.files import write_atomically, write_json
from fedxl.reporting.plots import STYLES, require_matplotlib

PROBLEM = (
    f"A linear score on {EXAMPLES} positives and {EXAMPLES} negatives with {FEATURES} features, float64, from "
    f"weights of 0, batch {BATCH}+{BATCH} unless a setting says otherwise, draws with replacement, rounds of "
    f"{SAMPLES} samples on each machine. P-norm push with p = 3; FeDXL1: AUROC; both with the logistic surrogate. "
    f"Federated methods: {MACHINES} clients that differ."
)
MEASURED = (
    "|grad F|: root of the mean of |grad F|^2 over the second half of a run, mean and standard error over seeds. "
    f"The setting is the best of eight for each number of samples, chosen on seed {TUNED_ON}, which is not among "
    "those shown."
)


def write(curves: Sequence[Curve], folder: Path, facts: Mapping[str, Any]) -> None:
    """complexity.json, complexity.md and complexity.png in a folder. facts: what else to record."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "complexity.json", as_record(curves, facts))
    write_atomically(folder / "complexity.md", as_markdown(curves, facts).encode())
    picture(curves, folder / "complexity.png")


def as_record(curves: Sequence[Curve], facts: Mapping[str, Any]) -> dict[str, Any]:
    def one(curve: Curve) -> dict[str, Any]:
        slope, error = curve.line.slope()
        return {
            "method": curve.method.name,
            "machines": curve.method.machines,
            "paper": curve.method.expected,
            "settings": [setting.name for setting in curve.method.settings],
            "samples": list(curve.line.x),
            "chosen": list(curve.chosen),
            "runs": [list(run) for run in curve.line.runs],
            "mean": curve.line.mean,
            "error": curve.line.error,
            "slope": slope,
            "slope_error": error,
        }

    return {"facts": dict(facts), "problem": PROBLEM, "measured": MEASURED, "curves": [one(each) for each in curves]}


def as_markdown(curves: Sequence[Curve], facts: Mapping[str, Any]) -> str:
    x = curves[0].line.x
    head = f"| samples a machine | {' | '.join(map(str, x))} | slope | the paper's table: samples for eps |"
    norms = [
        f"| {curve.line.name} | "
        + " | ".join(f"{m:.4f} ± {e:.4f}" for m, e in zip(curve.line.mean, curve.line.error, strict=True))
        + f" | {curve.line.slope()[0]:.2f} ± {curve.line.slope()[1]:.2f} | {curve.method.expected} |"
        for curve in curves
    ]
    chosen = [f"| {curve.line.name} | {' | '.join(curve.chosen)} |" for curve in curves]
    parts = [
        "# Sample complexities, measured",
        PROBLEM,
        ", ".join(f"{key} {value}" for key, value in facts.items()),
        "![Gradient norm against samples](complexity.png)",
        "## Gradient norms",
        MEASURED,
        "\n".join([head, "|---|" + "---:|" * (len(x) + 1) + "---|", *norms]),
        "## Chosen settings",
        "\n".join([f"| | {' | '.join(map(str, x))} |", "|---|" + "---|" * len(x), *chosen]),
    ]
    return "\n\n".join(parts) + "\n"


def picture(curves: Sequence[Curve], path: Path) -> None:
    """Log-log; dashed: FeDXL1, whose objective is another."""
    plt = require_matplotlib()
    figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
    for curve, (colour, _), mark in zip(curves, STYLES, "os^Dv", strict=False):
        line, (slope, error) = curve.line, curve.line.slope()
        other = curve.method.risk is not curves[0].method.risk
        axes.errorbar(
            line.x, line.mean, line.error, color=colour, marker=mark, ms=5, lw=1.5, capsize=3,
            ls="--" if other else "-", label=f"{line.name}: slope {slope:.2f} ± {error:.2f}",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(curves[0].line.x, [f"{value:,}" for value in curves[0].line.x])
    axes.minorticks_off()
    values = [value for curve in curves for value in curve.line.mean]
    ticks = [step * 10.0**power for power in range(-6, 3) for step in (1, 2, 5)]
    ticks = [tick for tick in ticks if min(values) / 2 < tick < 2 * max(values)]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set(xlabel="samples read by each machine", ylabel="|grad F|")
    axes.set_title("Gradient norm against samples, tuned for each number of samples", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)

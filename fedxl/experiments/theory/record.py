"""The measured rates as JSON, as Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fedxl.experiments.theory.measure import Line, Panel
from fedxl.experiments.theory.testbed import EXAMPLES, FEATURES
from fedxl.files import write_atomically, write_json
from fedxl.reporting.plots import STYLES, require_matplotlib

PROBLEM = (
    f"A linear score on {EXAMPLES} positives and {EXAMPLES} negatives with {FEATURES} features, float64, batch 8+8, "
    "draws with replacement. FeDXL1: AUROC, logistic surrogate. FeDXL2: partial AUC, lam = 1, squared hinge of "
    "sigmoid scores."
)
TICKS = [step * 10.0**power for power in range(-8, 4) for step in (1, 2, 5)]


def write(panels: Mapping[str, Panel], folder: Path, facts: Mapping[str, Any]) -> None:
    """theory.json, theory.md and theory.png in a folder. facts: what else to record, such as the time it took."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "theory.json", as_record(panels, facts))
    write_atomically(folder / "theory.md", as_markdown(panels, facts).encode())
    picture(panels, folder / "theory.png")


def as_record(panels: Mapping[str, Panel], facts: Mapping[str, Any]) -> dict[str, Any]:
    def line(panel: Panel, found: Line) -> dict[str, Any]:
        slope, error = found.slope(*panel.fitted)
        return {**asdict(found), "mean": found.mean, "error": found.error, "slope": slope, "slope_error": error}

    return {
        "facts": dict(facts),
        "problem": PROBLEM,
        "panels": {
            name: {**asdict(panel), "lines": [line(panel, found) for found in panel.lines]}
            for name, panel in panels.items()
        },
    }


def as_markdown(panels: Mapping[str, Panel], facts: Mapping[str, Any]) -> str:
    """One table for each experiment."""
    parts = ["# The theorems' rates, measured", PROBLEM, ", ".join(f"{key} {value}" for key, value in facts.items())]
    for panel in panels.values():
        x = panel.lines[0].x
        parts += [
            f"## {panel.title}",
            f"|grad F|^2, {panel.measured}: mean and standard error over {len(panel.lines[0].runs)} seeds. "
            f"{panel.setting}. The theorem's slope: {panel.expected:.2f}.",
            "\n".join(
                [
                    f"| {_cell(panel.varied)} | {' | '.join(map(str, x))} | slope{_between(panel)} |",
                    "|---|" + "---:|" * (len(x) + 1),
                    *(_row(panel, line) for line in panel.lines),
                ]
            ),
        ]
    return "\n\n".join(parts) + "\n"


def _row(panel: Panel, line: Line) -> str:
    cells = [f"{mean:.2e} ± {error:.0e}" for mean, error in zip(line.mean, line.error, strict=True)]
    slope, error = line.slope(*panel.fitted)
    return f"| {line.name} | {' | '.join(cells)} | {slope:.2f} ± {error:.2f} |"


def _between(panel: Panel) -> str:
    """For which x the slope is fitted, if not for all."""
    low, high = panel.fitted
    return f", from {low:.0f}" * (low > 0) + f", up to {high:.0f}" * bool(np.isfinite(high))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def picture(panels: Mapping[str, Panel], path: Path) -> None:
    """A panel for each experiment, log-log; dashed: the theorem's slope through the first fitted point."""
    plt = require_matplotlib()
    figure, grid = plt.subplots(2, 2, figsize=(10, 8), layout="constrained")
    for axes, panel in zip(grid.flat, panels.values(), strict=True):
        for line, (colour, _), mark in zip(panel.lines, STYLES, "os", strict=False):
            slope, error = line.slope(*panel.fitted)
            label = f"{line.name}: slope {slope:.2f} ± {error:.2f}"
            axes.errorbar(
                line.x, line.mean, line.error, color=colour, marker=mark, ms=5, lw=1.5, capsize=3, label=label
            )
            x = np.asarray(line.x, float)
            first = int(np.argmax(x >= panel.fitted[0]))
            axes.plot(x, line.mean[first] * (x / x[first]) ** panel.expected, color=colour, ls="--", lw=1, alpha=0.8)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(panel.lines[0].x, [str(value) for value in panel.lines[0].x])
        axes.minorticks_off()
        values = [value for line in panel.lines for value in line.mean]
        ticks = [tick for tick in TICKS if min(values) / 2 < tick < 2 * max(values)]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set(xlabel=panel.varied, ylabel=f"|grad F|², {panel.measured}")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=9)
        axes.set_title(_title(panel), fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _title(panel: Panel) -> str:
    return f"{panel.title} (dashed: the theorem, slope {panel.expected:.2f}{_between(panel)})"

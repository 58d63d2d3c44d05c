"""The study of hostile clients as Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedxl.experiments.hostile.attacks import ATTACKS
from fedxl.experiments.hostile.study import CLIENTS, COUNTS, DEFENCES, NOBODY
from fedxl.files import write_atomically
from fedxl.reporting.plots import STYLES, require_matplotlib
from fedxl.reporting.text import as_markdown, mean_and_spread, mean_with_spread

Runs = Sequence[Mapping[str, Any]]
COLOURS = [*STYLES, ("#7b4fa3", (0, (3, 1, 1, 1))), ("#2f2f2f", (0, (1, 1)))]
WHAT = {
    "last": "after the last round",
    "chosen": "of the round that honest validation data choose",
}
ABOUT = (
    f"The demo's FeDXL2 (digits, {CLIENTS} clients, six of one class), partial AUC (FPR <= 0.3) on test data: mean ± "
    'standard deviation over seeds. Every defence but "none" has the server\'s limits (`influence = 20`).'
)


def write(runs: Runs, folder: Path, machine: str) -> None:
    """hostile.md and hostile.png in a folder."""
    write_atomically(folder / "hostile.md", as_text(runs, machine).encode())
    picture(runs, folder / "hostile.png")


def values(runs: Runs, attack: str, count: int, defence: str, what: str) -> list[float]:
    """The metrics of a cell; 0.5, as good as chance, for a run that diverged."""
    wanted = (attack if count else NOBODY, count, defence)
    found = [run for run in runs if (run["attack"], run["hostile"], run["defence"]) == wanted]
    if count == 0:  # in a line with the other counts: the same seeds
        seeds = {run["seed"] for run in runs if run["attack"] == attack}
        found = [run for run in found if not seeds or run["seed"] in seeds]
    return [0.5 if run[what] is None else float(run[what]) for run in found]


def as_text(runs: Runs, machine: str) -> str:
    parts = [
        "# Hostile clients",
        ABOUT,
        f"On {machine}.",
        "## What a defence costs if nobody is hostile",
        costs(runs),
    ]
    for what, words in WHAT.items():
        parts.append(f"## Hostile clients: the model {words}")
        for attack in ATTACKS:
            parts += [f"### {attack[0].upper()}{attack[1:]}", table(runs, attack, what)]
    parts += ["## Refused updates", refusals(runs)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def table(runs: Runs, attack: str, what: str) -> str:
    rows = [
        [defence, *(mean_with_spread(values(runs, attack, count, defence, what)) for count in COUNTS)]
        for defence in DEFENCES
    ]
    return as_markdown(rows, ["defence", *(f"{count} of {CLIENTS}" for count in COUNTS)])


def costs(runs: Runs) -> str:
    """Each defence against none, seed by seed: mean difference and its standard error."""
    honest = {(run["defence"], run["seed"]): run for run in runs if run["attack"] == NOBODY}
    seeds = sorted({seed for _, seed in honest})
    rows = []
    for defence in DEFENCES:
        cells = [defence]
        for what in WHAT:
            own, none = ([float(honest[name, seed][what]) for seed in seeds] for name in (defence, "none"))
            difference, spread = mean_and_spread(np.subtract(own, none).tolist())
            cells += [mean_with_spread(own), f"{difference:+.4f} ± {spread / np.sqrt(len(seeds)):.4f}"]
        rows.append(cells)
    last, chosen = "last round", "chosen round"
    columns = ["defence", last, "against none (standard error)", chosen, "against none (standard error)"]
    return f"{len(seeds)} seeds.\n\n{as_markdown(rows, columns)}"


def refusals(runs: Runs) -> str:
    """How many updates the limits refused, of hostile and of honest clients."""
    checked = [run for run in runs if run["defence"] != "none" and run["refused"]]
    rows = []
    for attack in (NOBODY, *ATTACKS):
        found = [run["refused"] for run in checked if run["attack"] == attack]
        counts = [sum(each[who] for each in found) for who in ("hostile", "honest")]
        rows.append([attack, *map(str, counts), str(len(found))])
    return as_markdown(rows, ["attack", "of hostile clients", "of honest clients", "runs"])


def picture(runs: Runs, path: Path) -> None:
    """A panel for each attack, a line for each defence against the number of hostile clients."""
    plt = require_matplotlib()
    figure, grid = plt.subplots(2, 2, figsize=(10.5, 8), layout="constrained", sharex=True, sharey=True)
    for axes, attack in zip(grid.flat, ATTACKS, strict=True):
        for defence, (colour, style) in zip(DEFENCES, COLOURS, strict=True):
            cells = [values(runs, attack, count, defence, "last") for count in COUNTS]
            means, spreads = zip(*(mean_and_spread(cell) for cell in cells), strict=True)
            axes.errorbar(
                COUNTS, means, spreads, color=colour, ls=style, lw=1.7, marker="o", ms=4, capsize=2, label=defence
            )
        axes.set_title(attack, fontsize=11)
        axes.set_xticks(COUNTS)
        axes.grid(alpha=0.25)
    for axes in grid[1]:
        axes.set_xlabel(f"hostile clients of {CLIENTS}")
    for axes in grid[:, 0]:
        axes.set_ylabel("partial AUC (FPR ≤ 0.3), last round")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)

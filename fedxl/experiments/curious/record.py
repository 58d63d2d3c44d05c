"""The study of curious parties as Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedxl.experiments.curious.study import ARMS, ATTACKS, PLAIN
from fedxl.files import write_atomically
from fedxl.reporting.plots import STYLES, require_matplotlib
from fedxl.reporting.text import as_markdown, mean_and_spread, mean_with_spread

ABOUT = (
    "The demo's FeDXL2 (digits, 16 clients). A curious server links each pooled score of a client with one of the "
    "round before. A link is right if both are of one example; only scores whose example was read in both rounds "
    "count. Chance: a link drawn at random. A client of the demo reads each of its examples about ten times a round."
)
SIDES = {"first": "S1", "second": "S2"}


def write(found: Mapping[str, Any], folder: Path, machine: str) -> None:
    """curious.md and curious.png in a folder."""
    write_atomically(folder / "curious.md", as_text(found, machine).encode())
    picture(found, folder / "curious.png")


def as_text(found: Mapping[str, Any], machine: str) -> str:
    parts = [
        "# Curious parties",
        ABOUT,
        f"On {machine}.",
        "## A server that follows an example",
        followed(found),
        "## A site that asks whose scores it reads",
        "Site 0 works out whose each score is that it reads of the pool. Chance: it names whoever fills most of it.",
        guessed(found),
        "## What it costs",
        'Partial AUC (FPR <= 0.3) on test data, mean ± standard deviation. "Other draws" is the demo with other seeds'
        f" and nothing else: by so much do runs differ that differ in their draws alone. {costs(found)}",
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def followed(found: Mapping[str, Any]) -> str:
    runs = [each["server"] for each in found["attacks"].values()]
    rows = []
    for name, (*_, sides) in ATTACKS.items():
        for side in sides:
            right, chance = (mean_with_spread([run[name][side][key] for run in runs]) for key in ("right", "chance"))
            rows.append([name, SIDES[side], right, chance])
    return f"{len(runs)} seeds.\n\n{as_markdown(rows, ['links by', 'side', 'right', 'chance'])}"


def guessed(found: Mapping[str, Any]) -> str:
    runs = [each["site"] for each in found["attacks"].values()]
    rows = [
        [
            name,
            SIDES[side],
            *(mean_with_spread([run[name][side][key] for run in runs]) for key in ("right", "chance")),
        ]
        for name in runs[0]
        for side in SIDES
    ]
    return as_markdown(rows, ["the pool is drawn from", "side", "right", "chance"])


def costs(found: Mapping[str, Any]) -> str:
    """Each arm against the demo as it is, seed by seed: mean difference and its standard error."""
    seeds = sorted(set.intersection(*(set(found[arm]) for arm in ARMS)))
    rows = []
    for arm in ARMS:
        cells = [arm]
        for what in ("chosen", "last"):
            plain, own = ([float(found[name][seed][what]) for seed in seeds] for name in (PLAIN, arm))
            difference, spread = mean_and_spread(np.subtract(own, plain).tolist())
            error = spread / np.sqrt(len(seeds))
            cells += [mean_with_spread(own), "" if arm == PLAIN else f"{difference:+.4f} ± {error:.4f}"]
        rows.append(cells)
    against = "against the demo as it is (standard error)"
    return f"{len(seeds)} seeds.\n\n{as_markdown(rows, ['draws', 'chosen round', against, 'last round', against])}"


def picture(found: Mapping[str, Any], path: Path) -> None:
    """How many links of S1 are right, round by round, for each attack."""
    plt = require_matplotlib()
    runs = [each["server"] for each in found["attacks"].values()]
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    for (name, _), (colour, style) in zip(ATTACKS.items(), [*STYLES, ("#2f2f2f", (0, (1, 1)))], strict=False):
        lines = np.array([run[name]["first"]["by_round"] for run in runs])
        axes.plot(np.arange(2, 2 + lines.shape[1]), lines.mean(0), color=colour, ls=style, lw=1.7, label=name)
    chance = float(np.mean([run[next(iter(ATTACKS))]["first"]["chance"] for run in runs]))
    axes.axhline(chance, color="#999999", lw=1, label="chance")
    axes.set(xlabel="round", ylabel="links of S1 that are right", ylim=(0, 1.05))
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)

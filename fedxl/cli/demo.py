"""`fedxl demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedxl.cli.consoles import out
from fedxl.errors import require
from fedxl.experiments import demo as demos


def demo(
    seeds: Annotated[int, typer.Option(help="How many runs of each algorithm to average.")] = 3,
    folder: Annotated[Path, typer.Option("--out", help="Where the table, the plot and the report go.")] = Path(
        "demo"
    ),
) -> None:
    """FeDXL against the baselines on handwritten digits: a table, a plot and a report, in half a minute."""
    require(1 <= seeds <= len(demos.SEEDS), f"seeds must lie between 1 and {len(demos.SEEDS)}, got {seeds}")
    require(folder.is_dir() or not folder.exists(), f"{folder} is a file; --out must name a folder")
    demos.run(demos.SEEDS[:seeds], folder, out)

"""What the commands of all studies share: options, the end of a study, and one-line errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markdown import Markdown

from fedxl.config.experiment import Config
from fedxl.errors import UserError, require
from fedxl.files import write_atomically
from fedxl.reporting.plots import require_matplotlib

OUT = Path("results")
Folder = Annotated[Path, typer.Option("--out", help="Folder for results; finished runs in it are not repeated.")]
Seeds = Annotated[int, typer.Option(help="Runs of each method to average.")]
Jobs = Annotated[int, typer.Option(help="Parallel runs, one process each.")]
Rounds = Annotated[int, typer.Option(help="Rounds of each run, for a quick look; 0: as many as the study has.")]


def check(folder: Path, seeds: int = 1, jobs: int = 1, threads: int = 1) -> None:
    """Raises UserError before the first run, not after hours, if something is missing.

    threads: of torch; 0: as many as it has chosen. Small programs gain nothing from a second one.
    """
    require_matplotlib()
    require(seeds >= 1, f"seeds must be at least 1, got {seeds}")
    require(jobs >= 1, f"jobs must be at least 1, got {jobs}")
    require(folder.is_dir() or not folder.exists(), f"{folder} is a file; --out must name a folder")
    if threads:
        torch.set_num_threads(threads)


def length(rounds: int) -> dict[str, int]:
    """What the case of a run says of `--rounds`: nothing, unless there is another number of them."""
    return {"rounds": rounds} if rounds else {}


def shorten(config: Config, case: Mapping[str, Any]) -> Config:
    """The config with as many rounds as the case of its run says, if it does."""
    if "rounds" in case:
        every = min(config.run["eval_every"], case["rounds"])
        config.run.update(rounds=case["rounds"], eval_every=every)
    return config


def finish(name: str, folder: Path, text: str) -> None:
    """Write a study's table as NAME.md and show it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{name}.md", text.encode())
    out = Console()
    out.print(Markdown(text)) if out.is_terminal else print(text)
    files = ", ".join(sorted(path.name for path in folder.glob(f"{name}.*")))
    Console(stderr=True).print(f"in {folder}: {files}", style="dim", highlight=False, soft_wrap=True, markup=False)


def to_one_line(error: UserError) -> None:
    """Print an error for wrong input, in one line."""
    Console(stderr=True).print(f"studies: {error}", style="red", highlight=False, soft_wrap=True, markup=False)

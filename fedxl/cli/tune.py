"""`fedxl tune`: the same search for each of several algorithms."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedxl.config import experiment as configs
from fedxl.errors import require
from fedxl.reporting.text import as_text

out, err = Console(), Console(stderr=True)


def tune(
    config: Annotated[Path, typer.Argument(help="The experiment, a TOML file; its section [tune] has the defaults.")],
    algorithms: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Whose settings are searched; by default the config's.")
    ] = None,
    trials: Annotated[int | None, typer.Option(help="For each algorithm; 16 by default.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each trial, to average; 1 by default.")] = None,
    sampler: Annotated[
        str | None,
        typer.Option(help="halving (default): the best go on; random: all to the end; optuna: drawn by its TPE."),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Runs in parallel, each in a process.")] = 1,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting; repeatable."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for trials and results; by default tune/ and the config's name."),
    ] = None,
) -> None:
    """Search settings on validation data, with the same budget for each algorithm. The same command goes on."""
    from fedxl.experiments.tune import outcome, plan
    from fedxl.experiments.tune.search import Search

    names = None if algorithms is None else [name.strip() for name in algorithms.split(",") if name.strip()]
    options: dict[str, Any] = {"algorithms": names, "trials": trials, "seeds": seeds, "sampler": sampler}
    given = {name: value for name, value in options.items() if value is not None}
    experiment = configs.read(config, overrides or [])
    todo = plan.plan(experiment, *plan.read(config, given))
    target = folder or Path("tune") / config.stem
    require(target.is_dir() or not target.exists(), f"{target} is a file; --out must name a folder")
    rungs = ", ".join(f"{rung.trials} to round {rung.rounds}" for rung in todo.rungs)
    _say(f"trials of each algorithm: {rungs}; {todo.budget} rounds of training each")
    try:
        found = Search(todo, target, jobs, _say)()
    except KeyboardInterrupt:
        _say("stopped; finished trials are kept, and the same command goes on from there")
        sys.exit(130)
    written = outcome.save(todo, found, target, _say)
    table = as_text(outcome.rows(todo, found), outcome.columns(todo))
    Console(width=max(out.width, 150) if out.is_terminal else 200).print(table)
    out.print(f"in {target}: {', '.join(written)}; runs in {target / 'runs'}", highlight=False, soft_wrap=True)
    out.print(f"go on with: fedxl train {target / 'best.toml'}", highlight=False, soft_wrap=True, markup=False)


def _say(line: str) -> None:
    err.print(line, style="dim", highlight=False, soft_wrap=True, markup=False)

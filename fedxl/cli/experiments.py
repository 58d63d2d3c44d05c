"""`fedxl demo` and `fedxl tune`: many runs, and what they come to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedxl.cli.output import Overrides, interruptible, out, say, show, writing
from fedxl.config import experiment as configs
from fedxl.errors import require
from fedxl.reporting.text import as_text


def demo(
    seeds: Annotated[int, typer.Option(help="Runs per algorithm, averaged.")] = 3,
    folder: Annotated[Path, typer.Option("--out", help="Folder for the table, plot and report.")] = Path("demo"),
) -> None:
    """FeDXL against the baselines on handwritten digits: a table, a plot and a report, in half a minute."""
    from fedxl.experiments import demo as demos

    require(1 <= seeds <= len(demos.SEEDS), f"seeds must lie between 1 and {len(demos.SEEDS)}, got {seeds}")
    require(folder.is_dir() or not folder.exists(), f"{folder} is a file; --out must name a folder")
    with writing(folder, "free some space and run it again"):
        demos.run(demos.SEEDS[:seeds], folder, out)


def tune(
    config: Annotated[Path, typer.Argument(help="The experiment, a TOML file. Its tune section sets the defaults.")],
    algorithms: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Algorithms to tune; by default the config's.")
    ] = None,
    trials: Annotated[int | None, typer.Option(help="Trials per algorithm; 16 by default.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds per trial, averaged; 1 by default.")] = None,
    sampler: Annotated[
        str | None,
        typer.Option(help="halving (default; bad trials stop early), random, or optuna (TPE)."),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Parallel runs, one process each.")] = 1,
    overrides: Overrides = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for trials and results; by default tune/ and the config's name."),
    ] = None,
) -> None:
    """Search settings on validation data, with the same budget for each algorithm. Run it again to continue."""
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
    say(f"trials of each algorithm: {rungs}; {todo.budget} rounds of training each")
    kept = "finished trials are kept; run the command again to continue"
    with interruptible(f"stopped; {kept}"), writing(target, f"free some space; {kept}"):
        found = Search(todo, target, jobs, say)()
        written = outcome.save(todo, found, target, say)
    table = as_text(outcome.rows(todo, found), outcome.columns(todo))
    Console(width=max(out.width, 150) if out.is_terminal else 200).print(table, crop=False)
    show(f"in {target}: {', '.join(written)}; runs in {target / 'runs'}")
    show(f"continue with: fedxl train {target / 'best.toml'}")

"""`fedxl train` and `fedxl resume`: a run with its progress, and what came of it."""

from __future__ import annotations

import itertools
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fedxl import metrics
from fedxl.cli import processes
from fedxl.cli.output import Overrides, out, show, tell, writing
from fedxl.config import experiment as configs
from fedxl.errors import UserError, printable, require
from fedxl.files import write_atomically
from fedxl.options import call
from fedxl.progress import rounds
from fedxl.reporting import text
from fedxl.training import run_folder
from fedxl.training.interrupts import Interrupts
from fedxl.training.result import Result
from fedxl.training.settings import Hooks, Settings

MOST_SEEDS = 1000  # more are a typing error


def train(
    config: Annotated[Path, typer.Argument(help="The experiment, a TOML file.")],
    overrides: Overrides = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="The run's folder; a new one under runs/ by default.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many runs, with run.seed, run.seed + 1, ...: a folder each.")] = 1,
    devices: processes.Devices = 1,
    limit: processes.Limit = processes.LIMIT,
) -> None:
    """Run the experiment of a TOML file."""
    experiment = configs.read(config, overrides or [])
    alone = not processes.follows()
    require(1 <= seeds <= MOST_SEEDS, f"--seeds must lie between 1 and {MOST_SEEDS}, got {seeds}")
    several = "--seeds starts one run after another, which torchrun cannot; leave torchrun out, and use --devices"
    require(seeds == 1 or not processes.one_of_several(), several)
    target = folder or (_new(Path("runs"), config.stem) if alone else Path("runs"))
    if alone and (run_folder.is_run(target) or run_folder.seeds_in(target)):
        raise UserError(f"{target} already holds a run; `fedxl resume {target}`, or choose another folder")
    if seeds > 1:
        return _begin_seeds(experiment, target, seeds, devices, limit)
    given = ["train", str(config), *(f"--set={each}" for each in overrides or []), f"--out={target}"]
    try:
        _show(experiment, target, False, devices, limit, given)
    finally:
        if alone and not folder:
            with suppress(OSError):
                target.rmdir()  # if nothing was written
    return None


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run that was stopped.")],
    devices: processes.Devices = 1,
    limit: processes.Limit = processes.LIMIT,
) -> None:
    """Resume a run from its last checkpoint, or the runs of several seeds."""
    if below := run_folder.seeds_in(folder):
        return _run_seeds(folder, below, devices, limit)
    begun = (folder / run_folder.ABOUT).is_file()
    how = "of a config; in Python: fit(..., resume=True)" if begun else f"yet: fedxl train CONFIG --out {folder}"
    require((folder / run_folder.CONFIG).is_file(), f"{folder} holds no run {how} (there is no config.toml in it)")
    return _resume(folder, devices, limit)


def _resume(folder: Path, devices: int, limit: float) -> None:
    experiment = configs.read(folder / run_folder.CONFIG)
    _show(experiment, folder, True, devices, limit, ["resume", str(folder)])


def _begin_seeds(experiment: configs.Config, target: Path, seeds: int, devices: int, limit: float) -> None:
    """A folder with its config for each seed, so that `resume` knows them all; then one run after another."""
    first, folders = call(Settings, experiment.run, "run").seed, list[Path]()
    if configs.draws_from_run_seed(experiment):
        show(f"what [data] draws, such as a split, differs with each seed; --set data.seed={first} keeps it")
    try:
        for seed in range(first, first + seeds):
            path = target / f"{run_folder.SEED}{seed}"
            with writing(path, "nothing was begun"):
                path.mkdir(parents=True)
                folders.append(path)
                own = replace(experiment, run={**experiment.run, "seed": seed})
                write_atomically(path / run_folder.CONFIG, configs.dump(own).encode())
        _run_seeds(target, folders, devices, limit)
    finally:
        if not any((path / run_folder.ABOUT).exists() for path in folders):  # it could not begin
            for path in folders:
                shutil.rmtree(path)
            with suppress(OSError):
                target.rmdir()


def _run_seeds(target: Path, folders: Sequence[Path], devices: int, limit: float) -> None:
    """Each seed that has not finished, one after another, and the mean over all of them."""
    for number, folder in enumerate(folders, 1):
        if run_folder.read_run(folder).done is not None:
            continue
        show(f"{folder.name.replace('-', ' ')} ({number} of {len(folders)})")
        try:
            _resume(folder, devices, limit)
        except SystemExit:
            show(f"all seeds: fedxl resume {target}")
            raise
    runs = [run_folder.read_run(folder) for folder in folders]
    values = [run.values for run in runs]
    names = [name for name in metrics.shown(*values) if all(each.get(name) is not None for each in values)]
    means = (f"{printable(name)} {text.mean_with_spread([each[name] for each in values])}" for name in names)
    splits = " and ".join(sorted({run.split for run in runs}))
    show(f"{splits}, {text.over_seeds(len(runs))}: {'  '.join(means)}")
    show(f"compare and plot: fedxl report {target} --html report.html")


def _new(parent: Path, stem: str) -> Path:
    """runs/NAME-1, or the next number that is free: created now, so that no other process takes it."""
    for number in itertools.count(1):
        path = parent / f"{stem}-{number}"
        with writing(path, "nothing was begun"), suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError("numbers do not end")


def _show(
    experiment: configs.Config, folder: Path, resume: bool, devices: int, limit: float, given: list[str]
) -> None:
    """Run with a progress bar, in a log with lines, and say what came of it.

    given: the arguments of this command, for the processes that it starts on several devices.
    """
    require(devices >= 1, f"--devices must be at least 1, got {devices}")
    if devices > 1:
        return processes.start(devices, given, folder, limit)
    if processes.follows():
        return processes.follow(experiment, folder, resume, limit)
    try:
        result = _run(experiment, folder, resume, limit)
    except UserError as error:
        if processes.one_of_several():
            tell(error)
            processes.leave(2)
        raise
    code = _conclude(result, folder)
    processes.leave(code)
    if code:
        sys.exit(code)
    return None


def _run(experiment: configs.Config, folder: Path, resume: bool, limit: float) -> Result:
    with Interrupts(show, (signal.SIGINT, signal.SIGTERM)) as interrupts, rounds(out) as tell:
        hooks = interrupts.stopping(Hooks(on_progress=lambda now: tell(now.round, now.rounds, now.latest), say=show))
        return processes.execute(experiment, folder, resume, hooks, limit)


def _conclude(result: Result, folder: Path) -> int:
    """Say what came of a run; the exit code."""
    if result.interrupted:
        show(f"stopped after the round was finished; continue with: fedxl resume {folder}")
        return 130
    tested = result.metrics["test"]
    values = tested or result.metrics["validation"]
    split = "test" if tested else "validation"
    summary = f", {split}: {text.in_words(values)}" if values else " (last round: no validation or test data)"
    show(f"best round {result.best_round}{summary}  ({result.seconds:.1f} s)")
    show(f"in {folder}: metrics.jsonl, model.safetensors, checkpoints/")
    return 0

"""`fedxl train` and `fedxl resume`: a run with its progress, and what came of it."""

from __future__ import annotations

import itertools
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from fedxl.cli import processes
from fedxl.cli.output import Overrides, out, show, tell
from fedxl.config import experiment as configs
from fedxl.errors import UserError, require
from fedxl.metrics import METRICS
from fedxl.progress import Pace, time_left
from fedxl.reporting import text
from fedxl.training import run_folder
from fedxl.training.result import Result
from fedxl.training.settings import Hooks, Progress


def train(
    config: Annotated[Path, typer.Argument(help="The experiment, a TOML file.")],
    overrides: Overrides = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="The run's folder; a new one under runs/ by default.")
    ] = None,
    devices: processes.Devices = 1,
    limit: processes.Limit = processes.LIMIT,
) -> None:
    """Run an experiment."""
    experiment = configs.read(config, overrides or [])
    target = folder or _free(Path("runs"), config.stem)
    if not processes.follows() and run_folder.is_run(target):
        raise UserError(f"{target} already holds a run; `fedxl resume {target}`, or choose another folder")
    given = ["train", str(config), *(f"--set={each}" for each in overrides or []), f"--out={target}"]
    _show(experiment, target, False, devices, limit, given)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run that was stopped.")],
    devices: processes.Devices = 1,
    limit: processes.Limit = processes.LIMIT,
) -> None:
    """Go on with a run from its last checkpoint."""
    require(
        (folder / run_folder.CONFIG).is_file(),
        f"{folder} holds no run of a config: there is no config.toml in it; in Python: fit(..., resume=True)",
    )
    _show(configs.read(folder / "config.toml"), folder, True, devices, limit, ["resume", str(folder)])


def _free(parent: Path, stem: str) -> Path:
    """runs/NAME-1, or the next number that is free."""
    paths = (parent / f"{stem}-{number}" for number in itertools.count(1))
    return next(path for path in paths if not path.exists())


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
    done = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate())
    left = (TextColumn("{task.fields[metric]}"), TimeRemainingColumn())
    bar = Bar(*done, *left, console=out, disable=not out.is_terminal)
    with Interrupts() as interrupts:
        task, pace = bar.add_task("round", total=None, metric=""), Pace()

        def advance(progress: Progress) -> None:
            bar.start()  # not before: reading the data may show a bar of its own
            bar.update(task, total=progress.rounds, completed=progress.round, metric=_latest(progress))
            under_way = 0 < progress.round < progress.rounds
            if bar.disable and under_way and pace.due():  # a log: a line now and then
                soon = time_left(progress.seconds, progress.round, progress.rounds)
                parts = [f"round {progress.round} of {progress.rounds}", _latest(progress), soon]
                show(", ".join(filter(None, parts)))

        hooks = Hooks(on_progress=advance, say=show, should_stop=lambda: interrupts.asked)
        try:
            return processes.execute(experiment, folder, resume, hooks, limit)
        finally:
            bar.stop()


def _conclude(result: Result, folder: Path) -> int:
    """Say what came of a run; the exit code."""
    if result.interrupted:
        show(f"stopped after the round was finished; go on with: fedxl resume {folder}")
        return 130
    tested = result.metrics["test"]
    values = tested or result.metrics["validation"]
    split = "test" if tested else "validation"
    none = "the last one, for there is no validation or test data"
    summary = f"{split}: {text.in_words(values)}" if values else none
    show(f"best round {result.best_round}, {summary}  ({result.seconds:.1f} s)")
    show(f"in {folder}: metrics.jsonl, model.safetensors, checkpoints/")
    return 0


def _latest(progress: Progress) -> str:
    values = (progress.record or {}).get("validation") or {}
    name = next((name for name in METRICS if name in values), None)
    return f"validation {name} {values[name]:.4f}" if name else ""


class Rate(ProgressColumn):
    """Rounds a second, over the last of them."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f} rounds/s" if task.speed else "")


class Interrupts:
    """Ctrl-C asks for a stop after the round; a second one stops at once."""

    asked = False

    def __enter__(self) -> Interrupts:
        self.previous = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        show("finishing the round, then saving (again: stop at once) ...")  # above the progress bar

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

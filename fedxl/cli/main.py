"""The command line: argument parsing and what is shown on the way; the work is done elsewhere."""

from __future__ import annotations

import inspect
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from fedxl import __version__
from fedxl.algorithms import ALGORITHMS
from fedxl.cli import after, bench, data_check, deploy, follow, paper, processes, theory, tune
from fedxl.config import experiment as configs
from fedxl.data import DATASETS, published
from fedxl.errors import UserError, require
from fedxl.metrics import METRICS
from fedxl.progress import Pace, time_left
from fedxl.reporting import runs as run_folders
from fedxl.reporting import text
from fedxl.risks import KNOWN_RISKS
from fedxl.toml import read as read_toml
from fedxl.training import rundir
from fedxl.training.advice import Advice
from fedxl.training.hooks import Hooks, Progress
from fedxl.training.result import Result

HELP = "Train across data holders who cannot pool their data, for AUROC, partial AUC and other X-risks."
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=HELP)
data = typer.Typer(no_args_is_help=True, help="Data sets: what there is, and how to get it here.")
app.add_typer(data, name="data")
app.add_typer(paper.app, name="paper")
app.add_typer(deploy.deploy, name="deploy")
app.add_typer(deploy.site, name="site")
out, err = Console(), Console(stderr=True)


def _version(asked: bool) -> None:
    if asked:
        print(f"fedxl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Which this is.")
    ] = False,
) -> None:
    """What all commands share."""


def main() -> None:
    """A user's mistake is one line and exit code 2; anything else is a bug and shows its traceback."""
    try:
        app()
    except UserError as error:
        err.print(f"fedxl: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
        sys.exit(2)


Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting; repeatable."),
]


@app.command()
def demo(
    seeds: Annotated[int, typer.Option(help="How many runs of each algorithm to average.")] = 3,
    folder: Annotated[Path, typer.Option("--out", help="Where the table, the plot and the report go.")] = Path(
        "demo"
    ),
) -> None:
    """FeDXL against the baselines on handwritten digits: a table, a plot and a report, in half a minute."""
    from fedxl.experiments import demo as demos

    require(1 <= seeds <= len(demos.SEEDS), f"seeds must lie between 1 and {len(demos.SEEDS)}, got {seeds}")
    require(folder.is_dir() or not folder.exists(), f"{folder} is a file; --out must name a folder")
    demos.run(demos.SEEDS[:seeds], folder, out)


@app.command()
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
    if not processes.follows() and rundir.is_run(target):
        raise UserError(f"{target} already holds a run; `fedxl resume {target}`, or choose another folder")
    given = ["train", str(config), *(f"--set={each}" for each in overrides or []), f"--out={target}"]
    _show(experiment, target, False, devices, limit, given)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run that was stopped.")],
    devices: processes.Devices = 1,
    limit: processes.Limit = processes.LIMIT,
) -> None:
    """Go on with a run from its last checkpoint."""
    require(
        (folder / rundir.CONFIG).is_file(),
        f"{folder} holds no run of a config: there is no config.toml in it; in Python: fit(..., resume=True)",
    )
    _show(configs.read(folder / "config.toml"), folder, True, devices, limit, ["resume", str(folder)])


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Runs, or folders of runs.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of text.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write a report into this file instead.")] = None,
    reference: Annotated[
        str, typer.Option(help="The run to look at closely; by default the best on validation data (--html).")
    ] = "",
) -> None:
    """A table of runs, or a report with curves, intervals and sites in one HTML file."""
    if html is not None:
        from fedxl.reporting import document

        document.write(html, folders, reference)
        out.print(f"report in {html}", highlight=False, soft_wrap=True, markup=False)
        return
    require(not reference, "--reference belongs to --html")
    from fedxl.reporting.report import table  # loads scipy, which takes a second

    columns, rows = table(run_folders.run_dirs(folders))
    if markdown:
        print(text.as_markdown(rows, columns), end="")
    else:
        # Metrics must not be cut: a pipe has no width to fit, and a narrow terminal may wrap.
        Console(width=max(out.width, 200)).print(text.as_text(rows, columns))


app.command()(after.predict)
app.command()(after.export)


@app.command()
def advise(
    config: Annotated[Path, typer.Argument(help="The experiment, a TOML file.")],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: facts, settings, lines and flags.")] = False,
) -> None:
    """Which algorithm, weighting, norm, local steps and rate fit the sites of a config, by their counts."""
    found = configs.advise(configs.read(config, overrides or []))
    print(json.dumps(found.as_json(), indent=2) if as_json else found)


app.command()(bench.bench)
app.command()(theory.theory)
app.command()(follow.watch)
app.command()(tune.tune)


@app.command()
def algorithms() -> None:
    """What there is to train with, one line each."""
    _list({name: (inspect.getdoc(kind) or "").splitlines()[0] for name, kind in ALGORITHMS.items()})


@app.command()
def risks() -> None:
    """What there is to optimise, one line each."""
    _list({name: (inspect.getdoc(risk) or "").splitlines()[0] for name, risk in KNOWN_RISKS.items()})


@app.command()
def metrics() -> None:
    """What models are judged by, one line each."""
    _list({name + "@LIMIT" * metric.takes_limit: metric.summary for name, metric in METRICS.items()})


@data.command("list")
def datasets() -> None:
    """What there is to train on, one line each."""
    _list({name: (inspect.getdoc(load) or "").splitlines()[0] for name, load in DATASETS.items()})


@data.command()
def fetch(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(published.FILES)}.")],
    root: Annotated[Path, typer.Option(help="The folder to put it into; a config's data.root.")] = Path("data"),
) -> None:
    """Download a data set as its owners publish it; it is kept only if its checksum is right."""
    path = published.fetch(name, root)
    out.print(f"{path} is there, and its checksum is the published one", highlight=False, soft_wrap=True)


@data.command()
def check(
    config: Annotated[Path, typer.Argument(help="An experiment, or a site's own site.toml.")],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: counts, problems, remarks, advice.")] = False,
) -> None:
    """Look at data before training: counts by site and split, gaps, copies; exit code 2 if it would be wrong."""
    from fedxl.config.check import as_json as json_of
    from fedxl.config.check import check_config

    advice: Advice | None = None
    if "site" in read_toml(config):
        from fedxl.deploy.provision.settings import read_site
        from fedxl.deploy.site.data_check import check_site

        require(not overrides, "--set is for experiments; change the settings in the site's own file")
        findings = check_site(read_site(config))
    else:
        findings, advice = check_config(configs.read(config, overrides or []))
    if as_json:
        print(json.dumps(json_of(findings, advice), indent=2))
    else:
        data_check.show(findings, advice, out)
    if findings.problems:
        raise typer.Exit(2)


def _list(lines: dict[str, str]) -> None:
    width = max(map(len, lines))
    for name, line in lines.items():
        print(f"{name:<{width}}  {line}")


def _free(parent: Path, stem: str) -> Path:
    """runs/NAME-1, or the next number that is free."""
    number = 1
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return parent / f"{stem}-{number}"


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
    bar = _bar()
    with Interrupts(bar.console) as interrupts:
        task = bar.add_task("round", total=None, metric="")

        def say(line: str) -> None:
            bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

        log = Log(say)

        def advance(progress: Progress) -> None:
            bar.start()  # not before: reading the data may show a bar of its own
            bar.update(task, total=progress.rounds, completed=progress.round, metric=_latest(progress))
            if bar.disable:
                log(progress)

        hooks = Hooks(on_progress=advance, say=say, should_stop=lambda: interrupts.asked)
        try:
            result = processes.execute(experiment, folder, resume, hooks, limit)
        finally:
            bar.stop()
    _conclude(result, folder)
    return processes.leave()


def _conclude(result: Result, folder: Path) -> None:
    if result.interrupted:
        out.print(
            f"stopped after the round was finished; go on with: fedxl resume {folder}",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
        sys.exit(130)
    tested = result.metrics["test"]
    values = tested or result.metrics["validation"]
    shown = text.in_words(values)
    where = "test" if tested else "validation"
    summary = f"{where}: {shown}" if values else "the last one, for there is no validation or test data"
    line = f"best round {result.best_round}, {summary}  ({result.seconds:.1f} s)"
    out.print(line, highlight=False, soft_wrap=True)
    where = f"in {folder}: metrics.jsonl, model.safetensors, checkpoints/"
    out.print(where, highlight=False, soft_wrap=True, markup=False)


def _latest(progress: Progress) -> str:
    values = (progress.record or {}).get("validation") or {}
    name = next((name for name in METRICS if name in values), None)
    return f"validation {name} {values[name]:.4f}" if name else ""


def _bar() -> Bar:
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TextColumn("{task.fields[metric]}"),
        TimeRemainingColumn(),
        console=out,
        disable=not out.is_terminal,
    )


class Rate(ProgressColumn):
    """Rounds a second, over the last of them."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f} rounds/s" if task.speed else "")


class Log:
    """Where a run stands, for files that people follow: a line now and then, none of a run that is over by then."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.pace = say, Pace()

    def __call__(self, progress: Progress) -> None:
        under_way = 0 < progress.round < progress.rounds
        if under_way and self.pace.due():
            left = time_left(progress.seconds, progress.round, progress.rounds)
            parts = [f"round {progress.round} of {progress.rounds}", _latest(progress), left]
            self.say(", ".join(filter(None, parts)))


class Interrupts:
    """Ctrl-C asks for a stop after the round; a second one stops at once."""

    asked = False

    def __init__(self, console: Console) -> None:
        self.console = console  # the progress bar's, which prints above the bar

    def __enter__(self) -> Interrupts:
        self.previous = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.console.print("finishing the round, then saving (again: stop at once) ...", soft_wrap=True)

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()

"""`fedxl report` and `fedxl watch`: finished runs, and one in progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from fedxl.cli.output import out, show
from fedxl.errors import UserError, require
from fedxl.reporting import watch as views
from fedxl.reporting.watch import View, panel
from fedxl.training.run_folder import read_run, run_dirs

GONE = 3  # looks in a row that find no process at work: a run that is just restarted has a moment without one


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Runs, or folders of runs.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of text.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="One row per run, with every metric.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write a report into this file instead.")] = None,
    reference: Annotated[
        str,
        typer.Option(help="With --html: the run to compare with and show in detail. Default: the best."),
    ] = "",
) -> None:
    """A table of runs, or a report with curves, intervals and sites in one HTML file."""
    found = run_dirs(folders)
    if html is not None:
        from fedxl.reporting import document

        document.write(html, [read_run(path) for path in found], reference, "--html")
        show(f"report in {html}")
        return
    require(not reference, "--reference belongs to --html")
    from fedxl.reporting import runs, text  # the first loads scipy, which takes a second

    title, columns, rows = ("", *runs.table(found)) if everything else runs.overview(found)
    if markdown:
        print(text.as_markdown(rows, columns), end="")
    elif everything:
        # Metrics must not be cut: a pipe has no width to fit, and a narrow terminal may wrap.
        Console(width=max(out.width, 200)).print(text.as_text(rows, columns), crop=False)
    else:
        console = Console()
        console.print(f"{title}\n", markup=False, highlight=False)
        console.print(text.as_text(rows, columns, lines=False), crop=False)


def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's folder, or a deployed server's.")],
    every: Annotated[float, typer.Option(help="Seconds between updates.", min=0.1, max=3600)] = 1.0,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for a run to begin or resume.")] = False,
) -> None:
    """Follow a run in the terminal until it ends: progress, metrics, time left, sites. Changes nothing."""
    try:
        follow(folder, wait, lambda: time.sleep(every))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def follow(folder: Path, wait: bool, pause: Callable[[], None]) -> None:
    looks = _looks(folder, wait, pause)
    if out.is_terminal:
        first = next(looks)
        if first.final is not None:
            out.print(panel(first, out))
            return
        with Live(panel(first, out), console=out, auto_refresh=False) as live:
            for view in looks:
                live.update(panel(view, out), refresh=True)
        return
    said: object = None
    for view in looks:
        if said != (said := (len(view.rows), views.state(view))):  # a line for each evaluation, and for the end
            print(views.line(view), flush=True)


def _looks(folder: Path, wait: bool, pause: Callable[[], None]) -> Iterator[View]:
    """One look after another, until the run has ended or, unless we wait, nobody works on it."""
    begun, gone = False, 0
    while True:
        try:
            view = views.look(views.folder_of(folder))
        except UserError:
            if begun or not wait:
                raise
            require(not folder.is_file(), f"{folder} is a file; a run is a folder")
        else:
            begun = True
            yield view
            gone = gone + 1 if view.alive is False else 0
            if view.final is not None or (gone >= GONE and not wait):
                return
        pause()

"""`fedxl watch`: a run while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from fedxl.errors import UserError, require
from fedxl.reporting import watch as views
from fedxl.reporting.watch import View
from fedxl.reporting.watch_panel import panel

out = Console()
GONE = 3  # looks in a row that find no process at work: a run that is just restarted has a moment without one


def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's folder, or a deployed server's.")],
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1, max=3600)] = 1.0,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for a run that has not begun, or that was stopped, to go on.")
    ] = False,
) -> None:
    """Follow a run in the terminal until it ends: progress, metrics, time left, sites. Changes nothing."""
    try:
        _follow(folder, wait, lambda: time.sleep(every))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _follow(folder: Path, wait: bool, pause: Callable[[], None]) -> None:
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
    said = ""
    for view in looks:
        fresh = (len(view.rows), views.state(view))
        if repr(fresh) != said:  # a line for each evaluation, and for the end
            said = repr(fresh)
            print(views.line(view), flush=True)


def _looks(folder: Path, wait: bool, pause: Callable[[], None]) -> Iterator[View]:
    """One look after another, until the run has ended or, unless we wait, nobody works on it."""
    view, gone = _first(folder, wait, pause), 0
    yield view
    while view.final is None:
        gone = gone + 1 if view.alive is False else 0
        if gone >= GONE and not wait:
            return
        pause()
        view = views.look(views.folder_of(folder))
        yield view


def _first(folder: Path, wait: bool, pause: Callable[[], None]) -> View:
    while True:
        try:
            return views.look(views.folder_of(folder))
        except UserError:
            if not wait:
                raise
            require(not folder.is_file(), f"{folder} is a file; a run is a folder")
            pause()

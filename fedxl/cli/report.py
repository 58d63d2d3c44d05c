"""`fedxl report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedxl.cli.consoles import out
from fedxl.errors import require
from fedxl.reporting import runs, text


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

    columns, rows = table(runs.run_dirs(folders))
    if markdown:
        print(text.as_markdown(rows, columns), end="")
    else:
        # Metrics must not be cut: a pipe has no width to fit, and a narrow terminal may wrap.
        Console(width=max(out.width, 200)).print(text.as_text(rows, columns))

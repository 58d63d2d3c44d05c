"""What `fedxl data check` prints."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedxl.data.check import Count, Findings, total
from fedxl.errors import printable
from fedxl.training.advice import Advice

MOST_SITES = 20  # rows of the table; with thousands of sites nobody would read them all
MOST_LINES = 50  # problems, or remarks
SPLITS = ("train", "validation", "test")


def show(findings: Findings, advice: Advice | None, console: Console) -> None:
    """A table of sites, then problems, remarks and advice."""
    if findings.train:
        console.print(_table(findings))
    for lines, style, word in ((findings.problems, "red", "problem"), (findings.remarks, "yellow", "remark")):
        for line in lines[:MOST_LINES]:
            console.print(f"[{style}]{word}:[/] {escape(printable(line, 1000))}", highlight=False, soft_wrap=True)
        if len(lines) > MOST_LINES:
            console.print(f"[{style}]{word}:[/] and {len(lines) - MOST_LINES:,} more of them", highlight=False)
    if advice:
        console.print(escape(str(advice)), highlight=False, soft_wrap=True)
    if findings.problems:
        console.print("training on these data would be wrong", style="red", highlight=False)
    else:
        console.print("nothing here would make training wrong", style="green", highlight=False)


def _table(findings: Findings) -> Table:
    table = Table("site", box=None, header_style="bold", pad_edge=False)
    shown = [split for split in SPLITS if split == "train" or split in findings.held]
    for split in shown:
        table.add_column(split, justify="right")
        table.add_column("positive", justify="right")
    for at, name in enumerate(findings.names[:MOST_SITES]):
        cells = [_cells(findings.train[at])]
        cells += [_cells(by[at]) if (by := findings.held_by_site.get(split)) else ("", "") for split in shown[1:]]
        table.add_row(escape(printable(name, 40)), *(cell for pair in cells for cell in pair))
    left = len(findings.names) - MOST_SITES
    if left > 0:
        table.add_row(f"... and {left:,} more")
    totals = [_cells(total(findings.train)), *(_cells(findings.held[split]) for split in shown[1:])]
    table.add_row("all", *(cell for pair in totals for cell in pair), style="bold")
    return table


def _cells(count: Count) -> tuple[str, str]:
    return f"{count.examples:,}", f"{count.positives:,}"

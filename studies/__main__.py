"""`python -m studies`: one command per study."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import typer

from fedxl.errors import UserError
from studies import coverage, demo, drift, heterogeneity, histograms, labels, ranking, sites, times
from studies.curious import study as curious
from studies.hostile import study as hostile
from studies.options import to_one_line
from studies.paper.commands import app as paper
from studies.privacy import study as privacy
from studies.theory import complexity, prescriptions, rates

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Studies of the paper and of this library. A stopped study continues where it was.",
)
app.add_typer(paper, name="paper")
COMMANDS: Mapping[str, Callable[..., None]] = {
    "heterogeneity": heterogeneity.command,
    "theory": prescriptions.command,
    "rates": rates.command,
    "complexity": complexity.command,
    "hostile": hostile.command,
    "curious": curious.command,
    "privacy": privacy.command,
    "labels": labels.command,
    "ranking": ranking.command,
    "sites": sites.command,
    "times": times.command,
    "coverage": coverage.command,
    "histograms": histograms.command,
    "optimisers": demo.optimisers,
    "participation": demo.participation,
    "settings": demo.settings,
    "drift": drift.drift,
}
for name, command in COMMANDS.items():
    app.command(name)(command)


def main() -> None:
    """Run a command. Wrong input ends with one line and code 2; anything else is a bug and keeps its traceback."""
    try:
        app(prog_name="python -m studies")
    except UserError as error:
        to_one_line(error)
        sys.exit(2)


if __name__ == "__main__":
    main()

"""`python -m studies theory`: what the paper's theorems prescribe."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from studies.theory.plan import PLANS, Federated, Plan, prescribe, short

out = Console()
PAPER_STEPS = 20_000  # the paper trains for so many iterations

# Fields of a plan, and what they are called in the table.
ROWS = {
    "steps": "T, local steps in all",
    "rounds": "R, rounds",
    "local_steps": "K, local steps per round",
    "lr": "eta, learning rate (lr)",
    "beta": "beta, of the new gradient",
    "gamma": "gamma, of the new u",
    "epsilon": "eps: mean |grad F|^2 is eps^2",
    "steps_of_a_client": "mean local steps of a client",
}


def command(
    algorithm: Annotated[
        str | None, typer.Argument(metavar="[ALGORITHM]", help=f"{' or '.join(PLANS)}; both by default.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="T", help=f"Local steps in all, R K; {PAPER_STEPS:,} by default.")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="In place of T: the gradient norm to reach, between 0 and 1.")
    ] = None,
    clients: Annotated[int, typer.Option(metavar="N", help="How many there are.")] = 16,
    examples: Annotated[
        int, typer.Option(metavar="M", help="Examples of S1 at the client with the most of them, for FeDXL2.")
    ] = 1000,
    cohort: Annotated[int, typer.Option(metavar="P", help="Clients of a round; 0: all.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """What the paper's theorems prescribe.

    K, R, eta, beta and gamma, up to constants, and what limits them.
    """
    where = Federated(clients, examples, cohort)
    if steps is None and epsilon is None:
        steps = PAPER_STEPS
    plans = [prescribe(name, where, steps=steps, epsilon=epsilon) for name in ([algorithm] if algorithm else PLANS)]
    if as_json:
        print(json.dumps({"federation": asdict(where), "plans": [asdict(plan) for plan in plans]}, indent=2))
        return
    for plan in plans:
        out.print(table(plan))
        for limit in plan.limits:
            out.print(f"- {limit}", highlight=False, markup=False)
        out.print()
    out.print("All constants are set to 1: trust the ratios, tune the learning rate.", highlight=False)


def table(plan: Plan) -> Table:
    """One line for each quantity: its name, its order of magnitude, the formula."""
    shown = Table(title=f"{plan.algorithm}, {plan.theorem}", title_justify="left")
    shown.add_column("")
    shown.add_column("about", justify="right")
    shown.add_column("as")
    for field, name in ROWS.items():
        value = getattr(plan, field)
        if value is not None:
            shown.add_row(name, short(value), plan.formulas[field])
    return shown

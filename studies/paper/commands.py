"""`python -m studies paper ...`: one command for each table and figure of the paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedxl.errors import require, unknown
from fedxl.training.result import Result
from fedxl.training.settings import pick_device
from studies.harness import Harness, Outcome, to_stderr, train
from studies.options import OUT, Folder, Jobs, Seeds, check, finish
from studies.paper import ablation, runtime, setup, tables
from studies.paper.setup import Budget, Task
from studies.paper.study import TABLE1, TABLE2, Comparison, Study

app = typer.Typer(no_args_is_help=True, help="The paper's tables and figures, ours beside theirs.")

Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data", metavar="NAME[:KEY=VALUE,...]",
        help="cifar10, cifar100, chexpert, chestmnist or digits; repeatable, with options of the data after a colon.",
    ),
]  # fmt: skip
Root = Annotated[Path, typer.Option(help="The folder with the published data files.")]
Network = Annotated[
    list[str] | None,
    typer.Option("--model", metavar="KEY=VALUE", help="An option of the network, as score_norm=true; repeatable."),
]
BudgetName = Annotated[str, typer.Option("--budget", help=f"{', '.join(setup.BUDGETS)}: how long to train and tune.")]
Iterations = Annotated[int, typer.Option(help="Number of iterations; 0: the budget's.")]
Trials = Annotated[int, typer.Option(help="Iterations of a tuning trial; 0: the budget's share of a run.")]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile/--no-compile", help="Whether a GPU compiles the step: it takes minutes, too long for short runs."
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, ...")]
Ours = Annotated[
    list[str] | None,
    typer.Option("--fedxl", metavar="KEY=VALUE", help="An option of FeDXL, as level=even; repeatable."),
]


def only_option(methods: Sequence[setup.TableColumn]) -> object:
    names = ", ".join(map(setup.short_name, methods))
    return typer.Option("--only", metavar="NAME,...", help=f"Some methods only: {names}.")


Only = Annotated[str, only_option(setup.TABLE1)]


def change_budget(
    known: Mapping[str, Budget], name: str, iterations: int, trial_iterations: int, compiled: bool
) -> Budget:
    """A budget by name, with another length. Raises UserError if there is no such budget."""
    if name not in known:
        raise unknown("budget", name, known)
    for what, number in {"iterations": iterations, "trial-iterations": trial_iterations}.items():
        require(number >= 0, f"{what} must not be negative, got {number}")
    budget = known[name]
    budget = budget.with_iterations(iterations or budget.iterations, trial_iterations)
    return budget if compiled else replace(budget, run=(*budget.run, ("compile", False)))


def details(result: Result) -> Outcome:
    """What the commands want of a run besides its metrics; those on training data are of `runtime` alone."""
    found, arrays = ablation.curves(result)
    timed = runtime.pace(result) if "train" in result.history[-1] else ({}, {})
    return {**found, **timed[0]}, {**arrays, **timed[1]}


def perform(
    name: str, tasks: Sequence[Task], budget: Budget, seeds: int, jobs: int, device: str, folder: Path,
    work: Callable[[Study], str],
) -> None:  # fmt: skip
    """Do the work of a command and show its table."""
    check(folder, seeds, jobs, threads=0)
    if budget.trial_iterations <= budget.local_steps:
        to_stderr(
            f"trials of {budget.trial_iterations} iterations are one round, in which FeDXL knows other sites "
            f"only by scores of the untrained network; use more than {budget.local_steps} for two rounds"
        )
    run = partial(train, device=str(pick_device(device)), more=details)
    with Harness(folder / "runs.jsonl", run, jobs) as do:
        text = work(Study(tasks, budget, seeds, do))
    finish(name, folder, text)


def _command(name: str, about: str, comparison: Comparison, work: Callable[[Study, Comparison], str]) -> None:
    """All commands take the same options. They may leave methods out, or set FeDXL in another way."""

    def command(
        only: Only = "",
        fedxl: Ours = None,
        data: Data = None,
        root: Root = Path("data"),
        model: Network = None,
        seeds: Seeds = 3,
        budget: BudgetName = "full",
        iterations: Iterations = 0,
        trial_iterations: Trials = 0,
        jobs: Jobs = 1,
        compiled: Compile = True,
        device: Device = "auto",
        folder: Folder = OUT,
    ) -> None:
        options = setup.parse_assignments(fedxl or [], "--fedxl level=even")
        methods = setup.select_methods(setup.with_options(comparison.methods, options), only)
        shown = "".join(f", {key} = {value}" for key, value in options.items())
        wanted = replace(comparison, title=comparison.title + shown, methods=methods)
        spent = change_budget(setup.BUDGETS, budget, iterations, trial_iterations, compiled)
        names = data or (["digits"] if budget == "quick" else list(setup.PAPER_TASKS))
        network = setup.parse_assignments(model or [], "--model score_norm=true")
        tasks = [setup.find_task(text, str(root), network) for text in names]
        perform(name, tasks, spent, seeds, jobs, device, folder, lambda study: work(study, wanted))

    command.__doc__ = about
    app.command(name)(command)


_command("table1", "Partial AUC: every method, and FeDXL2.", TABLE1, tables.run)
_command("table2", "AUC with one in five labels flipped, and FeDXL1.", TABLE2, tables.run)
_command("runtime", "Rounds, seconds and bytes until training is near its best.", TABLE1, runtime.run)
for varied in (ablation.VARY_K, ablation.VARY_N):
    _command(varied.name, varied.about, TABLE1, partial(ablation.run, ablation=varied))

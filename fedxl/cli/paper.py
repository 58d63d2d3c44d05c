"""`fedxl paper ...`: one command for each table and figure of the paper."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

from fedxl.errors import require, unknown
from fedxl.experiments.paper import ablation, runtime, setup, tables
from fedxl.experiments.paper.runs import Runner, RunStore
from fedxl.experiments.paper.study import TABLE1, TABLE2, Study
from fedxl.reporting.plots import require_matplotlib

app = typer.Typer(no_args_is_help=True, help="The FeDXL paper's tables and figures, ours beside theirs.")
out, err = Console(), Console(stderr=True)

Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data", metavar="NAME[:KEY=VALUE,...]",
        help="cifar10, cifar100, chexpert, chestmnist or digits; repeatable, with options of the data after a colon.",
    ),
]  # fmt: skip
Root = Annotated[Path, typer.Option(help="The folder with the published data files.")]
Seeds = Annotated[int, typer.Option(help="Number of runs of each method to average.")]
Network = Annotated[
    list[str] | None,
    typer.Option("--model", metavar="KEY=VALUE", help="An option of the network, as score_norm=true; repeatable."),
]
BudgetName = Annotated[str, typer.Option("--budget", help=f"{', '.join(setup.BUDGETS)}: how long to train and tune.")]
Iterations = Annotated[int, typer.Option(help="Number of iterations; 0: the budget's.")]
Trials = Annotated[int, typer.Option(help="Iterations of a tuning trial; 0: the budget's share of a run.")]
Jobs = Annotated[
    int, typer.Option(help="Runs in parallel, each in a process; on a GPU one compiles while another runs.")
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile/--no-compile", help="Whether a GPU compiles the step: it takes minutes, too long for short runs."
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, ...")]
Folder = Annotated[Path, typer.Option("--out", help="Folder for results; finished runs in it are not repeated.")]


def _command(name: str, about: str, work: Callable[[Study], str]) -> None:
    """All commands take the same options."""

    def command(
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
        folder: Folder = Path("paper"),
    ) -> None:
        require_matplotlib()
        if budget not in setup.BUDGETS:
            raise unknown("budget", budget, setup.BUDGETS)
        require(seeds >= 1, f"seeds must be at least 1, got {seeds}")
        require(jobs >= 1, f"jobs must be at least 1, got {jobs}")
        for what, number in {"iterations": iterations, "trial-iterations": trial_iterations}.items():
            require(number >= 0, f"{what} must not be negative, got {number}")
        require(folder.is_dir() or not folder.exists(), f"{folder} is a file; --out must name a folder")
        spent = setup.BUDGETS[budget]
        spent = spent.with_iterations(iterations or spent.iterations, trial_iterations)
        if not compiled:
            spent = replace(spent, run=(*spent.run, ("compile", False)))
        if spent.trial_iterations <= spent.local_steps:
            _say(
                f"trials of {spent.trial_iterations} iterations are one round, in which FeDXL knows other sites "
                f"only by scores of the untrained network; use more than {spent.local_steps} for two rounds"
            )
        names = data or (["digits"] if budget == "quick" else list(setup.PAPER_TASKS))
        network = setup.assignments(model or [], "--model score_norm=true")
        runner = Runner(RunStore(folder / "runs"), jobs, device, _say)
        study = Study(
            [setup.task(text, str(root)).with_network(network) for text in names],
            spent,
            seeds,
            runner,
            folder,
            _say,
        )
        try:
            text = work(study)
        except KeyboardInterrupt:
            _say("stopped; finished runs are kept, and the same command continues from there")
            sys.exit(130)
        finally:
            runner.stop_workers()
        out.print(Markdown(text)) if out.is_terminal else print(text)
        _say(f"in {folder}: {name}.md, {name}.json, {name}.png; every run in {folder / 'runs'}")

    command.__doc__ = about
    app.command(name)(command)


def _say(line: str) -> None:
    err.print(line, style="dim", highlight=False, soft_wrap=True, markup=False)


_command(
    "table1", "Partial AUC: Centralized, Local SGD, CODASCA, Local Pair and FeDXL2.", lambda s: tables.run(s, TABLE1)
)
_command("table2", "AUC with one in five labels flipped: the same with FeDXL1.", lambda s: tables.run(s, TABLE2))
_command("runtime", "Rounds, seconds and bytes until training is near its best.", runtime.run)
_command("ablation-k", "FeDXL2 with different numbers of local steps.", lambda s: ablation.run(s, ablation.VARY_K))
_command("ablation-n", "FeDXL2 with fewer sites.", lambda s: ablation.run(s, ablation.VARY_N))

"""`fedxl paper ...`: one command for each table and figure of the paper."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

from fedxl.errors import require, unknown
from fedxl.experiments.paper import ablation, heterogeneity, runtime, setup, skew, tables
from fedxl.experiments.paper.runs import Runner, RunStore
from fedxl.experiments.paper.setup import Budget
from fedxl.experiments.paper.study import TABLE1, TABLE2, Comparison, Study
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


def _only(methods: Sequence[setup.TableColumn]) -> object:
    names = ", ".join(map(setup.short_name, methods))
    return typer.Option("--only", metavar="NAME,...", help=f"Some methods only: {names}.")


Only = Annotated[str, _only(skew.METHODS)]
TableOnly = Annotated[str, _only(setup.TABLE1)]
Ours = Annotated[
    list[str] | None,
    typer.Option("--fedxl", metavar="KEY=VALUE", help="An option of FeDXL, as level=even; repeatable."),
]
Alphas = Annotated[str, typer.Option(metavar="ALPHA,...", help="Label skews, less is more; equal: equal shards.")]
OneClass = Annotated[
    str, typer.Option(metavar="N,...", help="Numbers of sites with one class; even, 0: equal shards.")
]
Rates = Annotated[str, typer.Option(metavar="LR,...", help="Learning rates to try; empty: the budget's.")]
Lam = Annotated[float, typer.Option(help="Of the partial AUC, for all methods that have one; it is not tuned.")]
Weights = Annotated[str, typer.Option(help="samples or clients: what sites count by.")]


@dataclass(frozen=True)
class Common:
    """What all commands need besides the data, the budget and their own options."""

    seeds: int
    jobs: int
    device: str
    folder: Path

    def perform(self, name: str, tasks: Sequence[setup.Task], budget: Budget, work: Callable[[Study], str]) -> None:
        """Do the work and print what came of it. After an interruption finished runs are kept."""
        if budget.trial_iterations <= budget.local_steps:
            _say(
                f"trials of {budget.trial_iterations} iterations are one round, in which FeDXL knows other sites "
                f"only by scores of the untrained network; use more than {budget.local_steps} for two rounds"
            )
        runner = Runner(RunStore(self.folder / "runs"), self.jobs, self.device, _say)
        try:
            text = work(Study(tasks, budget, self.seeds, runner, self.folder, _say))
        except KeyboardInterrupt:
            _say("stopped; finished runs are kept, and the same command continues from there")
            sys.exit(130)
        finally:
            runner.stop_workers()
        out.print(Markdown(text)) if out.is_terminal else print(text)
        _say(f"in {self.folder}: {name}.md, {name}.json, {name}.png; every run in {self.folder / 'runs'}")

    def check(self) -> None:
        require_matplotlib()
        require(self.seeds >= 1, f"seeds must be at least 1, got {self.seeds}")
        require(self.jobs >= 1, f"jobs must be at least 1, got {self.jobs}")
        folder = self.folder
        require(folder.is_dir() or not folder.exists(), f"{folder} is a file; --out must name a folder")


def _budget(known: Mapping[str, Budget], name: str, iterations: int, trial_iterations: int, compiled: bool) -> Budget:
    if name not in known:
        raise unknown("budget", name, known)
    for what, number in {"iterations": iterations, "trial-iterations": trial_iterations}.items():
        require(number >= 0, f"{what} must not be negative, got {number}")
    budget = known[name]
    budget = budget.with_iterations(iterations or budget.iterations, trial_iterations)
    return budget if compiled else replace(budget, run=(*budget.run, ("compile", False)))


def _table(comparison: Comparison, about: str) -> None:
    """A table's command has two options more: which methods, and how FeDXL is set."""

    def command(
        only: TableOnly = "",
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
        folder: Folder = Path("paper"),
    ) -> None:
        options = setup.assignments(fedxl or [], "--fedxl level=even")
        methods = setup.chosen(setup.with_options(comparison.methods, options), only)
        common = Common(seeds, jobs, device, folder)
        spent = _budget(setup.BUDGETS, budget, iterations, trial_iterations, compiled)
        shown = "".join(f", FeDXL with {name} = {value}" for name, value in options.items())
        wanted = replace(comparison, title=comparison.title + shown, methods=methods)
        _perform(common, comparison.name, data, root, model, spent, budget, lambda study: tables.run(study, wanted))

    command.__doc__ = about
    app.command(comparison.name)(command)


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
        spent = _budget(setup.BUDGETS, budget, iterations, trial_iterations, compiled)
        _perform(Common(seeds, jobs, device, folder), name, data, root, model, spent, budget, work)

    command.__doc__ = about
    app.command(name)(command)


def _perform(
    common: Common,
    name: str,
    data: list[str] | None,
    root: Path,
    model: list[str] | None,
    spent: Budget,
    budget: str,
    work: Callable[[Study], str],
) -> None:
    common.check()
    names = data or (["digits"] if budget == "quick" else list(setup.PAPER_TASKS))
    network = setup.assignments(model or [], "--model score_norm=true")
    tasks = [setup.task(text, str(root)).with_network(network) for text in names]
    common.perform(name, tasks, spent, work)


@app.command("heterogeneity")
def sites_that_differ(
    alphas: Alphas = "0.1,0.3,1,equal",
    one_class: OneClass = "0,4,8,12",
    only: Only = "",
    rates: Rates = "",
    lam: Lam = 2.0,
    weighting: Weights = "samples",
    data: Data = None,
    root: Root = Path("data"),
    model: Network = None,
    seeds: Seeds = 3,
    budget: Annotated[
        str, typer.Option("--budget", help=f"{', '.join(skew.BUDGETS)}; by default quick for digits, else short.")
    ] = "",
    iterations: Iterations = 0,
    trial_iterations: Trials = 0,
    jobs: Jobs = 1,
    compiled: Compile = True,
    device: Device = "auto",
    folder: Folder = Path("paper"),
) -> None:
    """Partial AUC where sites differ: every method over label skew and over the number of one-class sites."""
    common = Common(seeds, jobs, device, folder)
    names = data or (["cifar10"] if budget in ("short", "full") else ["digits"])
    tasks = [setup.task(text, str(root)) for text in names]
    small = all(task.data["name"] == "digits" for task in tasks)
    spent = _budget(skew.BUDGETS, budget or ("quick" if small else "short"), iterations, trial_iterations, compiled)
    common.check()
    chosen = skew.plan(alphas, one_class, only)
    spent = skew.changed(spent, rates, lam, weighting)
    network = setup.assignments(model or [], "--model norm=batch")
    tasks = [skew.with_network(task, network) for task in tasks]
    common.perform("heterogeneity", tasks, spent, lambda study: heterogeneity.run(study, chosen))


def _say(line: str) -> None:
    err.print(line, style="dim", highlight=False, soft_wrap=True, markup=False)


_table(TABLE1, "Partial AUC: Centralized, Local SGD, CODASCA, Local Pair and FeDXL2.")
_table(TABLE2, "AUC with one in five labels flipped: the same with FeDXL1.")
_command("runtime", "Rounds, seconds and bytes until training is near its best.", runtime.run)
_command("ablation-k", "FeDXL2 with different numbers of local steps.", lambda s: ablation.run(s, ablation.VARY_K))
_command("ablation-n", "FeDXL2 with fewer sites.", lambda s: ablation.run(s, ablation.VARY_N))

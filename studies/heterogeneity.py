"""Sites that differ: every method over label skew and over numbers of one-class sites, tuned alike in each cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

from fedxl.config.experiment import Config, build_algorithm, build_model, build_risk, load_data
from fedxl.data.examples import Examples, facts_about
from fedxl.errors import UserError
from fedxl.options import call
from fedxl.reporting.text import as_markdown, mean_and_spread, mean_with_spread, over_seeds
from fedxl.training.problem import assemble, check_data
from fedxl.training.settings import Settings
from studies import harness, pictures, skew
from studies.harness import Planned, Row, group, machines
from studies.options import OUT, Folder, Jobs, Seeds
from studies.paper import commands, setup, tables
from studies.paper.commands import Compile, Data, Device, Iterations, Network, Root, Trials
from studies.paper.setup import HyperParameters, TableColumn, Task, experiment, title_of
from studies.paper.study import OURS, TUNING_SEED, Comparison, Pair, Study, Tuned, rates
from studies.skew import METHODS, METRIC, Cell, Plan, by_alpha

COMPARISON = Comparison("heterogeneity", "Sites that differ", METHODS, {METRIC: "partial AUC, FPR ≤ 0.3"}, {}, {})
COLLAPSED = 0.55  # a run whose best validation metric is below this has learned next to nothing; chance is 0.5
DIVERGED = "every learning rate that was tried diverged"
JOINT = {method.label for method in METHODS if method.joint}
BASELINES = {method.label for method in METHODS if not str(method.algorithm["name"]).startswith("fedxl")} - JOINT


class Sites(NamedTuple):
    """The sites of a cell."""

    one_class: list[int]  # how many hold one class, for each seed of the results
    unfit: dict[str, str]  # methods that cannot run there, and why


class CellResult(NamedTuple):
    """A line of the table."""

    title: str
    cell: str
    one_class: list[int]
    line: tables.Line  # of the federated methods that ran
    reasons: dict[str, str]  # why others did not
    rates: dict[str, str]  # what tuning chose, and how many trials collapsed
    best: str  # the best federated baseline; empty: there is none
    lead: tables.Lead | None  # of FeDXL over it

    @property
    def verdict(self) -> int:
        """1: FeDXL is above the best baseline beyond the interval; -1: below; 0: neither can be told."""
        if self.lead is None or self.lead.interval is None:
            return 0
        low, high = self.lead.interval
        return int(low > 0) - int(high < 0)


def run(study: Study, plan: Plan) -> str:
    """Tune and train every method in every cell. Returns the text to print."""
    study.check_data()
    cells = [cell.of(base) for base in study.tasks for cell in plan.cells]
    sites = {task.name: survey(study, plan, task) for task in cells}
    equal = [by_alpha(math.inf).of(base) for base in study.tasks]
    pairs = [(task, method) for task in equal for method in plan.joint]
    pairs += [(t, method) for t in cells for method in plan.federated if method.label not in sites[t.name].unfit]
    tuned = study.trials(COMPARISON, pairs, lambda task, method: rates(study.budget, method))
    finals = study.do(plan_runs(study, pairs, tuned, sites))
    gone = [(task, label, reason) for task in cells for label, reason in sites[task.name].unfit.items()]
    gone += [(t, m.label, DIVERGED) for t, m in pairs if not _finite(tuned, t, m)]
    missing = [missing_row(task, label, reason) for task, label, reason in gone]
    rows = study.keep(COMPARISON.name, tuned, [*finals, *missing])
    results = table(rows, study.do.arrays)
    draw(study.folder / "heterogeneity.png", plan, results, rows)
    return markdown(rows, results, describe_budget(study))


def survey(study: Study, plan: Plan, task: Task) -> Sites:
    """Look at the data of all seeds before the first run."""
    counts, unfit = [], dict[str, str]()
    for seed in (TUNING_SEED, *range(study.seeds)):
        data = load_data(_any_run(study, task, METHODS[0], seed)).train
        counts.append(sum(0 in holding[:2] for holding in data.holdings()))
        for method in plan.federated:
            if reason := explain_unfit(_any_run(study, task, method, seed), data):
                unfit.setdefault(method.label, reason)
    title = f"{title_of(task.case)}, {task.case['cell']}"
    study.do.say(f"{title}: {_range(counts)} of {len(data.parts)} sites hold one class")
    return Sites(counts[1:], unfit)


def _any_run(study: Study, task: Task, method: TableColumn, seed: int) -> Config:
    """A run as far as its data and its network are concerned."""
    return experiment(task, method, study.budget, HyperParameters(1.0), seed, study.budget.iterations)


def explain_unfit(config: Config, data: Examples) -> str:
    """Why a method cannot train on these sites; empty if it can."""
    settings = call(Settings, config.run, "run")
    model = build_model(config, data.shape, build_risk(config))
    facts = facts_about(data.holdings(), settings.weighting)
    problem = assemble(model, build_algorithm(config), settings, facts, torch.device("cpu"))
    try:
        check_data(problem, data.holdings())
    except UserError as error:
        return str(error)
    return ""


def plan_runs(study: Study, pairs: Sequence[Pair], tuned: Tuned, sites: dict[str, Sites]) -> list[Planned]:
    """Every method with what its trials chose, one run per seed, unless all of its trials diverged."""
    planned = []
    for task, method in pairs:
        if not _finite(tuned, task, method):
            continue
        choice = harness.best(tuned[task.name, method.label])
        counts = sites[task.name].one_class if task.name in sites else [0] * study.seeds
        planned += [
            study.plan(COMPARISON, task, method, choice, seed, case={"one_class_sites": counts[seed]})
            for seed in range(study.seeds)
        ]
    return planned


def _finite(tuned: Tuned, task: Task, method: TableColumn) -> bool:
    return any(math.isfinite(trial.value) for trial in tuned[task.name, method.label])


def missing_row(task: Task, label: str, reason: str) -> Row:
    """The row of a method that cannot run in a cell."""
    case = {**task.case, "method": label}
    return Row(harness.key_of(case), case, {"unfit": reason})


def table(rows: Sequence[Row], arrays: tables.Arrays = lambda row: {}) -> list[CellResult]:
    """One line per cell. With the scores of all runs they have intervals over test sets."""
    federated = [row for row in rows if row.case["method"] not in JOINT]
    return [_cell_result(own, arrays) for own in group(federated, "data", "network", "cell").values()]


def _cell_result(rows: Sequence[Row], arrays: tables.Arrays) -> CellResult:
    reasons = {row.case["method"]: row.found["unfit"] for row in rows if "unfit" in row.found}
    finals = group([row for row in rows if not row.case.get("trial") and "unfit" not in row.found], "method")
    trials = group([row for row in rows if row.case.get("trial")], "method")
    line = tables.line_of(COMPARISON, finals, METRIC, arrays)
    means = {name: mean_and_spread(values)[0] for name, values in line.ours.items() if name in BASELINES}
    best = max((name for name, mean in means.items() if math.isfinite(mean)), key=means.__getitem__, default="")
    lead = tables.lead(line, best) if best and OURS in line.ours else None
    own = next(iter(finals.values()))
    counts = [row.case["one_class_sites"] for row in own]
    found = {name: _rate(trials[name], finals[name]) for name in finals}
    return CellResult(title_of(rows[0].case), rows[0].case["cell"], counts, line, reasons, found, best, lead)


def has_collapsed(rows: Sequence[Row]) -> bool:
    """Whether runs learned next to nothing, or one of them says so."""
    value = sum(row.validation(METRIC) for row in rows) / len(rows)
    return any(row.diverged or "collapsed" in row.found for row in rows) or not value >= COLLAPSED


def _rate(trials: Sequence[Row], finals: Sequence[Row]) -> str:
    """The chosen learning rate, and how many trials and seeds collapsed."""
    tried, lr = group(trials, "lr"), finals[0].case["lr"]
    edge = "*" if lr in (min(tried), max(tried)) else ""
    seeds = sum(has_collapsed([row]) for row in finals)
    gone = f"; {seeds} of {len(finals)} seeds" if seeds else ""
    return f"{lr:g}{edge} ({sum(map(has_collapsed, tried.values()))} collapsed{gone})"


def markdown(rows: Sequence[Row], results: Sequence[CellResult], how: str = "") -> str:
    labels = [m.label for m in METHODS if any(m.label in found.line.ours for found in results)]
    leads = any(found.lead for found in results)
    against = [f"{OURS} - the best baseline"] if leads else []
    values, chosen = [], []
    for found in results:
        head, ours = [found.title, found.cell], found.line.ours
        shown = [mean_with_spread(ours[name]) if name in ours else "–" for name in labels]
        last = [f"{found.lead}, {found.best}" if found.lead else "–"] if leads else []
        values.append([*head, _range(found.one_class), *shown, *last])
        chosen.append([*head, *(found.rates.get(name, "–") for name in labels)])
    joint = [row for row in rows if row.case["method"] in JOINT and not row.case.get("trial")]
    parts = [
        f"# {COMPARISON.title}\n",
        f"{message(results)}.\n",
        how,
        as_markdown(values, ["data", "sites", "with one class", *labels, *against]),
        *([LEADS] if leads else []),
        *(
            f"All data in one place ({method}), {title_of(own[0].case)}: {harness.cell(own, METRIC)}.\n"
            for (*_, method), own in group(joint, "data", "network", "method").items()
        ),
        *(f"– {name}, {f.title}, {f.cell}: {why}.\n" for f in results for name, why in f.reasons.items()),
        "## Chosen learning rates\n",
        f"And how many trials collapsed: best validation partial AUC below {COLLAPSED:g}, or the run says so; seeds "
        "that did with the chosen rate are counted apart. *: the smallest or the largest that was tried.\n",
        as_markdown(chosen, ["data", "sites", *labels]),
        f"On {machines(rows)}.\n",
    ]
    return "\n".join(filter(None, parts))


LEADS = (
    "The difference is to the federated baseline with the best test mean in that cell, with its 95 % interval over "
    "bootstrapped test sets, the same for both methods. It does not cover the draw of the sites, which the spread "
    "over seeds shows.\n"
)


def describe_budget(study: Study) -> str:
    budget, run = study.budget, dict(study.budget.run)
    others = "another seed" if budget.tuning_seeds == 1 else f"{budget.tuning_seeds} other seeds"
    tried = "one learning rate" if len(budget.rates) == 1 else f"{len(budget.rates)} learning rates"
    return (
        f"Test partial AUC (FPR ≤ 0.3), {over_seeds(study.seeds)} of {budget.iterations:,} iterations, each at its "
        "best round on validation data. A seed draws its own sites. In every cell every method was tuned by "
        f"{tried}, on validation data, in trials of {budget.trial_iterations:,} "
        f"iterations with {others}; lam is {budget.lams[0]:g}, K is {budget.local_steps}, and weighting is "
        f"{run.get('weighting', 'clients')}.\n"
    )


def message(results: Sequence[CellResult]) -> str:
    """What the picture shows, in one line."""
    verdicts = [found.verdict for found in results if found.lead]
    if not verdicts:
        return "Test partial AUC against skew"
    of = f"of {len(verdicts)} " + ("cell" if len(verdicts) == 1 else "cells")
    parts = [
        f"{word} in {verdicts.count(sign)}"
        for sign, word in ((1, "above"), (0, "level"), (-1, "below"))
        if sign in verdicts
    ]
    return f"{OURS} against the best federated baseline: {', '.join(parts)} {of}"


def draw(path: Path, plan: Plan, results: Sequence[CellResult], rows: Sequence[Row]) -> None:
    """Methods against skew, one panel per axis and data set."""
    joint = [row for row in rows if row.case["method"] in JOINT and not row.case.get("trial")]
    panels = []
    for title in dict.fromkeys(found.title for found in results):
        own = {found.cell: found for found in results if found.title == title}
        together = group([row for row in joint if title_of(row.case) == title], "method")
        reference = {
            f"{name}, all data in one place": mean_and_spread([row.test(METRIC) for row in found])[0]
            for name, found in together.items()
        }
        for along, cells in plan.axes.items():
            lines = {m.label: _points(own, list(cells.values()), m.label) for m in plan.federated}
            up = "test partial AUC, FPR ≤ 0.3"
            panels.append(pictures.Panel(title, along, up, lines, list(cells), reference))
    pictures.lines(path, message(results), panels, ours=OURS)


def _points(results: dict[str, CellResult], cells: Sequence[Cell], label: str) -> list[pictures.Point]:
    found = [results[cell.title].line.ours.get(label, [math.nan]) for cell in cells]
    return [pictures.Point(place, *mean_and_spread(values)) for place, values in enumerate(found)]


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


Only = Annotated[str, commands.only_option(METHODS)]
Alphas = Annotated[str, typer.Option(metavar="ALPHA,...", help="Label skews, less is more; equal: equal shards.")]
OneClass = Annotated[
    str, typer.Option(metavar="N,...", help="Numbers of sites with one class; even, 0: equal shards.")
]
Rates = Annotated[str, typer.Option(metavar="LR,...", help="Learning rates to try; empty: the budget's.")]
Lam = Annotated[float, typer.Option(help="Of the partial AUC, for all methods that have one; it is not tuned.")]
Weights = Annotated[str, typer.Option(help="samples or clients: what sites count by.")]
BudgetName = Annotated[
    str, typer.Option("--budget", help=f"{', '.join(skew.BUDGETS)}; by default quick for digits, else short.")
]


def command(
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
    budget: BudgetName = "",
    iterations: Iterations = 0,
    trial_iterations: Trials = 0,
    jobs: Jobs = 1,
    compiled: Compile = True,
    device: Device = "auto",
    folder: Folder = OUT,
) -> None:
    """Sites that differ: all methods over label skew.

    Partial AUC of every method over label skew and over the number of one-class sites, tuned alike in each cell.
    """
    names = data or (["cifar10"] if budget in ("short", "full") else ["digits"])
    network = setup.parse_assignments(model or [], "--model norm=batch")
    tasks = [skew.with_network(setup.find_task(text, str(root)), network) for text in names]
    small = all(task.data["name"] == "digits" for task in tasks)
    name = budget or ("quick" if small else "short")
    spent = commands.change_budget(skew.BUDGETS, name, iterations, trial_iterations, compiled)
    plan = skew.make_plan(alphas, one_class, only)
    spent = skew.change_budget(spent, rates, lam, weighting)
    commands.perform("heterogeneity", tasks, spent, seeds, jobs, device, folder, lambda study: run(study, plan))

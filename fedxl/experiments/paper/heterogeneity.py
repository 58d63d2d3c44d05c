"""Sites that differ: every method over label skew and over numbers of one-class sites, tuned alike in each cell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from fedxl import metrics
from fedxl.config.experiment import Config, build_algorithm, build_model, build_risk, load_data
from fedxl.data.federation import Federation
from fedxl.errors import UserError
from fedxl.experiments.paper import pictures, tables
from fedxl.experiments.paper.runs import PlannedRun
from fedxl.experiments.paper.setup import Budget, HyperParameters, TableColumn, Task, experiment
from fedxl.experiments.paper.skew import METHODS, METRIC, Cell, Plan, by_alpha
from fedxl.experiments.paper.study import OURS, Comparison, Study, machines, outline
from fedxl.experiments.paper.tables import Entry, Lead, Row
from fedxl.experiments.paper.tuning import SEED, Trial, TuningResult, TuningSearch, choose, describe
from fedxl.options import call
from fedxl.reporting.text import as_markdown, mean_and_spread, mean_with_spread, over_seeds
from fedxl.training.problem import assemble, check_data
from fedxl.training.settings import Settings

COMPARISON = Comparison("heterogeneity", "Sites that differ", METHODS, {METRIC: "partial AUC, FPR ≤ 0.3"}, {}, {})
COLLAPSED = 0.55  # a trial whose best validation metric is below this has learned next to nothing; chance is 0.5


class Outcome(NamedTuple):
    """What a method came to in a cell: tuning and runs, or why there are none."""

    entry: Entry | None
    reason: str = ""

    @property
    def collapsed(self) -> int:
        """How many of its trials learned next to nothing."""
        return sum(collapsed(trial) for trial in self.entry.tuned.trials) if self.entry else 0

    @property
    def collapsed_seeds(self) -> int:
        """How many of its runs did, with the rate that tuning chose."""
        records = self.entry.records if self.entry else []
        return sum(_came_to_nothing(record.collapsed, record.validation(METRIC)) for record in records)


def collapsed(trial: Trial) -> bool:
    return _came_to_nothing(trial.collapsed, trial.value)


def _came_to_nothing(says_so: bool, validation: float) -> bool:
    return says_so or not validation >= COLLAPSED


class CellResult(NamedTuple):
    """A row of the table."""

    base: Task
    cell: Cell
    one_class_sites: list[int]  # one number per seed
    outcomes: dict[str, Outcome]  # by method
    row: Row
    best: str  # the best federated baseline; empty: there is none
    lead: Lead | None  # of FeDXL over it

    @property
    def verdict(self) -> int:
        """1: FeDXL is above the best baseline beyond the interval; -1: below; 0: neither can be told."""
        if self.lead is None or self.lead.interval is None:
            return 0
        low, high = self.lead.interval
        return int(low > 0) - int(high < 0)


class Results(NamedTuple):
    cells: list[CellResult]
    reference: dict[tuple[str, str], Outcome]  # methods with all data in one place, by base task and method


def run(study: Study, chosen: Plan) -> str:
    """Tune and train every method in every cell. Returns the text to print."""
    study.check_data()
    sites = {
        (base.name, cell): _survey(study, chosen, cell.of(base)) for base in study.tasks for cell in chosen.cells
    }
    equal = by_alpha(math.inf)
    pairs = [(equal.of(base), method) for base in study.tasks for method in chosen.joint]
    for base in study.tasks:
        for cell in chosen.cells:
            unfit = sites[base.name, cell].unfit
            pairs += [(cell.of(base), method) for method in chosen.federated if method.label not in unfit]
    outcomes = _outcomes(study, pairs)
    cells = [
        _result(study, chosen, base, cell, sites[base.name, cell], outcomes)
        for base in study.tasks
        for cell in chosen.cells
    ]
    reference = {
        (base.name, method.label): outcomes[equal.of(base).name, method.label]
        for base in study.tasks
        for method in chosen.joint
    }
    results = Results(cells, reference)
    text = markdown(study, chosen, results)
    study.write("heterogeneity", text, content(study, results))
    picture(study, chosen, results)
    return text


class Sites(NamedTuple):
    """The sites of a cell."""

    one_class: list[int]  # how many hold one class, for each seed of the results
    unfit: dict[str, str]  # methods that cannot run there, and why


def _survey(study: Study, chosen: Plan, task: Task) -> Sites:
    """Look at the data of all seeds before the first run."""
    counts, unfit = [], dict[str, str]()
    for seed in (SEED, *range(study.seeds)):
        federation = load_data(_any_run(study, task, METHODS[0], seed)).train
        counts.append(sum(0 in holding[:2] for holding in federation.holdings()))
        for method in chosen.federated:
            if reason := _unfit(_any_run(study, task, method, seed), federation):
                unfit.setdefault(method.label, reason)
    study.say(f"{task.title}: {_range(counts)} of {len(federation.parts)} sites hold one class")
    return Sites(counts[1:], unfit)


def _any_run(study: Study, task: Task, method: TableColumn, seed: int) -> Config:
    """A run as far as its data and its network are concerned."""
    return experiment(task, method, study.budget, HyperParameters(1.0), seed, study.budget.iterations)


def _unfit(config: Config, federation: Federation) -> str:
    """Why a method cannot train on these sites; empty: it can."""
    settings = call(Settings, config.run, "run")
    model = build_model(config, federation.example_shape, build_risk(config))
    facts = federation.facts(settings.weighting)
    problem = assemble(model, build_algorithm(config), settings, facts, torch.device("cpu"))
    try:
        check_data(problem, federation.holdings())
    except UserError as error:
        return str(error)
    return ""


def _outcomes(study: Study, pairs: Sequence[tuple[Task, TableColumn]]) -> dict[tuple[str, str], Outcome]:
    """Tune each pair, then run it with every seed. All trials are planned together, and then all runs."""
    search = TuningSearch(study.budget, study.runner, METRIC, {})
    rates = {(task.name, method.label): search.rates(method) for task, method in pairs}
    trials = search.trials(pairs, rates)
    jobs: dict[tuple[str, str], list[PlannedRun]] = {}
    tuned: dict[tuple[str, str], TuningResult] = {}
    for task, method in pairs:
        name = task.name, method.label
        if any(math.isfinite(trial.value) for trial in trials[name]):
            tuned[name] = TuningResult(choose(trials[name]), trials[name])
            study.say(f"chosen for {task.title}, {method.label}: {describe(tuned[name].choice)}")
            jobs[name] = study.jobs(COMPARISON, task, method, tuned[name].choice)
    records = study.perform(jobs)
    diverged = Outcome(None, "every learning rate that was tried diverged")
    return {name: Outcome(Entry(tuned[name], records[name])) if name in jobs else diverged for name in rates}


def _result(
    study: Study, chosen: Plan, base: Task, cell: Cell, sites: Sites, done: Mapping[tuple[str, str], Outcome]
) -> CellResult:
    task = cell.of(base)
    outcomes = {
        method.label: Outcome(None, sites.unfit[method.label])
        if method.label in sites.unfit
        else done[task.name, method.label]
        for method in chosen.federated
    }
    entries = {(task.name, label): found.entry for label, found in outcomes.items() if found.entry}
    ran = [method for method in chosen.federated if (task.name, method.label) in entries]
    row = tables.row(study.runner.store, replace(COMPARISON, methods=ran), entries, task, METRIC)
    baselines = [m.label for m in ran if not str(m.algorithm["name"]).startswith("fedxl")]
    means = {label: mean_and_spread(row.ours[label])[0] for label in baselines}
    best = max((label for label in baselines if np.isfinite(means[label])), key=means.__getitem__, default="")
    lead = tables.lead(row, best) if best and OURS in row.ours else None
    return CellResult(base, cell, sites.one_class, outcomes, row, best, lead)


def markdown(study: Study, chosen: Plan, results: Results) -> str:
    labels, budget = [method.label for method in chosen.federated], study.budget
    leads = any(found.lead for found in results.cells)
    rows, rates = [], []
    for found in results.cells:
        head = [found.base.title, found.cell.title, _range(found.one_class_sites)]
        values = [mean_with_spread(found.row.ours[name]) if name in found.row.ours else "–" for name in labels]
        rows.append([*head, *values, *([_lead(found)] if leads else [])])
        rates.append([*head[:2], *(_rate(budget, found.outcomes[name]) for name in labels)])
    parts = [
        f"# {COMPARISON.title}\n",
        f"{message(results)}.\n",
        _how(study),
        as_markdown(
            rows, ["data", "sites", "with one class", *labels, *([f"{OURS} - the best baseline"] if leads else [])]
        ),
    ]
    if leads:
        parts.append(
            "The difference is to the federated baseline with the best test mean in that cell, with its 95 % "
            "interval over bootstrapped test sets, the same for both methods. It does not cover the draw of the "
            "sites, which the spread over seeds shows.\n"
        )
    parts += [
        f"All data in one place ({name}), {study.titles[task]}: {_shown(outcome)}.\n"
        for (task, name), outcome in results.reference.items()
    ]
    parts += [
        f"– {name}, {found.base.title}, {found.cell.title}: {outcome.reason}.\n"
        for found in results.cells
        for name, outcome in found.outcomes.items()
        if outcome.reason
    ]
    parts += [
        "## Chosen learning rates\n",
        f"And how many of {len(budget.rates)} collapsed: best validation partial AUC below {COLLAPSED:g}, or the run "
        "says so; seeds that did with the chosen rate are counted apart. *: the smallest or the largest "
        "that was tried.\n",
        as_markdown(rates, ["data", "sites", *labels]),
        f"On {'; '.join(machines([record for entry in _entries(results) for record in entry.records]))}.\n",
    ]
    return "\n".join(parts)


def _how(study: Study) -> str:
    budget, run = study.budget, dict(study.budget.run)
    others = "another seed" if budget.tuning_seeds == 1 else f"{budget.tuning_seeds} other seeds"
    rates = "one learning rate" if len(budget.rates) == 1 else f"{len(budget.rates)} learning rates"
    return (
        f"Test partial AUC (FPR ≤ 0.3), {over_seeds(study.seeds)} of {budget.iterations:,} iterations, each at its "
        "best round on validation data. A seed draws its own sites. In every cell every method was tuned by "
        f"{rates}, on validation data, in trials of {budget.trial_iterations:,} "
        f"iterations with {others}; lam is {budget.lams[0]:g}, K is {budget.local_steps}, and weighting is "
        f"{run.get('weighting', 'clients')}.\n"
    )


def message(results: Results) -> str:
    """What the picture shows, in one line."""
    verdicts = [found.verdict for found in results.cells if found.lead]
    if not verdicts:
        return "Test partial AUC against skew"
    of = f"of {len(verdicts)} " + ("cell" if len(verdicts) == 1 else "cells")
    parts = [
        f"{word} in {verdicts.count(sign)}"
        for sign, word in ((1, "above"), (0, "level"), (-1, "below"))
        if sign in verdicts
    ]
    return f"{OURS} against the best federated baseline: {', '.join(parts)} {of}"


def picture(study: Study, chosen: Plan, results: Results) -> None:
    by_cell = {(found.base.name, found.cell): found for found in results.cells}
    panels = []
    for base in study.tasks:
        reference = {
            name: mean_and_spread([record.test(METRIC) for record in outcome.entry.records])[0]
            for (task, name), outcome in results.reference.items()
            if task == base.name and outcome.entry
        }
        axes = {"Dirichlet alpha: more skew to the right": chosen.alphas, "sites with one class": chosen.one_class}
        for along, cells in axes.items():
            found = [by_cell[base.name, cell] for cell in cells.values()]
            series = {
                method.label: [mean_and_spread(f.row.ours.get(method.label, [float("nan")])) for f in found]
                for method in chosen.federated
            }
            if cells:
                panels.append(pictures.Panel(base.title, along, list(cells), series, reference))
    pictures.against_skew(
        study.folder / "heterogeneity.png", message(results), "test partial AUC, FPR ≤ 0.3", panels, OURS
    )


def content(study: Study, results: Results) -> dict[str, Any]:
    """The table and all runs behind it, as JSON. The whole history of a run is in its own file."""
    return {
        "table": "heterogeneity",
        **study.how(),
        "metric": METRIC,
        "rows": [
            {
                "data": found.base.name,
                "cell": found.cell.title,
                "settings": dict(found.cell.settings),
                "one_class_sites": found.one_class_sites,
                "ours": found.row.ours,
                "intervals": {name: metrics.interval(values) for name, values in found.row.drawn.items()},
                "unfit": {name: outcome.reason for name, outcome in found.outcomes.items() if outcome.reason},
                "best_baseline": found.best,
                "lead": found.lead and found.lead._asdict(),
                "methods": {name: _content(out.entry) for name, out in found.outcomes.items() if out.entry},
            }
            for found in results.cells
        ],
        "reference": [
            {
                "data": task,
                "method": name,
                **(_content(outcome.entry) if outcome.entry else {"reason": outcome.reason}),
            }
            for (task, name), outcome in results.reference.items()
        ],
    }


def _content(entry: Entry) -> dict[str, Any]:
    trials = [
        {**vars(trial.choice), "value": trial.value, "collapsed": collapsed(trial)} for trial in entry.tuned.trials
    ]
    return {
        "chosen": vars(entry.tuned.choice),
        "trials": trials,
        "runs": [outline(record) for record in entry.records],
    }


def _entries(results: Results) -> list[Entry]:
    outcomes = [outcome for found in results.cells for outcome in found.outcomes.values()]
    return [outcome.entry for outcome in [*outcomes, *results.reference.values()] if outcome.entry]


def _shown(outcome: Outcome) -> str:
    return mean_with_spread([r.test(METRIC) for r in outcome.entry.records]) if outcome.entry else outcome.reason


def _lead(found: CellResult) -> str:
    return f"{found.lead}, {found.best}" if found.lead else "–"


def _rate(budget: Budget, outcome: Outcome) -> str:
    if not outcome.entry:
        return "–"
    lr = outcome.entry.tuned.choice.lr
    edge = "*" if lr in (min(budget.rates), max(budget.rates)) else ""
    seeds = f"; {outcome.collapsed_seeds} of {len(outcome.entry.records)} seeds" if outcome.collapsed_seeds else ""
    return f"{lr:g}{edge} ({outcome.collapsed} collapsed{seeds})"


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"

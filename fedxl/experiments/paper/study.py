"""What all commands share: the data sets, the budget, the runner and the folder of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedxl.config.experiment import Table, build_model, build_risk, load_data
from fedxl.experiments.paper import published, setup
from fedxl.experiments.paper.published import PublishedTable
from fedxl.experiments.paper.runs import PlannedRun, Runner, RunRecord, without_root
from fedxl.experiments.paper.setup import Budget, HyperParameters, TableColumn, Task, experiment
from fedxl.experiments.paper.tuning import TuningResult, TuningSearch, describe
from fedxl.files import write_atomically, write_json
from fedxl.metrics import key

K = TypeVar("K")
OURS = "FeDXL"


@dataclass(frozen=True)
class Comparison:
    """A table of the paper: methods, metrics and changes to the data."""

    name: str
    title: str
    methods: Sequence[TableColumn]
    metrics: Mapping[str, str]  # by name, and how to say them; models are chosen by the first
    data: Table
    published: PublishedTable


TABLE1 = Comparison(
    "table1",
    "Partial AUC",
    setup.TABLE1,
    {"pauc@0.3": "partial AUC, FPR ≤ 0.3", "pauc@0.5": "partial AUC, FPR ≤ 0.5"},
    {},
    published.TABLE1,
)
TABLE2 = Comparison(
    "table2",
    "AUC, one in five labels flipped",
    setup.TABLE2,
    {"auroc": "AUC"},
    {"flipped": 0.2},
    published.TABLE2,
)


@dataclass(frozen=True)
class Study:
    tasks: Sequence[Task]
    budget: Budget
    seeds: int
    runner: Runner
    folder: Path
    say: Callable[[str], None]

    def check_data(self) -> None:
        """Find missing or wrong data before the first run, not after hours."""
        for task in self.tasks:
            config = experiment(task, setup.TABLE1[0], self.budget, HyperParameters(1.0), 0, 1)
            splits = load_data(config)
            build_model(config, splits.train.example_shape, build_risk(config))
            parts = [len(splits.train.source.labels), *(len(s.y) for s in (splits.validation, splits.test) if s)]
            train, validation, test = (f"{n:,}" for n in parts)
            self.say(f"{task.title}: {train} training images, {validation} for validation, {test} for test")

    def tune(
        self, comparison: Comparison, methods: Sequence[TableColumn] | None = None
    ) -> dict[tuple[str, str], TuningResult]:
        search = TuningSearch(self.budget, self.runner, next(iter(comparison.metrics)), comparison.data)
        tuned = search(self.tasks, methods or comparison.methods)
        for (task, method), found in tuned.items():
            self.say(f"chosen for {task}, {method}: {describe(found.choice)}")
        return tuned

    def jobs(
        self,
        comparison: Comparison,
        task: Task,
        method: TableColumn,
        choice: HyperParameters,
        data: Table | None = None,
        **run: Any,
    ) -> list[PlannedRun]:
        """The runs of a method, one per seed."""
        run = {"select": next(iter(comparison.metrics)), **run}
        return [
            PlannedRun(
                f"{task.title}, {method.label}, {describe(choice)}, seed {seed}",
                experiment(
                    task, method, self.budget, choice, seed, self.budget.iterations,
                    {**comparison.data, **(data or {})}, **run,
                ),
            )
            for seed in range(self.seeds)
        ]  # fmt: skip

    def perform(
        self, groups: Mapping[K, Sequence[PlannedRun]], at_once: int | None = None
    ) -> dict[K, list[RunRecord]]:
        """Do all runs of all groups together. Returns the run records of each group."""
        records = iter(self.runner([job for group in groups.values() for job in group], at_once))
        return {name: [next(records) for _ in group] for name, group in groups.items()}

    @property
    def titles(self) -> dict[str, str]:
        return {task.name: task.title for task in self.tasks}

    def write(self, name: str, markdown: str, content: Mapping[str, Any]) -> None:
        """NAME.md and NAME.json; a metric that is not defined is null."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / f"{name}.md", markdown.encode())
        write_json(self.folder / f"{name}.json", content)

    def how(self) -> dict[str, Any]:
        """What the results were made with."""
        budget = {name: value for name, value in vars(self.budget).items() if value is not None}
        return {"budget": budget, "seeds": self.seeds, "subjects": self.titles}


def machines(records: Sequence[RunRecord]) -> list[str]:
    """The machines on which the runs were done."""
    found = [", ".join(f"{key} {value}" for key, value in record.content["machine"].items()) for record in records]
    return sorted(set(found))


def outline(record: RunRecord) -> dict[str, Any]:
    """A run, and of its history the metric by which its best round was chosen: [round, value]."""
    metric = key(record.content["experiment"]["run"].get("select", ""))
    curve = [
        [found["round"], round(found["validation"][metric], 5)]
        for found in record.content.get("history", [])
        if metric in found.get("validation", {})
    ]
    content = {name: value for name, value in record.content.items() if name != "history"}
    return {"key": record.key, **content, "experiment": without_root(content["experiment"]), "curve": curve}


def column_named(comparison: Comparison, label: str) -> TableColumn:
    return next(method for method in comparison.methods if method.label == label)

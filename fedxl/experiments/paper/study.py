"""What the commands share: which data sets, how much to spend, who runs it, and where it goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedxl.config.experiment import Table, build_model, build_risk, load_data
from fedxl.experiments.paper import published, setup
from fedxl.experiments.paper.published import Rows
from fedxl.experiments.paper.runs import Job, Record, Runner, without_root
from fedxl.experiments.paper.setup import Budget, Choice, Method, Subject, experiment
from fedxl.experiments.paper.tuning import Search, Tuned, describe
from fedxl.files import write_atomically, write_json
from fedxl.metrics import key

K = TypeVar("K")
OURS = "FeDXL"


@dataclass(frozen=True)
class Contest:
    """A table of the paper: who takes part, what counts, and what is done to the data."""

    name: str
    title: str
    methods: Sequence[Method]
    metrics: Mapping[str, str]  # by name, and how to say them; models are chosen by the first
    data: Table
    published: Rows


TABLE1 = Contest(
    "table1",
    "Partial AUC",
    setup.TABLE1,
    {"pauc@0.3": "partial AUC, FPR ≤ 0.3", "pauc@0.5": "partial AUC, FPR ≤ 0.5"},
    {},
    published.TABLE1,
)
TABLE2 = Contest(
    "table2",
    "AUC, one in five labels flipped",
    setup.TABLE2,
    {"auroc": "AUC"},
    {"flipped": 0.2},
    published.TABLE2,
)


@dataclass(frozen=True)
class Study:
    subjects: Sequence[Subject]
    budget: Budget
    seeds: int
    runner: Runner
    folder: Path
    say: Callable[[str], None]

    def check_data(self) -> None:
        """Everything that is missing or wrong is found before the first run, not after a night."""
        for subject in self.subjects:
            config = experiment(subject, setup.TABLE1[0], self.budget, Choice(1.0), 0, 1)
            splits = load_data(config)
            build_model(config, splits.train.example_shape, build_risk(config))
            parts = [len(splits.train.source.labels), *(len(s.y) for s in (splits.validation, splits.test) if s)]
            train, validation, test = (f"{n:,}" for n in parts)
            self.say(f"{subject.title}: {train} images to train on, {validation} to validate, {test} to test")

    def tune(self, contest: Contest, methods: Sequence[Method] | None = None) -> dict[tuple[str, str], Tuned]:
        search = Search(self.budget, self.runner, next(iter(contest.metrics)), contest.data)
        tuned = search(self.subjects, methods or contest.methods)
        for (subject, method), found in tuned.items():
            self.say(f"chosen for {subject}, {method}: {describe(found.choice)}")
        return tuned

    def jobs(
        self,
        contest: Contest,
        subject: Subject,
        method: Method,
        choice: Choice,
        data: Table | None = None,
        **run: Any,
    ) -> list[Job]:
        """A method's runs, one a seed."""
        run = {"select": next(iter(contest.metrics)), **run}
        return [
            Job(
                f"{subject.title}, {method.label}, {describe(choice)}, seed {seed}",
                experiment(
                    subject, method, self.budget, choice, seed, self.budget.iterations,
                    {**contest.data, **(data or {})}, **run,
                ),
            )
            for seed in range(self.seeds)
        ]  # fmt: skip

    def perform(self, groups: Mapping[K, Sequence[Job]], at_once: int | None = None) -> dict[K, list[Record]]:
        """All jobs of all groups together; their records, group by group."""
        records = iter(self.runner([job for group in groups.values() for job in group], at_once))
        return {name: [next(records) for _ in group] for name, group in groups.items()}

    @property
    def titles(self) -> dict[str, str]:
        return {subject.name: subject.title for subject in self.subjects}

    def write(self, name: str, markdown: str, content: Mapping[str, Any]) -> None:
        """NAME.md and NAME.json; a metric that is not defined is null."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / f"{name}.md", markdown.encode())
        write_json(self.folder / f"{name}.json", content)

    def how(self) -> dict[str, Any]:
        """What the results were made with, for the record."""
        budget = {name: value for name, value in vars(self.budget).items() if value is not None}
        return {"budget": budget, "seeds": self.seeds, "subjects": self.titles}


def machines(records: Sequence[Record]) -> list[str]:
    """What the runs were done on."""
    found = [", ".join(f"{key} {value}" for key, value in record.content["machine"].items()) for record in records]
    return sorted(set(found))


def outline(record: Record) -> dict[str, Any]:
    """A run, and of its history the metric by which its best round was chosen: [round, value]."""
    metric = key(record.content["experiment"]["run"].get("select", ""))
    curve = [
        [found["round"], round(found["validation"][metric], 5)]
        for found in record.content.get("history", [])
        if metric in found.get("validation", {})
    ]
    content = {name: value for name, value in record.content.items() if name != "history"}
    return {"key": record.key, **content, "experiment": without_root(content["experiment"]), "curve": curve}


def method_named(contest: Contest, label: str) -> Method:
    return next(method for method in contest.methods if method.label == label)

"""The paper's data sets, networks, methods and budgets, and our choices where the paper does not say."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedxl.config.experiment import Config, Table, parse_assignment
from fedxl.errors import unknown

FPRS = (0.3, 0.5)


@dataclass(frozen=True)
class Task:
    """A data set and its network: a section of a table."""

    name: str  # what it is called on the command line and in the paper's tables
    title: str
    data: Table
    model: Table
    network: Table = field(default_factory=dict)  # options of the network, whichever is used

    @property
    def case(self) -> Table:
        """What the rows of its runs say of it."""
        name, _, cell = self.name.partition(", ")
        options = ", ".join(f"{name} = {value}" for name, value in self.network.items())
        parts = {"data": name, "network": options, "cell": cell}
        return {part: text for part, text in parts.items() if text}


def title_of(case: Mapping[str, Any]) -> str:
    """What tables call a data set and its network.

    >>> title_of({"data": "digits:clients=4", "network": "norm = group"})
    'digits (clients=4), norm = group'
    """
    name, _, options = str(case["data"]).partition(":")
    title = TASKS[name].title + (f" ({options.replace(',', ', ')})" if options else "")
    return ", ".join(filter(None, (title, case.get("network"))))


# Crops and flips are our choice: the paper does not mention augmentation besides the noise. Its authors' script for
# ChestMNIST moves images by up to two pixels and flips them.
PHOTOS = {"crop": 4, "flip": True}
RADIOGRAPHS = {"crop": 2, "flip": True, "site_noise": 0.04}
TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task("cifar10", "CIFAR-10", {"name": "cifar10", **PHOTOS}, {"name": "resnet18", "stem": "7x7"}),
        Task("cifar100", "CIFAR-100", {"name": "cifar100", **PHOTOS}, {"name": "resnet18", "stem": "7x7"}),
        Task("chexpert", "CheXpert", {"name": "chexpert", **RADIOGRAPHS}, {"name": "densenet121"}),
        Task(
            "chestmnist",
            "ChestMNIST",
            {"name": "medmnist", "set": "chestmnist", "label": "mass", **RADIOGRAPHS},
            {"name": "densenet121"},
        ),
        Task("digits", "digits", {"name": "digits"}, {"name": "mlp", "hidden": [64]}),
    )
}
PAPER_TASKS = ("cifar10", "cifar100", "chexpert", "chestmnist")  # the data sets of the paper's tables


def find_task(text: str, root: str, network: Table | None = None) -> Task:
    """A data set by name, with options after a colon: `chestmnist:set=chestmnist_64,label=infiltration`."""
    name, _, options = text.partition(":")
    if name not in TASKS:
        raise unknown("data set", name, TASKS)
    known = TASKS[name]
    changes: Table = {} if name == "digits" else {"root": root}
    changes |= parse_assignments(filter(None, options.split(",")), "chestmnist:label=infiltration")
    return replace(known, name=text, data={**known.data, **changes}, network=network or {})


def parse_assignments(texts: Iterable[str], example: str) -> Table:
    """Several `key=value` as a table."""
    return dict(parse_assignment(text, f"key=value, as in {example}") for text in texts)


@dataclass(frozen=True)
class TableColumn:
    """A column of a table: an algorithm, its risk, and whether the risk's lam is tuned."""

    label: str
    algorithm: Table
    risk: Table
    tunes_lam: bool = False
    joint: bool = False  # all data in one place; a step reads as many images as all clients together


# The paper sets beta; gamma is our choice.
AVERAGES = {"gamma": 0.1, "beta": 0.1}
PLAIN: Table = {"level": "free"}  # FeDXL as in the paper, and Local Pair
PAUC, PSM = {"name": "pauc"}, {"name": "auroc", "surrogate": "psm"}
TABLE1 = (
    TableColumn("Centralized", {"name": "sox", **AVERAGES}, PAUC, tunes_lam=True, joint=True),
    TableColumn("Local SGD", {"name": "local_sgd"}, PAUC),
    TableColumn("CODASCA", {"name": "codasca"}, PAUC),
    TableColumn("Local Pair", {"name": "local_pair", **PLAIN, **AVERAGES}, PAUC, tunes_lam=True),
    TableColumn("FeDXL", {"name": "fedxl2", **PLAIN, **AVERAGES}, PAUC, tunes_lam=True),
)
TABLE2 = (
    TableColumn("Centralized", {"name": "sgd"}, PSM, joint=True),
    TableColumn("Local SGD", {"name": "local_sgd"}, PSM),
    TableColumn("CODASCA", {"name": "codasca"}, PSM),
    TableColumn("Local Pair", {"name": "local_pair", **PLAIN, "beta": 1.0}, PSM),
    TableColumn("FeDXL", {"name": "fedxl1", **PLAIN}, PSM),
)


def short_name(method: TableColumn) -> str:
    """How a method is called on the command line: local-pair for Local Pair."""
    return "-".join(method.label.lower().replace(",", "").split())


def select_methods(methods: Sequence[TableColumn], only: str) -> list[TableColumn]:
    """The methods that a list of short names asks for, in their own order; all of them if it is empty."""
    known = {short_name(method): method for method in methods}
    for name in split_list(only):
        if name not in known:
            raise unknown("method", name, known)
    return [method for name, method in known.items() if name in split_list(only) or not only]


def with_options(methods: Sequence[TableColumn], options: Table) -> list[TableColumn]:
    """The methods, with FeDXL's options changed."""
    return [
        replace(method, algorithm={**method.algorithm, **options})
        if str(method.algorithm["name"]).startswith("fedxl")
        else method
        for method in methods
    ]


def split_list(text: str) -> list[str]:
    """The parts of a text between commas, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


@dataclass(frozen=True)
class Budget:
    """How long to train and tune. All methods get the same budget."""

    iterations: int  # local steps of a run
    trial_iterations: int  # local steps of a tuning run
    rates: tuple[float, ...]  # learning rates, tried first, with the first lam
    # The others are tried with the best learning rate. Methods without lam try as many more learning rates.
    lams: tuple[float, ...]
    local_steps: int = 32
    batch: int = 32  # of S1 and of S2
    evaluations: int = 20  # in a run
    tuning_seeds: int = 1  # of each trial; its value is their mean
    network: Table | None = None  # instead of the task's own
    falls: tuple[float, ...] = (0.5, 0.75)  # after these shares of a run the learning rate falls to a tenth
    run: tuple[tuple[str, Any], ...] = ()  # other settings of a run

    def milestones(self, iterations: int) -> list[int]:
        return [max(1, round(share * iterations)) for share in self.falls]

    def with_iterations(self, iterations: int, trial_iterations: int = 0) -> Budget:
        """The budget for longer or shorter runs. Trials keep their share of a run, unless their length is given."""
        share = self.trial_iterations / self.iterations
        trial_iterations = trial_iterations or max(1, round(share * iterations))
        return replace(self, iterations=iterations, trial_iterations=trial_iterations)


BUDGETS: Mapping[str, Budget] = {
    # Minutes on a CPU: a small network and few steps. Shows that all works; its numbers mean little.
    "quick": Budget(
        iterations=160, trial_iterations=80, rates=(0.03, 0.1, 0.3, 1.0), lams=(2.0, 1.0),
        local_steps=8, batch=8, evaluations=4, network={"name": "cnn"},
    ),
    # About twenty minutes on one GPU: 220 rounds of 32 steps, more than the paper needs to converge. Trials are half
    # a run: shorter ones choose learning rates that are good early (docs/reproduction.md).
    "short": Budget(
        iterations=7040, trial_iterations=3520, falls=(0.7, 0.9), rates=(0.03, 0.1, 0.2, 0.5, 1.0),
        lams=(2.0, 1.0, 4.0),
        run=(("precision", "bf16"),),
    ),
    # The paper's: the learning rate falls every 5,000 of 20,000 iterations. A trial is only a quarter of a run, but
    # as long as the whole runs that showed shorter trials to be too short.
    "full": Budget(
        iterations=20_000, trial_iterations=5000, rates=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
        lams=(2.0, 1.0, 3.0, 4.0, 5.0), evaluations=40,
        falls=(0.25, 0.5, 0.75), run=(("precision", "bf16"),),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class HyperParameters:
    """What tuning chooses."""

    lr: float
    lam: float | None = None

    @property
    def case(self) -> Table:
        """What the row of a run says of it."""
        return {"lr": self.lr, **({} if self.lam is None else {"lam": self.lam})}

    def __str__(self) -> str:
        return f"lr {self.lr:g}" + ("" if self.lam is None else f", lam {self.lam:g}")


def experiment(
    task: Task,
    method: TableColumn,
    budget: Budget,
    choice: HyperParameters,
    seed: int,
    iterations: int,
    data: Table | None = None,
    **run: Any,
) -> Config:
    """The config of one run."""
    steps = int(run.get("local_steps", budget.local_steps))
    rounds = max(1, math.ceil(iterations / steps))
    batch = budget.batch * (int(task.data.get("clients", 16)) if method.joint else 1)
    network = budget.network if budget.network and task.data["name"] != "digits" else task.model
    algorithm: Table = {**method.algorithm, "lr": choice.lr, "milestones": budget.milestones(iterations)}
    if method.algorithm["name"] == "codasca":
        # Its reference moves every quarter of a run, and its learning rate falls when the others' do.
        algorithm |= {"stage_steps": max(1, iterations // 4), "stage_decay": 1.0}
    return Config(
        data={**task.data, **(data or {}), "seed": seed},
        model={**network, **task.network},
        risk={**method.risk, **({} if choice.lam is None else {"lam": choice.lam})},
        algorithm=algorithm,
        run={
            "rounds": rounds,
            "local_steps": steps,
            "batch1": batch,
            "batch2": batch,
            "eval_every": max(1, rounds // budget.evaluations),
            "seed": seed,
            "fpr": list(FPRS),
            **dict(budget.run),
            **run,
        },
    )

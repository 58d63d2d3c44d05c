"""What the paper trains on, with what, and for how long; and what we chose where it does not say."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedxl.config.experiment import Config, Table, parse_assignment
from fedxl.errors import unknown

FPRS = (0.3, 0.5)


@dataclass(frozen=True)
class Subject:
    """A data set and its network, as a section of a table."""

    name: str  # what it is called on the command line and in the paper's tables
    title: str
    data: Table
    model: Table
    network: Table = field(default_factory=dict)  # options of the network, whichever is used

    def with_network(self, options: Table) -> Subject:
        """With other options of its network, of which the title tells."""
        told = "".join(f", {name} = {value}" for name, value in options.items())
        return replace(self, title=self.title + told, network=options)


# Crops and flips are ours: the paper does not say what it does to images besides the noise. Its authors' script, made
# for ChestMNIST, moves images by up to two pixels and flips them, too.
PHOTOS = {"crop": 4, "flip": True}
RADIOGRAPHS = {"crop": 2, "flip": True, "site_noise": 0.04}
SUBJECTS: Mapping[str, Subject] = {
    subject.name: subject
    for subject in (
        Subject("cifar10", "CIFAR-10", {"name": "cifar10", **PHOTOS}, {"name": "resnet18", "stem": "7x7"}),
        Subject("cifar100", "CIFAR-100", {"name": "cifar100", **PHOTOS}, {"name": "resnet18", "stem": "7x7"}),
        Subject("chexpert", "CheXpert", {"name": "chexpert", **RADIOGRAPHS}, {"name": "densenet121"}),
        Subject(
            "chestmnist",
            "ChestMNIST",
            {"name": "medmnist", "set": "chestmnist", "label": "mass", **RADIOGRAPHS},
            {"name": "densenet121"},
        ),
        Subject("digits", "digits", {"name": "digits"}, {"name": "mlp", "hidden": [64]}),
    )
}
PAPERS = ("cifar10", "cifar100", "chexpert", "chestmnist")  # those of the paper's tables


def subject(text: str, root: str) -> Subject:
    """A data set by name, perhaps with other options: `chestmnist:set=chestmnist_64,label=infiltration`."""
    name, _, options = text.partition(":")
    if name not in SUBJECTS:
        raise unknown("data set", name, SUBJECTS)
    known = SUBJECTS[name]
    changes: Table = {} if name == "digits" else {"root": root}
    changes |= assignments(filter(None, options.split(",")), "chestmnist:label=infiltration")
    title = f"{known.title} ({options.replace(',', ', ')})" if options else known.title
    return replace(known, name=text, title=title, data={**known.data, **changes})


def assignments(texts: Iterable[str], example: str) -> Table:
    """`key=value`, several times."""
    return dict(parse_assignment(text, f"key=value, as in {example}") for text in texts)


@dataclass(frozen=True)
class Method:
    """A column of a table: an algorithm, what it optimises, and whether the risk's lam is tuned for it."""

    label: str
    algorithm: Table
    risk: Table
    tunes_lam: bool = False
    joint: bool = False  # all data in one place, a step reads as many images as all clients' together


# Of the moving averages the paper sets beta; gamma is ours.
AVERAGES = {"gamma": 0.1, "beta": 0.1}
PAUC, PSM = {"name": "pauc"}, {"name": "auroc", "surrogate": "psm"}
TABLE1 = (
    Method("Centralized", {"name": "sox", **AVERAGES}, PAUC, tunes_lam=True, joint=True),
    Method("Local SGD", {"name": "local_sgd"}, PAUC),
    Method("CODASCA", {"name": "codasca"}, PAUC),
    Method("Local Pair", {"name": "local_pair", **AVERAGES}, PAUC, tunes_lam=True),
    Method("FeDXL", {"name": "fedxl2", **AVERAGES}, PAUC, tunes_lam=True),
)
TABLE2 = (
    Method("Centralized", {"name": "sgd"}, PSM, joint=True),
    Method("Local SGD", {"name": "local_sgd"}, PSM),
    Method("CODASCA", {"name": "codasca"}, PSM),
    Method("Local Pair", {"name": "local_pair", "beta": 1.0}, PSM),
    Method("FeDXL", {"name": "fedxl1"}, PSM),
)


@dataclass(frozen=True)
class Budget:
    """How much is spent on each method: all get the same."""

    iterations: int  # local steps of a run
    trial_iterations: int  # of a run that is done for tuning alone
    rates: tuple[float, ...]  # tried first, with the first lam
    lams: tuple[float, ...]  # then the others, with the best rate; methods without lam try as many more rates
    local_steps: int = 32
    batch: int = 32  # of either side
    evaluations: int = 20  # in a run
    network: Table | None = None  # in place of the subject's
    falls: tuple[float, ...] = (0.5, 0.75)  # after these shares of a run the rate falls to a tenth
    run: tuple[tuple[str, Any], ...] = ()  # other settings of a run

    def milestones(self, iterations: int) -> list[int]:
        return [max(1, round(share * iterations)) for share in self.falls]

    def with_iterations(self, iterations: int, trial_iterations: int = 0) -> Budget:
        """Longer or shorter runs; trials stay the share of a run that they are, unless their length is given, too."""
        share = self.trial_iterations / self.iterations
        trial_iterations = trial_iterations or max(1, round(share * iterations))
        return replace(self, iterations=iterations, trial_iterations=trial_iterations)


BUDGETS: Mapping[str, Budget] = {
    # Minutes on a CPU: a small network and few steps. Shows that all works; its numbers mean little.
    "quick": Budget(
        iterations=160, trial_iterations=80, rates=(0.03, 0.1, 0.3, 1.0), lams=(2.0, 1.0),
        local_steps=8, batch=8, evaluations=4, network={"name": "cnn"},
    ),
    # What one GPU does of a table in about twenty minutes; 220 rounds of 32 steps, more than the paper needs to
    # converge. Trials are half a run: shorter ones choose rates that are good early (docs/reproduction.md).
    "short": Budget(
        iterations=7040, trial_iterations=3520, falls=(0.7, 0.9), rates=(0.03, 0.1, 0.2, 0.5, 1.0),
        lams=(2.0, 1.0, 4.0),
        run=(("precision", "bf16"),),
    ),
    # The paper's: the rate falls every 5,000 of 20,000 iterations. A trial is a quarter of a run only, but as long as
    # the whole runs by which shorter trials were found wanting.
    "full": Budget(
        iterations=20_000, trial_iterations=5000, rates=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
        lams=(2.0, 1.0, 3.0, 4.0, 5.0), evaluations=40,
        falls=(0.25, 0.5, 0.75), run=(("precision", "bf16"),),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """What tuning decides."""

    lr: float
    lam: float | None = None


def experiment(
    subject: Subject,
    method: Method,
    budget: Budget,
    choice: Choice,
    seed: int,
    iterations: int,
    data: Table | None = None,
    **run: Any,
) -> Config:
    """One run, as a config like any other."""
    steps = int(run.get("local_steps", budget.local_steps))
    rounds = max(1, math.ceil(iterations / steps))
    batch = budget.batch * (int(subject.data.get("clients", 16)) if method.joint else 1)
    network = budget.network if budget.network and subject.name != "digits" else subject.model
    algorithm: Table = {**method.algorithm, "lr": choice.lr, "milestones": budget.milestones(iterations)}
    if method.algorithm["name"] == "codasca":
        # Its reference moves every quarter of a run, and its rate falls when everyone's does.
        algorithm |= {"stage_steps": max(1, iterations // 4), "stage_decay": 1.0}
    return Config(
        data={**subject.data, **(data or {}), "seed": seed},
        model={**network, **subject.network},
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

"""What a run is made of: model, risk, algorithm and settings, put together and checked in one place.

`fit`, the command line, sites, servers and benchmarks all start from a `Problem`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fedxl.algorithms import optional
from fedxl.algorithms.protocol import AnyAlgorithm, Assignment, DataFacts, Reading, Share
from fedxl.data.federation import Counted
from fedxl.engine.drawing import Schedule
from fedxl.engine.simulator import Placement
from fedxl.errors import printable, require
from fedxl.models import Score, scorer
from fedxl.models.layers import check_classes, norms_scores
from fedxl.risks import Several, XRisk, check_risk
from fedxl.training.evaluate import Evaluator, asked_for
from fedxl.training.settings import DTYPES, Settings, pick_device


@dataclass(frozen=True, eq=False)
class Problem:
    """A network on its device, and the algorithm that trains it."""

    model: nn.Module
    algorithm: AnyAlgorithm
    settings: Settings
    device: torch.device
    given: AnyAlgorithm  # as the user built it, without facts about the data
    uses_facts: bool = False  # whether the algorithm had to know something about the data

    @property
    def risk(self) -> XRisk:
        return self.algorithm.risk

    @property
    def label_names(self) -> tuple[str, ...]:
        """Of several labels; empty: there is one."""
        return self.risk.label_names if isinstance(self.risk, Several) else ()

    @property
    def needs_both_sides(self) -> bool:
        """Whether some client must hold both sides of a label, or nobody would train it."""
        return self.algorithm.needs_both_classes or self.algorithm.local_pairs

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.settings.dtype]

    @property
    def select(self) -> str:
        """The metric that chooses the best model."""
        return self.settings.selects_by(self.risk)

    @property
    def reading(self) -> Reading:
        return self.algorithm.reading(self.settings.batch1, self.settings.batch2)

    @property
    def schedule(self) -> Schedule:
        run = self.settings
        return Schedule(run.local_steps, run.batch1, run.batch2, run.seed)

    @property
    def placement(self) -> Placement:
        run = self.settings
        return Placement(self.device, self.dtype, run.precision, run.clients_at_once)

    @cached_property
    def score(self) -> Score:
        """The network as it is trained."""
        return scorer(self.model, True, self.settings.precision, self.risk.score_shape)

    @cached_property
    def evaluator(self) -> Evaluator:
        # Never in half precision, in which many scores would be tied.
        exact = "fp32" if self.settings.precision == "fp32" else "tf32"
        metrics = asked_for(self.risk, self.select, self.settings.fpr, self.settings.metrics)
        shown = optional.shown(self.algorithm)
        score = scorer(self.model, False, score_shape=self.risk.score_shape)
        return Evaluator(score, self.risk, metrics, self.dtype, exact, shown)

    def assignment(self, share: Share) -> Assignment:
        """What a client with this share does in a round."""
        return Assignment(share, self.settings.local_steps, self.reading)


def assemble(
    model: nn.Module,
    algorithm: AnyAlgorithm,
    settings: Settings,
    facts: DataFacts,
    device: torch.device | None = None,
) -> Problem:
    """A problem whose parts fit together, or one line. The model is copied."""
    require_algorithm(algorithm)
    check_risk(algorithm.risk)
    device = device or pick_device(settings.device)
    model = copy.deepcopy(model).to(device, DTYPES[settings.dtype])
    if optional.is_private(algorithm):
        told = "with dp_clip, {}: set {}"
        require(
            not settings.train_metrics, told.format("metrics of training data have no noise", "train_metrics = false")
        )
        exact = settings.precision == "fp32"
        require(exact, told.format("lengths of gradients must be exact", 'precision = "fp32"'))
    suited = algorithm.with_network(norms_scores(model))
    informed = suited.with_facts(facts)
    return Problem(model, informed, settings, device, algorithm, uses_facts=informed is not suited)


def require_algorithm(algorithm: Any) -> None:
    """One line for a name, a risk or a class in its place."""
    right = isinstance(getattr(algorithm, "risk", None), XRisk)
    found = printable(repr(algorithm), 60)
    require(right, f"algorithm must be an object such as fedxl.FeDXL2(fedxl.auroc()), not {found}")


def check_data(problem: Problem, holders: Sequence[Counted]) -> None:
    """One line if there is nothing to train on."""
    risk, algorithm, cohort = problem.risk, problem.algorithm, problem.settings.cohort
    for name, side in zip(("S1", "S2"), risk.sides, strict=True):
        some = any(holder.count(side) for holder in holders)
        require(some, f"the risk needs {side} examples ({name}), and no client holds any")
    both = [all(holder.count(side) for side in risk.sides) for holder in holders]
    if algorithm.local_pairs:
        require(any(both), "no client holds both sides of a pair, so there is nothing to train on; use fedxl2")
    require(
        any(both) or not algorithm.needs_both_classes,
        "no client holds both classes, and one with one class only lends its scores, so nobody would train; "
        "set one_class = 'train'",
    )
    check_classes(problem.model, all(both) or algorithm.local_pairs)
    require(
        algorithm.centralized or cohort <= len(holders),
        f"cohort is {cohort}, but there are only {len(holders)} clients",
    )

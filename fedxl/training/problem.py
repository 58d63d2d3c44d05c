"""What a run is made of: model, risk, algorithm and settings, put together and checked in one place."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import nn

from fedxl.algorithms.protocol import Algorithm, Assignment, DataFacts, Reading
from fedxl.data.examples import Examples
from fedxl.engine.drawing import Schedule
from fedxl.engine.simulator import Placement
from fedxl.errors import UserError, first_line, printable, require
from fedxl.models import Score, scorer, takes
from fedxl.models.layers import check_classes, norms_scores
from fedxl.risks.pairing import Entry, Holder, OneLabel, Share
from fedxl.risks.xrisk import XRisk
from fedxl.training.evaluate import Evaluator, asked_for
from fedxl.training.settings import DTYPES, Settings, pick_device


@dataclass(frozen=True, eq=False)
class Problem:
    """A network on its device, and the algorithm that trains it."""

    model: nn.Module
    algorithm: Algorithm
    settings: Settings
    device: torch.device
    given: Algorithm  # as the user built it, without facts about the data
    uses_facts: bool = False  # whether the algorithm had to know something about the data

    @property
    def risk(self) -> XRisk:
        return self.algorithm.risk

    @property
    def label_names(self) -> tuple[str, ...]:
        """Of several labels; empty if there is one."""
        return self.risk.pairing.labels

    @property
    def num_labels(self) -> int:
        return max(1, len(self.label_names))

    @property
    def needs_both_sides(self) -> bool:
        """Whether some client must hold both sides of a label, or nobody would train it."""
        return self.algorithm.lends or self.algorithm.local_pairs

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
        score = scorer(self.model, False, score_shape=self.risk.score_shape)
        return Evaluator(score, self.risk, metrics, self.dtype, exact, self.algorithm.optimised_scores)

    def assignment(self, share: Share) -> Assignment:
        """What a client with this share does in a round."""
        return Assignment(share, self.settings.local_steps, self.reading)


def assemble(
    model: nn.Module, algorithm: Algorithm, settings: Settings, facts: DataFacts, device: torch.device | None = None
) -> Problem:
    """A problem whose parts fit together. Raises UserError if they do not. The model is copied."""
    check_risk(algorithm.risk)
    device = device or pick_device(settings.device)
    model = copy.deepcopy(model).to(device, DTYPES[settings.dtype])
    if algorithm.private:
        told = "with dp_clip, {}: set {}"
        hidden = not settings.train_metrics
        require(hidden, told.format("metrics of training data have no noise", "train_metrics = false"))
        exact = settings.precision == "fp32"
        require(exact, told.format("lengths of gradients must be exact", 'precision = "fp32"'))
    suited = algorithm.with_network(norms_scores(model))
    informed = suited.with_facts(facts)
    return Problem(model, informed, settings, device, algorithm, uses_facts=informed is not suited)


def check_risk(risk: XRisk) -> None:
    """Raises UserError if a risk of the user's own does not give one number (or `m`) per pair."""
    if type(risk.pairing) is not OneLabel:
        return  # built of a risk that was checked, or one of ours
    a, b, y = torch.zeros(2, 3, *risk.score_shape), torch.zeros(2, 4, *risk.score_shape), torch.zeros(2, 4)
    try:
        l = risk.losses(Entry(a, ()), Entry(b, y))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"the risk's pair cannot take a [2, 3], b [2, 4], y [2, 4]: {first_line(error)}") from None
    wanted = (2, 3, 4, *risk.inner_shape)
    right = tuple(l.shape) == wanted
    require(right, f"the risk's pair must return {list(wanted)} for a [2, 3], b [2, 4], not {list(l.shape)}")
    f = risk.outer(torch.ones(2, 3, *risk.inner_shape))
    require(tuple(f.shape) == (2, 3), f"the risk's outer must work entry by entry: [2, 3] became {list(f.shape)}")


def check_data(problem: Problem, holders: Sequence[Holder]) -> None:
    """Raises UserError if there is nothing to train on."""
    risk, algorithm, cohort = problem.risk, problem.algorithm, problem.settings.cohort
    for name, side in zip(("S1", "S2"), risk.sides, strict=True):
        some = any(holder.count(side) for holder in holders)
        require(some, f"the risk needs {side} examples ({name}), and no client holds any")
    both = [all(holder.count(side) for side in risk.sides) for holder in holders]
    if algorithm.local_pairs:
        require(any(both), "no client holds both sides of a pair, so there is nothing to train on; use fedxl2")
    nobody = "no client holds both classes, and one with one class only lends its scores, so nobody would train"
    require(any(both) or not algorithm.lends, f"{nobody}; set one_class = 'train'")
    check_classes(problem.model, all(both) or algorithm.local_pairs)
    enough = algorithm.centralized or cohort <= len(holders)
    require(enough, f"cohort is {cohort}, but there are only {len(holders)} clients")


def check_labels(problem: Problem, holders: Sequence[Holder], of_data: Sequence[str] = ()) -> None:
    """Raises UserError if some of several labels cannot be trained, or the data call them otherwise."""
    if not (names := problem.label_names):
        return
    first, second = (np.stack([each.by_label(side) for each in holders]) for side in problem.risk.sides)  # [N, L]
    for label, name in enumerate(names):
        for side, counts in (("S1", first), ("S2", second)):
            some = bool(counts[:, label].any())
            require(some, f"no client holds an example of {side} for the label '{name}'; leave it out")
        both = bool(((first[:, label] > 0) & (second[:, label] > 0)).any())
        nobody = f"no client holds both classes of the label '{name}', so nobody would train it"
        require(both or not problem.needs_both_sides, f"{nobody}; leave it out, or set one_class = 'train'")
    check_label_names(names, of_data)


def check_label_names(of_risk: Sequence[str], of_data: Sequence[str]) -> None:
    """Raises UserError if the risk names labels differently from the table, or in another order."""
    same = not of_data or list(of_risk) == list(of_data)
    wanted = ", ".join(f'"{printable(name, 40)}"' for name in of_data)
    require(same, f"the risk must name the labels as the table does, in the same order: labels = [{wanted:.500}]")


def check_queries(problem: Problem, data: Mapping[str, Examples]) -> None:
    """Raises UserError unless data and risk agree on queries and times. data: of training, and to evaluate on."""
    for name, found in data.items():
        whose = "the data" if name == "train" else f"the {name} data"
        check_ranked(problem, found.group is not None, whose)
        check_timed(problem, found.time is not None, whose)


def check_ranked(problem: Problem, known: bool, whose: str = "the data") -> None:
    """Raises UserError unless data, risk and algorithm agree on queries."""
    risk = problem.risk
    if not risk.pairing.ranked:
        require(not known, f"{whose} are items of queries with grades; use a risk of queries: ndcg or listwise")
        return
    told = f"the risk {risk} ranks items within queries, and {whose} name none"
    require(known, f"{told}: give the query of each item (fedxl.from_queries, or query in [data])")
    some = problem.reading.pairing.ranked or problem.algorithm.learns_grades
    others = "FeDXL2 (fedxl2), LocalPair, SOX, or LocalSGD with loss = 'squared' for grades"
    require(some, f"{type(problem.algorithm).__name__} does not rank items within queries: use {others}")


def check_timed(problem: Problem, known: bool, whose: str = "the data") -> None:
    """Raises UserError unless data, risk and algorithm agree on times of events."""
    risk = problem.risk
    if not risk.pairing.timed:
        require(not known, f"{whose} have times of events; use a risk of time to event: cox or concordance")
        return
    told = f"the risk {risk} compares times of events, and {whose} have none"
    require(known, f"{told}: give them (fedxl.from_times, or time in [data])")
    others = "FeDXL2 (fedxl2), FeDXL1 for concordance, LocalPair, or SOX"
    learns = problem.reading.pairing.timed
    require(learns, f"{type(problem.algorithm).__name__} does not learn from times: use {others}")


def require_for_sites(problem: Problem) -> None:
    """Raises UserError if real sites cannot let scores meet as the risk wants it."""
    why = "" if problem.algorithm.local_pairs else problem.reading.pairing.why_not_at_sites
    require(not why, why)


def match_types(problem: Problem, data: Examples) -> Examples:
    """The same data, with floats for integers if the network refuses integers, as embeddings do not."""
    probe = data.fetch(torch.arange(min(2, len(data)), device=data.x.device)).to(problem.device)
    if probe.is_floating_point() or takes(problem.model, probe):
        return data
    if not takes(problem.model, probe.to(problem.dtype)):
        return data  # the shape is wrong, not the type; whoever checks the output says so
    return replace(data, x=data.x.to(problem.dtype))

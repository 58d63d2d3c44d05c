"""Who takes part in the rounds of a run, and how much each counts: for simulations and servers alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedxl.algorithms import optional
from fedxl.algorithms.protocol import Share
from fedxl.data.availability import read_trace
from fedxl.data.federation import shares, weigh, weigh_by
from fedxl.data.participation import PLANS, Plan, Trace
from fedxl.errors import require
from fedxl.sampling import Floats
from fedxl.training.problem import Problem
from fedxl.training.settings import Settings


class Participants(NamedTuple):
    shares: Share  # stacked over clients
    plan: Plan


def participants(problem: Problem, first: Sequence[int], second: Sequence[int], names: Sequence[str]) -> Participants:
    """Shares and plan of clients with so many examples of S1 and S2. A centralised method has one client, always."""
    run, many = problem.settings, len(first)
    size: dict[str, Any] = {"num_clients": many, "size": run.cohort, "seed": run.seed}
    if run.participation == "uniform" or problem.algorithm.centralized:
        share, chances = weigh(first, second, run.weighting, run.cohort)
        return Participants(share, Plan(**size, chances=chances))
    plan = _traced(problem, first, second, names, size) if run.trace else PLANS[run.participation](**size)
    frequency = plan.frequency
    _require_present(first, second, frequency)
    share = weigh_by(first, second, run.weighting, frequency)
    _require_trained(problem, share, frequency)
    if run.cohort_weights == "normalised":
        return Participants(share, plan)
    plain = optional.plain_average(problem.algorithm)
    require(
        plain,
        "unbiased cohorts make the server's steps of different lengths, which momentum and adam would undo; "
        'set cohort_weights = "normalised" or server_update = "mean"',
    )
    return Participants(share, replace(plan, weights=_weights(problem, share, frequency)))


def never_there(plan: Plan, names: Sequence[str]) -> str:
    """A line on the clients whose risk cannot be optimised, because they never take part; empty: there are none."""
    if not isinstance(plan, Trace):
        return ""
    absent = np.flatnonzero(~plan.available.any(0))
    some = ", ".join(names[number] for number in absent[:3]) + (", ..." if len(absent) > 3 else "")
    told = f"{len(absent)} of {len(names)} clients are never available ({some})"
    return f"trace: {told}; the run optimises the risk of the others" if len(absent) else ""


def _traced(
    problem: Problem, first: Sequence[int], second: Sequence[int], names: Sequence[str], size: dict[str, Any]
) -> Trace:
    run = problem.settings
    available = read_trace(Path(run.trace), names)
    parts = shares(first, second, run.weighting).part.numpy() if run.weighting == "samples" else None
    return Trace(**size, available=available, parts=parts)


def _require_present(first: Sequence[int], second: Sequence[int], frequency: Floats) -> None:
    for name, counts in (("S1", first), ("S2", second)):
        held = np.array(counts) > 0
        some = not held.any() or bool((held & (frequency > 0)).any())
        require(some, f"no client that holds examples of {name} is ever available; the trace must name one")


def _weights(problem: Problem, share: Share, frequency: Floats) -> Floats:
    """What each client adds to the weight of its cohort, so that cohorts weigh 1 on average.

    A client that does not train, for example one that only lends its scores, adds nothing.
    """
    kind = type(problem.algorithm).__name__
    told = "needs an algorithm based on fedxl's Descent; set cohort_weights = 'normalised'"
    require(
        optional.can_scale(problem.algorithm), f"participation = '{problem.settings.participation}' {told} for {kind}"
    )
    each: Floats = optional.trained(problem.algorithm, share).numpy()
    return each / float((frequency * each).sum())


def _require_trained(problem: Problem, share: Share, frequency: Floats) -> None:
    some = float((frequency * optional.trained(problem.algorithm, share).numpy()).sum()) > 0
    require(some, "no client that trains is ever available; the trace must name one that holds both classes")


def present(run: Settings, names: Sequence[str]) -> list[int]:
    """Which clients take part at all."""
    if not run.trace:
        return [*range(len(names))]
    return np.flatnonzero(read_trace(Path(run.trace), names).any(0)).tolist()

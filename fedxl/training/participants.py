"""Who takes part in the rounds of a run, and how much each counts: for simulations and servers alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedxl.data.federation import shares, weigh, weigh_by
from fedxl.data.participation import Plan, Trace, read_trace
from fedxl.errors import printable, require
from fedxl.risks.pairing import Holder, Share
from fedxl.training.problem import Problem
from fedxl.training.settings import Settings

Counts = npt.NDArray[np.int64]


class Participants(NamedTuple):
    shares: Share  # stacked over clients
    plan: Plan


def participants(problem: Problem, holders: Sequence[Holder], names: Sequence[str]) -> Participants:
    """Shares and plan of clients that hold so much. A centralised method has one client, always."""
    run, algorithm, reading = problem.settings, problem.algorithm, problem.reading
    pairing, sides, local = reading.pairing, (reading.first, reading.second), algorithm.local_pairs
    first, second = pairing.counts(holders, sides, local)
    size: dict[str, Any] = {"num_clients": len(holders), "size": run.cohort, "seed": run.seed}
    if run.participation == "uniform" or algorithm.centralized:
        share, chances = weigh(first, second, run.weighting, run.cohort)
        plan = Plan(**size, chances=chances)
    else:
        parts = shares(first, second, run.weighting).part.numpy() if run.weighting == "samples" else None
        plan = Trace(**size, available=read_trace(Path(run.trace), names), parts=parts)
        for name, counts in (("S1", first), ("S2", second)):
            held = np.array(counts) > 0
            some = not held.any() or bool((held & (plan.frequency > 0)).any())
            require(some, f"no client that holds examples of {name} is ever available; the trace must name one")
        share = weigh_by(first, second, run.weighting, plan.frequency)
        trained = float((plan.frequency * algorithm.counts(share).numpy()).sum()) > 0
        require(trained, "no client that trains is ever available; the trace must name one that holds both classes")
    share = pairing.spread(share, holders, sides, run.weighting == "samples", local)
    return Participants(share, plan)


def never_available(plan: Plan, names: Sequence[str]) -> str:
    """A line on the clients whose risk cannot be optimised, because they never take part; empty if there are none."""
    if not isinstance(plan, Trace):
        return ""
    absent = np.flatnonzero(~plan.available.any(0))
    some = ", ".join(names[number] for number in absent[:3]) + (", ..." if len(absent) > 3 else "")
    line = f"trace: {len(absent)} of {len(names)} clients are never available ({some})"
    return f"{line}; the run optimises the risk of the others" if len(absent) else ""


def present(run: Settings, names: Sequence[str]) -> list[int]:
    """Which clients take part at all."""
    if not run.trace:
        return [*range(len(names))]
    return np.flatnonzero(read_trace(Path(run.trace), names).any(0)).tolist()


def check_labels(first: Counts, second: Counts, names: Sequence[str], needs_both: bool) -> None:
    """Raises UserError if some label cannot be trained. first, second: examples of each side, [N, L]."""
    for label, name in enumerate(names):
        for side, counts in (("S1", first), ("S2", second)):
            some = bool(counts[:, label].any())
            require(some, f"no client holds an example of {side} for the label '{name}'; leave it out")
        both = bool(((first[:, label] > 0) & (second[:, label] > 0)).any())
        nobody = f"no client holds both classes of the label '{name}', so nobody would train it"
        require(both or not needs_both, f"{nobody}; leave it out, or set one_class = 'train'")


def check_label_names(of_risk: Sequence[str], of_data: Sequence[str]) -> None:
    """Raises UserError if the risk names labels differently from the table, or in another order."""
    same = not of_data or list(of_risk) == list(of_data)
    wanted = ", ".join(f'"{printable(name, 40)}"' for name in of_data)
    require(same, f"the risk must name the labels as the table does, in the same order: labels = [{wanted:.500}]")

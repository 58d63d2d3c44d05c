"""What a private run has spent: epsilon at delta, after any number of its rounds.

The unit is an example. Its data set's neighbour holds a blank in its place: an example without a gradient, whose
score is the middle of the range. Each step that reads the example is a Gaussian mechanism on the sum of gradients,
and each upload of its score is one on the score. What counts is how often an example can be read at most, in any
order, which follows from public numbers alone. docs/differential-privacy.md has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fedxl.algorithms.private import ByExample
from fedxl.algorithms.protocol import Reading
from fedxl.data.participation import Plan
from fedxl.errors import UserError, require
from fedxl.training.rounds import Task
from fedxl.training.run_folder import Member
from fedxl.training.settings import Settings

CONDITION = "if no preparation of a table was made from private rows"  # of a promise on rows of tables
SMALLEST = 1e-300  # of a squared noise; less is as if there were none, and could not be divided by
MOST_MU = 100.0  # of a Gaussian mechanism, one over its noise; its epsilon is in the thousands, and promises nothing


class Releases(NamedTuple):
    """How often one example counts at most."""

    gradients: int = 0  # in sums of gradients; an example that stands m times in one batch counts m^2 times
    scores: int = 0  # its uploaded scores

    def squared_mu(self, settings: ByExample) -> float:
        """Of the one Gaussian mechanism that all of these are together."""
        pairs = zip(self, (settings.dp_noise, 2 * settings.dp_score_noise), strict=True)
        return sum(count / max(noise * noise, SMALLEST) for count, noise in pairs)


class Spent(NamedTuple):
    epsilon: float  # for an example against a blank
    epsilon_replaced: float  # for an example against any other of its class
    delta: float
    gradients: int  # in how many sums of gradients the example that counts most takes part
    scores: int  # how many of its scores are uploaded
    condition: str = ""  # what must hold besides

    def __str__(self) -> str:
        return f"epsilon {promise(self.recorded())}"

    def recorded(self) -> dict[str, Any]:
        """For metrics rows and run.json: without a condition that is none."""
        return {name: value for name, value in self._asdict().items() if value != ""}


def promise(recorded: Any) -> str:
    """The privacy that a metrics row or run.json tells of, in words; empty if it tells of none.

    >>> promise({"epsilon": 7.9, "delta": 1e-05}), promise({"epsilon": None, "delta": 0.001}), promise(None)
    ('7.9 at delta 1e-05', 'infinite at delta 0.001', '')
    """
    told = recorded if isinstance(recorded, dict) else {}
    epsilon, delta = told.get("epsilon", ""), told.get("delta")
    if not isinstance(delta, float) or not (epsilon is None or isinstance(epsilon, float)):
        return ""
    finite, condition = epsilon is not None and math.isfinite(epsilon), told.get("condition", "")
    shown = f"{f'{epsilon:.3g}' if finite else 'infinite'} at delta {delta:g}"
    return f"{shown} ({condition})" if condition == CONDITION else shown


@dataclass(frozen=True)
class Ledger:
    """The account of a run whose algorithm is private."""

    algorithm: Any
    reading: Reading
    run: Settings
    members: Sequence[Member]
    plan: Plan
    may_miss: bool = False  # whether a client of a cohort may not answer, as sites may not
    condition: str = ""

    def __post_init__(self) -> None:
        accountant()  # missing software is said before the first round

    def after(self, round: int) -> Spent:
        """What has been spent once this round is done."""
        settings, worst = self.algorithm.gradient, Releases()
        for releases in set(self._releases(round)):
            worst = max(worst, releases, key=lambda each: each.squared_mu(settings))
        blank, replaced = (epsilon(worst, settings, blanks) for blanks in (1, 2))
        return Spent(blank, replaced, settings.dp_delta, *worst, self.condition)

    def _releases(self, round: int) -> list[Releases]:
        """Of every client and side; of one that may have missed the warm-up, also as if it had."""
        warm_ups, visits = self._visits(round)
        found, steps = [], self.run.local_steps
        for member, warm_up, visited in zip(self.members, warm_ups.tolist(), visits.tolist(), strict=True):
            sides = (member.positives, member.negatives)
            counts = sides if self.reading.first == "positive" else sides[::-1]
            for begin in {warm_up, 0} if self.may_miss else {warm_up}:
                found += most_released(self.algorithm, self.reading, steps, counts, begin, begin + visited)
        return found

    def _visits(self, round: int) -> tuple[Any, Any]:
        """Which clients were in the warm-up round, and in how many others, by their cohorts."""
        clients, first = len(self.members), self.algorithm.first_round
        if type(self.plan) is Plan and not 0 < self.plan.size < clients:
            return np.full(clients, first == 0), np.full(clients, max(round, 0))
        visits = np.zeros((2, clients), np.int64)
        for each in range(first, round + 1):
            visits[int(each > 0), self.plan.cohort(each)] += 1
        return visits[0], visits[1]


def most_released(
    algorithm: Any, reading: Reading, steps: int, counts: Sequence[int], begin: int, rounds: int
) -> list[Releases]:
    """By one client, of either side. counts: its examples of S1 and S2; begin: its first round that trains."""
    trains, found = begin < rounds and (all(counts) or not algorithm.lends), []
    for count, size in zip(counts, (reading.size1, reading.size2), strict=True):
        if count:
            total = steps * size
            gradients = most_squared(count, size, begin * steps, rounds * steps) if trains else 0
            found.append(Releases(gradients, most_uploaded(count, total, algorithm.pool.count(total), rounds)))
    return found


def ledger(task: Task) -> Ledger | None:
    """The account of a run; None if its algorithm makes no promise."""
    problem, made = task.problem, task.preparation
    if not problem.algorithm.private:
        return None
    # Whether sites hold tables their server does not know: examples of tables are vectors.
    tables = bool(made.columns) if made else task.may_miss and len(task.form.shape) == 1
    known = (problem.algorithm, problem.reading, problem.settings, task.members, task.plan, task.may_miss)
    return Ledger(*known, CONDITION if tables else "")


def require_given(algorithm: Any, fitted: bool) -> None:
    """Refuse private training on columns scaled by their own means: each row moves all others, or means leave."""
    why = "with dp_clip, columns must not be scaled by their own means, which every row moves and which may leave"
    made = "a table takes a preparation.json of public rows: `fedxl data prepare` makes one; name it in [data]"
    require(not (fitted and algorithm.private), f"{why}; {made}")


def spent(ledger: Ledger | None, round: int) -> dict[str, Any]:
    """For a metrics row, and for run.json: what has been spent once this round is done."""
    return {} if ledger is None else {"privacy": ledger.after(round).recorded()}


@lru_cache(maxsize=4096)
def most_squared(count: int, size: int, begin: int, end: int) -> int:
    """The largest sum of m^2 over steps from `begin` to `end`, where one example stands m times in a step's batch.

    A side of `count` examples is read in epochs, `size` of them per step, and the example stands anywhere in each.
    The best assignment of epochs to batches is in groups of neighbours (docs/differential-privacy.md).
    """
    first, last = begin * size // count, (end * size - 1) // count  # epochs
    best = [0]  # of the first so many epochs
    for epoch in range(first, last + 1):
        most, group = 0, 0
        batch = max(begin, epoch * count // size)  # the first that reads from this epoch
        while epoch - group >= first and batch <= ((epoch - group + 1) * count - 1) // size:
            group += 1
            most = max(most, best[-group] + group**2)
        best.append(most)
    return best[-1]


@lru_cache(maxsize=4096)
def most_uploaded(count: int, total: int, kept: int, rounds: int) -> int:
    """How many scores of one example are uploaded at most: epochs in which any position is uploaded.

    A round reads `total` examples of a side, of which the scores at `kept` positions are uploaded (`pool.thin`).
    """
    if kept >= total:
        return -(-rounds * total // count)
    positions = np.arange(kept) * total // kept
    epochs: set[int] = set()
    for round in range(rounds):
        epochs.update(((round * total + positions) // count).tolist())
    return len(epochs)


def accountant() -> Any:
    """dp-accounting. Raises UserError if it is not installed."""
    try:
        import dp_accounting
        import dp_accounting.pld
    except ImportError:
        raise UserError("differential privacy needs dp-accounting: pip install 'fedxl[dp]'") from None
    return dp_accounting


def epsilon(releases: Releases, settings: ByExample, blanks: int = 1) -> float:
    """The epsilon of all releases together at delta.

    blanks: 1 for an example against a blank. Replacing one by another is two such steps, and moves sums twice as far.
    """
    return epsilon_of(blanks**2 * releases.squared_mu(settings), settings.dp_delta)


@lru_cache(maxsize=1024)
def epsilon_of(squared_mu: float, delta: float) -> float:
    """The epsilon of one Gaussian mechanism, by its privacy loss distribution. Any number of them are one."""
    if squared_mu == 0:
        return 0.0
    if squared_mu > MOST_MU**2:
        return math.inf
    mu, dp = math.sqrt(squared_mu), accountant()
    # Losses are spread over about mu, so a grid in proportion to it is as fine for every mu.
    account = dp.pld.PLDAccountant(value_discretization_interval=1e-3 * max(1.0, mu))
    account.compose(dp.GaussianDpEvent(1 / mu))
    return float(account.get_epsilon(delta))

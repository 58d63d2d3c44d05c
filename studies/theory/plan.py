"""What the paper's Theorems 1, 2 and 3 prescribe: K, R, eta, beta and gamma, all constants set to 1.

The theorems are written in R. Here they are solved for eps, the bound on the mean gradient norm, because every other
quantity is a power of it; |P| is the size of the cohort:

    FeDXL1   eps = (|P| T)^(-1/4)          R = eps^-3           K = 1 / (|P| eps)          eta = |P| eps^2
    FeDXL2   eps = (N M / (|P| T))^(1/4)   R = M^(1/2) eps^-3   K = N M^(1/2) / (|P| eps)  eta = |P| eps^2 / (N M)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedxl.errors import UserError, require, unknown


@dataclass(frozen=True)
class Federated:
    """How many clients there are, and what they hold."""

    clients: int  # N
    examples: int = 1  # M: examples of S1 at the client with the most of them
    cohort: int = 0  # |P|: clients of a round; 0: all

    def __post_init__(self) -> None:
        require(self.clients >= 1, f"clients must be at least 1, got {self.clients}")
        require(self.examples >= 1, f"examples must be at least 1, got {self.examples}")
        require(
            0 <= self.cohort <= self.clients,
            f"cohort must lie between 1 and the {self.clients} clients (0: all), got {self.cohort}",
        )

    @property
    def present(self) -> int:
        """|P|."""
        return self.cohort or self.clients


@dataclass(frozen=True)
class Plan:
    """The prescription of a theorem. All numbers are orders of magnitude: their ratios count."""

    algorithm: str
    theorem: str
    epsilon: float  # the mean over rounds of |grad F|^2 is of the order of epsilon^2
    steps: float  # T = R K: local steps of a client that takes part in every round
    local_steps: float  # K
    rounds: float  # R
    lr: float  # eta
    beta: float
    gamma: float | None  # None: FeDXL1 has no u
    steps_of_a_client: float  # on average: T |P| / N
    formulas: dict[str, str]
    limits: tuple[str, ...]


def fedxl1(where: Federated, epsilon: float) -> Plan:
    """Theorem 1: R = eps^-3, K = 1 / (N eps), eta = N eps^2.

    >>> plan = fedxl1(Federated(clients=4), epsilon=0.05)
    >>> round(plan.rounds), round(plan.local_steps), round(plan.lr, 9), round(plan.steps)
    (8000, 5, 0.01, 40000)
    """
    p, n = where.present, where.clients
    crowded = p * epsilon > 1  # K would fall below 1
    k, lr = (1.0, epsilon) if crowded else (1 / (p * epsilon), p * epsilon**2)
    rounds = epsilon**-3
    name = "N" if p == n else "|P|"
    formulas = {
        "epsilon": "T^(-1/3)" if crowded else f"({name} T)^(-1/4)",
        "steps": "eps^-3" if crowded else f"eps^-4 / {name}",
        "local_steps": "1" if crowded else f"T^(1/4) / {name}^(3/4) = 1 / ({name} eps)",
        "rounds": "T = eps^-3" if crowded else f"({name} T)^(3/4) = eps^-3",
        "lr": "eps" if crowded else f"({name} / T)^(1/2) = {name} eps^2",
        "beta": "1: no moving average",
        "steps_of_a_client": "T" if p == n else "T |P| / N",
    }
    theorem = "Theorem 1" if not crowded else "the bound in the proof of Theorem 1, with K = 1"
    return Plan(
        "FeDXL1", theorem, epsilon, rounds * k, k, rounds, lr, 1.0, None, rounds * k * p / n, formulas,
        (*_limits1(name, crowded, 1 / epsilon, rounds), *([_NO_COHORT] if p < n else [])),
    )  # fmt: skip


_NO_COHORT = (
    "The paper has no theorem for FeDXL1 with a cohort. Here |P| takes the place of N, which supposes that clients "
    "are alike; if they differ, the choice of the cohort is noise of its own."
)


def _limits1(name: str, crowded: bool, most: float, rounds: float) -> tuple[str, ...]:
    """What limits FeDXL1. Its bound is 1 / (eta K R) + (eta K)^2 + eta / N."""
    if crowded:
        return (
            f"There are more clients than 1 / eps = {short(most)}: the noise is averaged out already, and what "
            "limits is (eta K)^2, the age of the passive scores. More clients no longer save steps.",
        )
    return (
        f"K may grow no faster than T^(1/4) / {name}^(3/4). Beyond it the drift of local models and the age of the "
        "passive scores, (eta K)^2, cost more than the noise, eta / N.",
        f"Twice the clients need half the steps T and half of K; the rounds, eps^-3 = {short(rounds)}, stay. "
        f"That ends at {name} = 1 / eps = {short(most)}, where K is 1.",
    )


def fedxl2(where: Federated, epsilon: float) -> Plan:
    """Theorem 2, and Theorem 3 for cohorts: R = M^(1/2) eps^-3, K = N M^(1/2) / (|P| eps), eta = |P| eps^2 / (N M).

    >>> plan = fedxl2(Federated(clients=16, examples=100), epsilon=0.1)
    >>> round(plan.rounds), round(plan.local_steps), round(plan.lr, 9), round(plan.beta, 9), round(plan.gamma, 9)
    (10000, 100, 0.0001, 0.001, 0.01)
    >>> half = fedxl2(Federated(clients=16, examples=100, cohort=8), epsilon=0.1)
    >>> round(half.rounds), round(half.local_steps), round(half.lr, 9)
    (10000, 200, 5e-05)
    """
    root, absent = math.sqrt(where.examples), where.clients / where.present
    k, rounds = absent * root / epsilon, root / epsilon**3
    lr, beta, gamma = epsilon**2 / (absent * where.examples), epsilon**2 / root, epsilon**2
    some = absent > 1
    formulas = {
        "epsilon": "(N M / (|P| T))^(1/4)" if some else "(M / T)^(1/4)",
        "steps": "N M eps^-4 / |P|" if some else "M eps^-4",
        "local_steps": "N M^(1/2) / (|P| eps)" if some else "(M T)^(1/4) = M^(1/2) / eps",
        "rounds": "M^(1/2) eps^-3" if some else "T^(3/4) / M^(1/4) = M^(1/2) eps^-3",
        "lr": "|P| eps^2 / (N M)" if some else "eps^2 / M",
        "beta": "eps^2 / M^(1/2)",
        "gamma": "eps^2",
        "steps_of_a_client": "T |P| / N" if some else "T",
    }
    theorem = "Theorem 3" if some else "Theorem 2"
    return Plan(
        "FeDXL2", theorem, epsilon, rounds * k, k, rounds, lr, beta, gamma, rounds * k / absent, formulas,
        _limits2(where.examples, absent),
    )  # fmt: skip


def _limits2(examples: int, absent: float) -> tuple[str, ...]:
    """What limits FeDXL2: gamma, (beta K)^2 and M / (gamma T) are all of the order of eps^2."""
    grows = "(M T)^(1/4)" if absent == 1 else "(N / |P|)^(3/4) (M T)^(1/4)"
    shared = (
        f"What limits is u: a step refreshes one of a client's {examples:,} estimates, so T is of the order of "
        f"{'' if absent == 1 else '(N / |P|) '}M eps^-4. More clients help only if each then holds fewer examples.",
        f"K may grow no faster than {grows}: beyond it (beta K)^2, the age of G and of the passive u, exceeds eps^2.",
        "The theorem writes its bound as R^(-2/3). It is M^(1/3) R^(-2/3) = eps^2, as the remark after it says.",
    )
    if absent == 1:
        return shared
    return (
        *shared,
        f"With Theorem 3's K the proof's term (beta K)^2 is (N / |P|)^2 = {short(absent**2)} times eps^2: the "
        "theorem takes N / |P| for a constant. beta |P| / N in place of beta removes the factor, and the other terms "
        "stay in order.",
    )


def short(number: float) -> str:
    """Three digits, without exponents where that is readable.

    >>> short(13454.3), short(999.9999), short(0.0001), short(4.0)
    ('13,500', '1,000', '0.0001', '4')
    """
    if number >= 999.5:
        digits = 10 ** (math.floor(math.log10(1.0005 * number)) - 2)
        return f"{round(number / digits) * digits:,}"
    return f"{number:.3g}"


PLANS: dict[str, Callable[[Federated, float], Plan]] = {"fedxl1": fedxl1, "fedxl2": fedxl2}


def prescribe(algorithm: str, where: Federated, *, steps: float | None = None, epsilon: float | None = None) -> Plan:
    """What the theorem of an algorithm prescribes for a number of steps T, or for a bound epsilon.

    >>> plan = prescribe("fedxl1", Federated(clients=4), steps=40_000)
    >>> round(plan.epsilon, 3), round(plan.rounds), round(plan.local_steps)
    (0.05, 8000, 5)
    """
    if algorithm not in PLANS:
        raise unknown("algorithm", algorithm, PLANS)
    if (steps is None) == (epsilon is None):
        raise UserError("give either the steps T or epsilon, and not both: one follows from the other")
    if epsilon is None:
        assert steps is not None
        epsilon = _reached(algorithm, where, steps)
    require(0 < epsilon < 1, f"epsilon must lie between 0 and 1, got {epsilon:g}")
    return PLANS[algorithm](where, epsilon)


def _reached(algorithm: str, where: Federated, steps: float) -> float:
    """The epsilon that T steps reach."""
    if algorithm == "fedxl1":
        require(steps > 1, f"steps must be more than 1, got {steps:g}")
        # The first is the theorem. The second is what is left of it where K would fall below 1.
        return float(max((where.present * steps) ** -0.25, steps ** (-1 / 3)))
    least = where.clients * where.examples / where.present
    require(
        steps > least,
        f"steps must be more than N M / |P| = {least:,.0f}, got {steps:,.0f}: each u must be refreshed at least once",
    )
    return float((least / steps) ** 0.25)

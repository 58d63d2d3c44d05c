"""Where the study of heterogeneity looks: its methods, its budgets, and its cells, ways to split data over sites."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedxl.config.experiment import Table
from fedxl.data.examples import Weighting
from fedxl.errors import UserError, require, unknown
from studies import recorded
from studies.paper import setup
from studies.paper.setup import Budget, TableColumn, Task

METRIC = "pauc@0.3"
# One line is one method and one column.
METHODS: Sequence[TableColumn] = (
    *setup.TABLE1[:-1],
    TableColumn("Local Pair, guarded", {"name": "local_pair", **recorded.EVEN}, setup.PAUC, tunes_lam=True),
    TableColumn("Local Pair, held", {"name": "local_pair"}, setup.PAUC, tunes_lam=True),
    TableColumn("FeDXL, paper", {"name": "fedxl2", **setup.PLAIN, **setup.AVERAGES}, setup.PAUC, tunes_lam=True),
    TableColumn("FeDXL, not held", {"name": "fedxl2", **recorded.EVEN}, setup.PAUC, tunes_lam=True),
    TableColumn("FeDXL", {"name": "fedxl2"}, setup.PAUC, tunes_lam=True),
)
WEIGHTINGS = typing.get_args(Weighting)
NORM: Table = {"norm": "group"}  # of image networks: batch norm would mix the statistics of sites that differ

# lam is not tuned: the trials go into learning rates, as many for every method.
BUDGETS: Mapping[str, Budget] = {
    # A few minutes on two CPU cores with digits: trials are as long as runs, which are short.
    "quick": replace(
        setup.BUDGETS["quick"],
        iterations=320, trial_iterations=320, rates=(0.1, 0.3, 1.0, 3.0, 10.0), lams=(2.0,), evaluations=8,
        tuning_seeds=3,
    ),
    "short": replace(
        setup.BUDGETS["short"],
        iterations=1920, trial_iterations=960, rates=(0.01, 0.03, 0.1, 0.3, 1.0), lams=(2.0,),
    ),
    "full": replace(setup.BUDGETS["full"], iterations=7040, trial_iterations=3520, falls=(0.7, 0.9), lams=(2.0,)),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A way to split the training data over sites."""

    title: str
    settings: tuple[tuple[str, Any], ...]  # of the data

    def of(self, task: Task) -> Task:
        """The task with its data split in this way."""
        return replace(task, name=f"{task.name}, {self.title}", data={**task.data, **dict(self.settings)})


def by_alpha(alpha: float) -> Cell:
    """Label skew; an infinite alpha stands for equal shards."""
    if math.isinf(alpha):
        return Cell("equal shards", (("partition", "equal"),))
    return Cell(f"alpha {alpha:g}", (("partition", "dirichlet"), ("alpha", alpha)))


def by_one_class(count: int) -> Cell:
    """Some sites hold one class; none stands for equal shards."""
    if count == 0:
        return by_alpha(math.inf)
    return Cell(f"{count} one-class sites", (("partition", "one_class"), ("one_class", count)))


@dataclass(frozen=True)
class Plan:
    """Which cells, and which methods. Cells are in the order of the picture: the more skew, the further right."""

    alphas: Mapping[str, Cell]  # by their place on the axis
    one_class: Mapping[str, Cell]
    methods: Sequence[TableColumn] = METHODS

    @property
    def cells(self) -> list[Cell]:
        """Each once: no one-class site and equal shards are the same cell."""
        return list(dict.fromkeys([*self.alphas.values(), *self.one_class.values()]))

    @property
    def axes(self) -> dict[str, Mapping[str, Cell]]:
        """The two axes of the picture that have cells."""
        both = {"Dirichlet alpha: more skew to the right": self.alphas, "sites with one class": self.one_class}
        return {name: cells for name, cells in both.items() if cells}

    @property
    def federated(self) -> list[TableColumn]:
        return [method for method in self.methods if not method.joint]

    @property
    def joint(self) -> list[TableColumn]:
        return [method for method in self.methods if method.joint]


def make_plan(alphas: str, one_class: str, only: str = "") -> Plan:
    """The plan that these texts describe: `0.1,0.3,equal`, `0,4,8` and the short names of methods."""
    rates = sorted(
        (math.inf if text == "equal" else _number(text, "alphas") for text in setup.split_list(alphas)), reverse=True
    )
    counts = sorted(_number(text, "one-class") for text in setup.split_list(one_class))
    require(all(rate > 0 for rate in rates), f"alphas must be positive numbers or equal, got {alphas}")
    whole = all(count >= 0 and count.is_integer() for count in counts)
    require(whole, f"one-class must be whole numbers of sites, got {one_class}")
    require(bool(rates or counts), "there are no cells: both alphas and one-class are empty")
    chosen = setup.select_methods(METHODS, only)
    found = Plan(
        {"equal" if math.isinf(rate) else f"{rate:g}": by_alpha(rate) for rate in rates},
        {f"{count:g}": by_one_class(int(count)) for count in counts},
        chosen,
    )
    known = ", ".join(map(setup.short_name, METHODS))
    require(bool(found.federated), f"only must name a federated method: {known}")
    return found


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{option} must be numbers, separated by commas; '{text}' is none") from None


def change_budget(budget: Budget, rates: str, lam: float, weighting: str) -> Budget:
    """The budget with other learning rates (empty: its own), this lam, and this weighting of sites."""
    tried = tuple(sorted(_number(text, "rates") for text in setup.split_list(rates))) or budget.rates
    require(all(rate > 0 for rate in tried), f"rates must be positive, got {rates}")
    require(lam > 0, f"lam must be positive, got {lam}")
    if weighting not in WEIGHTINGS:
        raise unknown("weighting", weighting, WEIGHTINGS)
    return replace(budget, rates=tried, lams=(lam,), run=(*budget.run, ("weighting", weighting)))


def with_network(task: Task, options: Table) -> Task:
    """The task with these options of its network, and group norm unless they say otherwise."""
    normed = {} if task.data["name"] == "digits" else NORM  # the digits' network has no norm
    return replace(task, network={**normed, **options})

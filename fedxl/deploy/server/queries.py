"""Queries at sites, as the server knows them: how much each site counts, and whose scores of a query meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedxl.data.federation import Weighted
from fedxl.deploy.protocol.query_lists import GRADES
from fedxl.deploy.server.directory import SiteFacts
from fedxl.engine.drawing import PoolDraws
from fedxl.engine.query_drawing import lags_of, queries_read
from fedxl.errors import RefusedError, require
from fedxl.risks import QueryRisk
from fedxl.risks.queries import gains
from fedxl.sampling import Indices
from fedxl.training.problem import Problem
from fedxl.training.queries import check_ranked, pooled, weigh_counts


def check_queries(problem: Problem, facts: Mapping[str, SiteFacts], secure: bool = False) -> None:
    """One line unless all sites have queries if the risk ranks within them, or none has any.

    secure: whether the server sees sums of updates only.
    """
    told = "secure sums need draws that the server cannot know, and scores of one query meet by draws that it knows"
    require(not (secure and pooled(problem)), f"{told}; use local_pair, or set secure = false")
    for name, each in facts.items():
        check_ranked(problem, each.queries is not None, f"the data of {name}")
        told = f"{name} does not tell which queries it holds, so scores of one query cannot meet"
        right = "its site.toml must say queries = true and private_draws = false, or use local_pair"
        require(bool(each.lists) or not pooled(problem), f"{told}; {right}")


def weigh_sites(problem: Problem, facts: Sequence[SiteFacts]) -> Weighted:
    """How much sites count that each rank their own items: by their queries with a relevant item."""
    counts = [each.queries or 0 for each in facts]
    return weigh_counts(problem, counts, counts, sum(counts))


class QueryBook:
    """All sites' queries, where scores of one query meet in the pool."""

    def __init__(self, problem: Problem, facts: Sequence[SiteFacts], secret: int = 0) -> None:
        """secret: the seed of what sites read of the pool; 0: the run's."""
        risk = problem.risk
        assert isinstance(risk, QueryRisk)
        self.problem, self.secret = problem, secret
        told = [each.query_lists() for each in facts]
        self.names = [torch.tensor(lists.names) for lists in told]
        self.counts = [torch.from_numpy(lists.table()) for lists in told]
        whole: dict[int, Tensor] = {}
        for names, counts in zip(self.names, self.counts, strict=True):
            for name, count in zip(names.tolist(), counts, strict=True):
                whole[name] = whole.get(name, 0) + count
        grades = torch.arange(GRADES)
        known = {name: torch.stack(risk.totals(grades.repeat_interleave(count))) for name, count in whole.items()}
        self.totals = [torch.stack([known[name] for name in names.tolist()]) for names in self.names]  # [Q, 3]
        self.distinct = sum(bool(total[0]) for total in known.values())

    def weigh(self) -> Weighted:
        """How much sites count: by their queries that hold a relevant item anywhere."""
        second = [int((totals[:, 0] > 0).sum()) for totals in self.totals]
        some = [bool(counts[:, 1:].any()) for counts in self.counts]
        first = [count if relevant else 0 for count, relevant in zip(second, some, strict=True)]
        return weigh_counts(self.problem, first, second, self.distinct)

    def read(self, number: int, visits: int) -> Indices:
        """Which of its queries a site reads in a round, by the run's seed: [K * Q]."""
        usable = np.flatnonzero(self.totals[number][:, 0].numpy() > 0)
        if not len(usable):
            usable = np.arange(len(self.names[number]))  # it reads them with factors of 0
        schedule = self.problem.schedule
        drawn = queries_read(schedule, self.problem.reading, schedule.seed, number, visits, len(usable))
        return usable[drawn]

    def lags(self, number: int, round: int, visits: int, pool: PoolDraws) -> tuple[Indices, Indices]:
        """Which entries of the pool a site reads, as the simulator draws them."""
        blocks = self.names[number].numpy()[self.read(number, visits)]
        return lags_of(self.problem.schedule, self.problem.reading, blocks, number, round, pool, self.secret)

    def check(self, number: int, visits: int, update: Any) -> None:
        """RefusedError unless a site's scores are of the queries that it reads, with constants of items it has."""
        blocks, (_, _, size1, size2, _, queries) = torch.from_numpy(self.read(number, visits)), self.problem.reading
        first, second = (blocks.repeat_interleave(size // queries) for size in (size1, size2))
        names, totals, counts = self.names[number], self.totals[number], self.counts[number]
        if not torch.equal(update.first.query, names[first]) or not torch.equal(update.second.query, names[second]):
            raise RefusedError("its scores are of other queries than those that it reads")
        relevant, size, ideal = totals.unbind(-1)
        part1 = counts[:, 1:].sum(1) / relevant.clamp(min=1)
        part2 = torch.where(relevant > 0, counts.sum(1) / size, 0.0)
        dtype, heavy = update.first.weight.dtype, update.first.weight > 0
        if not torch.equal(update.second.weight, part2.to(dtype)[second]) or not torch.equal(
            update.first.weight[heavy], part1.to(dtype)[first][heavy]
        ):
            raise RefusedError("its scores do not weigh what its part of their queries does")
        weight = relevant[:, None] * gains(torch.arange(GRADES)) / ideal[:, None]  # [Q, grades]
        weight = torch.where(counts > 0, weight, torch.nan).to(dtype)[first]
        found = update.first.constants[heavy]
        known = (found[:, :1] == weight[heavy]).any(1) & (found[:, 1] == size.to(dtype)[first][heavy])
        if not bool(known.all()):
            raise RefusedError("the constants of its items are those of no item that it holds")

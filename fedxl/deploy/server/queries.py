"""Queries at sites, as the server knows them: how much each site counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedxl.data.federation import Weighted
from fedxl.deploy.server.directory import SiteFacts
from fedxl.errors import require
from fedxl.training.problem import Problem
from fedxl.training.queries import check_ranked, weigh_counts


def check_queries(problem: Problem, facts: Mapping[str, SiteFacts]) -> None:
    """One line unless all sites have queries if the risk ranks within them, or none has any."""
    for name, each in facts.items():
        check_ranked(problem, each.queries is not None, f"the data of {name}")
    pooled = problem.reading.queries and not problem.algorithm.local_pairs
    told = "scores of one query cannot meet across real sites yet"
    require(not pooled, f"{told}: use local_pair, which ranks each site's items, or simulate it (fedxl train)")


def weigh_sites(problem: Problem, facts: Sequence[SiteFacts]) -> Weighted:
    """How much sites count that each rank their own items: by their queries with a relevant item."""
    counts = [each.queries or 0 for each in facts]
    return weigh_counts(problem, counts, counts, sum(counts))

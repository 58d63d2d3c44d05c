"""Whether model, risk and data agree on queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedxl.algorithms.optional import regresses_grades
from fedxl.data.federation import Federation, Split, Weighted, weigh
from fedxl.data.queries import item_table, queries_of, query_counts, usable_queries
from fedxl.data.source import Source
from fedxl.errors import require
from fedxl.risks import QueryRisk
from fedxl.training.problem import Problem


def check_queries(problem: Problem, source: Source, pairs: Mapping[str, Any]) -> None:
    """One line if the risk needs queries that the data do not have, or the data have grades that nothing can use."""
    check_ranked(problem, queries_of(source) is not None)
    check_held_back(problem, pairs)


def check_held_back(problem: Problem, pairs: Mapping[str, Any]) -> None:
    """One line if the risk needs queries that data to evaluate on do not name."""
    for name, pair in pairs.items() if problem.risk.queries else ():
        known = pair is None or (isinstance(pair, Split) and pair.queries is not None)
        require(known, f"{name} must name the query of each item, as the training data do")


def check_ranked(problem: Problem, known: bool, whose: str = "the data") -> None:
    """One line unless data and risk both know queries, or neither does, and the algorithm ranks within them."""
    risk = problem.risk
    if not risk.queries:
        told = f"{whose} are items of queries with grades; use a risk of queries: ndcg or listwise"
        require(not known, told)
        return
    told = f"the risk {risk} ranks items within queries, and {whose} name none"
    require(known, f"{told}: give the query of each item (fedxl.from_queries, or query in [data])")
    some = bool(problem.reading.queries > 0 or regresses_grades(problem.algorithm))
    told = f"{type(problem.algorithm).__name__} does not rank items within queries"
    require(some, f"{told}: use FeDXL2 (fedxl2), LocalPair, SOX, or LocalSGD with loss = 'squared' for grades")


def weigh_queries(problem: Problem, federation: Federation) -> Weighted:
    """How much the clients of a federation count, by their queries."""
    risk = problem.risk
    assert isinstance(risk, QueryRisk)
    items = item_table(risk, federation, problem.algorithm.local_pairs)
    distinct = len(np.unique(np.concatenate(usable_queries(federation, items))))
    return weigh_counts(problem, *query_counts(federation, items), distinct)


def weigh_counts(problem: Problem, first: Sequence[int], second: Sequence[int], distinct: int) -> Weighted:
    """Clients count by their queries. Factors are multiplied by the number of clients that hold a query, on average.

    So the average over all clients is the gradient of the whole risk (docs/maths.md), not a fraction of it.

    first, second: the queries of each client that count on either side. distinct: different ones, of all clients.
    """
    run = problem.settings
    told = "risks of queries weigh clients by their queries, and know uniform cohorts alone; leave participation out"
    require(run.participation == "uniform", told)
    weighted = weigh(first, second, run.weighting, run.cohort)
    if problem.algorithm.local_pairs:
        return weighted
    several = sum(second) / max(1, distinct)
    share = weighted.shares
    return weighted._replace(shares=share._replace(first=share.first * several, second=share.second * several))


def pooled(problem: Problem) -> bool:
    """Whether scores of one query meet across clients."""
    return bool(problem.reading.queries) and not problem.algorithm.local_pairs

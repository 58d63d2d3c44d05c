"""Whether model, risk and data agree on queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedxl.data.federation import Federation, Split, Weighted, weigh
from fedxl.data.queries import item_table, queries_of, query_counts, usable_queries
from fedxl.data.source import Source
from fedxl.errors import require
from fedxl.risks import QueryRisk
from fedxl.training.problem import Problem


def check_queries(problem: Problem, source: Source, pairs: Mapping[str, Any]) -> None:
    """One line if the risk needs queries that the data do not have, or the data have grades that nothing can use."""
    risk, queries = problem.risk, queries_of(source)
    if not risk.queries:
        told = "the data are items of queries with grades; use a risk of queries: ndcg or listwise"
        require(queries is None, told)
        return
    told = f"the risk {risk} ranks items within queries, and the data name none"
    require(queries is not None, f"{told}: give the query of each item (fedxl.from_queries, or query in [data])")
    for name, pair in pairs.items():
        known = pair is None or (isinstance(pair, Split) and pair.queries is not None)
        require(known, f"{name} must name the query of each item, as the training data do")
    some = bool((problem.reading.queries > 0) | (getattr(problem.algorithm, "loss", "") == "squared"))
    told = f"{type(problem.algorithm).__name__} does not rank items within queries"
    require(some, f"{told}: use FeDXL2 (fedxl2), LocalPair, SOX, or LocalSGD with loss = 'squared' for grades")


def weigh_queries(problem: Problem, federation: Federation) -> Weighted:
    """Clients count by their queries. Factors are multiplied by the number of clients that hold a query, on average.

    So the average over all clients is the gradient of the whole risk (docs/maths.md), not a fraction of it.
    """
    risk, run = problem.risk, problem.settings
    told = "risks of queries weigh clients by their queries, and know uniform cohorts alone; leave participation out"
    require(run.participation == "uniform", told)
    assert isinstance(risk, QueryRisk)
    items = item_table(risk, federation, problem.algorithm.local_pairs)
    first, second = query_counts(federation, items)
    weighted = weigh(first, second, run.weighting, run.cohort)
    if problem.algorithm.local_pairs:
        return weighted
    several = sum(second) / max(1, len(np.unique(np.concatenate(usable_queries(federation, items)))))
    share = weighted.shares
    return weighted._replace(shares=share._replace(first=share.first * several, second=share.second * several))

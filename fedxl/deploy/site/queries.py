"""A site's part where scores of one query meet: what it allows, and what the server tells of its queries."""

from __future__ import annotations

import torch
from torch import Tensor

from fedxl.algorithms.protocol import Items
from fedxl.data.queries import items_among, queries_of
from fedxl.data.source import Source
from fedxl.deploy.protocol.query_lists import QueryLists
from fedxl.deploy.provision.settings import SiteFile
from fedxl.deploy.site import cache
from fedxl.errors import RefusedError, require
from fedxl.training.problem import Problem
from fedxl.training.queries import pooled


def require_queries(site: SiteFile, problem: Problem) -> None:
    """Refuse a run whose uploads name queries, unless site.toml allows it."""
    told = "this site does not tell which queries it holds, and this run pools scores with their queries"
    require(site.settings.queries or not pooled(problem), f"{told}; use local_pair, or set queries = true in [site]")


def totals_like(problem: Problem, source: Source) -> Tensor | tuple[()]:
    """The form of what a server tells of this site's queries: what all sites together hold of each."""
    queries = queries_of(source)
    if queries is None or not pooled(problem):
        return ()
    return torch.zeros(len(torch.unique(queries)), 3, dtype=torch.float64)


def known_items(site: SiteFile, problem: Problem, source: Source, totals: Tensor | tuple[()]) -> Items | None:
    """What is known of its items, if others hold items of the same queries; None: its lists are its own."""
    queries = queries_of(source)
    if not isinstance(totals, Tensor) or queries is None:
        return None
    names = cache.query_names(site)
    check_totals(totals, QueryLists.of(source.labels, queries, names))
    return items_among(source.labels, queries, names, totals)


def check_totals(totals: Tensor, own: QueryLists) -> None:
    """RefusedError for totals that this site's own items contradict."""
    counts = torch.from_numpy(own.table())
    relevant, size, ideal = totals.unbind(-1)
    enough = (relevant >= counts[:, 1:].sum(1)) & (size >= counts.sum(1)) & (size >= relevant)
    if not bool((enough & ((ideal > 0) | (relevant == 0))).all()):
        raise RefusedError("what it tells of all sites' queries cannot be true of this site's")

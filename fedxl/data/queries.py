"""Items of queries: what a search returned, with a grade of relevance each. Who holds them, what is known of each.

A query's items may lie at one client or at several: a query has the same number wherever it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedxl.algorithms.protocol import Items
from fedxl.data.feature_forms import features
from fedxl.data.federation import Federation, Split, Splits
from fedxl.data.label_forms import as_array
from fedxl.data.source import Source, TensorSource, checked_tensors
from fedxl.errors import kind_of, require
from fedxl.risks import QueryRisk
from fedxl.risks.queries import HIGHEST_GRADE, gains
from fedxl.sampling import Indices

Ranked = tuple[Any, Any, Any]  # examples, grades, queries


def from_queries(
    clients: Mapping[str, Ranked] | Sequence[Ranked], validation: Ranked | None = None, test: Ranked | None = None
) -> Splits:
    """The clients of a federation that ranks items within queries: what `fit` takes.

    Args:
        clients: Each has triples (x, grades, queries), in a list or by the clients' names: rows of features, grades
            of relevance (0: not relevant, 1, 2, ...), and the query of each row, a whole number. Rows of one query
            may lie at several clients.
        validation: Such a triple to choose the best round on.
        test: Such a triple to evaluate the chosen model on.
    """
    names = tuple(map(str, clients)) if isinstance(clients, Mapping) else ()
    each = list(clients.values()) if isinstance(clients, Mapping) else list(clients)
    require(len(each) > 0, "a federation needs at least one client")
    held = [ranked(client, names[at] if names else f"client {at}") for at, client in enumerate(each)]
    shapes = {tuple(source.x.shape[1:]) for source in held}
    require(len(shapes) == 1, f"clients hold examples of different shapes: {sorted(map(list, shapes))}")
    ends = np.cumsum([len(source) for source in held])
    parts = [np.arange(end - len(source), end) for source, end in zip(held, ends, strict=True)]
    x, labels, queries = (
        torch.cat([getattr(source, leaf) for source in held]) for leaf in ("x", "labels", "queries")
    )
    train = Federation(TensorSource(x, labels, queries=queries), parts)
    return Splits(train, query_split(validation, "validation"), query_split(test, "test"), names)


def query_split(data: Ranked | None, where: str) -> Split | None:
    """Items to evaluate on."""
    if data is None:
        return None
    source = ranked(data, where)
    return Split(source.x, source.labels, queries=source.queries)


def ranked(data: Any, where: str) -> TensorSource:
    """Checked examples with their grades and queries."""
    right = isinstance(data, (tuple, list)) and len(data) == 3
    require(right, f"{where} must be a triple (x, grades, queries), not {kind_of(data)}")
    x, grades, queries = data
    found, graded = features(x, where).x, whole(grades, f"{where}: grades")
    return with_queries(
        checked_tensors(found, (graded > 0).astype(np.int64), where), graded, whole(queries, where), where
    )


def with_queries(source: TensorSource, grades: Any, queries: Any, where: str) -> TensorSource:
    """A source whose labels are grades, with the query of each example."""
    grades, queries = (torch.as_tensor(values, dtype=torch.int64) for values in (grades, queries))
    require(len(queries) == len(source), f"{where}: {len(source)} examples but {len(queries)} queries")
    low, high = int(grades.min()), int(grades.max())
    require(
        low >= 0 and high <= HIGHEST_GRADE,
        f"{where}: grades lie between 0 and {HIGHEST_GRADE}, found {low} to {high}",
    )
    return replace(source, labels=grades, queries=queries)


def whole(values: Any, where: str) -> np.ndarray:
    """Whole numbers, one for each example."""
    array = as_array(values, where)
    plain = array.ndim == 1 and array.dtype.kind in "biuf"
    require(plain, f"{where} must be whole numbers, one for each example")
    exact = array.dtype.kind != "f" or bool(np.isfinite(array).all() and (array == np.floor(array)).all())
    require(exact, f"{where} must be whole numbers, found others")
    return np.asarray(array, np.int64)


def queries_of(source: Source) -> Tensor | None:
    """The query of each example; None: the source knows none."""
    return getattr(source, "queries", None)


def count_relevant(grades: Tensor, queries: Tensor) -> int:
    """How many queries hold a relevant item."""
    return len(torch.unique(queries[grades > 0]))


def item_table(risk: QueryRisk, federation: Federation, own_lists: bool) -> Items:
    """What is known of every example of the source. Examples that nobody holds have parts of 0.

    own_lists: whether a query's items at one client are a list of their own, as for methods with local pairs alone.
    """
    source, holder = federation.source, holders(federation)
    queries = queries_of(source)
    assert queries is not None
    grades, query = source.labels.cpu(), queries.cpu()
    held = torch.from_numpy(holder >= 0)
    # Numbered anew: a query of one client, or of all.
    mine = torch.unique(torch.stack((query, torch.from_numpy(holder)), -1), dim=0, return_inverse=True)[1]
    lists = mine if own_lists else torch.unique(query, return_inverse=True)[1]
    items = risk.constants(torch.where(held, grades, 0), torch.where(held, lists, -1))
    relevant = (grades > 0) & held
    ours1, whole1 = (_counted(keys, relevant) for keys in (mine, lists))
    ours2, whole2 = (_counted(keys, held) for keys in (mine, lists))
    # A list without any relevant item has no gradient.
    part1 = ours1 / whole1.clamp(min=1)
    part2 = torch.where((whole1 > 0) & held, ours2 / whole2.clamp(min=1), 0.0)
    return Items(query, items.weight, items.size, torch.where(held, part1, 0.0), part2)


def items_among(grades: Tensor, query: Tensor, names: Tensor, totals: Tensor) -> Items:
    """The same for one client, where others hold items of its queries, too.

    names, totals: of the client's queries in ascending order, the number that all clients know each by [Q], and
    relevant, size and ideal of all its items [Q, 3] (`QueryTotals`).
    """
    which = torch.unique(query, return_inverse=True)[1]
    relevant, size, ideal = totals[which].unbind(-1)
    weight = torch.where(relevant > 0, relevant * gains(grades) / ideal, 0.0)
    ours1, ours2 = (_counted(which, some) for some in (grades > 0, torch.ones_like(grades)))
    part2 = torch.where(relevant > 0, ours2 / size, 0.0)
    return Items(names[which], weight, size, ours1 / relevant.clamp(min=1), part2)


def _counted(keys: Tensor, which: Tensor) -> Tensor:
    """For every example, how many of its key there are among some."""
    return torch.bincount(keys, weights=which.double(), minlength=int(keys.max()) + 1)[keys]


def holders(federation: Federation) -> Indices:
    """The client that holds each example of the source; -1: nobody."""
    found = np.full(len(federation.source.labels), -1, np.int64)
    for client, part in enumerate(federation.parts):
        found[part] = client
    return found


def usable_queries(federation: Federation, items: Items) -> list[Indices]:
    """For each client, the numbers of the queries that it can learn from, in ascending order."""
    query, part = items.query.numpy(), items.part2.numpy()
    return [np.unique(query[held[part[held] > 0]]) for held in federation.parts]


def query_counts(federation: Federation, items: Items) -> tuple[list[int], list[int]]:
    """How many queries each client holds, as S1 (0 if it holds no relevant item) and as S2: what it counts by."""
    counts = [len(queries) for queries in usable_queries(federation, items)]
    relevant = [bool((items.part1.numpy()[held] > 0).any()) for held in federation.parts]
    return [count if some else 0 for count, some in zip(counts, relevant, strict=True)], counts

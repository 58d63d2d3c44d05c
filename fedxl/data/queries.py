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

from fedxl.data.feature_forms import features
from fedxl.data.federation import Federation, Split, Splits
from fedxl.data.label_forms import as_array
from fedxl.data.source import TensorSource, checked_tensors
from fedxl.errors import kind_of, require
from fedxl.risks.ranking import HIGHEST_GRADE

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


def count_relevant(grades: Tensor, queries: Tensor) -> int:
    """How many queries hold a relevant item."""
    return len(torch.unique(queries[grades > 0]))

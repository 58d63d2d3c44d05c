"""What a site tells of its queries in its hello: how many it can learn from and, if it may, the items of each."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedxl.deploy.protocol.envelope import whole
from fedxl.errors import RefusedError, require
from fedxl.risks.queries import HIGHEST_GRADE

LONGEST = 2**20  # characters of all lists of a site
GRADES = HIGHEST_GRADE + 1


def relevant_queries(told: Any, positives: int) -> int:
    """How many queries hold a relevant item, as a site says that has so many relevant items."""
    count = whole(told, "number of queries")
    if not min(1, positives) <= count <= positives:
        raise RefusedError(f"it reports {count} queries with a relevant item, and {positives} relevant items")
    return count


class QueryLists(NamedTuple):
    """A site's queries, in the order in which it numbers them itself."""

    names: tuple[int, ...]  # by which all sites know them
    grades: tuple[tuple[int, ...], ...]  # of each, how many items have grade 0, 1, ..., up to the highest there is

    @classmethod
    def of(cls, grades: Tensor, query: Tensor, names: Tensor) -> QueryLists:
        """names: of the queries, in ascending order."""
        which = torch.unique(query, return_inverse=True)[1]
        counts = torch.bincount(which * GRADES + grades, minlength=len(names) * GRADES).view(-1, GRADES).tolist()
        return cls(tuple(names.tolist()), tuple(map(_without_end, counts)))

    def to_text(self) -> str:
        text = json.dumps(self._asdict(), separators=(",", ":"))
        told = f"a list of {len(self.names):,} queries has {len(text):,} characters"
        require(len(text) <= LONGEST, f"{told}, and at most {LONGEST:,} are sent; hold fewer, or set queries = false")
        return text

    @classmethod
    def from_text(cls, text: str, positives: int, negatives: int, relevant: int) -> QueryLists:
        """What a site sent; RefusedError if it cannot be true of a site with these counts."""
        try:
            found: Any = json.loads(text) if len(text) <= LONGEST else None
            names, grades = found["names"], found["grades"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RefusedError("its queries cannot be read") from None
        lists = (
            isinstance(names, list) and isinstance(grades, list) and all(isinstance(each, list) for each in grades)
        )
        if not lists or len(names) != len(grades) or set(found) != set(cls._fields):
            raise RefusedError("its queries are not a name and a list of counts each")
        if not all(_count(name) and name < 2**63 for name in names) or len(set(names)) != len(names):
            raise RefusedError("the names of its queries are not different whole numbers")
        if not all(1 <= len(each) <= GRADES and all(map(_count, each)) and each[-1] for each in grades):
            raise RefusedError("the items of its queries are not counts by grade")
        counts = sum(sum(each[1:]) for each in grades), sum(each[0] for each in grades)
        if counts != (positives, negatives) or sum(len(each) > 1 for each in grades) != relevant:
            raise RefusedError("its queries do not hold as many items as it reports")
        return cls(tuple(names), tuple(map(tuple, grades)))

    def table(self) -> np.ndarray:
        """Items by query and grade [Q, grades]."""
        rows = [np.pad(np.array(each, np.int64), (0, GRADES - len(each))) for each in self.grades]
        return np.stack(rows)


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _without_end(counts: list[int]) -> tuple[int, ...]:
    """Without the zeros of grades above the highest."""
    last = max(grade for grade, count in enumerate(counts) if count)
    return tuple(counts[: last + 1])

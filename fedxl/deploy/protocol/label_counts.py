"""What a site tells in its hello of several labels, and of queries: how many examples or lists there are."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedxl.data.federation import Federation
from fedxl.deploy.protocol.envelope import whole
from fedxl.errors import RefusedError
from fedxl.risks.pairing import Side
from fedxl.risks.several import MOST_LABELS

KINDS: tuple[Side, ...] = ("positive", "negative")


class LabelCounts(NamedTuple):
    """Examples of a site by label."""

    positive: tuple[int, ...]
    negative: tuple[int, ...]

    @classmethod
    def of(cls, federation: Federation) -> LabelCounts:
        """Those of the only client of a federation."""
        return cls(*(tuple(counts) for counts in federation.holdings()[0].label_counts.tolist()))

    def to_text(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_text(cls, text: str, examples: int) -> LabelCounts:
        """What a site sent; RefusedError if it cannot be true of so many examples."""
        try:
            found: Any = json.loads(text)
            each = [found[side] for side in KINDS]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RefusedError("its counts by label cannot be read") from None
        lists = all(isinstance(counts, list) and 1 <= len(counts) <= MOST_LABELS for counts in each)
        if not lists or len(each[0]) != len(each[1]) or set(found) != set(KINDS):
            raise RefusedError("its counts by label are not two lists of one length")
        for pair in zip(*each, strict=True):
            right = all(type(count) is int and count >= 0 for count in pair)
            if not right or sum(pair) > examples:
                raise RefusedError(f"its counts by label are not those of {examples} examples")
        return cls(*(tuple(counts) for counts in each))

    def side(self, side: Side) -> npt.NDArray[np.int64]:
        """[L]"""
        positive, negative = (np.array(counts, np.int64) for counts in self)
        return {"positive": positive, "negative": negative, "all": positive + negative}[side]


def relevant_queries(told: Any, positives: int) -> int:
    """How many queries hold a relevant item, as a site says that has so many relevant items."""
    count = whole(told, "number of queries")
    if not min(1, positives) <= count <= positives:
        raise RefusedError(f"it reports {count} queries with a relevant item, and {positives} relevant items")
    return count

"""What a site tells of its queries in its hello: how many it can learn from."""

from __future__ import annotations

from typing import Any

from fedxl.deploy.protocol.envelope import whole
from fedxl.errors import RefusedError


def relevant_queries(told: Any, positives: int) -> int:
    """How many queries hold a relevant item, as a site says that has so many relevant items."""
    count = whole(told, "number of queries")
    if not min(1, positives) <= count <= positives:
        raise RefusedError(f"it reports {count} queries with a relevant item, and {positives} relevant items")
    return count

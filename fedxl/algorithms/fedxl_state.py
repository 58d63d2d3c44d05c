"""What FeDXL's server keeps, and what its clients send."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from fedxl.algorithms.optimisers import Moments
from fedxl.algorithms.pool import (
    Pool,
    S1Scores,
    S2Scores,
)
from fedxl.algorithms.protocol import Share
from fedxl.algorithms.worst_site import RiskLevel
from fedxl.models import Weights

# u that the server computes are estimated against so many pooled b. All pairs of a large pool would take too long.
MOST_COMPARED = 1024
# Whose u the pool holds. clients: running estimates, as in the paper. server: estimates from the pooled scores alone.
PoolU = Literal["clients", "server"]


class FeDXLServer(NamedTuple):
    weights: Weights
    G: dict[str, Tensor]
    pool: Pool
    step: Tensor  # local steps since the beginning
    norms: Tensor | tuple[()] = ()  # usual norms of clients' changes, where they are clipped
    worst: RiskLevel | tuple[()] = ()  # the level of clients' own risks, where these count (`worst_site.py`)
    moments: Moments | tuple[()] = ()  # of the server's momentum or Adam
    threshold: Tensor | tuple[()] = ()  # of f in the pool, where a share of S1 counts; NaN: the pool holds no S1


class FeDXLUpdate(NamedTuple):
    weights: Weights
    G: dict[str, Tensor]
    first: S1Scores
    second: S2Scores
    share: Share
    steps: Tensor
    risk: Tensor | tuple[()] = ()  # its own, where that counts

"""FeDXL's round 0, which fills the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms.compositional import ClientEstimates, PairWork, ScoreTrace, sides
from fedxl.algorithms.fedxl_state import FeDXLServer, FeDXLUpdate
from fedxl.algorithms.private import (
    Noise,
    one_by_one,
)
from fedxl.algorithms.protocol import Assignment, Batch, PoolWeights, Reading, Share
from fedxl.errors import RefusedError
from fedxl.models import Score

if TYPE_CHECKING:
    from fedxl.algorithms.fedxl import FeDXL2


class WarmUp:
    """The warm-up round: clients score their batches with the initial weights, and the server pools the scores.

    The server computes the pool's first u from the pooled scores alone. So a client with one class contributes to the
    pool from the beginning.
    """

    name = "warm-up"
    summed = ()  # weights and G do not move

    def __init__(self, algorithm: FeDXL2) -> None:
        self.of = algorithm

    def pool_weights(self, server: FeDXLServer) -> PoolWeights | None:
        return None

    def passive(self, server: FeDXLServer, lag1: Tensor, lag2: Tensor) -> tuple[()]:
        return ()

    def downlink(self, server: FeDXLServer) -> FeDXLServer:
        return self.of.downlink(server)

    def start(self, server: FeDXLServer, client: ClientEstimates, share: Share) -> PairWork:
        # The sides that the client holds count, whatever the pool holds: it is about to be filled.
        return self.of.begin(server, client, share, torch.stack((share.first, share.second)))

    def step(self, score: Score, server: FeDXLServer, work: PairWork, batch: Batch) -> tuple[PairWork, ScoreTrace]:
        h, _ = (one_by_one(score) if self.of.private else score)(work.weights, batch.x)
        a, b, y = sides(self.of.linked(h, batch.y, batch.rows, work), batch.y, batch.rows)
        u = work.u[batch.rows]
        # Of queries, an unknown u would keep its item out of the pool.
        u = torch.zeros_like(u) if self.of.risk.queries else u
        return work, self.of.disclosed(ScoreTrace(a, u, b, y, batch.items), batch)

    def noise_like(self, server: FeDXLServer, reading: Reading) -> Noise | tuple[()]:
        """Of scores alone: there is no gradient yet."""
        noise = self.of.noise_like(server, reading)
        return noise._replace(gradient={}) if isinstance(noise, Noise) else noise

    def finish(
        self, server: FeDXLServer, share: Share, work: PairWork, trace: ScoreTrace
    ) -> tuple[ClientEstimates, FeDXLUpdate]:
        return self.of.finish(server, share, work, trace)

    def update_like(self, server: FeDXLServer, assignment: Assignment) -> FeDXLUpdate:
        return self.of.update_like(server, assignment)

    def aggregate(self, server: FeDXLServer, updates: FeDXLUpdate) -> FeDXLServer:
        pool = self.of.judged(server.pool, self.of.merge(server.pool, updates))
        return server._replace(pool=pool, threshold=self.of.share_threshold(pool))

    def check_update(self, server: FeDXLServer, update: FeDXLUpdate, assignment: Assignment) -> dict[str, Tensor]:
        sent, mine = (tree.leaves((state.weights.params, state.G)) for state in (server, update))
        if not all(map(torch.equal, sent, mine)):
            raise RefusedError("it changes weights or G in the warm-up round, which only scores")
        # Their u are still unknown: the server computes the first ones itself.
        return self.of.check_scores(update, assignment, with_u=False)

    def check_server(self, server: FeDXLServer) -> None:
        self.of.check_server(server)

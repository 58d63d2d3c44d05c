"""FeDXL (Guo, Jin, Luo, Yang. Provable Federated Learning for Deep X-Risk Optimization. ICML 2023), its Algorithms.

Each step pairs the client's own examples (active, they carry gradient) with scores that others computed in the last
round (passive, numbers from the pool):

    u_i <- (1 - gamma) u_i + gamma g_i            g_i: active a_i against passive b
    G   <- (1 - beta) G + beta (G1 + G2)          G1: active a, passive b, u just updated
    w   <- w - eta G                              G2: passive a with its passive u, active b
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithm import Batch, Descent, Fresh, PoolWeights, Reading, Share, average
from fedxl.algorithms.pool import Firsts, Passive, Pool, Seconds, empty, merge, spread, thin
from fedxl.errors import require
from fedxl.models import Weights
from fedxl.risk import XRisk

# Against so many pooled b the first u of a pool are estimated; all pairs of a large pool would take for ever.
FIRST_ESTIMATE = 1024


class Server(NamedTuple):
    weights: Weights
    G: dict[str, Tensor]
    pool: Pool
    step: Tensor  # local steps since the beginning


class Client(NamedTuple):
    u: Tensor  # [n1, *m] running inner estimates; NaN: never visited
    buffers: dict[str, Tensor]  # its own, where buffers stay local


class Work(NamedTuple):
    weights: Weights
    G: dict[str, Tensor]
    u: Tensor
    step: Tensor
    factors: Tensor  # [2] of G1 and G2: 0 where a side of the client or of the pool is empty


class Trace(NamedTuple):
    a: Tensor  # [B1, *d]
    u: Tensor  # [B1, *m]
    b: Tensor  # [B2, *d]
    y: Tensor  # [B2]


class Update(NamedTuple):
    weights: Weights
    G: dict[str, Tensor]
    first: Firsts
    second: Seconds
    share: Share
    steps: Tensor


def sides(h: Tensor, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [B1 + B2, *d] as those of S1 and those of S2, and S2's labels."""
    size1 = rows.shape[0]
    return h[:size1], h[size1:], y[size1:]


@dataclass(frozen=True, kw_only=True, eq=False)
class FeDXL2(Descent):
    """FeDXL2, for any outer function f: running inner estimates u and a moving-average gradient G."""

    risk: XRisk
    beta: float = 0.1  # weight of the new gradient in G
    gamma: float = 0.1  # weight of the new inner estimate in u
    pool_rounds: int = 1  # how many rounds of scores the pool keeps
    uploads: int = 0  # scores a client uploads per side and round; 0: all K * B of them
    fresh: bool = False  # pool the scores of fresh points (z-hat, an extra forward) instead of the batch's

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.beta <= 1, f"beta must lie in (0, 1], got {self.beta}")
        require(0 < self.gamma <= 1, f"gamma must lie in (0, 1], got {self.gamma}")
        require(self.pool_rounds >= 1, f"pool_rounds must be at least 1, got {self.pool_rounds}")
        require(self.uploads >= 0, f"uploads must not be negative (0: all), got {self.uploads}")

    @property
    def prelude(self) -> FillPool | None:
        return FillPool(self)

    def reading(self, batch1: int, batch2: int) -> Reading:
        return Reading(*self.risk.sides, batch1, batch2, self.fresh)

    def pool_weights(self, server: Server) -> PoolWeights | None:
        return server.pool.weights()

    def passive(self, server: Server, lag1: Tensor, lag2: Tensor) -> Passive | tuple[()]:
        return server.pool.take(lag1, lag2)

    def init(self, weights: Weights) -> Server:
        like = next(iter(weights.params.values()))
        step = torch.zeros((), dtype=torch.int64, device=like.device)
        return Server(weights, tree.map(torch.zeros_like, weights.params), empty(self.risk, like), step)

    def init_client(self, server: Server, num_rows: int) -> Client:
        like = server.pool.first.u
        u = like.new_full((max(1, num_rows), *self.risk.inner_shape), float("nan"))
        return Client(u, self.own_buffers(server.weights.buffers))

    def start(self, server: Server, client: Client, share: Share) -> Work:
        weights = server.weights._replace(buffers=client.buffers or server.weights.buffers)
        return Work(weights, server.G, client.u, server.step, self.factors(server, share))

    def factors(self, server: Server, share: Share) -> Tensor:
        some_a, some_b = server.pool.ready()
        return torch.stack((share.first * some_b, share.second * some_a))

    def step(self, server: Server, work: Work, batch: Batch) -> tuple[Work, Trace]:
        before = work.u[batch.rows]

        def scores(params: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            h, buffers = self.score(work.weights._replace(params=params), batch.x)
            return self.risk.link(h), buffers

        scored: Any = torch.func.vjp(scores, work.weights.params, has_aux=True)
        h, back, buffers = scored
        a, b, y = sides(h, batch.y, batch.rows)
        da, db, u = self.pull(batch.passive, work.factors, a, b, y, before)
        (gradient,) = back(torch.cat((da, db)))
        trace = Trace(a, u, b, y)
        G = tree.map(lambda old, new: torch.lerp(old, new, self.beta), work.G, gradient)
        params = self.descend(work.weights.params, G, work.step)
        u = work.u if self.risk.linear else self.remember(work, batch.rows, before, u)
        if self.fresh:
            trace = self.score_fresh(work._replace(u=u), batch)
        return work._replace(weights=Weights(params, buffers), G=G, u=u, step=work.step + 1), trace

    def remember(self, work: Work, rows: Tensor, before: Tensor, u: Tensor) -> Tensor:
        """u with the batch's new estimates, unless they are of stand-ins: no S1 here, or nothing to pair it with."""
        return work.u.index_put((rows,), torch.where(work.factors[0] > 0, u, before))

    def pull(
        self, passive: Passive, factors: Tensor, a: Tensor, b: Tensor, y: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients by the active scores a (its part of G1) and b (of G2), and the updated u of the former.

        Both halves are one block of pairs, [2, B1, B2]: (active a, passive b) above (passive a, active b).
        """
        l, back = self.risk.pairs(
            torch.stack((a, passive.a)), torch.stack((passive.b, b)), torch.stack((passive.y, y))
        )
        u = before if self.risk.linear else self.risk.blend(before, self.risk.estimate(l[0]), self.gamma)
        weights = self.risk.weights(l, torch.stack((u, passive.u)))
        first, second = back(weights * factors.view(2, *[1] * (l.ndim - 1)))
        return first[0], second[1], u

    def score_fresh(self, work: Work, batch: Batch) -> Trace:
        """Scores of the fresh points, by the model before the step; u of one never visited is its first estimate."""
        assert isinstance(batch.fresh, Fresh)
        x, labels, rows = batch.fresh
        h, _ = self.score(work.weights, x)
        a, b, y = sides(self.risk.link(h), labels, rows)
        u = work.u[rows]
        if not self.risk.linear:
            first = self.risk.estimate(self.risk.pair(a, batch.passive.b, batch.passive.y))
            u = torch.where(u.isnan(), first, u)
        return Trace(a, u, b, y)

    def finish(self, server: Server, share: Share, work: Work, trace: Trace) -> tuple[Client, Update]:
        client = Client(work.u, self.own_buffers(work.weights.buffers))
        first, second = self.upload(trace, share.model * work.factors[0], share.model * share.second)
        return client, Update(work.weights, work.G, first, second, share, work.step - server.step)

    def upload(self, trace: Trace, mass1: Tensor, mass2: Tensor) -> tuple[Firsts, Seconds]:
        """What a client adds to the pool; its mass is spread evenly over its entries."""
        a, u, b, y = (thin(scores, self.uploads) for scores in trace)
        ages = [torch.zeros(len(scores), dtype=torch.int64, device=scores.device) for scores in (a, b)]
        return (
            Firsts(a, u, (mass1 / len(a)).expand(len(a)), ages[0]),
            Seconds(b, y, (mass2 / len(b)).expand(len(b)), ages[1]),
        )

    def aggregate(self, server: Server, updates: Update) -> Server:
        shares = updates.share.model
        return Server(
            weights=average(updates.weights, shares, server.weights),
            G=average(updates.G, shares, server.G),
            pool=self.merge(server.pool, updates),
            step=server.step + updates.steps.max(),
        )

    def merge(self, pool: Pool, updates: Update) -> Pool:
        return Pool(
            merge(pool.first, updates.first, self.pool_rounds),
            merge(pool.second, updates.second, self.pool_rounds),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class FeDXL1(FeDXL2):
    """FeDXL1, for linear f: FeDXL2 with beta = 1, whose u plays no part."""

    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.risk.linear, "fedxl1 is for risks with a linear outer function (auroc); use fedxl2")
        require(self.beta == 1, f"fedxl1 has no moving average: beta must be 1, got {self.beta}; use fedxl2")


class FillPool:
    """Round 0: clients score their batches with the initial weights, and the server pools the scores.

    The pool's first u are computed by the server from the pooled scores alone: so a client with one class has its
    part in the pool from the beginning.
    """

    def __init__(self, algorithm: FeDXL2) -> None:
        self.of = algorithm

    def pool_weights(self, server: Server) -> PoolWeights | None:
        return None

    def passive(self, server: Server, lag1: Tensor, lag2: Tensor) -> tuple[()]:
        return ()

    def start(self, server: Server, client: Client, share: Share) -> Work:
        # The sides that the client holds count, whatever the pool holds: it is about to be filled.
        return self.of.start(server, client, share)._replace(factors=torch.stack((share.first, share.second)))

    def step(self, server: Server, work: Work, batch: Batch) -> tuple[Work, Trace]:
        h, _ = self.of.score(work.weights, batch.x)
        a, b, y = sides(self.of.risk.link(h), batch.y, batch.rows)
        return work, Trace(a, work.u[batch.rows], b, y)

    def finish(self, server: Server, share: Share, work: Work, trace: Trace) -> tuple[Client, Update]:
        return self.of.finish(server, share, work, trace)

    def aggregate(self, server: Server, updates: Update) -> Server:
        first, second = self.of.merge(server.pool, updates)
        if not bool(second.weight.sum() > 0):
            # Without any b there is no u, and an a without its u is of no use.
            return server._replace(pool=Pool(server.pool.first, second))
        if not self.of.risk.linear:
            some = spread(second.weight, FIRST_ESTIMATE)
            first = first._replace(u=self.of.risk.inner(first.a, second.b[some], second.y[some]))
        return server._replace(pool=Pool(first, second))

"""FeDXL (Guo, Jin, Luo, Yang. Provable Federated Learning for Deep X-Risk Optimization. ICML 2023).

Algorithm 1 (FeDXL1, linear f), 2 (FeDXL2, any f) and 3 (partial participation: clients not drawn keep their state).

Each step pairs the client's own examples (active, they carry gradient) with scores that others computed in the last
round (passive, numbers from the pool):

    u_i <- (1 - gamma) u_i + gamma g_i            g_i: active a_i against passive b
    G   <- (1 - beta) G + beta (G1 + G2)          G1: active a, passive b, u just updated
    w   <- w - eta G                              G2: passive a with its passive u, active b
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms import labels, queries
from fedxl.algorithms.compositional import ClientEstimates, PairWork, ScoreTrace, sides
from fedxl.algorithms.estimators import Earlier
from fedxl.algorithms.fedxl_server import PoolServer
from fedxl.algorithms.fedxl_state import FeDXLServer, FeDXLUpdate
from fedxl.algorithms.level import centred, even, pace
from fedxl.algorithms.ordering import sort_rows
from fedxl.algorithms.pool import (
    Passive,
    S1Scores,
    S2Scores,
    empty,
    thin,
)
from fedxl.algorithms.private import (
    Noise,
    blank,
    check_weights,
    noisy_scores,
    one_by_one,
    private_outputs,
)
from fedxl.algorithms.protocol import Batch, DataFacts, Fresh, Items, PoolWeights, Reading, Share
from fedxl.algorithms.warm_up import WarmUp
from fedxl.algorithms.worst_site import RiskLevel, emphasis, unknown_level
from fedxl.errors import require
from fedxl.models import Score, Weights


@dataclass(frozen=True, kw_only=True, eq=False)
class FeDXL2(PoolServer):
    """FeDXL for any outer function (partial AUC, AP, ...), pairs across all clients.

    >>> from fedxl import FeDXL2, partial_auc
    >>> algorithm = FeDXL2(partial_auc(lam=0.5), lr=0.3)
    >>> algorithm.risk, algorithm.lr, algorithm.beta
    (partial_auc(lam=0.5), 0.3, 0.1)
    """

    def with_facts(self, facts: DataFacts) -> FeDXL2:
        """If no client holds both classes, nobody can be lent to, and `auto` lets all train."""
        return self if self.one_class != "auto" or facts.both_classes else replace(self, one_class="train")

    def phase(self, round: int) -> FeDXL2 | WarmUp:  # type: ignore[override]
        return WarmUp(self) if round == 0 else self

    def reading(self, batch1: int, batch2: int) -> Reading:
        return super().reading(batch1, batch2)._replace(fresh=self.fresh)

    def pool_weights(self, server: FeDXLServer) -> PoolWeights:
        return server.pool.weights()

    def passive(self, server: FeDXLServer, lag1: Tensor, lag2: Tensor) -> Passive | queries.QueryPassive:
        return queries.take(server.pool, lag1, lag2) if self.risk.queries else server.pool.take(lag1, lag2)

    def downlink(self, server: FeDXLServer) -> FeDXLServer:
        return super().downlink(server._replace(pool=server.pool.emptied()))

    def init(self, weights: Weights) -> FeDXLServer:
        if self.private:
            check_weights(weights)
        like = next(iter(weights.params.values()))
        step = torch.zeros((), dtype=torch.int64, device=like.device)
        pool = queries.empty_pool(self.risk, like) if self.risk.queries else empty(self.risk, like, self.mix > 0)
        worst = unknown_level(like) if self.worst_site else ()
        threshold = self.share_threshold(pool)
        server = FeDXLServer(weights, self.init_G(weights.params), pool, step, worst=worst, threshold=threshold)
        return self.with_moments(self.with_norms(server))

    def start(self, server: FeDXLServer, client: ClientEstimates, share: Share) -> PairWork:
        some_a, some_b = server.pool.ready()
        first = share.first * some_b
        if isinstance(server.worst, RiskLevel) and isinstance(client.risk, Tensor):
            first = first * emphasis(server.worst, client.risk, share, self.worst_site)
        work = self.begin(server, client, share, torch.stack((first, share.second * some_a)))
        return work._replace(threshold=server.threshold)

    def others(self, passive: Passive, b: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return passive.b, passive.y

    def step(self, score: Score, server: FeDXLServer, work: PairWork, batch: Batch) -> tuple[PairWork, ScoreTrace]:
        after, trace = self.advance(score, work, batch)
        trace = self.score_fresh(score, work, after.u, batch) if self.fresh else trace
        return after, self.disclosed(trace, batch)

    def outputs(self, score: Score, work: PairWork, batch: Batch) -> Any:
        if not self.private:
            return super().outputs(score, work, batch)
        return private_outputs(score, work.weights, batch.x, batch.noise, self.privacy)

    def noise_like(self, server: FeDXLServer, reading: Reading) -> Noise | tuple[()]:
        """The noise that a step adds, where training is private."""
        scores = next(iter(server.weights.params.values())).new_zeros(reading.size1 + reading.size2)
        return Noise(server.weights.params, scores) if self.private else ()

    def disclosed(self, trace: ScoreTrace, batch: Batch) -> ScoreTrace:
        """What a step's scores become before they may leave the client. The server computes u by itself."""
        if not self.private:
            return trace
        first, second = batch.noise.scores.split([len(trace.a), len(trace.b)])
        a, b = (
            noisy_scores(scores, noise, self.privacy, self.risk.score_range)
            for scores, noise in ((trace.a, first), (trace.b, second))
        )
        return trace._replace(a=a, u=torch.zeros_like(trace.u), b=b)

    def pull(
        self, passive: Passive, work: PairWork, a: Tensor, b: Tensor, y: Tensor, before: Tensor,
        earlier: Earlier | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """G1's part by the active a, G2's by the active b.

        Both are one block of pairs, [2, B1, B2]: (active a, passive b) above (passive a, active b). With `mix` the
        client's own pairs, (active a, active b), are a third.
        """
        risk, own = self.risk, self.mix * work.both
        blocks = [(a, passive.b, passive.y), (passive.a, b, y), (a, b, y)][: 3 if self.mix else 2]
        l, back = risk.pairs(*(torch.stack(each) for each in zip(*blocks, strict=True)))
        past = None if earlier is None else self.past_pairs(passive, y, earlier)
        u = before if risk.linear else self.followed(work, before, l[::2], past)  # the pairs of the active a
        estimates = torch.stack((u, passive.u, u)[: len(blocks)])
        force1, force2 = self.forces(work, a, passive.a)
        forces = torch.stack((force1, force2, torch.ones_like(force1))[: len(blocks)])
        threshold = work.threshold if isinstance(work.threshold, Tensor) else None
        weights = risk.weights(l, estimates, passive.u, threshold)
        first, second = back(weights * forces.view(*forces.shape, *[1] * (l.ndim - forces.ndim)))
        da, db = first[0], second[1]
        if self.mix:
            da, db = torch.lerp(da, force1 * first[2], own), torch.lerp(db, force2 * second[2], own)
        return da, db, u

    def mixed(self, work: PairWork, each: list[Tensor]) -> Tensor:
        if len(each) == 1:
            return each[0]
        pooled, own = each
        return torch.where(work.both > 0, self.risk.blend(pooled, own, self.mix), pooled)

    def past_pairs(self, passive: Passive, y: Tensor, earlier: Earlier) -> tuple[Tensor, Tensor]:
        """The pairs of the active a as they were one step before. The passive side has not moved."""
        blocks = [(passive.b, passive.y), (earlier.b, y)][: 2 if self.mix else 1]
        b, classes = (torch.stack(each) for each in zip(*blocks, strict=True))
        return self.risk.losses(earlier.a.expand(len(blocks), *earlier.a.shape), b, classes), earlier.theta

    def pull_queries(
        self, batch: Batch, work: PairWork, a: Tensor, b: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        force1, force2 = self.forces(work, a, batch.passive.a)
        return queries.pooled_pull(self.risk, batch.items, batch.passive, self.gamma, (force1, force2), a, b, before)

    def forces(self, work: PairWork, a: Tensor, passive: Tensor) -> Tensor:
        """What the pulls on S1 and on S2 are multiplied by: the same where there is something to pull on both."""
        if isinstance(work.labels, Tensor):
            lend = self.with_one_class == "lend"
            return labels.forces(self.risk, work.labels, self.level, lend, a, passive)
        if self.level != "even":
            return work.factors
        force = even(work.factors)
        return torch.where(force > 0, force, work.factors)

    def conserved(self, d: Tensor, size1: int, work: PairWork) -> Tensor:
        d = super().conserved(d, size1, work)
        return torch.where(work.both > 0, d, centred(d, size1)) if self.with_one_class == "centre" else d

    def paced(
        self, G: dict[str, Tensor], gradient: dict[str, Tensor], d: Tensor, work: PairWork
    ) -> tuple[Tensor | None, Tensor]:
        """Whole steps at a client with both classes; at one with one class none, or until its level has moved far."""
        if self.with_one_class == "lend":
            return work.both, work.moved
        if self.with_one_class != "train" or not self.reach:
            return None, work.moved
        along = torch.stack([(gradient[name] * G[name]).sum() for name in G]).sum()
        descent = self.rate(work.step, d.dtype) * along
        scale, moved = pace(d, descent, work.moved, self.reach)
        return torch.where(work.both > 0, torch.ones_like(scale), scale), moved

    def score_fresh(self, score: Score, work: PairWork, u: Tensor, batch: Batch) -> ScoreTrace:
        """Scores of the fresh points, by the model before the step; u of one never visited is its first estimate."""
        assert isinstance(batch.fresh, Fresh)
        x, y, rows = batch.fresh
        h, _ = (one_by_one(score) if self.private else score)(work.weights, x)
        a, b, y = sides(self.linked(h, y, rows, work), y, rows)
        u = u[rows]
        if not self.risk.linear:
            first = self.risk.inner(a, batch.passive.b, batch.passive.y)
            u = torch.where(u.isnan(), first, u)
        return ScoreTrace(a, u, b, y)

    def finish(
        self, server: FeDXLServer, share: Share, work: PairWork, trace: ScoreTrace
    ) -> tuple[ClientEstimates, FeDXLUpdate]:
        mass1 = share.model * share.first * (work.factors[0] > 0)
        first, second = self.upload(trace, share, mass1, share.model * share.second)
        weights, G = work.weights, work.G
        if self.with_one_class == "lend":
            # Who only lends scores sends nothing else of its examples, above all no gradient.
            weights, G = tree.map(
                lambda own, sent: torch.where(work.both > 0, own, sent), (weights, G), (server.weights, server.G)
            )
        steps, risk = work.step - server.step, self.reported(work)
        return self.remembered(work), FeDXLUpdate(weights, G, first, second, share, steps, risk)

    def upload(self, trace: ScoreTrace, share: Share, mass1: Tensor, mass2: Tensor) -> tuple[S1Scores, S2Scores]:
        """What a client adds to the pool; its mass is spread evenly over its entries."""
        if isinstance(trace.items, Items):
            return queries.uploads(*trace[:3], trace.items, share)
        a, u, b, y = (thin(scores, self.uploads) for scores in trace[:4])
        if self.pool_u == "server":
            u = torch.full_like(u, torch.nan)  # which the server does not use, so it need not know them
        if self.private:
            a, b = blank(a, mass1, self.risk.score_range), blank(b, mass2, self.risk.score_range)
        if self.order == "sorted":
            (a, u), (b, y) = sort_rows(a, u), sort_rows(b, y)
        ages = [torch.zeros(len(scores), dtype=torch.int64, device=scores.device) for scores in (a, b)]
        # A client that has its own pairs fresh does not read its old scores.
        owners: list[Any] = [share.client.expand(len(scores)) if self.mix else () for scores in (a, b)]
        weight1 = (mass1 / len(a)).expand(len(a))
        if isinstance(share.labels, Tensor):
            weight1 = labels.couple_weights(self.risk, share.labels, a, share.model)
        return (
            S1Scores(a, u, weight1, ages[0], owners[0]),
            S2Scores(b, y, (mass2 / len(b)).expand(len(b)), ages[1], owners[1]),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class FeDXL1(FeDXL2):
    """FeDXL for linear outer functions (AUROC), pairs across all clients: FeDXL2 with beta = 1."""

    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.risk.linear, "fedxl1 is for risks with a linear outer function (auroc); use fedxl2")
        require(self.beta == 1, f"fedxl1 has no moving average: beta must be 1, got {self.beta}; use fedxl2")

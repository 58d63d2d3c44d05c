"""FeDXL (Guo, Jin, Luo, Yang. Provable Federated Learning for Deep X-Risk Optimization. ICML 2023).

Algorithm 1 (FeDXL1, linear f), 2 (FeDXL2, any f) and 3 (partial participation: clients not drawn keep their state).

Each step pairs the client's own examples (active, they carry gradient) with scores that others computed in the last
round (passive, numbers from the pool):

    u_i <- (1 - gamma) u_i + gamma g_i            g_i: active a_i against passive b
    G   <- (1 - beta) G + beta (G1 + G2)          G1: active a, passive b, u just updated
    w   <- w - eta G                              G2: passive a with its passive u, active b

In the paper's letters: a and b are h(w; z) of S1 and S2, the pool is H1, H2 and U, what a client receives of it is
R1, R2 and P. The engine draws examples and entries of the pool before the round. The defaults differ from the paper
where that was measured to help (docs/maths.md): its own form is level = "free", fresh = true.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms import gradient as gradients
from fedxl.algorithms import pool as pools
from fedxl.algorithms.gradient import Exact
from fedxl.algorithms.level import Level
from fedxl.algorithms.pool import Pool, Pooling, Scores
from fedxl.algorithms.protocol import Assignment, Batch, DataFacts, Phase, Reading
from fedxl.algorithms.step import ClientEstimates, PairDescent, PairWork, pull
from fedxl.errors import require
from fedxl.models import Score, Weights
from fedxl.risks.pairing import Entry, Minibatch, PoolWeights, Share

# Clients with one class lend scores, or train like others. auto: with even levels they lend, unless all of them hold
# the same class and most of its examples, or nobody holds both.
OneClass = Literal["auto", "lend", "train"]


class FeDXLServer(NamedTuple):
    weights: Weights
    G: dict[str, Tensor]
    pool: Pool
    step: Tensor
    rules: Any = ()


class FeDXLUpdate(NamedTuple):
    weights: Weights
    G: dict[str, Tensor]
    scores: Scores  # [n] for the pool
    share: Share
    steps: Tensor


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FeDXL2(PairDescent):
    """FeDXL for any outer function (partial AUC, AP, ...), pairs across all clients.

    >>> from fedxl import FeDXL2, partial_auc
    >>> algorithm = FeDXL2(partial_auc(lam=0.5), lr=0.3)
    >>> algorithm.risk, algorithm.lr, algorithm.beta
    (partial_auc(lam=0.5), 0.3, 0.1)
    """

    first_round: ClassVar[int] = 0
    facts_read: ClassVar[tuple[str, ...]] = ("one_class", "pairs")

    one_class: OneClass = "auto"  # clients with one class: lend scores, or train (the paper)
    pool: Pooling = Pooling()
    gradient: Exact = field(default=Exact(), metadata={"options": gradients.OPTIONS})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gradient.check(self)

    def phase(self, round: int) -> Phase:
        return WarmUp(self) if round == 0 else self

    def reading(self, batch1: int, batch2: int) -> Reading:
        return super().reading(batch1, batch2)._replace(fresh=self.pool.fresh)

    # The server, before a round.

    def init(self, weights: Weights) -> FeDXLServer:
        self.gradient.check_weights(weights)
        like = next(iter(weights.params.values()))
        step = torch.zeros((), dtype=torch.int64, device=like.device)
        return FeDXLServer(weights, self.init_G(weights.params), pools.begin(self.risk, like), step)

    def pool_weights(self, server: FeDXLServer) -> PoolWeights | None:
        return pools.pool_weights(self.risk, server.pool)

    def passive(self, server: FeDXLServer, lag1: Tensor, lag2: Tensor) -> Scores:
        """R1, R2 and P: what a client takes from the pool."""
        return server.pool.take(lag1, lag2)

    def downlink(self, server: FeDXLServer) -> FeDXLServer:
        return super().downlink(server._replace(pool=server.pool.empty()))  # type: ignore[no-any-return]

    # A client's round.

    def start(self, server: FeDXLServer, client: ClientEstimates, share: Share) -> PairWork:
        """w <- w bar, G <- G bar. A side that finds nothing to meet in the pool does not count."""
        ready = server.pool.ready()
        factors = share.factors * ready.view(2, *[1] * (share.factors.ndim - 1))
        return self.begin(server, client, share, factors)

    def step(self, score: Score, server: FeDXLServer, work: PairWork, batch: Batch) -> tuple[PairWork, Scores]:
        """Algorithm 2, the loop over k."""
        rows, pooled = batch.examples.rows, batch.passive  # pooled: a is h_zeta, u is u_zeta, b is h_xi
        (a, b), back, buffers = self.active(score, work, batch, self.gradient)  # h(w; z) of z from S1 and S2
        forces = self.risk.pairing.forces(self.level.even_factors(work.factors), (a, b), pooled.a)
        da, db, u = pull(self.risk, (a, b), pooled, work.u[rows], self.gamma, forces)  # u, and G1 + G2 by a and b
        after = self.descend(work, back(da, db), buffers)  # G, then w
        if not self.risk.linear:
            after = after._replace(u=work.u.index_put((rows,), u))
        for fresh in batch.fresh:
            a, u, b = self.score_fresh(score, work, after.u, fresh, pooled)
        return after, self.disclose(a, u, b, batch)  # into H1, U and H2

    def score_fresh(self, score: Score, work: PairWork, u: Tensor, fresh: Minibatch, pooled: Scores) -> Scores:
        """Scores of the points z-hat, by the model before the step; u of one never visited is its first estimate."""
        h, _ = self.gradient.scorer(score)(work.weights, fresh.x)
        a, b = self.entries(h, fresh, work.both, self.members(fresh))
        known = u[fresh.rows]
        if not self.risk.linear:
            known = torch.where(known.isnan(), self.risk.inner(a, pooled.b), known)
        return Scores(a, known, b)

    def finish(
        self, server: FeDXLServer, share: Share, work: PairWork, trace: Scores
    ) -> tuple[ClientEstimates, FeDXLUpdate]:
        within = self.risk.score_range
        sent = self.pool.upload(trace)
        a, b = (self.gradient.blank(entry, share.mass[side], within) for side, entry in enumerate((sent.a, sent.b)))
        # Who only lends scores sends nothing else of its examples, above all no gradient.
        weights, G = tree.map(
            lambda own, old: torch.where(work.pace > 0, own, old),
            (work.weights, self.own_G(server, work)),
            (server.weights, server.G),
        )
        client = ClientEstimates(work.u, self.own_buffers(work.weights.buffers))
        return client, FeDXLUpdate(weights, G, Scores(a, sent.u, b), share, work.step - server.step)

    def disclose(self, a: Entry, u: Tensor, b: Entry, batch: Batch) -> Scores:
        """A step's scores as they may leave the client."""
        a, b = self.gradient.disclose(a, b, batch.noise, self.risk.score_range)
        return Scores(a, u, b)

    def noise_like(self, server: FeDXLServer, reading: Reading) -> Any:
        return self.gradient.noise_like(server.weights.params, reading.size1 + reading.size2, trains=True)

    # The server, after a round.

    def update_like(self, server: FeDXLServer, assignment: Assignment) -> FeDXLUpdate:
        pool, steps = server.pool, assignment.steps
        count1, count2 = (
            self.pool.count(steps * size) for size in (assignment.reading.size1, assignment.reading.size2)
        )
        a, u = tree.map(lambda leaf: leaf.new_zeros(count1, *leaf.shape[1:]), (pool.first.entry, pool.first.u))
        scores = Scores(a, u, tree.map(lambda leaf: leaf.new_zeros(count2, *leaf.shape[1:]), pool.second.entry))
        return FeDXLUpdate(server.weights, server.G, scores, assignment.share, server.step)

    def aggregate(self, server: FeDXLServer, mean: dict[str, Any], updates: FeDXLUpdate) -> FeDXLServer:
        """w bar and G bar; H1, H2 and U of all clients are the next pool."""
        pool = self.pool.merge(self.risk, server.pool, updates.scores, updates.share)
        own = self.pool.pool_u == "server"
        pool = pools.estimate_u(self.risk, server.pool, pool) if own else pools.drop_unknown(self.risk, pool)
        return FeDXLServer(mean["weights"], mean["G"], pool, server.step + updates.steps.max())

    def counts(self, share: Share) -> Tensor:
        return share.model * share.holds_both if self.lends else share.model

    def growth(self, share: Share) -> Tensor:
        factors = self.level.even_factors(share.factors.movedim(share.mass.ndim - 1, 0)).amax(0)
        return self.risk.pairing.over_labels(factors).double()

    def sent_scores(self, update: FeDXLUpdate) -> Scores:
        return update.scores

    def pooled_scores(self, server: FeDXLServer) -> Pool:
        return server.pool

    @property
    def lends(self) -> bool:  # type: ignore[override]
        return self.one_class == "lend" or (self.one_class == "auto" and self.level.level == "even")

    def trains_on(self, share: Share) -> Tensor:
        return share.both.to(share.model.dtype) if self.lends else super().trains_on(share)

    def with_facts(self, facts: DataFacts) -> FeDXL2:
        """Decides what `auto` means. A guard would keep scores of clients with one class from being compared."""
        found = super().with_facts(facts)
        if not self.risk.pairing.has_level:
            return replace(found, level=Level("free"))
        if found.one_class == "auto" and found.level.trains_one_class(found.risk, facts.one_class):
            found = replace(found, one_class="train")
        unguarded = facts.one_class > 0 and found.level.level == "even" and not found.lends
        return replace(found, level=replace(found.level, guard=False)) if unguarded else found

    @property
    def private(self) -> bool:  # type: ignore[override]
        return self.gradient.private

    @property
    def order(self) -> str:  # type: ignore[override]
        return self.pool.order


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FeDXL1(FeDXL2):
    """FeDXL for linear outer functions (AUROC), pairs across all clients: FeDXL2 with beta = 1."""

    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.risk.linear, "fedxl1 is for risks with a linear outer function (auroc); use fedxl2")
        require(self.beta == 1, f"fedxl1 has no moving average: beta must be 1, got {self.beta}; use fedxl2")


class WarmUp(Phase):
    """Round 0: clients score batches with the initial weights; the server pools the scores and computes their u."""

    name = "warm-up"
    averaged = ()  # weights and G do not move

    def __init__(self, algorithm: FeDXL2) -> None:
        self.of, self.risk = algorithm, algorithm.risk
        same = ["downlink", "finish", "update_like", "counts", "growth", "position", "sent_scores", "pooled_scores"]
        for name in same:
            setattr(self, name, getattr(algorithm, name))  # as in every other round

    def start(self, server: FeDXLServer, client: ClientEstimates, share: Share) -> PairWork:
        return self.of.begin(server, client, share, share.factors)

    def step(self, score: Score, server: FeDXLServer, work: PairWork, batch: Batch) -> tuple[PairWork, Scores]:
        h, _ = self.of.gradient.scorer(score)(work.weights, batch.examples.x)
        a, b = self.of.entries(h, batch.examples, work.both, self.of.members(batch.examples))
        return work, self.of.disclose(a, work.u[batch.examples.rows], b, batch)

    def noise_like(self, server: FeDXLServer, reading: Reading) -> Any:
        return self.of.gradient.noise_like(server.weights.params, reading.size1 + reading.size2, trains=False)

    def aggregate(self, server: FeDXLServer, mean: dict[str, Any], updates: FeDXLUpdate) -> FeDXLServer:
        pool = self.of.pool.merge(self.risk, server.pool, updates.scores, updates.share)
        return server._replace(pool=pools.estimate_u(self.risk, server.pool, pool))

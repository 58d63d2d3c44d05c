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
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms import labels, queries
from fedxl.algorithms.compositional import WEIGHTS_AND_G, ClientEstimates, Compositional, PairWork, ScoreTrace, sides
from fedxl.algorithms.estimators import Earlier
from fedxl.algorithms.level import Level, OneClass, centred, even, pace
from fedxl.algorithms.optimisers import Moments
from fedxl.algorithms.ordering import Order, sort_rows
from fedxl.algorithms.pool import (
    Passive,
    Pool,
    S1Scores,
    S2Scores,
    capped,
    check_distance,
    check_upload,
    check_values,
    empty,
    largest_score,
    merge,
    spread,
    thin,
)
from fedxl.algorithms.private import (
    Noise,
    PrivacySettings,
    blank,
    check_method,
    check_settings,
    check_weights,
    noisy_scores,
    one_by_one,
    private_outputs,
)
from fedxl.algorithms.protocol import Assignment, Batch, DataFacts, Fresh, Health, Items, PoolWeights, Reading, Share
from fedxl.algorithms.worst_site import RiskLevel, emphasis, level_after, unknown_level
from fedxl.errors import RefusedError, require, unknown
from fedxl.models import Score, Weights
from fedxl.risks.scores import outputs_behind

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


class FeDXLUpdate(NamedTuple):
    weights: Weights
    G: dict[str, Tensor]
    first: S1Scores
    second: S2Scores
    share: Share
    steps: Tensor
    risk: Tensor | tuple[()] = ()  # its own, where that counts


@dataclass(frozen=True, kw_only=True, eq=False)
class FeDXL2(Compositional[FeDXLServer, FeDXLUpdate]):
    """FeDXL for any outer function (partial AUC, AP, ...), pairs across all clients.

    >>> from fedxl import FeDXL2, partial_auc
    >>> algorithm = FeDXL2(partial_auc(lam=0.5), lr=0.3)
    >>> algorithm.risk, algorithm.lr, algorithm.beta
    (partial_auc(lam=0.5), 0.3, 0.1)
    """

    first_round: ClassVar[int] = 0

    pool_rounds: int = 1  # rounds of which the pool keeps the scores
    uploads: int = 0  # scores that a client uploads for each side in a round; 0: all K * B of them
    level: Level = "even"  # what steps may do to the level of all scores: even, balanced, bounded; free: the paper
    one_class: OneClass = "auto"  # clients with one class: lend scores, train (the paper), or centre their pull
    reach: float = 0.0  # how far a client with one class that trains may move its scores in a round; 0: any distance
    mix: float = 0.0  # weight of a client's own fresh pairs; 1/N: as much as they have in the whole risk
    pool_u: PoolU = "clients"  # u of pooled scores: the clients' running estimates, or the server's own (server)
    pool_share: float = 1.0  # the share of a side of the pool that one client may fill; 1: all
    order: Order = "drawn"  # of uploaded scores: drawn, from which the server knows the examples; or sorted
    fresh: bool = False  # pool scores of fresh examples (the paper's z-hat, an extra forward pass), not of the batch
    dp_clip: float = 0.0  # differential privacy: the length that an example's gradient is cut to; 0: no privacy
    dp_noise: float = 0.0  # standard deviation of the noise on the sum of a step's gradients, in units of dp_clip
    dp_score_noise: float = 0.0  # standard deviation of the noise on an uploaded score, which lies in [0, 1]
    dp_delta: float = 1e-5  # the delta at which epsilon is reported; below one in the number of examples

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.pool_rounds >= 1, f"pool_rounds must be at least 1, got {self.pool_rounds}")
        if self.one_class not in get_args(OneClass):
            raise unknown("way with one_class", self.one_class, get_args(OneClass))
        if self.pool_u not in get_args(PoolU):
            raise unknown("pool_u", self.pool_u, get_args(PoolU))
        if self.order not in get_args(Order):
            raise unknown("order", self.order, get_args(Order))
        require(self.reach >= 0, f"reach must not be negative (0: no limit), got {self.reach}")
        trains = self.with_one_class == "train"
        require(
            trains or not self.reach, "reach is for clients with one class that train: set one_class = 'train', too"
        )
        plain = self.descent == "sgd" or not self.reach
        require(plain, f"reach measures steps along G: set descent = 'sgd' (it is '{self.descent}'), or reach = 0")
        require(0 <= self.mix < 1, f"mix must lie in [0, 1), got {self.mix}")
        require(0 < self.pool_share <= 1, f"pool_share must lie in (0, 1], got {self.pool_share}")
        require(self.uploads >= 0, f"uploads must not be negative (0: all), got {self.uploads}")
        check_settings(self.privacy)
        if self.private:
            check_method(self)
        if self.worst_site:
            require(not self.mix, "worst_site and mix cannot be combined: own pairs would count twice; set mix = 0")
            plain = self.risk.lam_outer is None
            require(plain, "worst_site needs a risk that is a mean over S1; for tpauc set normalised = false")
        single = not (self.mix or self.reach or self.one_class == "centre")
        require(
            single or not self.risk.labels, "mix, reach and one_class = 'centre' are for one label, not for several"
        )
        if self.risk.queries:
            plain = (self.pool_rounds, self.uploads, self.mix, self.pool_share, self.fresh) == (1, 0, 0, 1, False)
            told = "with queries, the pool keeps each client's latest scores of each query, all of them"
            require(plain, f"{told}: leave pool_rounds, uploads, mix, pool_share and fresh out")
            require(self.order == "drawn", "scores of queries are pooled with their query; leave order out")

    @property
    def private(self) -> bool:
        return self.dp_clip > 0

    @property
    def privacy(self) -> PrivacySettings:
        return PrivacySettings(self.dp_clip, self.dp_noise, self.dp_score_noise, self.dp_delta)

    @property
    def with_one_class(self) -> OneClass:
        """What a client with one class does; never `auto`."""
        if self.one_class != "auto":
            return self.one_class
        return "lend" if self.level in ("even", "balanced") else "train"

    @property
    def needs_both_classes(self) -> bool:
        """If clients with one class only lend their scores, somebody else must train."""
        return self.with_one_class == "lend"

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
        server = FeDXLServer(weights, self.init_G(weights.params), pool, step, worst=worst)
        return self.with_moments(self.with_norms(server))

    def start(self, server: FeDXLServer, client: ClientEstimates, share: Share) -> PairWork:
        some_a, some_b = server.pool.ready()
        first = share.first * some_b
        if isinstance(server.worst, RiskLevel) and isinstance(client.risk, Tensor):
            first = first * emphasis(server.worst, client.risk, share, self.worst_site)
        return self.begin(server, client, share, torch.stack((first, share.second * some_a)))

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
        weights = risk.weights(l, estimates, sample=passive.u)
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

    def update_like(self, server: FeDXLServer, assignment: Assignment) -> FeDXLUpdate:
        (_, _, size1, size2, *_), steps = assignment.reading, assignment.steps
        first = tree.map(
            lambda leaf: leaf.new_zeros(self.uploaded(steps * size1), *leaf.shape[1:]), server.pool.first
        )
        second = tree.map(
            lambda leaf: leaf.new_zeros(self.uploaded(steps * size2), *leaf.shape[1:]), server.pool.second
        )
        risk = torch.zeros_like(assignment.share.model) if self.worst_site else ()
        return FeDXLUpdate(server.weights, server.G, first, second, assignment.share, server.step, risk)

    def aggregate(self, server: FeDXLServer, updates: FeDXLUpdate) -> FeDXLServer:
        shares = self.trained(updates.share)
        updates, norms = self.clipped(server, updates, shares)
        shares = self.chosen(server, updates, shares)
        weights, G = self.merged((updates.weights, updates.G), shares, (server.weights, server.G))
        weights, moments = self.improved(server, weights, shares)
        updates, worst = self.emphasised(server, updates)
        pool = self.merge(server.pool, updates)
        pool = self.estimated(pool) if self.pool_u == "server" else labels.usable(self.risk, pool)
        return FeDXLServer(weights, G, pool, server.step + updates.steps.max(), norms, worst, moments)

    def emphasised(self, server: FeDXLServer, updates: FeDXLUpdate) -> tuple[FeDXLUpdate, RiskLevel | tuple[()]]:
        """Updates whose scores of S1 are drawn by their clients' own risks, and the level of these risks."""
        if not isinstance(server.worst, RiskLevel) or not isinstance(updates.risk, Tensor):
            return updates, ()
        worst = level_after(server.worst, updates.share, updates.risk, self.worst_site)
        e = emphasis(worst, updates.risk, updates.share, self.worst_site)
        first = updates.first._replace(weight=updates.first.weight * e[:, None])
        return updates._replace(first=first), worst

    def trained(self, share: Share) -> Tensor:
        """How much each client counts in the average of the models: not at all if it only lends its scores."""
        return (
            share.model * ((share.first > 0) & (share.second > 0)) if self.with_one_class == "lend" else share.model
        )

    def merge(self, pool: Pool, updates: FeDXLUpdate) -> Pool:
        if self.risk.queries:
            latest = queries.merge_latest(pool.first, updates.first)
            return Pool(latest, queries.merge_latest(pool.second, updates.second))
        first = merge(pool.first, capped(updates.first, self.pool_share), self.pool_rounds)
        return Pool(first, merge(pool.second, capped(updates.second, self.pool_share), self.pool_rounds))
        if self.risk.queries:
            merged = (
                queries.merge_latest(pool.first, updates.first),
                queries.merge_latest(pool.second, updates.second),
            )
            return Pool(*merged)
        return Pool(
            merge(pool.first, capped(updates.first, self.pool_share), self.pool_rounds),
            merge(pool.second, capped(updates.second, self.pool_share), self.pool_rounds),
        )

    def estimated(self, pool: Pool) -> Pool:
        """The pool with u that follow from its own scores."""
        first, second = pool
        if self.risk.linear or not bool(second.weight.sum() > 0):
            return pool
        if self.risk.queries:
            return queries.estimated_within(self.risk, pool)
        some = spread(second.weight, MOST_COMPARED)
        u = self.risk.inner(first.a, second.b[some], second.y[some])
        return labels.usable(self.risk, Pool(first._replace(u=u), second))

    def check_update(self, server: FeDXLServer, update: FeDXLUpdate, assignment: Assignment) -> dict[str, Tensor]:
        sizes = super().check_update(server, update, assignment)
        # A client with rare examples has its gradient multiplied by this factor. That alone is not an excess.
        sizes |= {WEIGHTS_AND_G: sizes[WEIGHTS_AND_G] / self.factors(assignment.share)}
        with_u = not self.risk.linear and self.pool_u == "clients"
        sizes |= self.check_scores(update, assignment, with_u)
        check_distance(self.risk, server.pool, Pool(update.first, update.second))
        return sizes

    def factors(self, share: Share) -> Tensor:
        if isinstance(share.labels, Tensor):
            return labels.largest_factor(self.risk, share.labels, self.level)
        factors = torch.stack((share.first, share.second))
        if self.level == "even":
            factors = torch.where((factors > 0).all(0), even(factors), factors)
        return factors.amax(0).clamp(min=1).double()

    def check_scores(self, update: FeDXLUpdate, assignment: Assignment, with_u: bool) -> dict[str, Tensor]:
        """The size of its part of the pool, where nothing else bounds scores."""
        share, (_, _, size1, size2, *_) = assignment.share, assignment.reading
        if not all(map(torch.equal, tree.leaves(update.share), tree.leaves(share))):
            # With share 0 its scores would enter the pool, and its sizes would not be compared. The factors say
            # whether it holds both classes, and so whether its model counts.
            raise RefusedError("its share is not the one that it was given")
        if self.risk.labels:
            labels.check_couples(self.risk, share, Pool(update.first, update.second))
        mass1 = None if self.risk.labels else share.model * share.first
        sent = (("first", update.first, size1, mass1), ("second", update.second, size2, share.model * share.second))
        for name, side, size, mass in sent:
            count = self.uploaded(assignment.steps * size)
            if self.risk.queries:
                queries.check_uploads(name, side, count, share.client)
            else:
                check_upload(name, side, count, mass, share.client)
        scores = Pool(update.first, update.second)
        check_values(self.risk, labels.usable(self.risk, scores), with_u)
        # Squared, as the steepest surrogates are in the scores.
        return (
            {}
            if self.risk.score_range.bounded
            else {"largest score, squared,": largest_score(self.risk, scores).square()}
        )

    def uploaded(self, total: int) -> int:
        """How many of a round's scores of a side a client uploads."""
        return self.uploads if 0 < self.uploads < total else total

    def check_server(self, server: FeDXLServer) -> None:
        check_values(self.risk, server.pool, with_u=not self.risk.linear)

    def health(self, server: FeDXLServer, h: Tensor | None, labels: Tensor | None) -> Health:
        """Where no raw scores are known, the pool says whether scores have collapsed."""
        pool = server.pool
        found = Health(pool.saturated(self.risk)) if h is None else super().health(server, h, labels)
        ages = zip(("S1", "S2"), self.risk.sides, pool.stale(self.pool_rounds), strict=True)
        return found._replace(stale={f"{name} ({side})": age for name, side, age in ages if age})

    def pooled_outputs(self, server: FeDXLServer) -> Tensor | None:
        """The model's outputs behind the pooled scores, as steps saw them; None where they are not known."""
        (a, b), (first, second) = (server.pool.first.a, server.pool.second.b), (s.weight > 0 for s in server.pool)
        return None if self.risk.score_shape else outputs_behind(self.risk.link, torch.cat((a[first], b[second])))


@dataclass(frozen=True, kw_only=True, eq=False)
class FeDXL1(FeDXL2):
    """FeDXL for linear outer functions (AUROC), pairs across all clients: FeDXL2 with beta = 1."""

    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.risk.linear, "fedxl1 is for risks with a linear outer function (auroc); use fedxl2")
        require(self.beta == 1, f"fedxl1 has no moving average: beta must be 1, got {self.beta}; use fedxl2")


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
        first, second = self.of.merge(server.pool, updates)
        if not bool(second.weight.sum() > 0):
            # Without any b there is no u, and an a without its u cannot be used.
            return server._replace(pool=Pool(server.pool.first, second))
        return server._replace(pool=self.of.estimated(Pool(first, second)))

    def check_update(self, server: FeDXLServer, update: FeDXLUpdate, assignment: Assignment) -> dict[str, Tensor]:
        sent, mine = (tree.leaves((state.weights.params, state.G)) for state in (server, update))
        if not all(map(torch.equal, sent, mine)):
            raise RefusedError("it changes weights or G in the warm-up round, which only scores")
        # Their u are still unknown: the server computes the first ones itself.
        return self.of.check_scores(update, assignment, with_u=False)

    def check_server(self, server: FeDXLServer) -> None:
        self.of.check_server(server)

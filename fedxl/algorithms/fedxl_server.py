"""The server's side of FeDXL: how updates become the next state, and which of them are refused."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms import labels, queries
from fedxl.algorithms.compositional import WEIGHTS_AND_G
from fedxl.algorithms.fedxl_settings import FeDXLSettings
from fedxl.algorithms.fedxl_state import MOST_COMPARED, FeDXLServer, FeDXLUpdate
from fedxl.algorithms.level import even
from fedxl.algorithms.pool import (
    Pool,
    capped,
    check_distance,
    check_upload,
    check_values,
    largest_score,
    merge,
    spread,
)
from fedxl.algorithms.protocol import Assignment, Health, Share
from fedxl.algorithms.worst_site import RiskLevel, emphasis, level_after
from fedxl.errors import RefusedError
from fedxl.risks.scores import outputs_behind


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolServer(FeDXLSettings):
    """Merges models and pools scores."""

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
        pool = self.judged(server.pool, pool) if self.pool_u == "server" else labels.usable(self.risk, pool)
        step, threshold = server.step + updates.steps.max(), self.share_threshold(pool)
        return FeDXLServer(weights, G, pool, step, norms, worst, moments, threshold)

    def share_threshold(self, pool: Pool) -> Tensor | tuple[()]:
        """The threshold of f over S1, where a share of it counts: that of all clients' pooled estimates."""
        return self.risk.share_threshold(pool.first.u, pool.first.weight) if self.risk.counts_share else ()

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

    def judged(self, before: Pool, pool: Pool) -> Pool:
        """The pool with the server's own u. Without any b there is none, and an a without its u cannot be used."""
        some = self.risk.linear or bool(pool.second.weight.sum() > 0)
        return self.estimated(pool) if some else Pool(before.first, pool.second)

    def estimated(self, pool: Pool) -> Pool:
        """The pool with u that follow from its own scores."""
        first, second = pool
        if self.risk.linear:
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

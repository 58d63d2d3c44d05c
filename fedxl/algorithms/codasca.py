"""CODASCA (Yuan, Guo, Xu, Ying, Yang. Federated Deep AUC Maximization for Heterogeneous Data. ICML 2021).

Min-max AUC on sigmoid scores h, p the share of positives, m the margin, (w, a, b) primal and alpha dual:

    F = (1-p) E[(h-a)^2; y=1] + p E[(h-b)^2; y=0]
        + 2 alpha (p (1-p) m + E[p h; y=0] - E[(1-p) h; y=1]) - p (1-p) alpha^2

Local steps are corrected by control variates, c - c_i, and pulled to a reference point that moves stage by stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms.descent import Descent
from fedxl.algorithms.protocol import Algorithm, Assignment, Batch, DataFacts, NoTrace
from fedxl.errors import require
from fedxl.models import Score, Weights
from fedxl.risks.auc import auroc
from fedxl.risks.pairing import Share
from fedxl.risks.xrisk import XRisk


class Scalars(NamedTuple):
    """What there is to optimise besides the network."""

    a: Tensor
    b: Tensor
    alpha: Tensor


class Point(NamedTuple):
    """The primal-dual variable, or a direction in its space."""

    params: dict[str, Tensor]
    a: Tensor
    b: Tensor
    alpha: Tensor

    @property
    def scalars(self) -> Scalars:
        return Scalars(self.a, self.b, self.alpha)


class CODASCAServer(NamedTuple):
    weights: Weights
    scalars: Scalars
    reference: Point  # where this stage began
    c: Point  # mean of all clients' control variates
    step: Tensor
    rules: Any = ()

    @property
    def point(self) -> Point:
        return Point(self.weights.params, *self.scalars)


class CODASCAClient(NamedTuple):
    c: Point  # its mean direction in its last round
    buffers: dict[str, Tensor]


class CODASCAWork(NamedTuple):
    point: Point
    buffers: dict[str, Tensor]
    c: Point
    total: Point  # sum of this round's directions
    step: Tensor


class CODASCAUpdate(NamedTuple):
    weights: Weights
    scalars: Scalars
    variates: Point  # the change of this client's control variate
    share: Share
    steps: Tensor


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CODASCA(Algorithm):
    """Min-max AUC with control variates.

    The defaults are its authors' settings. The risk is reported, not optimised.
    """

    averaged: ClassVar[tuple[str, ...]] = ("weights", "scalars")
    facts_read: ClassVar[tuple[str, ...]] = ("positive_share", "pairs")
    summable: ClassVar[bool] = False  # control variates are weighted by other shares than models

    risk: XRisk = field(default_factory=auroc, kw_only=False)  # what is reported
    descent: Descent = Descent(weight_decay=1e-5)
    positive_share: float = 0.0  # p of its objective; 0: the data's own, with clients weighted as in the run
    margin: float = 1.0  # m of its objective: by how much positives should score above negatives
    proximal: float = 500.0  # gamma of its paper: the pull to the reference is (v - v_ref) / proximal
    clip: float = 1.0  # gradients are clipped entry by entry, as in its authors' optimiser; 0: no clipping
    stage_steps: int = 4000  # T0: local steps of a stage; then the learning rate falls and the reference moves
    stage_decay: float = 3.0  # the learning rate is divided by this after each stage
    control: bool = True  # whether to use control variates; false: CODA+, the same without them

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.risk.score_shape, "this algorithm needs one score per example, and the risk pairs vectors")
        own = self.descent.descent == "sgd"
        require(own, "codasca moves its primal and dual variables by its own rule: leave descent out")
        require(0 <= self.positive_share < 1, f"positive_share must lie in [0, 1), got {self.positive_share}")
        require(self.margin > 0, f"margin must be positive, got {self.margin}")
        require(self.proximal > 0, f"proximal must be positive, got {self.proximal}")
        require(self.clip >= 0, f"clip must not be negative (0: no clipping), got {self.clip}")
        require(self.stage_steps > 0, f"stage_steps must be positive, got {self.stage_steps}")
        require(self.stage_decay >= 1, f"stage_decay must be at least 1, got {self.stage_decay}")

    def with_facts(self, facts: DataFacts) -> CODASCA:
        found = super().with_facts(facts)
        known = self.positive_share > 0 or not 0 < facts.positive_share < 1
        return found if known else replace(found, positive_share=facts.positive_share)

    def init(self, weights: Weights) -> CODASCAServer:
        like = next(iter(weights.params.values()))
        zero = like.new_zeros(())
        point = Point(weights.params, zero, zero, zero)
        still = tree.map(torch.zeros_like, point)
        step = torch.zeros_like(zero, dtype=torch.int64)
        return CODASCAServer(weights, point.scalars, point, still, step)

    def init_client(self, server: CODASCAServer, num_rows: int) -> CODASCAClient:
        return CODASCAClient(tree.map(torch.zeros_like, server.c), self.own_buffers(server.weights.buffers))

    def rejoin(self, server: CODASCAServer, num_rows: int) -> CODASCAClient:
        # The mean still contains this client's lost control variate, and is the best guess of it.
        return self.init_client(server, num_rows)._replace(c=server.c)

    def start(self, server: CODASCAServer, client: CODASCAClient, share: Share) -> CODASCAWork:
        buffers = client.buffers or server.weights.buffers
        total = tree.map(torch.zeros_like, client.c)
        return CODASCAWork(server.point, buffers, client.c, total, server.step)

    def step(
        self, score: Score, server: CODASCAServer, work: CODASCAWork, batch: Batch
    ) -> tuple[CODASCAWork, NoTrace]:
        of = batch.examples

        def objective(point: Point) -> tuple[Tensor, dict[str, Tensor]]:
            h, buffers = score(Weights(point.params, work.buffers), of.x)
            return self.min_max(torch.sigmoid(h), of.y, point), buffers

        gradient, buffers = torch.func.grad(objective, has_aux=True)(work.point)
        direction = self.direction(gradient)
        total = tree.map(torch.add, work.total, direction)
        if self.control:
            direction = tree.map(lambda d, own, mean: d - own + mean, direction, work.c, server.c)
        point = self.move(work.point, direction, server.reference, work.step)
        return work._replace(point=point, buffers=buffers, total=total, step=work.step + 1), NoTrace()

    def min_max(self, h: Tensor, y: Tensor, point: Point) -> Tensor:
        p, (_, a, b, alpha) = self.positive_share, point
        squares = (1 - p) * y * (h - a).square() + p * (1 - y) * (h - b).square()
        coupling = p * (1 - y) * h - (1 - p) * y * h
        return squares.mean() + 2 * alpha * (p * (1 - p) * self.margin + coupling.mean()) - p * (1 - p) * alpha**2

    def direction(self, gradient: Point) -> Point:
        """What to subtract: the gradient in the primal variables, its negative in the dual one, clipped."""
        if self.clip:
            gradient = tree.map(lambda g: g.clamp(-self.clip, self.clip), gradient)
        return gradient._replace(alpha=-gradient.alpha)

    def move(self, point: Point, direction: Point, reference: Point, step: Tensor) -> Point:
        dtype = point.a.dtype
        rate = self.descent.rate(self.lr, step, dtype) * self.stage_decay ** -(step // self.stage_steps).to(dtype)
        decay = tree.map(torch.zeros_like, point)._replace(
            params=tree.map(lambda w: self.descent.weight_decay * w, point.params)
        )
        pulled = tree.map(
            lambda v, d, ref, w: v - rate * (d + (v - ref) / self.proximal + w),
            point,
            direction,
            reference,
            decay,
        )
        # The proximal term is for the primal variables; the dual one is held at or above 0.
        return pulled._replace(alpha=torch.relu(point.alpha - rate * direction.alpha))

    def finish(
        self, server: CODASCAServer, share: Share, work: CODASCAWork, trace: NoTrace
    ) -> tuple[CODASCAClient, CODASCAUpdate]:
        steps = work.step - server.step
        c = tree.map(lambda total: total / steps, work.total)
        client = CODASCAClient(c, self.own_buffers(work.buffers))
        change = tree.map(torch.sub, c, work.c)
        weights = Weights(work.point.params, work.buffers)
        return client, CODASCAUpdate(weights, work.point.scalars, change, share, steps)

    def update_like(self, server: CODASCAServer, assignment: Assignment) -> CODASCAUpdate:
        return CODASCAUpdate(server.weights, server.scalars, server.c, assignment.share, server.step)

    def aggregate(self, server: CODASCAServer, mean: dict[str, Any], updates: CODASCAUpdate) -> CODASCAServer:
        step, point = server.step + updates.steps.max(), Point(mean["weights"].params, *mean["scalars"])
        new_stage = step // self.stage_steps > server.step // self.stage_steps
        reference = tree.map(lambda old, new: torch.where(new_stage, new, old), server.reference, point)
        # Absent clients keep their c_i, so the mean over all moves by the changes of the others.
        part = updates.share.part
        c = tree.map(lambda mean, d: mean + torch.tensordot(part.to(d.dtype), d, 1), server.c, updates.variates)
        return CODASCAServer(mean["weights"], mean["scalars"], reference, c, step)

    def parts(self, state: CODASCAServer | CODASCAUpdate) -> dict[str, Any]:
        """Control variates follow from the primal-dual variable; of the server they are no change."""
        change = state.variates if isinstance(state, CODASCAUpdate) else tree.map(torch.zeros_like, state.c)
        return super().parts(state) | {"variates": change}

    def position(self, server: CODASCAServer, updates: CODASCAUpdate) -> tuple[Any, ...]:
        return updates.weights.params, updates.scalars

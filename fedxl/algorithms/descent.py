"""What all methods of the package share: descent with a learning rate that decays, and how the server merges."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms.averages import Aggregation
from fedxl.algorithms.fixed_point import FORMS
from fedxl.algorithms.merging import Merging
from fedxl.algorithms.optimisers import LocalDescent, Moments, Optimised, ServerUpdate
from fedxl.algorithms.protocol import (
    Assignment,
    Client,
    DataFacts,
    Health,
    PoolWeights,
    Reading,
    Server,
    Update,
)
from fedxl.errors import require, unknown
from fedxl.models import check_buffers
from fedxl.options import require_types
from fedxl.risks import XRisk
from fedxl.risks.saturation import alike

D = TypeVar("D", bound="Descent[Any, Any, Any]")
WEIGHTS = "change of weights"  # the size that every update has


@dataclass(frozen=True, eq=False)
class Descent(Optimised, Merging, Generic[Server, Client, Update]):
    """A base class: a risk, a learning rate with its schedule, weight decay, and how buffers are merged.

    It is its own phase, in every round. A subclass without pairs and pool adds `init`, `init_client`, `start`,
    `step`, `finish`, `aggregate` and `update_like`; the rest of `Algorithm` and `Phase` is here.
    """

    name: ClassVar[str] = "training"
    centralized: ClassVar[bool] = False
    local_pairs: ClassVar[bool] = False
    may_be_nan: ClassVar[tuple[str, ...]] = ()
    first_round: ClassVar[int] = 1

    risk: XRisk  # what is optimised
    _: KW_ONLY
    lr: float = 0.1  # learning rate
    milestones: tuple[int, ...] = ()  # local steps of the run after which the learning rate is multiplied by `decay`
    decay: float = 0.1  # factor of the learning rate at each milestone
    weight_decay: float = 0.0  # this times the weights is added to the gradient
    buffers: Literal["average", "local"] = "average"  # BatchNorm statistics: averaged, or each client keeps its own
    aggregation: Aggregation = "mean"  # how clients' results are merged: mean, or median, trimmed, krum, if some lie
    hostile: float = 0.25  # share of clients that may lie: trimmed cuts it off at either end, krum leaves it out
    clip_change: float = 0.0  # a client's change is cut to so many times the running median of all; 0: never
    fixed_point: int = 0  # bits of the whole numbers in which changes are summed, 32 or 64; 0: sums of floats
    descent: LocalDescent = "sgd"  # how local steps use G: sgd, momentum or adam; they begin anew in every round
    momentum: float = 0.9  # weight of past gradients in momentum, and in adam's mean of gradients
    adam_decay: float = 0.999  # weight of past squares in adam
    adam_epsilon: float = 1e-8  # what adam adds to the root of the mean square
    server_update: ServerUpdate = "mean"  # how the server uses the merged change: as it is, by momentum or by adam
    server_lr: float = 0.0  # learning rate of the server's momentum or adam; 0: 1 for momentum, 0.01 for adam
    server_momentum: float = 0.9  # weight of past changes in the server's momentum and adam
    server_adam_decay: float = 0.99  # weight of past squares in the server's adam
    server_adam_epsilon: float = 1e-3  # what the server's adam adds to the root of the mean square

    def __post_init__(self) -> None:
        require_types(type(self), {item.name: getattr(self, item.name) for item in fields(self)})
        require(self.lr > 0, f"lr must be positive, got {self.lr}")
        require(0 < self.decay <= 1, f"decay must lie in (0, 1], got {self.decay}")
        require(self.weight_decay >= 0, f"weight_decay must not be negative, got {self.weight_decay}")
        require(
            all(step > 0 for step in self.milestones) and list(self.milestones) == sorted(set(self.milestones)),
            f"milestones must be positive and ascending, got {list(self.milestones)}",
        )
        if self.aggregation not in get_args(Aggregation):
            raise unknown("aggregation", self.aggregation, get_args(Aggregation))
        require(0 <= self.hostile < 0.5, f"hostile must lie in [0, 0.5), got {self.hostile}")
        require(
            self.clip_change == 0 or self.clip_change >= 1,
            f"clip_change must be at least 1, or 0 for no clipping, got {self.clip_change}",
        )
        self._require_summable()
        self.check_optimisers()

    def _require_summable(self) -> None:
        """Whoever knows only the sum of all changes can neither compare nor clip them."""
        if not self.fixed_point:
            return
        known = " or ".join(map(str, FORMS))
        require(self.fixed_point in FORMS, f"fixed_point must be {known}, or 0 for floats, got {self.fixed_point}")
        require(bool(self.summed), f"fixed_point is not for {type(self).__name__}: its server needs more than sums")
        one = self.aggregation == "mean" and not self.clip_change
        require(one, 'fixed_point sums changes of all clients: it needs aggregation = "mean" and clip_change = 0')

    def rate(self, step: Tensor, dtype: torch.dtype) -> Tensor | float:
        """The learning rate at a step; a plain number if there are no milestones."""
        return self.falling(step, dtype) if self.milestones else float(self.lr)

    def falling(self, step: Tensor, dtype: torch.dtype) -> Tensor:
        """The learning rate at a step, as a tensor, whether it falls or not."""
        rate = torch.full_like(step, self.lr, dtype=dtype)
        for milestone in self.milestones:
            rate = torch.where(step >= milestone, rate * self.decay, rate)
        return rate

    def descend(
        self, params: dict[str, Tensor], G: dict[str, Tensor], step: Tensor, pace: Tensor | None = None
    ) -> dict[str, Tensor]:
        """params - pace * learning rate * (G + weight_decay * params); no pace: 1."""
        return self._along(params, self._decayed(params, G), step, pace)

    def advanced(
        self,
        params: dict[str, Tensor],
        G: dict[str, Tensor],
        step: Tensor,
        moments: Moments | tuple[()],
        pace: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Moments | tuple[()]]:
        """`descend` by the rule of the setting `descent`, and what its next step remembers."""
        direction, moments = self.local_direction(moments, self._decayed(params, G))
        return self._along(params, direction, step, pace), moments

    def _decayed(self, params: dict[str, Tensor], G: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.weight_decay:
            return G
        return tree.map(lambda g, w: torch.add(g, w, alpha=self.weight_decay), G, params)

    def _along(
        self, params: dict[str, Tensor], G: dict[str, Tensor], step: Tensor, pace: Tensor | None
    ) -> dict[str, Tensor]:
        dtype = next(iter(params.values())).dtype
        # A rate of 1 as a plain number would vanish from a compiled step, and cost it a program of its own.
        rate = self.rate(step, dtype) if pace is None else self.falling(step, dtype) * pace
        if isinstance(rate, float):
            return tree.map(lambda w, g: torch.add(w, g, alpha=-rate), params, G)
        back = -rate
        return tree.map(lambda w, g: torch.addcmul(w, g, back), params, G)

    # Defaults for a method without pairs and pool. Other methods override them.

    @property
    def needs_both_classes(self) -> bool:
        return False

    def phase(self: D, round: int) -> D:
        return self

    def with_network(self: D, normed_scores: bool) -> D:
        return self

    def with_facts(self: D, facts: DataFacts) -> D:
        return self

    def reading(self, batch1: int, batch2: int) -> Reading:
        return Reading("all", "none", batch1 + batch2, 0)

    def pool_weights(self, server: Server) -> PoolWeights | None:
        return None

    def passive(self, server: Server, lag1: Tensor, lag2: Tensor) -> Any:
        return ()

    def downlink(self, server: Server) -> Server:
        return self.without_moments(self.without_norms(server))

    def init_client(self, server: Server, num_rows: int) -> Client:
        raise NotImplementedError

    def rejoin(self, server: Server, num_rows: int) -> Client:
        return self.init_client(server, num_rows)

    def check_update(self, server: Server, update: Update, assignment: Assignment) -> dict[str, Tensor]:
        check_buffers(update.weights.buffers)
        buffers = tree.map(lambda new, old: new.double() - old, update.weights.buffers, server.weights.buffers)
        # Counters change by whole steps. In one norm with the statistics, they would hide changes of these.
        counts = {name for name, leaf in update.weights.buffers.items() if not leaf.is_floating_point()}
        return {
            WEIGHTS: _moved(update.weights.params, server.weights.params),
            "change of buffers": tree.norm({name: leaf for name, leaf in buffers.items() if name not in counts}),
            "change of counters": tree.norm({name: buffers[name] for name in counts}),
        }

    def check_server(self, server: Server) -> None:
        pass  # any finite weights are accepted, and the engine has checked that

    def health(self, server: Server, h: Tensor | None, labels: Tensor | None) -> Health:
        return Health(collapsed=h is not None and alike(h))

    def own_buffers(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """The buffers that a client keeps between its rounds: all, or none."""
        return buffers if self.buffers == "local" else {}


def _moved(new: dict[str, Tensor], old: dict[str, Tensor]) -> Tensor:
    """How far weights have moved. A move past the origin, which reverses the weights, counts tenfold.

    The distance alone does not distinguish weights times -3 from those of an honest client at a high learning rate,
    which may move by more than their own length. But honest weights hardly ever reverse.
    """
    turned = -tree.inner(new, old) / tree.norm(old).clamp(min=torch.finfo(torch.float64).tiny)
    return tree.norm(tree.map(torch.sub, new, old)) + 10 * turned.clamp(min=0)

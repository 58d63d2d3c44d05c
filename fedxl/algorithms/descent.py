"""How a gradient becomes a local step: the learning rate with its schedule, weight decay, momentum or Adam.

    momentum   m <- mu m + g                                               step: m
    adam       m <- mu m + (1 - mu) g,   v <- nu v + (1 - nu) g^2          step: m' / (sqrt(v') + epsilon)

m' and v' are m and v over 1 - mu^t and 1 - nu^t. A client's g is its G; its moments begin anew in each round, so
that nothing more is kept or sent. The server's rules (`server_rules.py`) use the same definitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fedxl import tree
from fedxl.errors import require
from fedxl.options import require_types

Params = dict[str, Tensor]
Kind = Literal["sgd", "momentum", "adam"]


class Optimiser(Protocol):
    """Turns gradients into directions. Its state is its own."""

    def init(self, params: Params, step: Tensor) -> Any:
        """Nothing remembered. step: a count, on the right device."""

    def direction(self, state: Any, gradient: Params) -> tuple[Params, Any]:
        """The direction to subtract, and what to remember."""


class SGD(NamedTuple):
    def init(self, params: Params, step: Tensor) -> Any:
        return ()

    def direction(self, state: Any, gradient: Params) -> tuple[Params, Any]:
        return gradient, state


class Momentum(NamedTuple):
    mu: float

    def init(self, params: Params, step: Tensor) -> Any:
        return tree.map(torch.zeros_like, params)

    def direction(self, state: Any, gradient: Params) -> tuple[Params, Any]:
        m = tree.map(lambda m, g: self.mu * m + g, state, gradient)
        return m, m


class Moments(NamedTuple):
    first: Params  # m
    second: Params  # v
    number: Tensor  # t, gradients so far


class Adam(NamedTuple):
    mu: float
    nu: float
    epsilon: float

    def init(self, params: Params, step: Tensor) -> Moments:
        m, v = (tree.map(torch.zeros_like, params) for _ in range(2))
        return Moments(m, v, torch.zeros_like(step))

    def direction(self, state: Moments, gradient: Params) -> tuple[Params, Any]:
        count = state.number + 1
        m = tree.map(lambda m, g: torch.lerp(m, g, 1 - self.mu), state.first, gradient)
        v = tree.map(lambda v, g: torch.lerp(v, g.square(), 1 - self.nu), state.second, gradient)
        # In double precision: in single precision nu^t is rounded by more than 1 - nu^t in the first steps.
        known1, known2 = (1 - torch.pow(rate, count.double()) for rate in (self.mu, self.nu))

        def scaled(m: Tensor, v: Tensor) -> Tensor:
            return m / known1.to(m.dtype) / ((v / known2.to(v.dtype)).sqrt() + self.epsilon)

        return tree.map(scaled, m, v), Moments(m, v, count)


@dataclass(frozen=True)
class Descent:
    """Local steps along G."""

    descent: Kind = "sgd"  # how local steps use G: sgd, momentum or adam; their memory begins anew in every round
    momentum: float = 0.9  # weight of past gradients in momentum, and in adam's mean of gradients
    adam_decay: float = 0.999  # weight of past squares in adam
    adam_epsilon: float = 1e-8  # what adam adds to the root of the mean square
    milestones: tuple[int, ...] = ()  # local steps of the run after which the learning rate is multiplied by `decay`
    decay: float = 0.1  # factor of the learning rate at each milestone
    weight_decay: float = 0.0  # this times the weights is added to the gradient

    def __post_init__(self) -> None:
        require_types(type(self), vars(self))
        for name in ("momentum", "adam_decay"):
            value = getattr(self, name)
            require(0 <= value < 1, f"{name} must lie in [0, 1), got {value}")
        require(self.adam_epsilon > 0, f"adam_epsilon must be positive, got {self.adam_epsilon}")
        require(0 < self.decay <= 1, f"decay must lie in (0, 1], got {self.decay}")
        require(self.weight_decay >= 0, f"weight_decay must not be negative, got {self.weight_decay}")
        ascending = list(self.milestones) == sorted(set(self.milestones)) and all(s > 0 for s in self.milestones)
        require(ascending, f"milestones must be positive and ascending, got {list(self.milestones)}")

    @property
    def optimiser(self) -> Optimiser:
        if self.descent == "adam":
            return Adam(self.momentum, self.adam_decay, self.adam_epsilon)
        return Momentum(self.momentum) if self.descent == "momentum" else SGD()

    def rate(self, lr: float, step: Tensor, dtype: torch.dtype) -> Tensor:
        """The learning rate at a step of the run."""
        rate = torch.full_like(step, lr, dtype=dtype)
        for milestone in self.milestones:
            rate = torch.where(step >= milestone, rate * self.decay, rate)
        return rate

    def move(
        self, params: Params, G: Params, lr: float, step: Tensor, state: Any, pace: Tensor | None = None
    ) -> tuple[Params, Any]:
        """The weights after a step along G, and what the optimiser remembers. pace: a factor of the rate."""
        if self.weight_decay:
            G = tree.map(lambda g, w: torch.add(g, w, alpha=self.weight_decay), G, params)
        direction, state = self.optimiser.direction(state, G)
        if not self.milestones and pace is None:
            return tree.map(lambda w, g: torch.add(w, g, alpha=-lr), params, direction), state
        rate = self.rate(lr, step, next(iter(params.values())).dtype)
        # A pace of 1 as a plain number would vanish from a compiled step, and cost it a program of its own.
        back = -rate if pace is None else -rate * pace
        return tree.map(lambda w, g: torch.addcmul(w, g, back), params, direction), state

    def distance(self, lr: float, beta: float, steps: int, step: Tensor, hold: float = 0.0) -> Tensor:
        """How far a G of length 1 moves the model within so many steps; 0 by Adam, whatever the length of G."""
        speed, left = 0.0, 0.0
        for number in range(1, steps + 1):
            carried = self.momentum * speed if self.descent == "momentum" else 0.0
            speed = (1 - hold if hold else (1 - beta) ** number) + carried
            left += speed  # what is left of G, step by step
        return self.rate(lr, step, torch.float64) * (0.0 if self.descent == "adam" else left)

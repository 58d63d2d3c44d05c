"""Momentum and Adam, one definition for clients' local steps and for the server's update.

    momentum   m <- mu m + g                                               step: m
    adam       m <- mu m + (1 - mu) g,   v <- nu v + (1 - nu) g^2          step: m' / (sqrt(v') + epsilon)

m' and v' are m and v over 1 - mu^t and 1 - nu^t. A client's g is its G; its moments begin anew in every round, so a
round depends on the server's state alone, and nothing more is kept or sent. The server's g is the way back from the
merged model to the old one (FedAvgM: Hsu, Qi, Brown, 2019; FedAdam: Reddi et al. Adaptive Federated Optimization.
ICLR 2021); its moments are part of its state and are not sent.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import torch
from torch import Tensor

from fedxl import tree
from fedxl.errors import require, unknown
from fedxl.models import Weights

V = TypeVar("V")
LocalDescent = Literal["sgd", "momentum", "adam"]
ServerUpdate = Literal["mean", "momentum", "adam"]
SERVER_LR = {"momentum": 1.0, "adam": 0.01}  # where the user names none


class Moments(NamedTuple):
    """What is remembered of past gradients."""

    first: dict[str, Tensor]
    second: dict[str, Tensor]  # of squares; none for momentum
    number: Tensor  # gradients so far


class Rule(NamedTuple):
    """How gradients become steps."""

    adam: bool
    first: float  # mu
    second: float  # nu
    epsilon: float

    def begin(self, params: dict[str, Tensor], like: Tensor) -> Moments:
        """Nothing remembered. like: a count, on the right device."""
        zeros = tree.map(torch.zeros_like, params)
        return Moments(zeros, tree.map(torch.zeros_like, params) if self.adam else {}, torch.zeros_like(like))

    def step(self, moments: Moments, gradient: dict[str, Tensor]) -> tuple[dict[str, Tensor], Moments]:
        """The direction to subtract, and what to remember."""
        count = moments.number + 1
        if not self.adam:
            first = tree.map(lambda m, g: self.first * m + g, moments.first, gradient)
            return first, Moments(first, {}, count)
        first = tree.map(lambda m, g: torch.lerp(m, g, 1 - self.first), moments.first, gradient)
        second = tree.map(lambda v, g: torch.lerp(v, g.square(), 1 - self.second), moments.second, gradient)
        # In double precision: in single precision nu^t is rounded by more than 1 - nu^t in the first steps.
        known1, known2 = (1 - torch.pow(rate, count.double()) for rate in (self.first, self.second))

        def direction(m: Tensor, v: Tensor) -> Tensor:
            return m / known1.to(m.dtype) / ((v / known2.to(v.dtype)).sqrt() + self.epsilon)

        return tree.map(direction, first, second), Moments(first, second, count)


class Optimised:
    """Local steps and the server's update. `Descent` has the settings."""

    descent: LocalDescent
    momentum: float
    adam_decay: float
    adam_epsilon: float
    server_update: ServerUpdate
    server_lr: float
    server_momentum: float
    server_adam_decay: float
    server_adam_epsilon: float

    def check_optimisers(self) -> None:
        if self.descent not in get_args(LocalDescent):
            raise unknown("descent", self.descent, get_args(LocalDescent))
        if self.server_update not in get_args(ServerUpdate):
            raise unknown("server_update", self.server_update, get_args(ServerUpdate))
        for name in ("momentum", "adam_decay", "server_momentum", "server_adam_decay"):
            value = getattr(self, name)
            require(0 <= value < 1, f"{name} must lie in [0, 1), got {value}")
        for name in ("adam_epsilon", "server_adam_epsilon"):
            value = getattr(self, name)
            require(value > 0, f"{name} must be positive, got {value}")
        require(self.server_lr >= 0, f"server_lr must not be negative, got {self.server_lr}")
        used = self.server_update != "mean" or not self.server_lr
        require(used, "server_lr is for server_update = 'momentum' or 'adam'; the mean is taken as it is")

    def begin_moments(self, params: dict[str, Tensor], like: Tensor) -> Moments | tuple[()]:
        """What a client's steps remember when a round begins."""
        return () if self.descent == "sgd" else self._local.begin(params, like)

    def local_direction(
        self, moments: Moments | tuple[()], G: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], Moments | tuple[()]]:
        """The direction of a local step, and what it remembers."""
        return self._local.step(moments, G) if isinstance(moments, Moments) else (G, ())

    def with_moments(self, server: V) -> V:
        """The server's state before the first round."""
        if self.server_update == "mean":
            return server
        state = cast(Any, server)
        return cast(V, state._replace(moments=self._server.begin(state.weights.params, state.step)))

    def without_moments(self, server: V) -> V:
        """The server's state as clients receive it: moments are as large as the model, and of no use to them."""
        return server if self.server_update == "mean" else cast(V, cast(Any, server)._replace(moments=()))

    def improved(self, server: Any, merged: Weights, shares: Tensor) -> tuple[Weights, Moments | tuple[()]]:
        """The new weights from the merged ones, and the server's moments. Buffers stay as merged.

        Where no client counts nothing moves, not even by momentum.
        """
        if self.server_update == "mean" or not bool((shares > 0).any()):
            return merged, server.moments
        back = tree.map(torch.sub, server.weights.params, merged.params)
        direction, moments = self._server.step(server.moments, back)
        rate = self.server_lr or SERVER_LR[self.server_update]
        params = tree.map(lambda w, d: torch.add(w, d, alpha=-rate), server.weights.params, direction)
        return merged._replace(params=params), moments

    @property
    def _local(self) -> Rule:
        return Rule(self.descent == "adam", self.momentum, self.adam_decay, self.adam_epsilon)

    @property
    def _server(self) -> Rule:
        adam = self.server_update == "adam"
        return Rule(adam, self.server_momentum, self.server_adam_decay, self.server_adam_epsilon)

"""What the server does with clients' updates in every method: it clips changes, and merges what is left.

An algorithm's `aggregate` calls `clipped`, `chosen` and `merged`, in this order. Its server state has a field
`norms`, which is `()` unless changes are clipped.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms.averages import Aggregation, average, average_counted, central, median, trimmed
from fedxl.algorithms.clipping import clipped, no_norms
from fedxl.algorithms.protocol import ClientUpdate, Share

T = TypeVar("T")
V = TypeVar("V")
W = TypeVar("W", bound=ClientUpdate)


class Merging:
    """The server's side of `aggregate`. `Descent` has the settings."""

    summed: ClassVar[tuple[str, ...]] = ()  # fields of an update that the server needs in sum only; (): none

    aggregation: Aggregation
    hostile: float
    clip_change: float

    def with_norms(self, server: V) -> V:
        """The state before the first round; clients' usual norms are a part of it if changes are clipped."""
        if not self.clip_change:
            return server
        state = cast(Any, server)
        return cast(V, state._replace(norms=no_norms(len(self.changing(server)), state.step)))

    def without_norms(self, server: V) -> V:
        """The state as clients receive it: what is clipped is not theirs to know."""
        state = cast(Any, server)
        return cast(V, state._replace(norms=torch.zeros_like(state.norms))) if self.clip_change else server

    def clipped(self, server: Any, updates: W, counted: Tensor) -> tuple[W, Tensor | tuple[()]]:
        """Updates whose changes are no larger than `clip_change` allows, and the norms to remember."""
        if not self.clip_change:
            return updates, ()
        found = clipped(
            self.changing(updates),
            self.changing(server),
            counted > 0,
            self.factors(updates.share),
            server.norms,
            self.clip_change,
        )
        return self.with_parts(updates, found.parts), found.norms

    def chosen(self, server: Any, updates: Any, shares: Tensor) -> Tensor:
        """How much each client counts: krum leaves out those that lie far from the others."""
        return central(self.measured(server, updates), shares, self.hostile) if self.aggregation == "krum" else shares

    def merged(self, stacked: T, shares: Tensor, otherwise: T) -> T:
        """The clients' values as one; `otherwise` where no client counts."""
        if self.aggregation == "median":
            return median(stacked, shares, otherwise)
        if self.aggregation == "trimmed":
            return trimmed(stacked, shares, otherwise, self.hostile)
        if self.aggregation == "krum":
            return average_counted(stacked, shares, otherwise)
        return average(stacked, shares, otherwise)

    def trained(self, share: Share) -> Tensor:
        """How much each client counts in the average of the models: 0 if it does not train."""
        return share.model

    def scaled(self, before: V, after: V, by: float) -> V:
        """The state after a step of the server that is `by` times as long.

        Buffers are estimates and no steps, and so is a pool: they stay as they are.
        """
        old, new = cast(Any, before), cast(Any, after)
        params = stretched(old.weights.params, new.weights.params, by)
        return cast(V, new._replace(weights=new.weights._replace(params=params)))

    def changing(self, state: Any) -> dict[str, Any]:
        """The parts of a server state or of an update that a round changes, each with a norm of its own."""
        buffers = {name: leaf for name, leaf in state.weights.buffers.items() if leaf.is_floating_point()}
        return {"params": state.weights.params, "buffers": buffers}

    def with_parts(self, updates: Any, parts: dict[str, Any]) -> Any:
        """Updates with these parts in place of theirs."""
        weights = updates.weights._replace(
            params=parts["params"], buffers={**updates.weights.buffers, **parts["buffers"]}
        )
        return updates._replace(weights=weights)

    def factors(self, share: Share) -> Tensor:
        """By how much a client's gradient is multiplied if it holds rare examples; 1 for all others."""
        return torch.ones_like(share.model, dtype=torch.float64)

    def measured(self, server: Any, updates: Any) -> Any:
        """Of which numbers krum takes the distance between clients."""
        return updates.weights.params


def stretched(before: T, after: T, by: float) -> T:
    """A tree that lies `by` times as far from `before` as `after` does."""
    return tree.map(lambda old, new: old + by * (new - old), before, after)

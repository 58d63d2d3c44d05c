"""Updates whose networks stay on the ranks that made them, and weighted sums of them without gathering any.

An algorithm's `aggregate` gets updates stacked, one row per client. Of networks each rank holds the rows of its own
clients. A weighted sum over clients (`torch.tensordot`) adds up each rank's part and then the parts. Whatever else is
done to a leaf gathers its rows first. So every rank runs the algorithm's own `aggregate` and gets the same state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedxl.engine.ranks.team import Team

# What is known of a leaf without its rows.
PROPERTIES = ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")
ABOUT = {getattr(Tensor, name).__get__ for name in PROPERTIES} | {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.numel),
}


class Rows:
    """Which rank has which rows of a cohort's updates."""

    def __init__(self, team: Team, orders: Sequence[Sequence[int]]) -> None:
        """orders: by rank, which rows of the cohort it has, in the order in which it has them."""
        self.team, self.counts = team, [len(order) for order in orders]
        self.count = sum(self.counts)
        self.mine = torch.tensor(list(orders[team.rank]), dtype=torch.int64)
        # Where each row of the cohort lies once the rows of all ranks stand one after another.
        self.order = torch.argsort(torch.tensor([row for order in orders for row in order]))

    def gathered(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The leaves with all rows, in the order of the cohort, by one message."""
        if not leaves:
            return []
        own = torch.cat([as_bytes(leaf) for leaf in leaves])
        sizes = [row_bytes(leaf) for leaf in leaves]
        parts = self.team.gather(own, [many * sum(sizes) for many in self.counts])
        columns = [part.split([many * size for size in sizes]) for part, many in zip(parts, self.counts, strict=True)]
        whole = []
        for leaf, *pieces in zip(leaves, *columns, strict=True):
            stacked = torch.cat([piece.clone() for piece in pieces]).view(leaf.dtype)
            whole.append(stacked.view(self.count, *leaf.shape[1:])[self.order.to(leaf.device)])
        return whole


class Network:
    """The rows of one network's tensors at this rank."""

    def __init__(self, rows: Rows, leaves: Mapping[str, Tensor]) -> None:
        self.rows, self.leaves = rows, dict(leaves)
        self._weights: Tensor | None = None
        self._sums: dict[str, Tensor] = {}

    def spread(self) -> dict[str, Tensor]:
        return {name: Spread(self, name) for name in self.leaves}

    def summed(self, name: str, weights: Tensor) -> Tensor:
        """The weighted sum of a leaf over all clients. The first call adds up the whole network, in one message."""
        if self._weights is None or not torch.equal(self._weights, weights):
            # In double precision the result hardly depends on which rank had which client.
            own = weights[self.rows.mine.to(weights.device)].double()
            parts = {key: torch.tensordot(own, leaf.double(), 1) for key, leaf in self.leaves.items()}
            total = self.rows.team.total(torch.cat([part.flatten() for part in parts.values()]))
            pieces = total.split([part.numel() for part in parts.values()])
            self._sums = {key: piece.view(parts[key].shape) for key, piece in zip(parts, pieces, strict=True)}
            self._weights = weights.clone()
        return self._sums[name].to(self.leaves[name].dtype)


class Spread(Tensor):
    """A leaf of stacked updates, of which this rank holds the rows of its own clients."""

    network: Network
    name_: str
    whole_: Tensor | None

    @staticmethod
    def __new__(cls, network: Network, name: str) -> Spread:
        own = network.leaves[name]
        shape = (network.rows.count, *own.shape[1:])
        return Tensor._make_wrapper_subclass(cls, shape, dtype=own.dtype, device=own.device)

    def __init__(self, network: Network, name: str) -> None:
        self.network, self.name_, self.whole_ = network, name, None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Spread({self.name_}, {self.network.rows.counts})"  # without its numbers, which would be gathered

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in ABOUT:
            return super().__torch_function__(func, types, args, options)  # type: ignore[no-untyped-call]
        if func is Tensor.data_ptr:
            return id(args[0])  # the rows lie in several places; this tells one leaf from another
        if func is torch.tensordot and _weighs(*args, **options):
            return args[1].network.summed(args[1].name_, args[0])
        return func(*_whole(args), **_whole(options))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_whole(args), **_whole(kwargs or {}))

    def whole(self) -> Tensor:
        if self.whole_ is None:
            (self.whole_,) = self.network.rows.gathered([self.network.leaves[self.name_]])
        return self.whole_


def _weighs(first: Any, second: Any, dims: Any = 2, out: Any = None) -> bool:
    """Whether a product is that of weights [C] and rows [C, ...]."""
    plain = type(first) is not Spread and isinstance(first, Tensor) and first.ndim == 1
    return plain and type(second) is Spread and dims == 1 and out is None


def _whole(value: Any) -> Any:
    """Arguments with whole tensors in place of spread ones."""
    if type(value) is Spread:
        return value.whole()
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return type(value)(_whole(item) for item in value) if type(value) in (list, tuple) else value


def as_bytes(leaf: Tensor) -> Tensor:
    # A copy: an expanded leaf with one number counts as contiguous and yet cannot be seen as bytes.
    return leaf.detach().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def row_bytes(leaf: Tensor) -> int:
    return math.prod(leaf.shape[1:]) * leaf.element_size()

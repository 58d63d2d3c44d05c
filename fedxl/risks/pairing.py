"""Which entries of S1 meet which of S2: all that steps, draws, the pool and clients' weights know of labels.

`OneLabel` lets all meet. Others say what differs: `SeveralLabels` (several.py), `Queries` (ranking.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedxl.sampling import Floats, Indices, Purpose, Stream, pooled

Side = Literal["positive", "negative", "all", "none"]
Sides = tuple[Side, Side]
Column = Tensor | None  # [n] of examples, if it is known
# a [.., B1, *d], b [.., B2, *d] and labels of b [.., B2] (with queries: the size of a's query, [.., B1, 1]) -> l
PairLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Entry(NamedTuple):
    """Examples of one side, in a step or in the pool."""

    score: Tensor  # [.., B, *d]; S1's of several labels: of one label
    # What the pairing and the pair loss read besides, of S1 and of S2. One label: (), the label. Several: the index
    # of the label, all labels. Queries: `ranking.Relevant`, `ranking.Item`.
    target: Any


class Minibatch(NamedTuple):
    """What a client reads in a step: examples of S1, then of S2."""

    x: Tensor  # [B1 + B2, ...]
    y: Tensor  # [B1 + B2] labels as floats; of several labels [B1 + B2, L], -1 where one is unknown
    rows: Tensor  # [B1] where the examples of S1 stand in this client's u; of several labels they tell the label, too
    items: Any  # [B1 + B2] what else the pairing knows of examples


class Slices(NamedTuple):
    """Outputs of a batch of which the first `size1` are those of S1, and the others those of S2."""

    size1: int

    def mean(self, values: Tensor) -> Tensor:
        """Of both sides, which count the same, however many examples there are."""
        return 0.5 * (values[: self.size1].mean(0) + values[self.size1 :].mean(0))

    def present(self, both: Tensor) -> Tensor:
        """Of which labels the client holds both sides, and the batch some of S2."""
        return both > 0


class Masks(NamedTuple):
    """The same, where any output may be of either side, of both or of none. A label without S1 is judged by S2."""

    first: Tensor  # [B, *t]
    second: Tensor

    def mean(self, values: Tensor) -> Tensor:
        each = [torch.where(side, values, 0.0).sum(0) / side.sum(0).clamp(min=1) for side in self]
        return 0.5 * (torch.where(self.first.any(0), each[0], each[1]) + each[1])

    def present(self, both: Tensor) -> Tensor:
        return (both > 0) & self.second.any(0)


class Share(NamedTuple):
    """How much one client counts."""

    model: Tensor  # [] in the average of the models; only the ratios within a cohort matter
    part: Tensor  # [] of the population; 1 over all clients. Differs from `model` if cohorts are drawn by size
    client: Tensor  # [] its number
    mass: Tensor  # [2] its part of the pool's S1 and S2
    factors: Tensor  # [2, *t] what its gradients from S1 and S2 are multiplied by, 0 if it holds none

    @property
    def both(self) -> Tensor:
        """Whether it holds both sides, [*t]."""
        return (self.factors > 0).all(-1 - self.label_dims)

    @property
    def holds_both(self) -> Tensor:
        """Whether it holds both sides of any label, [] as 1 or 0."""
        return (self.both.any(-1) if self.label_dims else self.both).to(self.model.dtype)

    @property
    def label_dims(self) -> int:
        return self.factors.ndim - self.mass.ndim


class Held(NamedTuple):
    """What one client holds, as indices into the source."""

    first: Indices  # its examples of S1
    second: Indices
    every: Indices
    weights: tuple[Floats, Floats] | None  # how often each of either side is read; None: all alike
    more: Any  # what the pairing needs besides


class PoolWeights(NamedTuple):
    """How likely each entry of the pool is to be drawn. An empty side is one entry of weight 0."""

    first: Any  # [P1]
    second: Any  # [P2]
    groups: Any = None  # the groups of the entries of both sides, if only entries of one group meet


class Holder(Protocol):
    """A client or site, as far as others may know what it holds."""

    @property
    def times(self) -> Any: ...  # how many examples have which time: `timetable.Times`; None if they have none

    def count(self, side: Side) -> int: ...

    def by_label(self, side: Side) -> npt.NDArray[np.int64]:
        """Of several labels: its examples of this side, [L]."""

    def queries(self, relevant: bool) -> Indices:
        """The numbers of its queries, or of those of which it holds a relevant item."""


class Pairing:
    """Who meets whom. The defaults are those of one label: every example of S1 meets every one of S2."""

    ranked: ClassVar[bool] = False  # whether pairs lie within queries
    timed: ClassVar[bool] = False  # whether pairs depend on the times of events
    has_level: ClassVar[bool] = True  # whether skewed sites move the level of scores (level.py)
    probed_targets: ClassVar[tuple[float, ...]] = (0.0, 1.0)  # with which pair losses reach their extremes
    why_not_at_sites: ClassVar[str] = ""  # why scores of real sites cannot meet by it
    public_times: ClassVar[Floats | None] = None  # at which bins of all sites begin, if pairs know no exact time

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of several labels; empty if there is one."""
        return ()

    def check_sizes(self, batch1: int, batch2: int) -> None:
        """Raises UserError if a step cannot read so many examples of either side."""

    def facts(self, holders: Sequence[Holder], by_samples: bool) -> Any:
        """What clients must know of all clients' examples together; None: nothing."""

    def informed(self, facts: Any) -> Pairing:
        """The same, knowing these facts."""
        return self

    def targets(self, y: Tensor) -> Tensor:
        """Labels [n, L] of a record as steps and risks read them: [n], of several labels [n, L]."""
        return y[:, 0]

    # In a step.

    def entries(self, h: Tensor, of: Minibatch) -> tuple[Entry, Entry]:
        """Linked scores [B1 + B2, *d] as entries of S1 and of S2."""
        size1 = of.rows.shape[0]
        return Entry(h[:size1], ()), Entry(h[size1:], of.y[size1:])

    def members(self, of: Minibatch, sides: Sides) -> Any:
        """Which outputs of a batch are those of S1, and which are those of S2: `Slices`, or the like."""
        return Slices(of.rows.shape[0])

    def of_side(self, y: Tensor, side: Side) -> Tensor:
        """Which labels [n, *t] put their example into a side."""
        return belongs(y, side)

    def losses(self, pair: PairLoss, a: Entry, b: Entry) -> Tensor:
        """The loss of every pair, [.., B1, B2, *m]."""
        return pair(a.score, b.score, b.target)

    def meets(self, a: Entry, b: Entry, side: Side) -> Tensor | None:
        """[.., B1, B2] how much pairs count, 0 if they do not meet; None if all meet. side: which labels form S2."""
        return None

    def met(self, meets: Tensor) -> Tensor:
        """What the rows of `meets` are divided by to give means, [.., B1, 1]: here what they meet in this block."""
        return meets.sum(-1, keepdim=True).clamp(min=1)

    def forces(self, factors: Tensor, mine: tuple[Entry, Entry], pooled_a: Entry) -> Tensor:
        """How much pairs count, [2, B1 or 1, B2 or 1]: active a with passive b, then passive a with active b."""
        return factors.view(2, 1, 1)

    def over_labels(self, factors: Tensor) -> Tensor:
        """Factors [.., *t] of labels as one, [..]."""
        return factors

    # In the pool.

    def entry_weights(self, entry: Entry, side: int, share: Share) -> Tensor:
        """How likely entries [C, n] that clients have uploaded are to be drawn."""
        count = entry.score.shape[1]
        return (share.mass[:, side, None] / count).expand(-1, count)

    def group(self, entry: Entry) -> Tensor | None:
        """[P] the group of each entry, if only entries of one group meet."""
        return None

    def pool_target(self, first: bool, like: Tensor) -> Any:
        """The target of one entry of an empty pool, [1, *t]."""
        return () if first else like.new_zeros(1)

    def check_entries(self, first: Entry, second: Entry) -> str:
        """Why these targets cannot be those of a client; empty if they can."""
        y = second.target
        return "" if bool(((y == 0) | (y == 1)).all()) else "its labels (second) are not all 0 or 1"

    # What a client reads.

    def items(self, y: Tensor, groups: Column, time: Column, held: Sequence[Indices], local: bool, first: int) -> Any:
        """What is known of each example besides its label. local: pairs lie within a client. first: its number."""
        return ()

    def example_groups(self, items: Any) -> Indices | None:
        """The group of every example [n], if only examples of one group meet."""
        return None

    def hold(self, part: Indices, first: Indices, second: Indices, labels: Tensor, items: Any, side: Side) -> Any:
        """What drawing a client's examples needs besides; see `Held.more`."""
        return ()

    def num_rows(self, held: Held) -> int:
        """How many u a client keeps."""
        return len(held.first)

    def draw(
        self, stream: Stream, held: Held, visits: int, steps: int, sizes: tuple[int, int], fresh: bool = False
    ) -> tuple[Indices, Indices]:
        """The rows of S1 [K, B1] and the examples of both sides [K, B1 + B2] that a client reads in a round.

        A client reads a side epoch after epoch, from where its last visit ended. A side without examples is filled
        with others: they count for nothing, but BatchNorm sees them, so they must be real.
        """
        rows = self._read_first(stream, held, visits, (steps, sizes[0]), fresh)
        second = Purpose.FRESH_SECOND if fresh else Purpose.SECOND
        weights = held.weights[1] if held.weights else None
        others = _read(stream, second, visits, (steps, sizes[1]), len(held.second), weights)
        located = [self._locate(held, rows), _pick(held.second, others, held.every)]
        return rows, np.concatenate(located, axis=1)

    def _read_first(self, stream: Stream, held: Held, visits: int, shape: tuple[int, int], fresh: bool) -> Indices:
        weights = held.weights[0] if held.weights else None
        purpose = Purpose.FRESH_FIRST if fresh else Purpose.FIRST
        return _read(stream, purpose, visits, shape, len(held.first), weights)

    def _locate(self, held: Held, rows: Indices) -> Indices:
        return _pick(held.first, rows, held.every)

    def draw_pool(
        self, rng: np.random.Generator, pool: PoolWeights, steps: int, sizes: tuple[int, int], groups: Any
    ) -> tuple[Indices, Indices]:
        """The entries of the pool that a client's steps meet, [K, B1] and [K, B2].

        groups: [K, B1] of the client's own examples of S1, if only entries of one group meet.
        """
        first, second = (pooled(rng, steps * n, side) for n, side in zip(sizes, pool[:2], strict=True))
        return first.reshape(steps, -1), second.reshape(steps, -1)

    # How much clients count.

    def counts(self, holders: Sequence[Holder], sides: Sides, local: bool) -> tuple[list[int], list[int]]:
        """By how much each client counts on either side."""
        first, second = ([holder.count(side) for holder in holders] for side in sides)
        return first, second

    def spread(self, share: Share, holders: Sequence[Holder], sides: Sides, by_samples: bool, local: bool) -> Share:
        """Stacked shares of one label as those of this pairing."""
        return share

    # The whole objective.

    def value(self, risk: Any, h: Tensor, labels: Tensor, groups: Column = None, time: Column = None) -> Tensor:
        """The exact empirical `XRisk` of linked scores; NaN if S1 or S2 is empty."""
        first, second = (belongs(labels, side) for side in risk.sides)
        if not bool(first.any() & second.any()):
            return h.new_tensor(float("nan"))
        u = risk.whole(risk, Entry(h[first], ()), Entry(h[second], labels[second].to(h.dtype)))
        found: Tensor = risk.over_first(risk.outer(u))
        return found


class OneLabel(Pairing):
    """One label per example."""


def belongs(labels: Tensor, side: Side) -> Tensor:
    """Which examples form a side: a mask over labels of 0 and 1."""
    if side in ("all", "none"):
        return torch.full_like(labels, side == "all", dtype=torch.bool)
    return labels > 0 if side == "positive" else labels <= 0


def _read(
    stream: Stream, purpose: Purpose, visits: int, shape: tuple[int, int], count: int, weights: Floats | None
) -> Indices:
    """Positions among `count` examples, epoch after epoch; zeros if there are none to read."""
    reads = shape[0] * shape[1]
    if not reads or not count:
        return np.zeros(shape, np.int64)
    return stream.epochs(purpose, visits * reads, reads, count, weights).reshape(shape)


def _pick(side: Indices, rows: Indices, otherwise: Indices) -> Indices:
    return side[rows] if len(side) else np.resize(otherwise, rows.shape)

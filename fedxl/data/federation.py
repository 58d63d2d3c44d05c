"""The data of a federation: one source, split over clients, and the weight of each client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedxl import sampling, tree
from fedxl.algorithms.protocol import DataFacts
from fedxl.data.forms import Columns, Label
from fedxl.data.holders import gather, gather_split
from fedxl.data.preparation import Preparation
from fedxl.data.source import Augment, Source, TensorSource, queries_of
from fedxl.errors import require
from fedxl.risks.pairing import Holder, Share, Side, belongs
from fedxl.sampling import Floats, Indices

Weighting = Literal["clients", "samples"]
Pair = tuple[Any, Any]  # x and y: tensors, arrays, data frames or lists
Clients = Mapping[str, Pair | Dataset[Any]] | Iterable[Pair | Dataset[Any]]


class Holding(NamedTuple):
    """What one client holds, in numbers; of several labels, examples with any that is positive or negative."""

    positives: int
    negatives: int
    both: int = 0  # examples that count as both, of which there are none with one label
    label_counts: npt.NDArray[np.int64] = np.zeros((2, 0), np.int64)  # positives and negatives by label, [2, L]
    lists: tuple[Indices, Indices] = (np.zeros(0, np.int64),) * 2  # its queries, and those with a relevant item

    def count(self, side: Side) -> int:
        total = self.positives + self.negatives - self.both
        return {"positive": self.positives, "negative": self.negatives, "all": total}.get(side, 0)

    def by_label(self, side: Side) -> npt.NDArray[np.int64]:
        positives, negatives = self.label_counts
        found: npt.NDArray[np.int64] = {"positive": positives, "negative": negatives}.get(side, positives + negatives)
        return found

    def queries(self, relevant: bool) -> Indices:
        return self.lists[relevant]


@dataclass(frozen=True)
class Federation:
    """Which examples of the source each client holds."""

    source: Source
    parts: Sequence[Indices]

    def __post_init__(self) -> None:
        require(len(self.parts) > 0, "a federation needs at least one client")
        for client, part in enumerate(self.parts):
            require(len(part) > 0, f"client {client} has no examples; leave it out or give it some")

    @property
    def example_shape(self) -> tuple[int, ...]:
        return tuple(self.source.fetch(torch.tensor([0])).shape[1:])

    def pooled(self) -> Federation:
        """The same data in one place: what a centralised method trains on."""
        return Federation(self.source, [np.concatenate(self.parts)])

    def augmented(self, augment: Augment) -> Federation:
        """The same data, augmented in training."""
        source, means = self.source, augment.site_means
        require(isinstance(source, TensorSource), "only data held in memory can be augmented")
        assert isinstance(source, TensorSource)
        count = len(self.parts)
        require(len(means) in (0, count), f"site_means has {len(means)} entries for {count} clients")
        shift = torch.zeros(len(source))
        for mean, part in zip(means, self.parts, strict=False):
            shift[torch.as_tensor(part)] = mean
        return Federation(replace(source, augment=augment, means=shift if means else None, bank=None), self.parts)

    def side(self, side: Side) -> list[Indices]:
        """Each client's examples of one side, for any of several labels, as indices into the source."""
        members = self._members(side)
        member = np.asarray(members.any(1) if self.labels else members)
        return [part[member[part]] for part in self.parts]

    def weights(self) -> Floats | None:
        """How often each example of the source is read, relative to others of its class and client; None: alike."""
        found = getattr(self.source, "weights", None)
        return None if found is None else found.cpu().double().numpy().copy()

    @property
    def labels(self) -> int:
        """How many labels examples have, in columns; 0: they have one."""
        return self.source.labels.shape[1] if self.source.labels.ndim == 2 else 0

    def _members(self, side: Side) -> npt.NDArray[np.bool_]:
        """Which labels, [n] or [n, L], put their example into a side; of several, one that is not known does not."""
        labels = self.source.labels.cpu()
        member = belongs(labels, side)
        found: npt.NDArray[np.bool_] = (member & (labels >= 0) if self.labels else member).numpy()
        return found

    def holdings(self) -> list[Holding]:
        """What each client holds, in numbers."""
        sides = [self.side("positive"), self.side("negative")]
        found = []
        member = [self._members(side) for side in ("positive", "negative")] if self.labels else []
        groups = queries_of(self.source)
        query = None if groups is None else groups.cpu().numpy()
        for part, positives, negatives in zip(self.parts, *sides, strict=True):
            held = Holding(len(positives), len(negatives))
            if self.labels:
                both = len(np.intersect1d(positives, negatives))
                held = held._replace(both=both, label_counts=np.stack([each[part].sum(0) for each in member]))
            if query is not None:
                held = held._replace(lists=(np.unique(query[part]), np.unique(query[positives])))
            found.append(held)
        return found

    def facts(self, weighting: Weighting) -> DataFacts:
        return facts_about(self.holdings(), weighting)


def facts_about(holders: Sequence[Holder], weighting: Weighting) -> DataFacts:
    """What an algorithm may know of these clients' data together."""
    positives, sizes = ([float(one.count(side)) for one in holders] for side in ("positive", "all"))
    shares = [many / size for many, size in zip(positives, sizes, strict=True)]
    share = sum(positives) / sum(sizes) if weighting == "samples" else float(np.mean(shares))
    both = any(one.count("positive") and one.count("negative") for one in holders)
    return DataFacts(share, float(both))


class Split(NamedTuple):
    """Examples to evaluate on."""

    x: Tensor
    y: Tensor
    sites: Indices | None = None  # the client that each example is from, if that is known
    rows: Sequence[str] = ()  # what identifies each example where it is from, if that is known
    queries: Tensor | None = None  # of each example, if these are items of queries; then y holds grades


# To validate or test on: of nobody in particular, by name, or a list with one for each client.
HeldBack = Split | Pair | Dataset[Any] | Mapping[str, Pair | Dataset[Any]] | list[Pair | Dataset[Any]]


class Splits(NamedTuple):
    train: Federation
    validation: Split | None
    test: Split | None
    names: Sequence[str] = ()  # of the clients; empty: they have numbers alone
    preparation: Preparation | None = None  # how examples were made of files, which a run keeps with its model
    columns: Sequence[str] = ()  # of the clients' data frames, in order


def from_arrays(clients: Clients, positive: Label | Columns | None = None) -> Federation:
    """A federation of the clients' own data: pairs (x, y) or Datasets, in a list or by name."""
    return as_splits(clients, positive).train


def as_splits(
    clients: Federation | Splits | Clients,
    positive: Label | Columns | None = None,
    validation: HeldBack | None = None,
    test: HeldBack | None = None,
) -> Splits:
    """What `fit` is given, in any form: the clients, their names if they have any, and what is held back."""
    columns: Sequence[str] = ()
    if isinstance(clients, Splits):
        splits = clients
    elif isinstance(clients, Federation):
        splits = Splits(clients, None, None)
    else:
        found = gather(clients, positive)
        ends = np.cumsum(found.sizes)
        parts = [np.arange(end - size, end) for size, end in zip(found.sizes, ends, strict=True)]
        columns = found.columns
        splits = Splits(Federation(found.source, parts), None, None, found.names, columns=columns)
    names = tuple(splits.names) or tuple(map(str, range(len(splits.train.parts))))
    given = {
        split: _held_back(data, split, names, columns, positive)
        for split, data in (("validation", validation), ("test", test))
        if data is not None
    }
    return splits._replace(**given)  # type: ignore[arg-type]


def _held_back(data: Any, where: str, names: Sequence[str], columns: Sequence[str], positive: Any) -> Split:
    if isinstance(data, Split):
        return data
    found = gather_split(data, where, names, columns, positive)
    of = np.array([names.index(name) for name in found.names if name], np.int64)
    return Split(found.source.x, found.source.labels, of[found.sites] if len(of) else None)


class Weighted(NamedTuple):
    """How much clients count, and how often they take part."""

    shares: Share  # stacked over clients
    chances: Floats | None  # of each client to be in a cohort; None: all are alike


def weigh(num_first: Sequence[int], num_second: Sequence[int], weighting: Weighting, cohort: int = 0) -> Weighted:
    """Shares for cohorts of this size (0: everyone takes part), and the chances that these cohorts are drawn with.

    If cohorts were uniform, and weights by samples were divided by their sum in a cohort, a large client would count
    for less than its part of the population p_i. So `samples` draws cohorts by size, and a client's weight is p_i
    over its chance. Such weights sum to 1 in every cohort, and each is p_i on average.
    """
    share = shares(num_first, num_second, weighting)
    if weighting == "clients" or not 0 < cohort < len(num_first):
        return Weighted(share, None)
    chances = sampling.inclusion(share.part.numpy(), cohort)
    certain = torch.from_numpy(chances == 1)
    others = (1 - share.part[certain].sum()) / max(1, cohort - int(certain.sum()))
    model = torch.where(certain, share.part, torch.where(share.part > 0, others, 0.0))
    return Weighted(_counting(share, model), chances)


def weigh_by(num_first: Sequence[int], num_second: Sequence[int], weighting: Weighting, frequency: Floats) -> Share:
    """Shares for clients that take part in these shares of the rounds: the more rarely, the more it counts then.

    A client that never takes part counts for nothing, and the others make up for it.
    """
    present: list[int] = np.flatnonzero(frequency > 0).tolist()
    some = shares([num_first[i] for i in present], [num_second[i] for i in present], weighting)
    # Only ratios matter. The largest frequency counts as 1, so that if all are alike the shares are the parts.
    often = torch.from_numpy(frequency[present] / frequency.max())
    some = _counting(some, some.part / often)
    index = torch.tensor(present)
    spread = tree.map(lambda leaf: leaf.new_zeros(len(frequency), *leaf.shape[1:]).index_put((index,), leaf), some)
    return spread._replace(client=torch.arange(len(frequency), dtype=torch.float64))


def shares(num_first: Sequence[int], num_second: Sequence[int], weighting: Weighting) -> Share:
    """The weight of each client if all take part; model * factors is its mass, its part of S1 and of S2.

    `clients` is the paper's objective: every client that holds a side counts the same on it. `samples` is the
    objective of the pooled data: a client counts by its examples. Either way a client without S1 has a factor of 0
    there, and the others make up for it, so that the average over clients stays an unbiased gradient of the risk.
    """
    counts = torch.tensor([list(num_first), list(num_second)], dtype=torch.float64)  # [2, N]
    if weighting == "clients":
        model = torch.full((counts.shape[1],), 1 / counts.shape[1], dtype=torch.float64)
        mass = (counts > 0).double()
    else:
        model = counts.sum(0) / counts.sum()
        mass = counts
    mass = mass / mass.sum(1, keepdim=True).clamp(min=1)  # [2, N], each row sums to 1, or is all 0
    factors = torch.where(model > 0, mass / model, torch.zeros_like(mass))
    client = torch.arange(len(model), dtype=torch.float64)
    return _counting(Share(model, model.clone(), client, mass.T, factors.T.contiguous()), model)


def _counting(share: Share, model: Tensor) -> Share:
    """Shares of clients that count by these weights in the average of the models."""
    return share._replace(model=model, mass=model[:, None] * share.factors)

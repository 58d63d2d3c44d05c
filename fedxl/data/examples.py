"""`Examples`: the record that every source of data ends in, and what training reads."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedxl import display
from fedxl.algorithms.protocol import DataFacts
from fedxl.errors import require
from fedxl.evaluation.scores import UNKNOWN as UNKNOWN
from fedxl.options import require_types
from fedxl.risks.pairing import Holder, OneLabel, Pairing, Side, belongs
from fedxl.risks.ranking import HIGHEST_GRADE
from fedxl.risks.timetable import Times, times_of
from fedxl.sampling import Indices, Purpose, generator
from fedxl.tree import add_tensor

if TYPE_CHECKING:
    from fedxl.data.tables.prepare import Preparation

# Noise is read from a bank that is drawn once, at an offset that the code gives: the same bits on every device and in
# every executor, at the cost of a gather. Two reads for a 32 x 32 colour image overlap in about one of 170 pairs.
BANK = 2**20
LOOKED_AT = 256  # examples that tell whether images are whole numbers
MOST_CROP = 2**16  # so that a 64-bit integer can hold every code


@dataclass(frozen=True)
class Augment:
    """Random crop, flip and noise, each off by default.

    >>> Augment(crop=4, flip=True).codes
    162
    """

    crop: int = 0  # pad with so many black pixels on each side, then crop at a random place
    flip: bool = False  # horizontally, with probability 1/2
    noise: float = 0.0  # standard deviation of Gaussian noise, added to pixels in [0, 1]
    site_means: tuple[float, ...] = ()  # the mean of that noise at each client; empty: 0 everywhere

    def __post_init__(self) -> None:
        require_types(Augment, vars(self))
        require(0 <= self.crop <= MOST_CROP, f"crop must lie between 0 and {MOST_CROP} pixels, got {self.crop}")
        require(self.noise >= 0, f"noise must not be negative, got {self.noise}")
        require(all(map(math.isfinite, self.site_means)), f"site_means must be finite, got {self.site_means}")

    @property
    def codes(self) -> int:
        """The number of codes; 1: nothing is random."""
        return (2 * self.crop + 1) ** 2 * (2 if self.flip else 1) * (BANK if self.noise else 1)

    def bank(self) -> Tensor:
        """Standard normal numbers, or none if there is no noise."""
        size = BANK if self.noise else 0
        return torch.from_numpy(generator(0, Purpose.NOISE).standard_normal(size, "f4"))

    def read(self, images: Tensor, indices: Tensor, codes: Tensor, bank: Tensor) -> Tensor:
        """The images [n, C, H, W] at `indices`, [*indices.shape, C, H, W] in [0, 1], augmented by their codes."""
        channels, height, width = images.shape[1:]
        side = 2 * self.crop + 1

        def arange(size: int) -> Tensor:
            return torch.arange(size, device=images.device)

        codes = codes[..., None, None, None]
        down, codes = codes % side - self.crop, codes // side
        right, codes = codes % side - self.crop, codes // side
        columns = arange(width)
        if self.flip:
            columns, codes = torch.where(codes % 2 > 0, width - 1 - columns, columns), codes // 2
        y, x = arange(height)[:, None] + down, columns + right
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        y, x = y.clamp(0, height - 1), x.clamp(0, width - 1)
        pixels = scaled(images[indices[..., None, None, None], arange(channels)[:, None, None], y, x])
        pixels = torch.where(inside, pixels, torch.zeros_like(pixels))
        if not self.noise:
            return pixels
        place = arange(channels * height * width).view(channels, height, width)
        return pixels + self.noise * bank[(codes + place) % BANK].to(pixels.dtype)


NOTHING = Augment()


def scaled(x: Tensor) -> Tensor:
    """Bytes as floats in [0, 1]; other types unchanged."""
    return x.float() / 255 if x.dtype == torch.uint8 else x


ONE_LABEL = OneLabel()
Weighting = Literal["clients", "samples"]


@dataclass(frozen=True, eq=False, repr=False)
class Examples:
    """Examples in memory, one row each. Images of bytes stay bytes, and become floats in [0, 1] when fetched."""

    x: Tensor  # [n, ...]
    y: Tensor  # [n, L] 0 or 1, -1: not known; one label is L = 1; with groups grades of relevance
    site: Indices | None = None  # [n] who holds each example, as an index; None: not known
    sites: tuple[str, ...] = ()  # their names; empty: they have numbers alone
    weight: Tensor | None = None  # [n] how often each is read in training, relative to others of its class and site
    group: Tensor | None = None  # [n] the query of each item
    time: Tensor | None = None  # [n] of the event (y = 1), or until when there was none (y = 0); None: y has no time
    row: Sequence[str] = ()  # [n] what identifies each where it is from; empty: not known
    augment: Augment = NOTHING
    shift: Tensor | None = None  # [n] added to each in training, if sites differ
    bank: Tensor | None = None  # the augmentation's noise
    order: Indices | None = None  # [n] all rows, client after client, as each has its own; None: as they stand here

    def __post_init__(self) -> None:
        right = self.y.ndim == 2 and len(self.x) == len(self.y)
        shapes = f"{list(self.x.shape)} and {list(self.y.shape)}"
        require(right, f"examples and labels must be [n, ...] and [n, labels], not {shapes}; one label is y[:, None]")
        some = self.codes > 1
        told = f"crop, flip and noise are for images [channels, height, width], not for {list(self.x.shape[1:])}"
        require(self.x.ndim == 4 or not some, told)
        plain = self.x.dtype == torch.uint8 or self.x.is_floating_point()
        bytes_or_floats = "cannot be augmented; give images as bytes (uint8) or floats"
        require(plain or (not some and self.shift is None), f"examples of {self.x.dtype} {bytes_or_floats}")
        if some and self.bank is None:
            object.__setattr__(self, "bank", self.augment.bank())

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        held = f" at {_sites(len(self.parts))}" if self.site is not None else ""
        return f"Examples: {self.counted} of shape {list(self.shape)}{held}"

    @property
    def counted(self) -> str:
        """How many there are, in words.

        >>> Examples(torch.zeros(3, 2), torch.tensor([[0], [1], [1]])).counted
        '3 (2 positive)'
        """
        return f"{len(self):,} ({int((self.y > 0).any(1).sum()):,} {self.kind})"

    @property
    def kind(self) -> str:
        """What an example of label 1 is called."""
        return "with an event" if self.time is not None else "relevant" if self.group is not None else "positive"

    @property
    def labels(self) -> int:
        """How many labels each example has."""
        return self.y.shape[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example."""
        return tuple(self.x.shape[1:])

    @property
    def pixels(self) -> bool:
        """Whether they are images of bytes, which become floats in [0, 1]."""
        return self.x.ndim >= 3 and self.x.dtype == torch.uint8

    def require_valid(self, where: str, unknown: bool = False) -> None:
        """Raises UserError if there are no examples, or some that are not finite, or labels that there are not.

        unknown: whether one label may be unknown of some examples, as one of several may.
        """
        self.require_usable(where)
        least, most = (UNKNOWN if unknown or self.labels > 1 else 0), (HIGHEST_GRADE if self.group is not None else 1)
        right = bool(((self.y >= least) & (self.y <= most)).all())
        require(right, f"{where}: labels must lie between {least} and {most}")

    def require_usable(self, where: str) -> None:
        """Raises UserError if there are no examples, or some that are not finite."""
        require(len(self) > 0, f"{where} has no examples; leave it out or give it some")
        bad = not_finite(self.x)
        require(bad == 0, f"{where}: {bad} of {len(self)} examples hold NaN or infinity; drop or impute them")

    @property
    def scale(self) -> str:
        """Of images, whether their numbers are bytes, other whole numbers (up to 255, say) or floats; else empty."""
        if len(self.shape) < 2:
            return ""
        some = self.x[:LOOKED_AT]
        # Series of numbers may happen to be whole; channels of pixels in [0, 1] only if black or white.
        whole = some.is_floating_point() and some.ndim > 3 and bool((some == some.round()).all() & (some > 1).any())
        return "bytes" if self.pixels else "whole" if whole or not some.is_floating_point() else "floats"

    def require_scale(self, scale: str, where: str) -> None:
        """Raises UserError if images are of another scale than those of training, as far as that can be told.

        Floats and longer integers stay as they are, so whole numbers would be 255 times the floats of training.
        """
        mixed = "bytes" in (scale, self.scale) or (scale, self.scale) == ("floats", "whole")
        kind = {"bytes": "bytes (uint8), which become floats in [0, 1]", "floats": "floats, used unchanged"}
        were = kind.get(scale, "other numbers, used unchanged")
        are = str(self.x.dtype).removeprefix("torch.") + (" and whole" if self.scale == "whole" else "")
        told = f"{where}: images are {are}, those of training were {were}"
        require("" in (scale, self.scale) or scale == self.scale or not mixed, f"{told}; give them in the same type")

    # What training reads.

    @property
    def codes(self) -> int:
        """How many codes augmentation has: one is drawn each time training reads an example. 1: nothing is random."""
        return self.augment.codes

    def fetch(self, indices: Tensor, codes: Tensor | None = None) -> Tensor:
        """The examples at indices of any shape, [*indices.shape, ...]: unchanged, or augmented by their codes."""
        if codes is None:
            return self._plain(indices)
        x = self._plain(indices) if self.bank is None else self.augment.read(self.x, indices, codes, self.bank)
        if self.shift is None:
            return x
        return x + self.shift[indices].to(x.dtype)[(..., *[None] * (x.ndim - indices.ndim))]

    def _plain(self, indices: Tensor) -> Tensor:
        x = self.x[indices]
        # Byte features are not pixels.
        return scaled(x) if self.pixels else x.float() if x.dtype == torch.uint8 else x

    def to(self, device: torch.device) -> Examples:
        tensors: dict[str, Any] = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})

    # Who holds which.

    @cached_property
    def parts(self) -> list[Indices]:
        """Each client's examples, in their order. Without sites, one client holds all."""
        site = np.zeros(len(self), np.int64) if self.site is None else self.site
        count = len(self.sites) or int(site.max(initial=-1)) + 1
        order = np.argsort(site, kind="stable") if self.order is None else self.order
        parts = np.split(order, np.searchsorted(site[order], np.arange(1, count)))
        require(bool(parts) and len(self) > 0, "a federation needs at least one client")
        for client, part in enumerate(parts):
            require(len(part) > 0, f"client {client} has no examples; leave it out or give it some")
        return parts

    def take(self, rows: Indices) -> Examples:
        """These rows, in this order."""
        if len(rows) == len(self) and bool((rows == np.arange(len(self))).all()):
            return self  # nothing is copied
        at = torch.as_tensor(rows)
        each = ("x", "y", "weight", "group", "time", "shift")
        tensors = {name: value[at] for name in each if (value := getattr(self, name)) is not None}
        row = [self.row[number] for number in at.tolist()] if len(self.row) else ()
        site = None if self.site is None else self.site[at.numpy()]
        return replace(self, **tensors, site=site, row=row, order=None)

    def share_out(self, parts: Sequence[Indices], sites: Sequence[str] = ()) -> Examples:
        """These parts as those of the clients. If a row is in several parts or in none, this is a copy."""
        for client, part in enumerate(parts):
            require(len(part) > 0, f"client {client} has no examples; leave it out or give it some")
        order, site = np.concatenate(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        if len(order) != len(self) or len(np.unique(order)) != len(self):
            return replace(self.take(order), site=site, sites=tuple(sites))
        owner = np.empty_like(site)
        owner[order] = site
        return replace(self, site=owner, sites=tuple(sites), order=order)  # nothing is copied

    def pooled(self) -> Examples:
        """The same data in one place: what a centralised method trains on."""
        return self.share_out([np.concatenate(self.parts)])

    def augmented(self, augment: Augment) -> Examples:
        """The same data, augmented in training."""
        means, count = augment.site_means, len(self.parts)
        require(len(means) in (0, count), f"site_means has {len(means)} entries for {count} clients")
        site = np.zeros(len(self), np.int64) if self.site is None else self.site
        shift = torch.tensor(means)[torch.from_numpy(site)] if means else None
        return replace(self, augment=augment, shift=shift, bank=None)

    def side(self, side: Side) -> list[Indices]:
        """Each client's examples of one side, for any of their labels."""
        member = np.asarray(self._members(side).any(1))
        return [part[member[part]] for part in self.parts]

    def _members(self, side: Side) -> npt.NDArray[np.bool_]:
        """[n, L] which labels put their example into a side; one that is not known does not."""
        y = self.y.cpu()
        return np.asarray(belongs(y, side) & (y >= 0))

    def holdings(self) -> list[Holding]:
        """What each client holds, in numbers."""
        positive, negative = self._members("positive"), self._members("negative")
        group, time = (None if each is None else each.cpu().numpy() for each in (self.group, self.time))
        found = []
        for part in self.parts:
            one, other = positive[part], negative[part]
            some, none = one.any(1), other.any(1)
            by_label = np.stack([one.sum(0), other.sum(0)])
            held = Holding(int(some.sum()), int(none.sum()), int((some & none).sum()), by_label)
            if group is not None:
                held = held._replace(lists=(np.unique(group[part]), np.unique(group[part[some]])))
            if time is not None:
                held = held._replace(times=times_of(time[part], np.asarray(some)))
            found.append(held)
        return found

    def fingerprint(self) -> str:
        """A hash of all numbers, without fetching: bytes take a quarter of the memory of floats."""
        digest = hashlib.sha256()
        for name in ("y", "x", "shift", "weight", "group", "time"):
            if (tensor := getattr(self, name)) is not None:
                add_tensor(digest, name, tensor)
        return digest.hexdigest()


class Holding(NamedTuple):
    """What one client holds, in numbers. With several labels an example may count as positive and as negative."""

    positives: int
    negatives: int
    both: int = 0  # examples that count as both, of which there are none with one label
    label_counts: npt.NDArray[np.int64] = np.zeros((2, 0), np.int64)  # positives and negatives by label, [2, L]
    lists: tuple[Indices, Indices] = (np.zeros(0, np.int64),) * 2  # its queries, and those with a relevant item
    times: Times | None = None  # of time to event

    def count(self, side: Side) -> int:
        total = self.positives + self.negatives - self.both
        return {"positive": self.positives, "negative": self.negatives, "all": total}.get(side, 0)

    def by_label(self, side: Side) -> npt.NDArray[np.int64]:
        positives, negatives = self.label_counts
        return np.asarray({"positive": positives, "negative": negatives}.get(side, positives + negatives))

    @property
    def ranked(self) -> bool:
        """Whether its examples are items of queries."""
        return len(self.lists[0]) > 0

    def queries(self, relevant: bool) -> Indices:
        return self.lists[relevant]


def facts_about(holders: Sequence[Holder], weighting: Weighting, pairing: Pairing = ONE_LABEL) -> DataFacts:
    """What an algorithm with this pairing may know of all these clients' data."""
    positives, sizes = ([float(one.count(side)) for one in holders] for side in ("positive", "all"))
    shares = [many / size for many, size in zip(positives, sizes, strict=True)]
    share = sum(positives) / sum(sizes) if weighting == "samples" else float(np.mean(shares))
    return DataFacts(share, _one_class(holders, weighting), pairing.facts(holders, weighting == "samples"))


MOST_OF_AVERAGE = 0.85  # of the examples; by samples, clients that hold more would be nearly all of every average


def _one_class(holders: Sequence[Holder], weighting: Weighting) -> float:
    """`DataFacts.one_class`. Measured by `python -m studies drift`.

    Clients with one class should train if all of them hold the same class and most of its examples. Otherwise, or if
    they would be nearly all of every average, they should lend their scores.
    """
    counts = np.array([(one.count("positive"), one.count("negative")) for one in holders])
    alone = (counts == 0).any(1)
    if alone.all() or not alone.any():
        return 3.0 if alone.all() else 0.0
    fewer, more = sorted(counts[alone].sum(0) / np.maximum(counts.sum(0), 1))
    outweigh = weighting == "samples" and counts[alone].sum() > MOST_OF_AVERAGE * counts.sum()
    return 2.0 if fewer == 0 and more > 0.5 and not outweigh else 1.0


def numbered(count: int) -> tuple[str, ...]:
    """Names for clients that have none."""
    return tuple(f"client {number}" for number in range(count))


def _sites(count: int) -> str:
    return f"{count:,} sites" if count > 1 else "one site"


class Splits(NamedTuple):
    """What a run trains and evaluates on: one record per split, with the same sites."""

    train: Examples
    validation: Examples | None = None
    test: Examples | None = None
    preparation: Preparation | None = None  # how examples were made of files, which a run keeps with its model
    columns: Sequence[str] = ()  # of the clients' data frames, in order
    fitted: bool = False  # whether features are scaled by means of these examples themselves

    def __repr__(self) -> str:
        each = {"train": self.train, **self.held_back}
        counts = ", ".join(f"{name} {found.counted}" for name, found in each.items())
        return f"Splits: {_sites(len(self.names))}; {counts}; shape {list(self.train.shape)}"

    def _repr_html_(self) -> str:
        return display.html(self)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the clients, also of those that have numbers alone."""
        return self.train.sites or numbered(len(self.train.parts))

    @property
    def held_back(self) -> dict[str, Examples]:
        """Validation and test data, as far as there are any."""
        both = {"validation": self.validation, "test": self.test}
        return {name: found for name, found in both.items() if found is not None}


def not_finite(x: Tensor) -> int:
    """How many examples hold NaN or infinity."""
    return int((~torch.isfinite(x.flatten(1))).any(1).sum()) if x.is_floating_point() else 0


Digests = npt.NDArray[np.bytes_]  # [n] of 16 bytes


def digests(blocks: Iterable[Tensor]) -> Digests:
    """A digest of each example's numbers and their type, in which zero has one sign."""
    found = []
    for block in blocks:
        values = block.flatten(1)
        values = values.float() if values.dtype == torch.bfloat16 else values
        array = np.ascontiguousarray(values + 0 if values.is_floating_point() else values)
        found += [hashlib.blake2b(row, digest_size=16, person=array.dtype.str.encode()).digest() for row in array]
    return np.array(found, "S16")


def are_known(mine: Digests, known: Digests) -> npt.NDArray[np.bool_]:
    """Which of the first are among the others, which are sorted: so that these are not sorted for every block."""
    return np.asarray(np.append(known, b"")[np.searchsorted(known, mine)] == mine)


def floats_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Examples in the precision of a run; integers (tokens) keep their type."""
    return x.to(dtype) if x.is_floating_point() else x

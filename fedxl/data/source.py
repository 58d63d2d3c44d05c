"""Sources of examples, and their augmentation as they are read: one integer, the code, makes all random choices."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedxl.data.forms import Columns, Label, encoded, features
from fedxl.errors import require
from fedxl.options import require_types
from fedxl.sampling import Purpose, generator
from fedxl.tree import add_tensor

NOT_AUGMENTED = "cannot be augmented; give images as bytes (uint8) or floats"
BLOCK = 1024  # examples read at a time
# Noise is read from a bank that is drawn once, at an offset that the code gives: the same bits on every device and in
# every executor, at the cost of a gather. Two reads for a 32 x 32 colour image overlap in about one of 170 pairs.
BANK = 2**20
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
        require(self.crop >= 0, f"crop must not be negative, got {self.crop}")
        require(self.crop <= MOST_CROP, f"crop must be at most {MOST_CROP} pixels, got {self.crop}")
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


class Source(Protocol):
    @property
    def labels(self) -> Tensor:
        """[n], 0 or 1; of several labels [n, L], and -1 where one is not known."""

    @property
    def codes(self) -> int:
        """The number of codes; one is drawn each time training reads an example. 1: nothing is random."""

    def fetch(self, indices: Tensor, codes: Tensor | None = None) -> Tensor:
        """The examples at indices of any shape, [*indices.shape, ...]: unchanged, or augmented by their codes."""

    def to(self, device: torch.device) -> Source: ...


@dataclass(frozen=True, eq=False)
class TensorSource:
    """Examples in memory. Images of bytes stay bytes, and become floats in [0, 1] when fetched."""

    x: Tensor
    labels: Tensor
    augment: Augment = NOTHING
    means: Tensor | None = None  # [n] added to each example in training, if sites differ
    bank: Tensor | None = None  # the augmentation's noise
    weights: Tensor | None = None  # [n] how often each example is read, relative to others of its class and client
    queries: Tensor | None = None  # [n] the query of each example; then labels are grades of relevance

    def __post_init__(self) -> None:
        some = self.codes > 1
        require(
            self.x.ndim == 4 or not some,
            f"crop, flip and noise are for images [channels, height, width], not for {list(self.x.shape[1:])}",
        )
        plain = self.x.dtype == torch.uint8 or self.x.is_floating_point()
        require(plain or (not some and self.means is None), f"examples of {self.x.dtype} {NOT_AUGMENTED}")
        if some and self.bank is None:
            object.__setattr__(self, "bank", self.augment.bank())

    @property
    def codes(self) -> int:
        return self.augment.codes

    def fetch(self, indices: Tensor, codes: Tensor | None = None) -> Tensor:
        if codes is None:
            return self._plain(indices)
        x = self._plain(indices) if self.bank is None else self.augment.read(self.x, indices, codes, self.bank)
        if self.means is None:
            return x
        return x + self.means[indices].to(x.dtype)[(..., *[None] * (x.ndim - indices.ndim))]

    def _plain(self, indices: Tensor) -> Tensor:
        x = self.x[indices]
        pixels = self.x.ndim >= 3  # byte features are not pixels
        return scaled(x) if pixels else x.float() if x.dtype == torch.uint8 else x

    def to(self, device: torch.device) -> TensorSource:
        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        x, labels, queries = self.x.to(device), self.labels.to(device), moved(self.queries)
        return replace(self, x=x, labels=labels, means=moved(self.means), bank=moved(self.bank), queries=queries)

    def __len__(self) -> int:
        return len(self.labels)


def queries_of(source: Source) -> Tensor | None:
    """The query of each example; None if the source knows none."""
    return getattr(source, "queries", None)


def fingerprint(source: Source) -> str:
    """A hash of all numbers in a source, read in blocks."""
    digest = hashlib.sha256()
    add_tensor(digest, "labels", source.labels)
    if isinstance(source, TensorSource):
        # Without fetching: bytes take a quarter of the memory of floats.
        for name in ("x", "means", "weights", "queries"):
            if (tensor := getattr(source, name)) is not None:
                add_tensor(digest, name, tensor)
    else:
        for indices in torch.arange(len(source.labels), device=source.labels.device).split(BLOCK):
            add_tensor(digest, "x", source.fetch(indices))
    return digest.hexdigest()


def floats_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Examples in the precision of a run; integers (tokens) keep their type."""
    return x.to(dtype) if x.is_floating_point() else x


def checked(x: Any, y: Any, where: str, positive: Label | Columns | None = None) -> TensorSource:
    """A source of checked examples, in any form that `features` and `encoded` take."""
    return checked_tensors(features(x, where).x, y, where, positive)


def checked_tensors(x: Tensor, y: Any, where: str, positive: Label | Columns | None = None) -> TensorSource:
    """The same for examples that are a tensor already."""
    require(not _exchanged(x, y), f"{where}: examples and labels seem exchanged; give (x, y), the labels last")
    require(x.ndim >= 2, f"{where}: examples must be rows of features or images, got shape {list(x.shape)}")
    labels = encoded(y, where, positive) if len(x) else torch.empty(0)
    require(len(x) > 0, f"{where} has no examples; leave it out or give it some")
    require(len(x) == len(labels), f"{where}: {len(x)} examples but {len(labels)} labels")
    require(x.numel() > 0, f"{where}: examples of shape {list(x.shape[1:])} hold no numbers")
    if x.is_floating_point():
        bad = int((~torch.isfinite(x.flatten(1))).any(1).sum())
        require(bad == 0, f"{where}: {bad} of {len(x)} examples hold NaN or infinity; drop or impute them")
    return TensorSource(x, labels)


def _exchanged(x: Tensor, y: Any) -> bool:
    """Whether what should be labels are rows, and what should be rows are labels."""
    shape = None if isinstance(y, Tensor) and y.is_nested else getattr(y, "shape", None)
    return x.ndim == 1 and shape is not None and len(shape) >= 2 and shape[0] == len(x)

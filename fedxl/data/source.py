"""Sources of examples: `labels`, and `fetch` for any block of indices."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedxl.data.augment import NOTHING, Augment, scaled
from fedxl.data.feature_forms import features
from fedxl.data.label_columns import Columns
from fedxl.data.label_forms import Label, encoded
from fedxl.errors import require
from fedxl.tree import add_tensor

NOT_AUGMENTED = "cannot be augmented; give images as bytes (uint8) or floats"
BLOCK = 1024  # examples read at a time


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
        add_tensor(digest, "x", source.x)
        if source.means is not None:
            add_tensor(digest, "means", source.means)
        if source.weights is not None:
            add_tensor(digest, "weights", source.weights)
        if source.queries is not None:
            add_tensor(digest, "queries", source.queries)
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

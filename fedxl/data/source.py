"""Sources of examples: `labels`, and `fetch` for any block of indices."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fedxl.errors import UserError, require


class Source(Protocol):
    @property
    def labels(self) -> Tensor:
        """[n], 0 or 1."""

    def fetch(self, indices: Tensor) -> Tensor:
        """Examples for indices of any shape: [*indices.shape, ...]."""

    def to(self, device: torch.device) -> Source: ...


class TensorSource:
    """Examples held in memory. Images of bytes stay so, and become floats in [0, 1] as they are fetched."""

    def __init__(self, x: Tensor, labels: Tensor) -> None:
        self.x, self.labels = x, labels

    def fetch(self, indices: Tensor) -> Tensor:
        x = self.x[indices]
        if x.dtype != torch.uint8:
            return x
        return x.float() / 255 if self.x.ndim >= 3 else x.float()

    def to(self, device: torch.device) -> TensorSource:
        return TensorSource(self.x.to(device), self.labels.to(device))

    def __len__(self) -> int:
        return len(self.labels)


def checked(x: Tensor, y: Tensor, where: str) -> TensorSource:
    """A source of checked examples; labels may be bool, 0/1 or -1/1."""
    try:
        x, y = torch.as_tensor(x), torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{where}: examples and labels must be arrays of numbers") from None
    require(y.ndim == 1, f"{where}: labels must be one number an example, got shape {list(y.shape)}")
    require(x.ndim >= 2, f"{where}: examples must be rows of features or images, got shape {list(x.shape)}")
    require(len(x) == len(y), f"{where}: {len(x)} examples but {len(y)} labels")
    require(len(x) > 0, f"{where} has no examples; leave it out or give it some")
    if x.is_floating_point():
        bad = int((~torch.isfinite(x.flatten(1))).any(1).sum())
        require(bad == 0, f"{where}: {bad} of {len(x)} examples hold NaN or infinity; drop or impute them")
    y = torch.where(y == -1, torch.zeros_like(y), y) if y.dtype != torch.bool else y
    strange = y[(y != 0) & (y != 1)]
    require(not len(strange), f"{where}: labels must be 0 or 1 (or -1 and 1), found {_first(strange)}")
    return TensorSource(x, y.to(torch.int64))


def _first(values: Tensor) -> float | None:
    return values[0].item() if len(values) else None

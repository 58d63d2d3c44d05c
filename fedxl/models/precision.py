"""Precision of the network's products: full single precision, or faster on a GPU's tensor cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch


class Precision(NamedTuple):
    tf32: bool  # products of float32 with 10 bits of mantissa; sums in full precision
    autocast: torch.dtype | None  # dtype of the network's products and activations

    def casting(self, device: torch.device) -> AbstractContextManager[object]:
        """Inside, a network computes in this precision. Without the cache, which a recorded graph cannot have."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, self.autocast, cache_enabled=False)


PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision(False, None),
    "tf32": Precision(True, None),
    "bf16": Precision(True, torch.bfloat16),
}


@contextmanager
def products(precision: Precision) -> Iterator[None]:
    """Set the precision of matrix products and convolutions; torch's defaults differ between the two.

    torch has an old and a new interface for it, and raises an error if both are used. This uses the caller's.
    """
    try:
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        with _newer(precision):
            yield
        return
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = precision.tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def switched() -> tuple[str, ...]:
    """The current precision of products, as torch names it."""
    try:
        return torch.get_float32_matmul_precision(), str(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return tuple(place.fp32_precision for place in _places())


@contextmanager
def _newer(precision: Precision) -> Iterator[None]:
    places = _places()
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "tf32" if precision.tf32 else "ieee"
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


def _places() -> list[Any]:
    backends: Any = torch.backends
    return [backends.cuda.matmul, backends.cudnn.conv]

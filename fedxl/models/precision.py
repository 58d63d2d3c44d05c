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
    before = switched()
    old = "high" if precision.tf32 else "highest", precision.tf32
    new = ("tf32" if precision.tf32 else "ieee",) * 2
    _switch(old if isinstance(before[1], bool) else new)
    try:
        yield
    finally:
        _switch(before)


def switched() -> tuple[Any, ...]:
    """The current precision of matrix products and of convolutions, as the caller's interface of torch names it."""
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        backends: Any = torch.backends
        return backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision


def _switch(values: tuple[Any, ...]) -> None:
    backends: Any = torch.backends
    if isinstance(values[1], bool):
        torch.set_float32_matmul_precision(values[0])
        backends.cudnn.allow_tf32 = values[1]
    else:
        backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision = values

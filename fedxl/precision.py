"""How exactly the network's products are computed: full single precision, or faster on the units of a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch


class Precision(NamedTuple):
    tf32: bool  # products of single precision numbers cut to 10 bits of mantissa; sums stay whole
    autocast: torch.dtype | None  # the type in which the network's products and activations are held

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
    """Inside, matrix products and convolutions are as exact as that; torch's own defaults differ between the two."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = precision.tf32
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before

"""Digests of tensors."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

PIECE = 2**24  # bytes that are digested at a time


def add_tensor(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    """Digest a tensor, name, type, shape and bytes, a piece at a time: one mapped from a file is never held whole."""
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
    rows = tensor if tensor.ndim else tensor[None]
    size = max(1, rows[:1].numel() * rows.element_size())
    for piece in rows.split(max(1, PIECE // size)):
        # Seen as bytes, because numpy knows no bfloat16.
        digest.update(piece.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())

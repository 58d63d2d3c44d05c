"""The noise that private algorithms add to what leaves a client, drawn for a whole round before it begins."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedxl import tree
from fedxl.errors import require

MOST = 2**32  # numbers of noise that a group of clients draws in a round: 16 GB in single precision


def draw_noise(like: Any, seeds: Sequence[int], numbers: Sequence[int], round: int, steps: int) -> Any:
    """Noise like this for all steps of these clients, [C, K, ...]. seeds: of each client."""
    leaves = tree.leaves(like)
    if not leaves:
        return like
    sizes = [leaf.numel() for leaf in leaves]
    what = f"noise for {len(seeds)} clients, {steps} steps and {sum(sizes):,} numbers is too much for a round"
    require(len(seeds) * steps * sum(sizes) <= MOST, f"{what}; lower clients_at_once or local_steps")
    clients = zip(seeds, numbers, strict=True)
    drawn = [[normals(*client, round, step, sum(sizes)) for step in range(steps)] for client in clients]
    flat = np.array(drawn)  # [C, K, all leaves]
    pieces = torch.from_numpy(flat).to(leaves[0].device).split(sizes, dim=-1)
    each = zip(pieces, leaves, strict=True)
    return tree.rebuild(like, (piece.to(leaf.dtype).reshape(*flat.shape[:2], *leaf.shape) for piece, leaf in each))


Floats = npt.NDArray[np.float64]
DOMAIN = "fedxl noise for privacy"  # streams of this key serve nothing else


def normals(seed: int, client: int, round: int, step: int, count: int) -> Floats:
    """`count` independent draws of N(0, 1) for one step of a client.

    >>> normals(7, client=0, round=1, step=0, count=3).round(3).tolist() == normals(7, 0, 1, 0, 3).round(3).tolist()
    True
    """
    pairs = -(-count // 2)
    key = ",".join(map(str, (DOMAIN, seed, client, round, step)))
    bits = np.frombuffer(hashlib.shake_256(key.encode()).digest(16 * pairs), "<u8")
    uniform = ((bits >> np.uint64(11)) + 0.5) * 2.0**-53  # never 0, whose logarithm is infinite
    length, angle = np.sqrt(-2 * np.log(uniform[:pairs])), 2 * math.pi * uniform[pairs:]
    return np.concatenate((length * np.cos(angle), length * np.sin(angle)))[:count]

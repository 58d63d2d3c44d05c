"""The noise that private algorithms add to what leaves a client, drawn for a whole round before it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedxl import tree
from fedxl.errors import require
from fedxl.gaussian import normals

MOST = 2**32  # numbers of noise that a group of clients draws in a round: 16 GB in single precision


def drawn(like: Any, seeds: Sequence[int], numbers: Sequence[int], round: int, steps: int) -> Any:
    """Noise like this for all steps of these clients, [C, K, ...]. seeds: of each client."""
    leaves = tree.leaves(like)
    if not leaves:
        return like
    sizes = [leaf.numel() for leaf in leaves]
    total = len(seeds) * steps * sum(sizes)
    require(
        total <= MOST,
        f"noise for {len(seeds)} clients, {steps} steps and {sum(sizes):,} numbers is too much for a round; "
        "lower clients_at_once or local_steps",
    )
    flat = np.stack(
        [
            [normals(seed, number, round, step, sum(sizes)) for step in range(steps)]
            for seed, number in zip(seeds, numbers, strict=True)
        ]
    )  # [C, K, all leaves]
    pieces = torch.from_numpy(flat).to(leaves[0].device).split(sizes, dim=-1)
    each = zip(pieces, leaves, strict=True)
    return tree.rebuild(like, (piece.to(leaf.dtype).reshape(*flat.shape[:2], *leaf.shape) for piece, leaf in each))


def seeds_of(numbers: Sequence[int], secret: Mapping[int, int], seed: int) -> list[int]:
    """Each client's own seed, or the run's if it has none."""
    return [secret.get(number, seed) for number in numbers]

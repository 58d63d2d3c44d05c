"""Gaussian noise that follows from a seed, and that nobody can work out who does not know it.

The usual generators are made for simulations. Torch's on a CPU has 2**32 starting points, which a server could try
one by one, and the Mersenne Twister can be rewound from what it has given out. Noise for privacy is therefore a
stream of SHAKE-256, whose key is the seed, made normal by Box and Muller (1958). It is the same in every engine, and
on every machine that rounds logarithms and sines alike.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

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

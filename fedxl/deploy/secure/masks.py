"""Masks: two sites agree on a seed (X25519, HKDF), and a seed becomes a vector of random integers (ChaCha20)."""

from __future__ import annotations

from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedxl.errors import RefusedError

Ring = NDArray[Any]  # uint32 or uint64: numpy adds them modulo 2^32 or 2^64
RINGS: dict[int, np.dtype[Any]] = {32: np.dtype("<u4"), 64: np.dtype("<u8")}
SIGNED: dict[int, np.dtype[Any]] = {32: np.dtype("<i4"), 64: np.dtype("<i8")}
KEY = 32  # bytes of a key, of a seed
CHUNK = 2**20  # numbers of a mask that are made at a time


def agree(private: bytes, public: bytes, purpose: str) -> bytes:
    """The secret that two parties share, each from its own private key and the other's public one."""
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # a point of small order, which gives a secret that everyone knows
        raise RefusedError("a public key is not valid") from None
    return HKDF(SHA256(), KEY, salt=None, info=purpose.encode()).derive(shared)


def public_of(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def add_mask(vector: Ring, seed: bytes, sign: int = 1) -> None:
    """Add the mask of a seed to a vector, in place, or subtract it. A seed is used for one vector only."""
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    for begin in range(0, len(vector), CHUNK):
        piece = vector[begin : begin + CHUNK]
        mask = np.frombuffer(stream.update(bytes(piece.nbytes)), vector.dtype)
        (np.add if sign > 0 else np.subtract)(piece, mask, out=piece)

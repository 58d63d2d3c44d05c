"""The cryptography of a secure sum: X25519 and HKDF for keys, ChaCha20 for masks, AES-256-GCM, Shamir's shares."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
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
NONCE = 12  # bytes
OVERHEAD = NONCE + 16  # bytes by which a sealed text is longer
PRIME = 2**521 - 1  # a Mersenne prime: room for any secret of 64 bytes
SHARE = 66  # bytes of a share


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


def seal(key: bytes, text: bytes, about: str) -> bytes:
    """A text that the server passes on and cannot read or alter. about: who sends it to whom and when."""
    nonce = os.urandom(NONCE)
    return nonce + AESGCM(key).encrypt(nonce, text, about.encode())


def unseal(key: bytes, sealed: bytes, about: str) -> bytes:
    try:
        return AESGCM(key).decrypt(sealed[:NONCE], sealed[NONCE:], about.encode())
    except (InvalidTag, ValueError):
        raise RefusedError("a sealed share was altered on its way, or belongs to another round") from None


def split(secret: int, threshold: int, places: Sequence[int]) -> dict[int, int]:
    """Shares of a secret (Shamir, CACM 1979): a random polynomial of degree threshold - 1, the secret at 0."""
    assert 0 <= secret < PRIME
    assert 1 <= threshold <= len(places) == len(set(places))
    assert min(places) > 0
    shares = dict.fromkeys(places, 0)
    for coefficient in (*(secrets.randbelow(PRIME) for _ in range(threshold - 1)), secret):  # Horner's rule
        shares = {place: (value * place + coefficient) % PRIME for place, value in shares.items()}
    return shares


def combine(shares: Mapping[int, int]) -> int:
    """The secret: Lagrange's polynomial through exactly `threshold` shares, at 0."""
    secret = 0
    for place, share in shares.items():
        above, below = 1, 1
        for other in shares:
            if other != place:
                above, below = above * other % PRIME, below * (other - place) % PRIME
        secret += share * above * pow(below, -1, PRIME)
    return secret % PRIME

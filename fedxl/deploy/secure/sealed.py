"""What a site sends to another through the server, which cannot read or alter it: AES-256-GCM."""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedxl.errors import RefusedError

NONCE = 12  # bytes
OVERHEAD = NONCE + 16  # bytes by which a sealed text is longer


def seal(key: bytes, text: bytes, about: str) -> bytes:
    """about: who sends it to whom and when; `opened` must be told the same."""
    nonce = os.urandom(NONCE)
    return nonce + AESGCM(key).encrypt(nonce, text, about.encode())


def opened(key: bytes, sealed: bytes, about: str) -> bytes:
    try:
        return AESGCM(key).decrypt(sealed[:NONCE], sealed[NONCE:], about.encode())
    except (InvalidTag, ValueError):
        raise RefusedError("a sealed share was altered on its way, or belongs to another round") from None

"""Secret seeds: made once from the operating system's randomness, kept on this disk, never sent."""

from __future__ import annotations

import os
from pathlib import Path

from fedxl.deploy.site.locks import locked
from fedxl.errors import UserError, require
from fedxl.files import read_bytes, write_atomically

BYTES = 32
BITS = 128


def kept_seed(path: Path) -> int:
    """The seed in this file, which is made if there is none: the same after a crash or a restart.

    It is a whole number below 2**128. Its highest bit is set: `sampling` knows a secret by its size.
    """
    try:
        return _seed(path)
    except FileNotFoundError:
        pass
    with locked(path.parent, f".{path.name}.lock"):
        if not path.exists():  # another process may have made it meanwhile
            try:
                write_atomically(path, os.urandom(BYTES), private=True)
            except OSError as error:
                told = f"cannot write to {path.parent}: {error.strerror}; earlier states are intact"
                raise UserError(told) from None
    return _seed(path)


def _seed(path: Path) -> int:
    content = read_bytes(path)
    right = len(content) == BYTES
    require(right, f"{path} holds {len(content)} bytes, not the {BYTES} of a secret seed; its owner must remove it")
    return int.from_bytes(content, "big") >> (8 * BYTES - BITS) | 1 << (BITS - 1)

"""Arrays on a site's disk, written in pieces and readable by its user alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from fedxl.files import open_private


def write_array(
    path: Path, shape: tuple[int, ...], pieces: Iterable[np.ndarray], done: Callable[[int], None]
) -> None:
    """Write rows as an .npy file. Rename it when complete: another process may have the old one mapped.

    It writes instead of mapping: on a full disk, a write raises an error, and a mapping would kill the process.
    """
    partial = path.with_name(f".{path.name}")
    with open_private(partial) as file:
        begun = False
        for piece in pieces:
            if not begun:
                kind = np.lib.format.dtype_to_descr(piece.dtype)
                header = {"descr": kind, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
                begun = True
            file.write(piece.tobytes())
            done(len(piece))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)

"""Folders of images, resized and cached in one file: a few hundred thousand images are decoded only once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from fedxl.errors import UserError, require
from fedxl.progress import progress

FORM = 1  # version of the image processing; a new number makes old caches invalid
BLOCK = 256  # images per batch for the worker threads


def resized(folder: Path, paths: Sequence[str], size: int, cache: Path, name: str) -> np.ndarray:
    """The images at these paths in `folder`, as grey squares [n, size, size] of bytes, from the cache if possible.

    The cache's name is a digest of everything here but the images themselves. It is mapped into memory, and private:
    what is not read costs nothing, and what is written to the array does not reach the file.
    """
    key = hashlib.sha256(json.dumps([FORM, size, list(paths)]).encode()).hexdigest()[:16]
    target, shape = cache / f"{name}-{size}-{key}.npy", (len(paths), size, size)
    kept = _load(target, shape)
    if kept is None:
        _write(folder, paths, size, target)
        kept = _load(target, shape)
    require(kept is not None, f"the cache {target} cannot be read back; remove it and try again")
    assert kept is not None
    return kept


def _load(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """The array in a file; None if the file is missing or does not match."""
    try:
        kept = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return kept if kept.dtype == np.uint8 and kept.shape == shape else None


def _write(folder: Path, paths: Sequence[str], size: int, target: Path) -> None:
    """Write the file, under a temporary name until it is complete."""
    _require_pillow()
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": (len(paths), size, size)}
            np.lib.format.write_array_header_1_0(file, header)
            for image in _images(folder, paths, size):
                file.write(image.tobytes())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except OSError as error:
        raise UserError(f"cannot write the resized images to {target}: {error}") from None
    finally:
        with suppress(OSError):
            partial.unlink()


def _images(folder: Path, paths: Sequence[str], size: int) -> Iterator[np.ndarray]:
    """All images in order, decoded by a few threads in blocks."""
    with progress("resizing images", len(paths)) as advance, ThreadPoolExecutor(os.cpu_count()) as workers:
        for start in range(0, len(paths), BLOCK):
            for image in workers.map(lambda path: _image(folder / path, size), paths[start : start + BLOCK]):
                yield image
                advance(1)


def _require_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise UserError("reading image files needs Pillow; pip install 'fedxl[images]'") from None


def _image(path: Path, size: int) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.draft("L", (size, size))  # decode a JPEG at reduced size
            return np.asarray(image.convert("L").resize((size, size), Image.Resampling.BILINEAR))
    except FileNotFoundError:
        raise UserError(f"there is no image {path}, but the list of images names it") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"cannot read the image {path}: {error}") from None

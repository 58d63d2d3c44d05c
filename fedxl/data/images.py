"""Files of images as arrays: squares of bytes, decoded and resized once, and cached in one file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from fedxl.errors import UserError, printable, require
from fedxl.progress import progress

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
MOST_FILES = 10_000_000
LONGEST = 200  # characters of a column's name
FORM = 2  # version of the image processing; a new number makes old caches invalid
BLOCK = 256  # images per batch for the worker threads
SHOWN = 5  # unreadable images that an error names


@dataclass(frozen=True)
class Image:
    """Images of files: squares of bytes, grey or in colour."""

    size: int
    channels: int = 1
    column: str = ""  # of a table; "": the files of a folder

    def __post_init__(self) -> None:
        require(8 <= self.size <= 4096, f"size must lie between 8 and 4096 pixels, got {self.size}")
        require(self.channels in (1, 3), f"channels must be 1 (grey) or 3 (colour), got {self.channels}")
        require(len(self.column) <= LONGEST, f"a name has more than {LONGEST} characters")

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.size, self.size


def images_in(root: Path) -> list[str]:
    """The image files below a folder, sorted; hidden ones and other files are left out."""
    require(root.is_dir(), f"there is no folder {root}; path must name one with a folder for each class")
    found: list[str] = []
    for here, folders, files in os.walk(root, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith(".")]
        below = os.path.relpath(here, root)
        kept = (name for name in files if not name.startswith(".") and name.lower().endswith(SUFFIXES))
        found += [os.path.normpath(os.path.join(below, name)) for name in kept]
        require(len(found) <= MOST_FILES, f"{root} holds more than {MOST_FILES:,} images")
    require(bool(found), f"{root} holds no images ({', '.join(SUFFIXES)})")
    return sorted(found)


def resized(
    folder: Path, paths: Sequence[str], size: int, cache: Path, name: str, channels: int = 1, stamped: bool = False
) -> np.ndarray:
    """The images at these paths in `folder` as bytes [n, channels, size, size], from the cache if possible.

    The cache's name is a digest of everything here but the images themselves; stamped: of their sizes and times,
    too, so that other images make another cache. It is mapped into memory, and private: what is not read costs
    nothing, and what is written to the array does not reach the file.
    """
    shape = (len(paths), size, size) if channels == 1 else (len(paths), channels, size, size)
    about = [FORM, size, list(paths), *([channels] if channels > 1 else [])]
    about += [[_stamp(folder / path) for path in paths]] if stamped else []
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    target = cache / f"{name}-{size}-{key}.npy"
    kept = _load(target, shape)
    if kept is None:
        _write(target, shape, _images(folder, paths, size, channels))
        kept = _load(target, shape)
    require(kept is not None, f"the cache {target} cannot be read back; remove it and try again")
    assert kept is not None
    return kept.reshape(len(paths), channels, size, size)


def decoded(folder: Path, paths: Sequence[str], size: int, channels: int) -> np.ndarray:
    """The same images [n, channels, size, size] without a cache."""
    _require_pillow()
    images = np.empty((len(paths), channels, size, size), np.uint8)
    for at, image in enumerate(_images(folder, paths, size, channels)):
        images[at] = image
    return images


def within(text: str | None, where: str) -> str:
    """A path that stays inside its folder; raises UserError otherwise: a table must not reach for other files."""
    require(bool(text), f"{where} names no image in some row")
    assert text
    plain = text.replace("\\", "/")
    parts = PurePosixPath(plain).parts
    # A path that begins with two slashes is as absolute as with one, and pathlib keeps both.
    inside = bool(parts) and plain[0] != "/" and ".." not in parts and ":" not in parts[0] and "\0" not in text
    told = f"{where} names '{printable(text, 80)}', which is outside of the table's folder; paths are relative"
    require(inside, told)
    return "/".join(parts)


def require_inside(folder: Path, paths: Iterable[str]) -> None:
    """Raises UserError if a path below the folder is a link that leads out of it."""
    root = folder.resolve()
    for path in paths:
        away = not (root / path).resolve().is_relative_to(root)
        require(not away, f"{folder / path} is a link that leads out of the table's folder; copy what it leads to")


def unreadable(folder: Path, paths: Sequence[str]) -> list[str]:
    """A line about each image that cannot be read."""
    _require_pillow()
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        found = workers.map(lambda path: _image(folder / path, 8, 1), paths)
        return [str(each) for each in found if isinstance(each, UserError)]


def _stamp(path: Path) -> list[int]:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return []  # it is told when it is read
    return [found.st_size, found.st_mtime_ns]


def _load(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """The array in a file; None if the file is missing or does not match."""
    try:
        kept = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return kept if kept.dtype == np.uint8 and kept.shape == shape else None


def _write(target: Path, shape: tuple[int, ...], images: Iterable[np.ndarray]) -> None:
    """Write the file, under a temporary name until it is complete."""
    _require_pillow()
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for image in images:
                file.write(image.tobytes())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except OSError as error:
        raise UserError(f"cannot write the resized images to {target}: {error}") from None
    finally:
        with suppress(OSError):
            partial.unlink()


def _images(folder: Path, paths: Sequence[str], size: int, channels: int) -> Iterator[np.ndarray]:
    """All images in order, decoded by a few threads in blocks. Raises UserError about all that cannot be read."""
    wrong: list[str] = []
    with progress("resizing images", len(paths)) as advance, ThreadPoolExecutor(os.cpu_count()) as workers:
        for start in range(0, len(paths), BLOCK):
            block = paths[start : start + BLOCK]
            for image in workers.map(lambda path: _image(folder / path, size, channels), block):
                if isinstance(image, UserError):
                    wrong.append(str(image))
                elif not wrong:
                    yield image
                advance(1)
    more = f" (and {len(wrong) - SHOWN} more)" if len(wrong) > SHOWN else ""
    require(not wrong, "; ".join(wrong[:SHOWN]) + more)


def _require_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise UserError("reading image files needs Pillow; pip install 'fedxl[images]'") from None


def _image(path: Path, size: int, channels: int) -> np.ndarray | UserError:
    """An image as a square, or why there is none."""
    from PIL import Image

    mode = "L" if channels == 1 else "RGB"
    try:
        if path.exists() and not path.is_file():
            return UserError(f"cannot read the image {path}: it is not a file")
        with Image.open(path) as image:
            image.draft(mode, (size, size))  # decode a JPEG at reduced size
            square = np.asarray(_in_bytes(image).convert(mode).resize((size, size), Image.Resampling.BILINEAR))
            return square if channels == 1 else np.ascontiguousarray(square.transpose(2, 0, 1))
    except FileNotFoundError:
        return UserError(f"there is no image {path}, but the list of images names it")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return UserError(f"cannot read the image {path}: {error}")


def _in_bytes(image: Any) -> Any:
    """Grey values of 16 bits as those of 8. Pillow's own conversion makes everything above 255 white."""
    from PIL import Image

    sixteen = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")  # as older versions say
    if not sixteen and image.mode in ("I", "F"):
        raise ValueError("its pixels are numbers of 32 bits, whose black and white nobody says; save 8 or 16 bits")
    return Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)) if sixteen else image

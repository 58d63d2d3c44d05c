"""Files of images as arrays: squares of bytes, decoded and resized once, and cached in one file."""

from __future__ import annotations

import hashlib
import io
import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedxl.data.splits import Order, Shares
from fedxl.errors import UserError, printable, require
from fedxl.files import DAMAGED, whole_file
from fedxl.progress import progress

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
MOST_FILES = 10_000_000
LONGEST = 200  # characters of a column's name
FORM = 4  # version of the image processing; a new number makes old caches invalid
WHOLE = 0x2144DF1C  # the CRC-32 of anything that is followed by its own CRC-32
BLOCK = 256  # images per batch for the worker threads
SHOWN = 5  # unreadable images that an error names
T = TypeVar("T")


@dataclass(frozen=True)
class Image:
    """Images of files: squares of bytes, grey or in colour."""

    size: int
    channels: int = 1
    column: str = ""  # of a table; "": the files of a folder
    bits: int = 16  # of grey values of 16 bits, those that are used; 0: not known, or there are none

    def __post_init__(self) -> None:
        require(8 <= self.size <= 4096, f"size must lie between 8 and 4096 pixels, got {self.size}")
        require(self.channels in (1, 3), f"channels must be 1 (grey) or 3 (colour), got {self.channels}")
        require(self.bits in (0, *range(8, 17)), f"bits must lie between 8 and 16, or be 0, got {self.bits}")
        require(len(self.column) <= LONGEST, f"a name has more than {LONGEST} characters")

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.size, self.size


@dataclass(frozen=True)
class ImageOptions(Shares):
    """Settings of images in files."""

    size: int = 64  # images become squares of so many pixels a side
    channels: int = 1  # 1: grey, 3: colour
    bits: int = 0  # of grey values of 16 bits, those that are used; 0: as many as the largest value needs
    cache: str = ""  # where prepared images are kept; "": beside the files

    def __post_init__(self) -> None:
        super().__post_init__()
        Image(self.size, self.channels, bits=self.bits)  # checks them

    def load(self, order: Order, folder: Path, paths: Sequence[str], column: str = "") -> tuple[Tensor, Image]:
        """The images in this order, mapped into memory from the cache. paths: of all rows, in the files' order."""
        order.require_trained()  # before an image is opened
        image = Image(self.size, self.channels, column, self.bits)
        listed = [paths[row] for row in order.rows]
        x, image = resized(folder, listed, image, Path(self.cache or folder), "images", stamped=True)
        return torch.from_numpy(x), image


def images_in(root: Path) -> list[str]:
    """The image files below a folder, sorted; hidden ones and other files are left out."""
    require(root.is_dir(), f"there is no folder {root}; path must name one with a folder for each class")
    found: list[str] = []
    for here, folders, files in os.walk(root, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith(".")]
        below = os.path.relpath(here, root)
        kept = [name for name in files if not name.startswith(".") and name.lower().endswith(SUFFIXES)]
        found += [os.path.normpath(os.path.join(below, name)) for name in kept]
        links = (name for name in (*folders, *kept) if Path(here, name).is_symlink())
        require_inside(root, (os.path.join(below, name) for name in links))
        require(len(found) <= MOST_FILES, f"{root} holds more than {MOST_FILES:,} images")
    require(bool(found), f"{root} holds no images ({', '.join(SUFFIXES)})")
    return sorted(found)


def resized(
    folder: Path, paths: Sequence[str], image: Image, cache: Path, name: str, stamped: bool = False
) -> tuple[np.ndarray, Image]:
    """The images at these paths in `folder` as bytes [n, *image.shape], and `image` with the bits that were found.

    They are from the cache if possible. Its name is a digest of everything here but the images themselves; stamped:
    of their sizes and times, too, so that other images make another cache. A damaged one is made anew. It is mapped
    into memory, and private: what is written to the array does not reach the file.
    """
    about = [FORM, image.size, image.channels, image.bits, list(paths)]
    about += [[_stamp(folder / path) for path in paths]] if stamped else []
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    target, shape = cache / f"{name}-{image.size}-{key}.npy", (len(paths), *image.shape)
    kept = _load(target, shape)
    if kept is None:
        _require_pillow()
        known = replace(image, bits=image.bits or _bits(folder, paths))
        _write(target, shape, known.bits, _images(folder, paths, known))
        kept = _load(target, shape)
    require(kept is not None, f"the cache {target} cannot be read back; remove it and try again")
    assert kept is not None
    return kept[0], replace(image, bits=kept[1])


def decoded(folder: Path, paths: Sequence[str], image: Image) -> np.ndarray:
    """The same images [n, *image.shape] without a cache."""
    _require_pillow()
    images = np.empty((len(paths), *image.shape), np.uint8)
    for at, one in enumerate(_images(folder, paths, image)):
        images[at] = one
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
        require(not away, f"{folder / path} is a link that leads out of {folder}; copy what it leads to")


def unreadable(folder: Path, paths: Sequence[str]) -> list[str]:
    """A line about each image that cannot be read."""
    _require_pillow()
    found = _each(partial(_image, image=Image(8)), folder, paths)
    return [str(each) for each in found if isinstance(each, UserError)]


def _stamp(path: Path) -> list[int]:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return []  # it is told when it is read
    return [found.st_size, found.st_mtime_ns]


def _load(path: Path, shape: tuple[int, ...]) -> tuple[np.ndarray, int] | None:
    """The array in a file and the bits of its grey values; None if the file is missing, damaged or does not match."""
    checksum = 0
    try:
        with path.open("rb") as file:
            for block in iter(lambda: file.read(2**20), b""):
                checksum = zlib.crc32(block, checksum)
            file.seek(-5, os.SEEK_END)
            bits = file.read(1)[0]
        kept = np.load(path, mmap_mode="c", allow_pickle=False)
    except DAMAGED:
        return None
    return (kept, bits) if checksum == WHOLE and kept.dtype == np.uint8 and kept.shape == shape else None


def _write(target: Path, shape: tuple[int, ...], bits: int, images: Iterable[np.ndarray]) -> None:
    """Write the file: array, bits, and a checksum of both."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(target, shared=True) as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            start = io.BytesIO()
            np.lib.format.write_array_header_1_0(start, header)
            checksum = 0
            for part in chain([start.getvalue()], (image.tobytes() for image in images), [bytes([bits])]):
                checksum = zlib.crc32(part, checksum)
                file.write(part)
            file.write(checksum.to_bytes(4, "little"))
    except OSError as error:
        raise UserError(f"cannot write the resized images to {target}: {error}") from None


def _each(read: Callable[[Path], T], folder: Path, paths: Sequence[str]) -> Iterator[T]:
    """What `read` makes of all files in order, in blocks by a few threads."""
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        for start in range(0, len(paths), BLOCK):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Pillow, about files that it reads all the same
                found = list(workers.map(read, (folder / path for path in paths[start : start + BLOCK])))
            yield from found


def _images(folder: Path, paths: Sequence[str], image: Image) -> Iterator[np.ndarray]:
    """All images in order. Raises UserError about all that cannot be read."""
    wrong: list[str] = []
    with progress("resizing images", len(paths)) as advance:
        for one in _each(partial(_image, image=image), folder, paths):
            if isinstance(one, UserError):
                wrong.append(str(one))
            elif not wrong:
                yield one
            advance(1)
    more = f" (and {len(wrong) - SHOWN} more)" if len(wrong) > SHOWN else ""
    require(not wrong, "; ".join(wrong[:SHOWN]) + more)


def _bits(folder: Path, paths: Sequence[str]) -> int:
    """How many bits of grey values of 16 bits are used; 0 if no image has such."""
    most = max(_each(_largest, folder, paths), default=0)
    return max(8, most.bit_length()) if most else 0


def _largest(path: Path) -> int:
    """The largest grey value of 16 bits; 0 of other images, and of those that cannot be read."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return int(np.asarray(image).astype(np.uint16).max()) if path.is_file() and _sixteen(image) else 0
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return 0


def _require_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise UserError("reading image files needs Pillow; pip install 'fedxl[images]'") from None


def _image(path: Path, image: Image) -> np.ndarray | UserError:
    """An image as a square, upright, or why there is none."""
    from PIL import Image, ImageOps

    mode, size = "L" if image.channels == 1 else "RGB", (image.size, image.size)
    try:
        if path.exists() and not path.is_file():
            return UserError(f"cannot read the image {path}: it is not a file")
        with Image.open(path) as found:
            found.draft(mode, size)  # decode a JPEG at reduced size
            ImageOps.exif_transpose(found, in_place=True)  # cameras and scanners note how they were held
            square = np.asarray(_in_bytes(found, image.bits).convert(mode).resize(size, Image.Resampling.BILINEAR))
            return square[None] if image.channels == 1 else np.ascontiguousarray(square.transpose(2, 0, 1))
    except FileNotFoundError:
        return UserError(f"there is no image {path}, but the list of images names it")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return UserError(f"cannot read the image {path}: {error}")


def _sixteen(image: Any) -> bool:
    """Whether grey values have 16 bits; older versions of Pillow call them I in a PNG file."""
    return bool(image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"))


def _in_bytes(image: Any, bits: int) -> Any:
    """Grey values of 16 bits as bytes, of which the largest number of so many bits is white.

    Pillow's own conversion makes everything above 255 white.
    """
    from PIL import Image

    if _sixteen(image):
        values = np.asarray(image).astype(np.uint16) >> ((bits or 16) - 8)
        return Image.fromarray(np.minimum(values, 255).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers with an unknown value range; save 8 or 16 bits")
    return image

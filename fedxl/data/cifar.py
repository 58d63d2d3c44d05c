"""CIFAR-10 and CIFAR-100 as imbalanced binary tasks. Krizhevsky, Learning Multiple Layers of Features (2009)."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedxl.data import pickles
from fedxl.data.binary import hold_back, imbalance
from fedxl.data.federation import Split, Splits
from fedxl.data.published import FILES, how_to_get
from fedxl.data.sites import Sites, Stream
from fedxl.errors import UserError, require
from fedxl.sampling import Indices, Purpose, generator

LARGEST = 2**28  # bytes of a published file; the largest, CIFAR-100's train, has 155 million


@dataclass(frozen=True)
class _Release:
    """The files of the published archive."""

    name: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: str
    classes: int


CIFAR10 = _Release(
    "cifar10", "cifar-10-batches-py", tuple(f"data_batch_{n}" for n in range(1, 6)), ("test_batch",), "labels", 10
)
CIFAR100 = _Release("cifar100", "cifar-100-python", ("train",), ("test",), "fine_labels", 100)


def cifar10(
    root: str = "data",
    positive: tuple[int, ...] = tuple(range(5, 10)),
    ratio: float = 0.2,
    validation: int = 10_000,
    sites: Sites = Sites(site_noise=0.04),  # noqa: B008 (frozen)
) -> Splits:
    """CIFAR-10, five classes against five, imbalanced as in the FeDXL paper; 32 x 32 colour photographs.

    root: where cifar-10-batches-py is, or what is in it, or cifar-10-python.tar.gz;
    positive: the classes that count as positive; validation: how many of the 50,000 training images are held back,
    drawn by the seed, as balanced as these are; ratio: positives to negatives in the rest, images of the class that
    is too many being left out (0: all stay). With the defaults 4,000 positives and 20,000 negatives are trained on,
    and 10,000 images each validate and test. For the other settings see `Sites`.
    """
    return _binary(CIFAR10, root, positive, ratio, validation, sites)


def cifar100(
    root: str = "data",
    positive: tuple[int, ...] = tuple(range(50, 100)),
    ratio: float = 0.2,
    validation: int = 10_000,
    sites: Sites = Sites(site_noise=0.04),  # noqa: B008 (frozen)
) -> Splits:
    """CIFAR-100, fifty classes against fifty, imbalanced as in the FeDXL paper; 32 x 32 colour photographs.

    root: where cifar-100-python is, or what is in it, or cifar-100-python.tar.gz; the rest as for CIFAR-10.
    """
    return _binary(CIFAR100, root, positive, ratio, validation, sites)


def _binary(
    release: _Release, root: str, positive: tuple[int, ...], ratio: float, validation: int, sites: Sites
) -> Splits:
    known = positive and set(positive) <= set(range(release.classes))
    require(bool(known), f"positive must name classes 0 to {release.classes - 1}, got {list(positive)}")
    require(ratio >= 0, f"ratio must not be negative, got {ratio}")
    batches = _batches(release, Path(root))
    (images, classes), test = (_join(release, batches, names) for names in (release.train, release.test))

    def split(x: np.ndarray, y: Indices) -> Split:
        return Split(torch.from_numpy(x), torch.from_numpy(np.isin(y, positive).astype(np.int64)))

    labels = np.isin(classes, positive).astype(np.int64)
    rest, held = hold_back(labels, validation, generator(sites.seed, Purpose.DATA, 0, Stream.HOLD_BACK))
    kept = imbalance(rest, labels, ratio, generator(sites.seed, Purpose.DATA, 0, Stream.IMBALANCE))
    held_back = split(images[held], classes[held]) if validation else None
    return sites.share_out(split(images[kept], classes[kept]), held_back, split(*test))


def _join(release: _Release, batches: dict[str, bytes], names: tuple[str, ...]) -> tuple[np.ndarray, Indices]:
    """(images [n, 3, 32, 32], classes [n]) of these batches."""
    parts = [_checked(pickles.loads(batches[name], name), release, name) for name in names]
    images, classes = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return images.reshape(-1, 3, 32, 32), classes


def _checked(content: dict[str, Any], release: _Release, name: str) -> tuple[np.ndarray, Indices]:
    images, labels = content.get("data"), content.get(release.labels)
    pixels = isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.shape[1:] == (3072,)
    require(pixels, f"{name} is not a batch of {release.name}: its data are not rows of 3072 bytes")
    assert isinstance(images, np.ndarray)
    plain = isinstance(labels, list) and all(type(label) is int and 0 <= label < release.classes for label in labels)
    require(
        plain and len(labels or ()) == len(images),
        f"{name} is not a batch of {release.name}: {release.labels} must hold one of {release.classes} classes each",
    )
    return images, np.array(labels, np.int64)


def _batches(release: _Release, root: Path) -> dict[str, bytes]:
    """The content of the published files: unpacked in or above `root`, or still in the archive."""
    wanted = {*release.train, *release.test}
    advice = how_to_get(release.name, root)
    archive = root / FILES[release.name].file
    for folder in (root / release.folder, root):
        found = {name for name in wanted if (folder / name).is_file()}
        if found == wanted:
            for name in wanted:
                require((folder / name).stat().st_size <= LARGEST, f"{folder / name} is too large to be {name}")
            try:
                return {name: (folder / name).read_bytes() for name in wanted}
            except OSError as error:
                raise UserError(f"cannot read {folder}: {error}") from None
        lacking = ", ".join(sorted(wanted - found))
        # CIFAR-100's file names are common: a few of them in a folder of another name prove nothing.
        require(folder.name != release.folder or not folder.is_dir(), f"{folder} lacks {lacking}; {advice}")
    require(archive.is_file(), f"there is no {release.folder} in {root}; {advice}")
    found_in = dict(_members(archive, {f"{release.folder}/{name}": name for name in wanted}))
    require(found_in.keys() == wanted, f"{archive} does not hold all of {release.folder}; {advice}")
    return found_in


def _members(archive: Path, wanted: dict[str, str]) -> Iterator[tuple[str, bytes]]:
    """(short name, content) of the wanted files of an archive, read in one pass without unpacking."""
    try:
        with tarfile.open(archive, "r|gz") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if name in wanted and member.isfile() and (file := tar.extractfile(member)):
                    require(member.size <= LARGEST, f"{archive}: {name} is too large to be what was published")
                    yield wanted[name], file.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {archive}: {error}; remove it and fetch it again") from None

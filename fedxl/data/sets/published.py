"""Published images: CIFAR-10 and CIFAR-100 as imbalanced binary tasks, MedMNIST, and CheXpert.

Krizhevsky, Learning Multiple Layers of Features (2009). Yang et al., MedMNIST v2 (Scientific Data, 2023): small
medical images in two dimensions; its ChestMNIST is ChestX-ray14 at 28 pixels (Wang et al., CVPR 2017), with a split
that keeps patients apart. Irvin et al., CheXpert (AAAI 2019): chest X-rays of Stanford Hospital.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from fedxl.data.examples import Examples, Splits
from fedxl.data.images import Image, resized
from fedxl.data.sets.download import FILES, MEDMNIST, how_to_get, rows_of
from fedxl.data.sets.own import read
from fedxl.data.splits import Sites, Stream, hold_back, imbalance
from fedxl.data.targets import several
from fedxl.errors import UserError, require, require_known, unknown
from fedxl.sampling import Indices, Purpose, generator

LARGEST = 2**28  # bytes of a published file; the largest, CIFAR-100's train.bin, has 154 million
PIXELS = 3072  # bytes of an image: red, green, blue, each 32 x 32


class _Release(NamedTuple):
    """The published archive, binary version: each image follows its labels, a byte each, of which the last counts."""

    name: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: int
    classes: int


CIFAR10 = _Release(
    "cifar10", "cifar-10-batches-bin", tuple(f"data_batch_{n}.bin" for n in range(1, 6)), ("test_batch.bin",), 1, 10
)
CIFAR100 = _Release("cifar100", "cifar-100-binary", ("train.bin",), ("test.bin",), 2, 100)


def cifar10(
    root: str = "data",
    positive: tuple[int, ...] = tuple(range(5, 10)),
    ratio: float = 0.2,
    validation: int = 10_000,
    sites: Sites = Sites(site_noise=0.04),
) -> Splits:
    """CIFAR-10, five classes against five, imbalanced as in the FeDXL paper; 32 x 32 colour photographs.

    root: where cifar-10-batches-bin is, or what is in it, or cifar-10-binary.tar.gz;
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
    sites: Sites = Sites(site_noise=0.04),
) -> Splits:
    """CIFAR-100, fifty classes against fifty, imbalanced as in the FeDXL paper; 32 x 32 colour photographs.

    root: where cifar-100-binary is, or what is in it, or cifar-100-binary.tar.gz; the rest as for CIFAR-10.
    """
    return _binary(CIFAR100, root, positive, ratio, validation, sites)


def _binary(
    release: _Release, root: str, positive: tuple[int, ...], ratio: float, validation: int, sites: Sites
) -> Splits:
    known = positive and set(positive) <= set(range(release.classes))
    require(bool(known), f"positive must name classes 0 to {release.classes - 1}, got {list(positive)}")
    require(ratio >= 0, f"ratio must not be negative, got {ratio}")
    files = _files(release, Path(root))
    (images, classes), test = (_joined(release, files, names) for names in (release.train, release.test))

    def split(x: np.ndarray, y: Indices) -> Examples:
        return Examples(torch.from_numpy(x), torch.from_numpy(np.isin(y, positive).astype(np.int64))[:, None])

    labels = np.isin(classes, positive).astype(np.int64)
    rest, held = hold_back(labels, validation, generator(sites.seed, Purpose.DATA, 0, Stream.HOLD_BACK))
    kept = imbalance(rest, labels, ratio, generator(sites.seed, Purpose.DATA, 0, Stream.IMBALANCE))
    held_back = split(images[held], classes[held]) if validation else None
    return sites.share_out(split(images[kept], classes[kept]), held_back, split(*test))


def _joined(release: _Release, files: dict[str, bytes], names: tuple[str, ...]) -> tuple[np.ndarray, Indices]:
    """(images [n, 3, 32, 32], classes [n]) of these files."""
    record = release.labels + PIXELS
    for name in names:
        whole = len(files[name]) > 0 and len(files[name]) % record == 0
        require(whole, f"{name} is not a file of {release.name}: its length is no multiple of {record} bytes")
    rows = np.frombuffer(b"".join(files[name] for name in names), np.uint8).reshape(-1, record)
    classes = rows[:, release.labels - 1].astype(np.int64)
    known = int(classes.max()) < release.classes
    require(known, f"{names[0]} is not a file of {release.name}: a label is not among {release.classes} classes")
    return rows[:, release.labels :].copy().reshape(-1, 3, 32, 32), classes  # torch wants memory to write to


def _files(release: _Release, root: Path) -> dict[str, bytes]:
    """The published files: unpacked in or above `root`, or still in the archive."""
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


FAMILIES = sorted({name.partition("_")[0] for name in MEDMNIST})
CHEST = (
    "atelectasis", "cardiomegaly", "effusion", "infiltration", "mass", "nodule", "pneumonia", "pneumothorax",
    "consolidation", "edema", "emphysema", "fibrosis", "pleural", "hernia",
)  # fmt: skip
PARTS = ("train", "val", "test")
ALL = "all"


def medmnist(
    set: str = "chestmnist", label: int | str | None = None, root: str = "data", sites: Sites = Sites()
) -> Splits:
    """A MedMNIST 2D set, with its own split: one label of many or all, one class against the others or each.

    set: the file's name without .npz, for example chestmnist, pneumoniamnist or chestmnist_64; whatever follows the _
    is up to you, so that chestmnist_subset may be a file of your own with the same arrays;
    label: which label of a multi-label set or which class of the others is positive, a number or one of ChestMNIST's
    names. Without it the paper's task, mass, in ChestMNIST, and class 1 where there are two classes. "all": every
    label, or every class against the rest, for a risk of several labels;
    root: the folder of the file, or the file itself. For the other settings see `Sites`.
    """
    family = set.partition("_")[0]
    if family not in FAMILIES:
        raise unknown("MedMNIST set", set, MEDMNIST)
    path = Path(root) if root.endswith(".npz") else Path(root, f"{set}.npz")
    # A name outside MedMNIST has no address of its own: advise on the whole family.
    advice = how_to_get(set if set in MEDMNIST else family, path.parent)
    content = read(path, f"there is no file {path}; {advice}")
    names = [f"{part}_{kind}" for part in PARTS for kind in ("images", "labels")]
    missing = [name for name in names if name not in content]
    require(not missing, f"{path} is not a MedMNIST file: it lacks {', '.join(missing)}")
    chosen = _chosen(family, label, content["train_labels"], path)
    train, validation, test = (
        Examples(
            _images(content[f"{part}_images"], f"{path}: {part}_images"),
            _labels(content[f"{part}_labels"], chosen, len(content[f"{part}_images"]), f"{path}: {part}_labels"),
        )
        for part in PARTS
    )
    return sites.share_out(train, validation, test)


def _chosen(family: str, label: int | str | None, labels: np.ndarray, path: Path) -> range:
    """The index of the label, or of the class, that is positive; or those of all."""
    require(labels.ndim == 2 and labels.size > 0, f"{path}: train_labels must be [examples, labels]")
    known = CHEST if family == "chestmnist" else ()
    count = labels.shape[1] if labels.shape[1] > 1 else int(labels.max()) + 1
    if label == ALL:
        return range(count)
    if label is None:
        require(bool(known) or count == 2, f"label must name which of the {count} classes in {path} is positive")
        label = known.index("mass") if known else 1
    elif isinstance(label, str):
        require(bool(known), f"{path.stem} numbers its classes 0 to {count - 1}; there is no '{label}'")
        require_known("label", label.lower(), known)
        label = known.index(label.lower())
    require(0 <= label < count, f"label must lie in [0, {count}), got {label}")
    return range(label, label + 1)


def _images(images: np.ndarray, where: str) -> torch.Tensor:
    """Grey images as [n, 1, H, W], colour images as [n, 3, H, W]."""
    require(images.dtype == np.uint8, f"{where} must hold bytes, not {images.dtype}")
    if images.ndim == 3:
        return torch.from_numpy(images[:, None])
    colours = images.ndim == 4 and images.shape[3] == 3
    require(colours, f"{where} must be [n, H, W] or [n, H, W, 3], not {list(images.shape)}")
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


def _labels(labels: np.ndarray, chosen: range, count: int, where: str) -> torch.Tensor:
    """[n, L] of the chosen labels, or of the chosen classes against the rest."""
    require(labels.ndim == 2 and len(labels) == count, f"{where} has shape {list(labels.shape)} for {count} images")
    require(np.issubdtype(labels.dtype, np.integer), f"{where} must hold integers, not {labels.dtype}")
    if labels.shape[1] == 1:
        if len(chosen) > 1:
            return several(labels[:, 0], where, len(chosen))
        return torch.from_numpy((labels == chosen[0]).astype(np.int64))
    require(chosen[-1] < labels.shape[1], f"{where} has {labels.shape[1]} columns, so there is no label {chosen[-1]}")
    require(bool(np.isin(labels[:, chosen], (0, 1)).all()), f"{where}: a label must be 0 or 1")
    return torch.from_numpy(labels[:, chosen].astype(np.int64))


FOLDERS = ("CheXpert-v1.0-small", "CheXpert-v1.0")
DETAILS = ("Path", "Sex", "Age", "Frontal/Lateral", "AP/PA")  # the columns that are not labels
UNSURE = -1


def chexpert(
    label: str = "Consolidation",
    uncertain: Literal["zeros", "ones", "ignore"] = "zeros",
    frontal: bool = True,
    size: int = 128,
    validation: int = 1000,
    root: str = "data",
    cache: str = "",
    sites: Sites = Sites(),
) -> Splits:
    """CheXpert, one finding. As in the FeDXL paper, the last training images validate and its validation set tests.

    label: a column of train.csv; what it does not mention is negative; uncertain: whether training images whose
    label is uncertain (-1) are negatives, positives or left out; frontal: leave lateral views out;
    size: images become grey squares of so many pixels a side; the 191,000 frontal ones are 3 GB at 128, 10 GB at 224;
    validation: how many of the last training images (the paper: 1000);
    root: where CheXpert-v1.0-small (or CheXpert-v1.0) is, or what is in it;
    cache: where the resized images are kept, in the data's folder by default. It is done anew for other settings or
    another csv file; remove it if images have changed. For the other settings see `Sites`.
    """
    image = Image(size)
    folder = _folder(Path(root))
    paths, y = _read(folder / "train.csv", label, frontal)
    test_paths, test = _read(folder / "valid.csv", label, frontal)
    require(not (test == UNSURE).any(), f"{folder / 'valid.csv'}: a test label cannot be uncertain")
    require(0 <= validation < len(y), f"validation must lie in [0, {len(y)}), got {validation}")
    x = resized(folder, paths, image, Path(cache or folder), "chexpert-train")[0]
    tested = resized(folder, test_paths, image, Path(cache or folder), "chexpert-valid")[0]
    unsure = y == UNSURE
    if uncertain == "ignore" and unsure.any():
        x, y = x[~unsure], y[~unsure]
    y = np.where(y == UNSURE, int(uncertain == "ones"), y)
    require(validation < len(y), f"only {len(y)} training images have a certain {label}")
    cut = len(y) - validation
    held_back = _split(x[cut:], y[cut:]) if validation else None
    return sites.share_out(_split(x[:cut], y[:cut]), held_back, _split(tested, test))


def _split(images: np.ndarray, labels: Indices) -> Examples:
    return Examples(torch.from_numpy(images), torch.from_numpy(labels)[:, None])


def _folder(root: Path) -> Path:
    for folder in (*(root / name for name in FOLDERS), root):
        if (folder / "train.csv").is_file():
            require((folder / "valid.csv").is_file(), f"{folder} lacks valid.csv; {how_to_get('chexpert', root)}")
            return folder
    raise UserError(f"there is no {FOLDERS[0]} with a train.csv in {root}; {how_to_get('chexpert', root)}")


def _read(path: Path, label: str, frontal: bool) -> tuple[list[str], Indices]:
    """The paths of images, relative to the folder of the csv file, and their labels: 0, 1, or UNSURE."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = rows_of(file, path, ("Path", "Frontal/Lateral"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    require_known(f"label in {path}", label, {*rows[0]} - {*DETAILS} - {""})
    rows = [row for row in rows if not frontal or row["Frontal/Lateral"] == "Frontal"]
    require(len(rows) > 0, f"{path} has no {'frontal ' if frontal else ''}images")
    known = {"": 0, "0": 0, "0.0": 0, "1": 1, "1.0": 1, "-1": UNSURE, "-1.0": UNSURE}
    strange = next((row[label] for row in rows if row[label].strip() not in known), None)
    require(strange is None, f"{path}: a label must be 1, 0, -1 or empty, not '{strange}'")
    labels = np.array([known[row[label].strip()] for row in rows], np.int64)
    # A path starts with the name of the release, whatever the folder is called here.
    return [row["Path"].partition("/")[2] for row in rows], labels

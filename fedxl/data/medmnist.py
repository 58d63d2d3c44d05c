"""MedMNIST: small medical images in two dimensions. Yang et al., MedMNIST v2 (Scientific Data, 2023).

ChestMNIST is ChestX-ray14 at 28 pixels (Wang et al., CVPR 2017), with a split that keeps patients apart.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedxl.data.arrays import read
from fedxl.data.federation import Split, Splits
from fedxl.data.forms import columns
from fedxl.data.published import MEDMNIST, how_to_get
from fedxl.data.sites import Sites
from fedxl.errors import require, unknown

FAMILIES = sorted({name.partition("_")[0] for name in MEDMNIST})
CHEST = (
    "atelectasis", "cardiomegaly", "effusion", "infiltration", "mass", "nodule", "pneumonia", "pneumothorax",
    "consolidation", "edema", "emphysema", "fibrosis", "pleural", "hernia",
)  # fmt: skip
PARTS = ("train", "val", "test")
ALL = "all"


def medmnist(
    set: str = "chestmnist",
    label: int | str | None = None,
    root: str = "data",
    sites: Sites = Sites(),  # noqa: B008 (frozen)
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
    column = _column(family, label, content["train_labels"], path)
    train, validation, test = (
        Split(
            _images(content[f"{part}_images"], f"{path}: {part}_images"),
            _labels(content[f"{part}_labels"], column, len(content[f"{part}_images"]), f"{path}: {part}_labels"),
        )
        for part in PARTS
    )
    return sites.share_out(train, validation, test)


def _column(family: str, label: int | str | None, labels: np.ndarray, path: Path) -> int | slice:
    """The index of the label, or of the class, that is positive; a slice: all of them."""
    require(labels.ndim == 2 and labels.size > 0, f"{path}: train_labels must be [examples, labels]")
    known = CHEST if family == "chestmnist" else ()
    count = labels.shape[1] if labels.shape[1] > 1 else int(labels.max()) + 1
    if label == ALL:
        return slice(count)
    if label is None:
        require(bool(known) or count == 2, f"label must name which of the {count} classes in {path} is positive")
        return known.index("mass") if known else 1
    if isinstance(label, str):
        require(bool(known), f"{path.stem} numbers its classes 0 to {count - 1}; there is no '{label}'")
        if label.lower() not in known:
            raise unknown("label", label, known)
        return known.index(label.lower())
    require(0 <= label < count, f"label must lie in [0, {count}), got {label}")
    return label


def _images(images: np.ndarray, where: str) -> torch.Tensor:
    """Grey images as [n, 1, H, W], colour images as [n, 3, H, W]."""
    require(images.dtype == np.uint8, f"{where} must hold bytes, not {images.dtype}")
    if images.ndim == 3:
        return torch.from_numpy(images[:, None])
    colours = images.ndim == 4 and images.shape[3] == 3
    require(colours, f"{where} must be [n, H, W] or [n, H, W, 3], not {list(images.shape)}")
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


def _labels(labels: np.ndarray, column: int | slice, count: int, where: str) -> torch.Tensor:
    require(labels.ndim == 2 and len(labels) == count, f"{where} has shape {list(labels.shape)} for {count} images")
    require(np.issubdtype(labels.dtype, np.integer), f"{where} must hold integers, not {labels.dtype}")
    if isinstance(column, slice):
        return columns(labels if labels.shape[1] > 1 else labels[:, 0], column.stop, where)
    if labels.shape[1] == 1:
        return torch.from_numpy((labels[:, 0] == column).astype(np.int64))
    require(column < labels.shape[1], f"{where} has {labels.shape[1]} columns, so there is no label {column}")
    require(bool(np.isin(labels[:, column], (0, 1)).all()), f"{where}: a label must be 0 or 1")
    return torch.from_numpy(labels[:, column].astype(np.int64))

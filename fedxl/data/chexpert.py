"""CheXpert: chest X-rays of Stanford Hospital. Irvin et al., CheXpert (AAAI 2019)."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedxl.data.federation import Split, Splits
from fedxl.data.published import how_to_get
from fedxl.data.resized import resized
from fedxl.data.sites import Sites
from fedxl.errors import UserError, require, unknown
from fedxl.sampling import Indices

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
    sites: Sites = Sites(),  # noqa: B008 (frozen)
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
    require(8 <= size <= 4096, f"size must lie between 8 and 4096 pixels, got {size}")
    folder = _folder(Path(root))
    paths, y = _read(folder / "train.csv", label, frontal)
    test_paths, test = _read(folder / "valid.csv", label, frontal)
    require(not (test == UNSURE).any(), f"{folder / 'valid.csv'}: a test label cannot be uncertain")
    require(0 <= validation < len(y), f"validation must lie in [0, {len(y)}), got {validation}")
    x, tested = (
        resized(folder, paths, size, Path(cache or folder), f"chexpert-{name}")
        for name, paths in (("train", paths), ("valid", test_paths))
    )
    unsure = y == UNSURE
    if uncertain == "ignore" and unsure.any():
        x, y = x[~unsure], y[~unsure]
    y = np.where(y == UNSURE, int(uncertain == "ones"), y)
    require(validation < len(y), f"only {len(y)} training images have a certain {label}")
    cut = len(y) - validation
    held_back = _split(x[cut:], y[cut:]) if validation else None
    return sites.share_out(_split(x[:cut], y[:cut]), held_back, _split(tested, test))


def _split(images: np.ndarray, labels: Indices) -> Split:
    return Split(torch.from_numpy(images[:, None]), torch.from_numpy(labels))


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
            reader = csv.DictReader(file)
            columns = list(reader.fieldnames or ())
            require({"Path", "Frontal/Lateral"} <= {*columns}, f"{path} lacks the columns Path and Frontal/Lateral")
            if label not in columns or label in DETAILS:
                raise unknown(f"label in {path}", label, {*columns} - {*DETAILS} - {""})
            rows = [row for row in reader if not frontal or row["Frontal/Lateral"] == "Frontal"]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    require(len(rows) > 0, f"{path} has no {'frontal ' if frontal else ''}images")
    labels = np.array([_label(row[label], path) for row in rows], np.int64)
    # A path starts with the name of the release, whatever the folder is called here.
    return [row["Path"].partition("/")[2] for row in rows], labels


def _label(text: str | None, path: Path) -> int:
    known = {"": 0, "0": 0, "0.0": 0, "1": 1, "1.0": 1, "-1": UNSURE, "-1.0": UNSURE}
    value = known.get((text or "").strip())
    require(value is not None, f"{path}: a label must be 1, 0, -1 or empty, not '{text}'")
    assert value is not None
    return value

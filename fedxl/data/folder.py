"""Your own images in folders that are named by their class, and perhaps by site and split."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedxl.data.federation import Splits
from fedxl.data.forms import Label
from fedxl.data.holdout import WORDS, check_shares, draw
from fedxl.data.keys import canonical, in_order, two_values
from fedxl.data.preparation import Image, Preparation
from fedxl.data.rawtable import Order, assemble
from fedxl.data.resized import resized
from fedxl.errors import UserError, printable, require

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
LEVELS = "ROOT/CLASS, ROOT/SITE/CLASS, ROOT/SPLIT/CLASS or ROOT/SITE/SPLIT/CLASS (site and split in either order)"
MOST_FILES = 10_000_000


@dataclass(frozen=True)
class FolderOptions:
    """Settings of folders of images."""

    positive: Label | None = None  # the class that is positive; not needed for 0 and 1, or true and false
    size: int = 64  # images become squares of so many pixels a side
    channels: int = 1  # 1: grey, 3: colour
    validation: float = 0.2  # the share of images to draw, if no folder is called train, validation or test
    test: float = 0.2
    group: str = ""  # what ends a patient's (or the like's) name in file names ("_": p7_1.png): never in two splits
    called: str = ""  # the site's name, if folders name none
    cache: str = ""  # where prepared images are kept; "": in the folder itself
    seed: int = 0

    def __post_init__(self) -> None:
        check_shares(self.validation, self.test)
        require(self.seed >= 0, f"seed must not be negative, got {self.seed}")
        Image(self.size, self.channels)


def folder(path: str, options: FolderOptions = FolderOptions()) -> Splits:  # noqa: B008 (frozen)
    """Your own images in a folder for each class: path/CLASS/*.png.

    Above the classes there may be folders for sites, and for train, validation and test. There are two classes.
    Splits are drawn where no folder names them, at every site and in both classes alike.
    """
    root = Path(path)
    files = images_in(root)
    places = [_place(file, root) for file in files]
    classes = [canonical(place[0]) for place in places]
    one, other = two_values(sorted({*classes}), options.positive, f"{root}: the folders of classes")
    alone = options.called or root.resolve().name
    found, at = np.unique([place[1] or alone for place in places], return_inverse=True)
    sites, names = in_order(at.astype(np.int32), found.tolist())
    y = (np.array(classes) == one).astype(np.int8)
    told = [place[2].lower() for place in places]
    if all(told):
        splits = np.array([WORDS[split] for split in told], np.int8)
    elif any(told):
        without = files[told.index("")]
        raise UserError(f"{printable(without)} is in no folder called train, validation or test, but others are")
    else:
        of = [_group(file, options.group) for file in files] if options.group else None
        groups = None if of is None else np.unique(of, return_inverse=True)[1].astype(np.int32)
        splits = draw(sites, y, groups, names, (options.validation, options.test), options.seed)
    order = Order(splits, sites, names)
    order.parts()  # before an image is opened
    image = Image(options.size, options.channels)
    cache = Path(options.cache) if options.cache else root
    listed = [files[row] for row in order.rows]
    x = resized(root, listed, image.size, cache, "images", image.channels, stamped=True)
    made = Preparation(image=image, label="class", positive=one, negative=other, source="folder")
    pixels = torch.from_numpy(x.reshape(len(x), image.channels, image.size, image.size))
    return assemble(order, pixels, y, lambda rows: [files[row] for row in rows.tolist()], made)


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


def _place(file: str, root: Path) -> tuple[str, str, str]:
    """(class, site, split) of an image, from the folders that it is in."""
    *above, kind = Path(file).parts[:-1] or ("",)
    splits = [name for name in above if name.lower() in WORDS]
    sites = [name for name in above if name.lower() not in WORDS]
    right = bool(kind) and kind.lower() not in WORDS and len(splits) <= 1 and len(sites) <= 1
    require(right, f"{root / file} is not where an image should be: {LEVELS}")
    return kind, "".join(sites), "".join(splits)


def _group(file: str, mark: str) -> str:
    """What an image's name begins with, whichever class it is in."""
    name = Path(file).name
    require(mark in name, f"{printable(file)} has no '{printable(mark)}' in its name, which ends the group's name")
    return name.partition(mark)[0]

"""A site's data as memory-mapped arrays on its disk: opening them takes no time, whatever their size.

Flower's own nodes start a new process for every message. Decoding images each time would take longer than training.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedxl import __version__
from fedxl.config.experiment import Config, load_data
from fedxl.data.augment import Augment
from fedxl.data.federation import Federation, Splits
from fedxl.data.source import TensorSource
from fedxl.deploy.provision.settings import SiteFile
from fedxl.errors import UserError, require
from fedxl.files import open_private, private_folder, read_bytes, write_atomically
from fedxl.progress import progress

SPLITS = ("validation", "test")
FACTS = "data.json"  # written last: a cache without it is incomplete
FILES = {FACTS, *(f"{name}.npy" for name in ("x", "y", "means", *(f"{s}_{k}" for s in SPLITS for k in "xy")))}
CHUNK = 1024  # examples written at a time


def refresh(site: SiteFile) -> None:
    """Prepare the data if there is no cache, or if the data's files have changed since."""
    _make_private(site.cache)
    facts = _facts(site)
    # Missing files do not count as changed: a site may keep nothing but the cache.
    if facts is None or any(facts["stamps"].get(name) != stamp for name, stamp in _stamps(site).items()):
        prepare(site)


def identity(site: SiteFile) -> str:
    """A hash that changes when the data change."""
    facts = _ready(site)
    return hashlib.sha256(json.dumps([facts["key"], facts["stamps"]]).encode()).hexdigest()


def training_data(site: SiteFile) -> Federation:
    """The site's training data as a federation of one client. Prepares them first if there is no cache."""
    facts = _ready(site)
    x, y = (_mapped(site.cache / f"{name}.npy") for name in ("x", "y"))
    means = _mapped(site.cache / "means.npy") if facts["means"] else None
    augment = Augment(**{**facts["augment"], "site_means": tuple(facts["augment"]["site_means"])})
    return Federation(TensorSource(x, y, augment, means), [np.arange(len(y))])


def held_back(site: SiteFile, split: str) -> TensorSource | None:
    """The site's validation or test data, if it has any."""
    if split not in _ready(site)["splits"]:
        return None
    x, y = (_mapped(site.cache / f"{split}_{name}.npy") for name in ("x", "y"))
    return TensorSource(x, y)


def count(site: SiteFile) -> int:
    """Prepare the data if needed; the number of training examples."""
    refresh(site)
    return len(training_data(site).source.labels)


def prepare(site: SiteFile) -> int:
    """Write the cache; the number of training examples."""
    splits = load_data(Config(data=dict(site.data), risk={}, algorithm={}, run={}))
    own, source = own_rows(site, splits), splits.train.source
    require(isinstance(source, TensorSource), "only data held in memory can be prepared")
    assert isinstance(source, TensorSource)
    arrays = {"x": (source.x, own), "y": (source.labels, own)}
    if source.means is not None:
        arrays["means"] = (source.means, own)
    held = own_held_back(site, splits)
    for split, (x, y, rows) in held.items():
        arrays |= {f"{split}_x": (x, rows), f"{split}_y": (y, rows)}
    facts = {
        "key": key(site),
        "stamps": _stamps(site),
        "means": source.means is not None,
        "augment": asdict(source.augment),
        "splits": list(held),
    }
    try:
        private_folder(site.cache)
        (site.cache / FACTS).unlink(missing_ok=True)
        with progress(f"preparing {site.settings.name}", sum(len(rows) for _, rows in arrays.values())) as done:
            for name, (tensor, rows) in arrays.items():
                _write(site.cache / f"{name}.npy", tensor, rows, done)
        write_atomically(site.cache / FACTS, json.dumps(facts).encode(), private=True)
    except OSError as error:
        raise UserError(
            f"cannot write to {site.cache}: {error.strerror}; free some space and prepare again"
        ) from None
    return len(own)


def _write(path: Path, tensor: Tensor, rows: Tensor, done: Callable[[int], None]) -> None:
    """Write these rows as an .npy file. Rename it when complete: another process may have the old one mapped.

    It writes instead of mapping: on a full disk, a write raises an error, and a mapping would kill the process.
    """
    partial = path.with_name(f".{path.name}")
    kind = np.lib.format.dtype_to_descr(tensor[:0].numpy().dtype)
    header = {"descr": kind, "fortran_order": False, "shape": (len(rows), *tensor.shape[1:])}
    with open_private(partial) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for chunk in rows.split(CHUNK):
            file.write(tensor[chunk].numpy().tobytes())
            done(len(chunk))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def key(site: SiteFile) -> str:
    """A hash of everything that the cache depends on, except for the data's files."""
    text = json.dumps([__version__, site.data, site.settings.part], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def own_rows(site: SiteFile, splits: Splits) -> Tensor:
    """Which training examples of the data are this site's."""
    part, count = site.settings.part, len(splits.train.parts)
    require(part < count, f"part is {part}, but the data have {count} client(s), 0 to {count - 1}")
    return torch.as_tensor(splits.train.parts[part])


def own_held_back(site: SiteFile, splits: Splits) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """By split: examples, labels, and this site's rows. Sites with parts of one data set share its splits evenly."""
    found = {}
    for name, pair in zip(SPLITS, (splits.validation, splits.test), strict=True):
        if pair is not None:
            rows = torch.arange(site.settings.part, len(pair.y), len(splits.train.parts))
            found[name] = (pair.x, pair.y, rows)
    return {name: split for name, split in found.items() if len(split[2])}


def _stamps(site: SiteFile) -> dict[str, list[list[Any]]]:
    """Names, sizes and times of all files that the site's settings name, to notice changes."""
    found: dict[str, list[list[Any]]] = {}
    for value in site.data.values():
        place = Path(value) if isinstance(value, str) and value else None
        if place is not None and place.exists():
            files = sorted(place.iterdir()) if place.is_dir() else [place]
            found[str(value)] = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return found


def _ready(site: SiteFile) -> dict[str, Any]:
    """The description of the cache. Prepares the data first if there is none for these settings."""
    facts = _facts(site)
    if facts is None:
        prepare(site)
        facts = _facts(site)
        assert facts is not None
    return facts


def _facts(site: SiteFile) -> dict[str, Any] | None:
    """The description of the cache, or None if there is none for these settings. An unreadable disk is an error."""
    try:
        facts = json.loads(read_bytes(site.cache / FACTS))
    except UserError:
        raise
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) and facts.get("key") == key(site) else None


def _make_private(folder: Path) -> None:
    """Allow only this user to read the data, also in a cache that an older version left open.

    A folder that also holds other files keeps its permissions.
    """
    names = os.listdir(folder) if folder.is_dir() else []
    ours = [name for name in names if name.removeprefix(".") in FILES]
    whole = [folder] if ours and ours == names else []
    for path in [*(folder / name for name in ours), *whole]:
        with suppress(OSError):  # another user owns it, or another process is replacing it
            path.chmod(path.stat().st_mode & 0o700)


def _mapped(path: Path) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the memory is read-only; nothing writes to it
        return torch.from_numpy(np.load(path, mmap_mode="r"))

"""A site's data on its disk, ready to be mapped into memory: opened in no time, however large.

Flower starts a new process for every message. Reading images anew each time would take longer than training on them.
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
FACTS = "data.json"  # written last: without it there is no cache
FILES = {FACTS, *(f"{name}.npy" for name in ("x", "y", "means", *(f"{s}_{k}" for s in SPLITS for k in "xy")))}
PIECE = 1024  # examples that are written at a time


def refresh(site: SiteFile) -> None:
    """Prepare the data if that has not been done, or if their files have changed since."""
    _close(site.cache)
    facts = _facts(site)
    # Data that are no longer there have not changed: a site may have nothing but its cache.
    if facts is None or any(facts["stamps"].get(name) != stamp for name, stamp in _stamps(site).items()):
        prepare(site)


def identity(site: SiteFile) -> str:
    """The same as long as the data are."""
    facts = _ready(site)
    return hashlib.sha256(json.dumps([facts["key"], facts["stamps"]]).encode()).hexdigest()


def opened(site: SiteFile) -> Federation:
    """The site's training data as a federation of one client; prepared first if that has not been done."""
    facts = _ready(site)
    x, y = (_mapped(site.cache / f"{name}.npy") for name in ("x", "y"))
    means = _mapped(site.cache / "means.npy") if facts["means"] else None
    augment = Augment(**{**facts["augment"], "site_means": tuple(facts["augment"]["site_means"])})
    return Federation(TensorSource(x, y, augment, means), [np.arange(len(y))])


def held_back(site: SiteFile, split: str) -> TensorSource | None:
    """What the site has to validate or to test on, if it has."""
    if split not in _ready(site)["splits"]:
        return None
    x, y = (_mapped(site.cache / f"{split}_{name}.npy") for name in ("x", "y"))
    return TensorSource(x, y)


def count(site: SiteFile) -> int:
    """How many examples the site has to train on, once they are prepared as they are now."""
    refresh(site)
    return len(opened(site).source.labels)


def prepare(site: SiteFile) -> int:
    """Write the cache anew; how many examples to train on it holds."""
    splits = load_data(Config(data=dict(site.data), risk={}, algorithm={}, run={}))
    own, source = _own(site, splits), splits.train.source
    require(isinstance(source, TensorSource), "only data held in memory can be prepared")
    assert isinstance(source, TensorSource)
    arrays = {"x": (source.x, own), "y": (source.labels, own)}
    if source.means is not None:
        arrays["means"] = (source.means, own)
    held = _held_back(site, splits)
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
        raise UserError(f"cannot write to {site.cache}: {error.strerror}; make room and prepare again") from None
    return len(own)


def _write(path: Path, tensor: Tensor, rows: Tensor, done: Callable[[int], None]) -> None:
    """These rows as a file of numpy, under another name until it is whole: another process may have it mapped.

    Written, not mapped: on a full disk that is an error, and not the end of the process.
    """
    partial = path.with_name(f".{path.name}")
    kind = np.lib.format.dtype_to_descr(tensor[:0].numpy().dtype)
    header = {"descr": kind, "fortran_order": False, "shape": (len(rows), *tensor.shape[1:])}
    with open_private(partial) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for piece in rows.split(PIECE):
            file.write(tensor[piece].numpy().tobytes())
            done(len(piece))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def key(site: SiteFile) -> str:
    """Of everything that the cache depends on, but for the files themselves."""
    text = json.dumps([__version__, site.data, site.settings.part], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _own(site: SiteFile, splits: Splits) -> Tensor:
    part, count = site.settings.part, len(splits.train.parts)
    require(part < count, f"part is {part}, but the data have {count} client(s), 0 to {count - 1}")
    return torch.as_tensor(splits.train.parts[part])


def _held_back(site: SiteFile, splits: Splits) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """By split: examples, labels, and which of them are this site's. Parts of one data set share them evenly."""
    found = {}
    for name, pair in zip(SPLITS, (splits.validation, splits.test), strict=True):
        if pair is not None:
            rows = torch.arange(site.settings.part, len(pair.y), len(splits.train.parts))
            found[name] = (pair.x, pair.y, rows)
    return {name: split for name, split in found.items() if len(split[2])}


def _stamps(site: SiteFile) -> dict[str, list[list[Any]]]:
    """Of every file or folder that the site's settings name: what tells that it has changed."""
    found: dict[str, list[list[Any]]] = {}
    for value in site.data.values():
        place = Path(value) if isinstance(value, str) and value else None
        if place is not None and place.exists():
            files = sorted(place.iterdir()) if place.is_dir() else [place]
            found[str(value)] = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return found


def _ready(site: SiteFile) -> dict[str, Any]:
    """What is known of the cache, which is written first if there is none, or one by other settings."""
    facts = _facts(site)
    if facts is None:
        prepare(site)
        facts = _facts(site)
        assert facts is not None
    return facts


def _facts(site: SiteFile) -> dict[str, Any] | None:
    """What is known of the cache, if there is one by these settings. A disk that does not answer has not lost it."""
    try:
        facts = json.loads(read_bytes(site.cache / FACTS))
    except UserError:
        raise
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) and facts.get("key") == key(site) else None


def _close(folder: Path) -> None:
    """Patients' data are for this user alone, also where an older version has left them open.

    A folder that holds other things, too, stays as whoever made it wants it.
    """
    names = os.listdir(folder) if folder.is_dir() else []
    ours = [name for name in names if name.removeprefix(".") in FILES]
    whole = [folder] if ours and ours == names else []
    for path in [*(folder / name for name in ours), *whole]:
        with suppress(OSError):  # somebody else has made it, or is just making it anew
            path.chmod(path.stat().st_mode & 0o700)


def _mapped(path: Path) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of memory that cannot be written to: nobody does
        return torch.from_numpy(np.load(path, mmap_mode="r"))

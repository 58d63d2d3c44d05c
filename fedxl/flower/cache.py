"""A site's data on its disk, ready to be mapped into memory: opened in no time, however large.

Flower starts a new process for every message. Reading images anew each time would take longer than training on them.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedxl import __version__
from fedxl.checkpoint import write_atomically
from fedxl.config import Config, load_data
from fedxl.data.augment import Augment
from fedxl.data.federation import Federation, Splits
from fedxl.data.source import TensorSource
from fedxl.errors import UserError, require
from fedxl.flower.settings import SiteFile
from fedxl.progress import progress

FACTS = "data.json"  # written last: without it there is no cache
PIECE = 1024  # examples that are written at a time


def refresh(site: SiteFile) -> None:
    """Prepare the data if that has not been done, or if their files have changed since."""
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
        site.cache.mkdir(parents=True, exist_ok=True)
        (site.cache / FACTS).unlink(missing_ok=True)
        with progress(f"preparing {site.settings.name}", sum(len(rows) for _, rows in arrays.values())) as done:
            for name, (tensor, rows) in arrays.items():
                partial = site.cache / f".{name}.npy"  # not over a file that another process has mapped
                whole = np.lib.format.open_memmap(
                    partial, "w+", tensor[:0].numpy().dtype, (len(rows), *tensor.shape[1:])
                )
                for begin in range(0, len(rows), PIECE):
                    piece = rows[begin : begin + PIECE]
                    whole[begin : begin + len(piece)] = tensor[piece].numpy()
                    done(len(piece))
                whole.flush()
                partial.replace(site.cache / f"{name}.npy")
        write_atomically(site.cache / FACTS, json.dumps(facts).encode())
    except OSError as error:
        raise UserError(f"cannot write to {site.cache}: {error.strerror}; make room and prepare again") from None
    return len(own)


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
    for name, pair in {"validation": splits.validation, "test": splits.test}.items():
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
    try:
        facts: dict[str, Any] = json.loads((site.cache / FACTS).read_text())
    except (OSError, ValueError):
        return None
    return facts if facts.get("key") == key(site) else None


def _mapped(path: Path) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of memory that cannot be written to: nobody does
        return torch.from_numpy(np.load(path, mmap_mode="r"))

"""A site's data as memory-mapped arrays on its disk: opening them takes no time, whatever their size."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedxl import __version__
from fedxl.config.experiment import load_data, load_unfitted
from fedxl.data.federation import Federation
from fedxl.data.preparation import Preparation
from fedxl.data.source import Augment, TensorSource
from fedxl.deploy import Say
from fedxl.deploy.provision.settings import SiteFile, read_site
from fedxl.deploy.site import tables
from fedxl.deploy.site.own_part import SPLITS, own_config, own_data, own_held_back, own_rows, own_site
from fedxl.errors import UserError, require
from fedxl.files import read_bytes
from fedxl.progress import progress

EACH = ("x", "y", "queries")  # what there is of training data and of each split
MORE = ("means", "weights", "queries")  # what there may be of training data
FILES = {
    tables.FACTS,
    *(f"{name}.npy" for name in (*EACH, "means", "weights", *(f"{s}_{k}" for s in SPLITS for k in EACH))),
}


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


def training_data(site: SiteFile, made: Preparation | None = None) -> Federation:
    """The site's training data as a federation of one client. made: how the columns of its table are scaled."""
    facts = _ready(site)
    x, y = _examples(site, facts, "", made), _mapped(site.cache / "y.npy")
    augment = Augment(**{**facts["augment"], "site_means": tuple(facts["augment"]["site_means"])})
    more = {name: _mapped(site.cache / f"{name}.npy") for name in MORE if facts[name]}
    return Federation(TensorSource(x, y, augment, **more), [np.arange(len(y))])


def held_back(site: SiteFile, split: str, made: Preparation | None = None) -> TensorSource | None:
    """The site's validation or test data, if it has any."""
    facts = _ready(site)
    if split not in facts["splits"]:
        return None
    x, y = _examples(site, facts, f"{split}_", made), _mapped(site.cache / f"{split}_y.npy")
    return TensorSource(x, y, queries=_queries(site, facts, f"{split}_"))


def labels(site: SiteFile) -> Tensor:
    """Of the training data."""
    _ready(site)
    return _mapped(site.cache / "y.npy")


def queries(site: SiteFile) -> Tensor | None:
    """Of the training data: the query of each example; None: they have none."""
    return _queries(site, _ready(site), "")


def summary(site: SiteFile) -> str:
    """What may be told of the columns of its table, as JSON; "" if its data need no common preparation."""
    table = _ready(site)["table"]
    return "" if table is None else str(table["summary"])


def images(site: SiteFile) -> str:
    """How its files of images become examples, as JSON; "" if its data are something else."""
    return str(_ready(site).get("images", ""))


def label_names(site: SiteFile) -> list[str]:
    """The columns of its several labels, in their order; none if nothing names them here, as in arrays."""
    return list(_ready(site).get("labels", []))


def main(folder: Path, say: Say) -> None:
    """Prepare the data if needed: a process of its own, which ends."""
    site = read_site(folder / "site.toml")
    refresh(site)
    # Not by `say`: the supervisor, who reads this line, says it.
    print(f"site {site.settings.name}: {len(labels(site))} examples ready", flush=True)


def prepare(site: SiteFile) -> int:
    """Write the cache; the number of training examples."""
    config = own_config(site)
    raw = load_unfitted(config)
    if raw is not None:
        return tables.write(site.cache, raw, own_site(site, raw.order.names), _about(site), site.settings.name)
    splits = load_data(config)
    own, source = own_rows(site, splits), splits.train.source
    require(isinstance(source, TensorSource), "only data held in memory can be prepared")
    chosen = site.data.get("name") != "letor" or "standardise" in site.data or len(splits.train.parts) > 1
    told = "features would be scaled by this site's files alone, and those of other sites by theirs"
    require(chosen, f"{told}; say standardise = false in [data] to leave them as they are, or true")
    assert isinstance(source, TensorSource)
    more = {name: getattr(source, name) for name in MORE}
    arrays = {"x": (source.x, own), "y": (source.labels, own)}
    arrays |= {name: (tensor, own) for name, tensor in more.items() if tensor is not None}
    held = own_held_back(site, splits)
    for name, (split, rows) in held.items():
        arrays |= {f"{name}_x": (split.x, rows), f"{name}_y": (split.y, rows)}
        if split.queries is not None:
            arrays[f"{name}_queries"] = (split.queries, rows)
    facts = {
        **_about(site),
        **{name: tensor is not None for name, tensor in more.items()},
        "augment": asdict(source.augment),
        "splits": list(held),
        "table": None,
        "labels": list(splits.preparation.labels) if splits.preparation else [],
        "images": splits.preparation.to_text() if splits.preparation and splits.preparation.image else "",
    }
    total = sum(len(rows) for _, rows in arrays.values())
    with tables.writing(site.cache, facts), progress(f"preparing {site.settings.name}", total) as done:
        for name, (tensor, rows) in arrays.items():
            chunks = (tensor[chunk].numpy() for chunk in rows.split(tables.ROWS))
            tables.write_array(site.cache / f"{name}.npy", (len(rows), *tensor.shape[1:]), chunks, done)
    return len(own)


def _about(site: SiteFile) -> dict[str, Any]:
    return {"key": key(site), "stamps": _stamps(site)}


def _examples(site: SiteFile, facts: Mapping[str, Any], prefix: str, made: Preparation | None) -> Tensor:
    """Examples as they are in the cache, or those of a table, made by a preparation."""
    if facts["table"] is None:
        return _mapped(site.cache / f"{prefix}x.npy")
    require(made is not None, "this site has a table, and the server sent no preparation of its columns")
    # What follows compares it with this site's own names, and says where they differ.
    require(site.settings.summary, "this site tells nothing of its table, so that no preparation can be made for it")
    assert made is not None
    return _mapped(tables.examples(site.cache, facts["table"], prefix, made))


def _queries(site: SiteFile, facts: Mapping[str, Any], prefix: str) -> Tensor | None:
    return _mapped(site.cache / f"{prefix}queries.npy") if facts["queries"] else None


def key(site: SiteFile) -> str:
    """A hash of everything that the cache depends on, except for the data's files."""
    text = json.dumps([__version__, site.data, site.settings.part], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _stamps(site: SiteFile) -> dict[str, list[list[Any]]]:
    """Names, sizes and times of all files that the site's settings name, to notice changes."""
    found: dict[str, list[list[Any]]] = {}
    for value in (one for each in own_data(site).values() for one in (each if isinstance(each, list) else [each])):
        if not isinstance(value, str) or not value:
            continue
        named = [value] if os.path.exists(value) else sorted(glob.glob(value, recursive=True))
        if named:
            files = [Path(name) for name in named]
            if len(files) == 1 and files[0].is_dir():
                files = _content(files[0], site.cache)
            stats = [(file, file.stat()) for file in files if file.exists()]  # a link may lead nowhere
            found[value] = [[file.name, stat.st_size, stat.st_mtime_ns] for file, stat in stats]
    return found


def _content(folder: Path, cache: Path) -> list[Path]:
    """A folder's files and all folders below but the cache: what is added to one, or removed, changes its time."""
    below = [Path(here) / name for here, names, _ in os.walk(folder) for name in names]
    return sorted(path for path in {*folder.iterdir(), *below} if path.resolve() != cache.resolve())


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
        facts = json.loads(read_bytes(site.cache / tables.FACTS))
    except UserError:
        raise
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) and facts.get("key") == key(site) else None


def _make_private(folder: Path) -> None:
    """Allow only this user to read the data. A folder that also holds other files keeps its permissions."""
    found = {path: path.name.removeprefix(".") for path in (folder.iterdir() if folder.is_dir() else ())}
    ours = [path for path, name in found.items() if name in FILES or tables.FILE.fullmatch(name)]
    for path in [*ours, *([folder] if ours and len(ours) == len(found) else [])]:
        with suppress(OSError):  # another user owns it, or another process is replacing it
            path.chmod(path.stat().st_mode & 0o700)


def _mapped(path: Path) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the memory is read-only; nothing writes to it
        return torch.from_numpy(np.load(path, mmap_mode="r"))

"""A site's data as memory-mapped arrays on its disk: opening them takes no time, whatever their size.

A table is there unscaled, and as examples once a server has sent the preparation of all sites.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedxl import __version__
from fedxl.config.experiment import Config, Table, check_data, load_data, load_unfitted, with_files
from fedxl.data import NAMED
from fedxl.data.check import Findings
from fedxl.data.examples import NOTHING, Augment, Examples, Holding, Splits
from fedxl.data.splits import SPLITS, wide
from fedxl.data.tables.prepare import Preparation
from fedxl.data.tables.rawtable import RawTable, recoding
from fedxl.data.tables.summary import predicted
from fedxl.deploy.provision.settings import SiteFile, files_below
from fedxl.deploy.storage import writing_to
from fedxl.errors import UserError, printable, require
from fedxl.files import open_private, private_folder, read_bytes, write_atomically
from fedxl.progress import progress
from fedxl.sampling import Indices

COLUMNS = ("x", "y", "weight", "group", "time", "shift")  # of `Examples`, as far as there are any
FACTS = "data.json"  # the cache's own description of itself, written last: without it a cache is incomplete
FORM = 5  # of the cache; a new number means other files
# The files of a cache. raw: columns of a table, unscaled; x-...: what a preparation made of them, under its digest.
OURS = re.compile(rf"{re.escape(FACTS)}|(?:{'|'.join(SPLITS)})_({'|'.join(COLUMNS)}|raw|x-[0-9a-f]{{16}})\.npy")
ROWS = 1024
MOST_NAMED = 10  # sites of a table in an error
USUAL: Mapping[str, Any] = {  # what a cache says of its data, unless they say otherwise
    "augment": asdict(NOTHING),
    "table": None,  # names and texts of a table's columns, and its label
    "summary": "",  # what may be told of a table's columns, if the data need a common preparation
    "fitted": True,  # whether columns are scaled by means of rows of this site
    "labels": [],  # the columns of several labels, if they have names
    "images": "",  # how files of images become examples, if the data are some
}


class Rows(NamedTuple):
    """An array to be written piece by piece."""

    shape: tuple[int, ...]
    pieces: Iterable[np.ndarray]


def refresh(site: SiteFile) -> None:
    """Prepare the data if there is no cache, or if the data's files have changed since."""
    _make_private(site.cache)
    known = _facts(site)
    # Missing files do not count as changed: a site may keep nothing but the cache.
    if known is None or any(known["stamps"].get(name) != stamp for name, stamp in _stamps(site).items()):
        prepare(site)


def facts(site: SiteFile) -> dict[str, Any]:
    """The description of the cache. Prepares the data first if there is none for these settings."""
    return _facts(site) or prepare(site)


def identity(site: SiteFile) -> str:
    """A hash that changes when the data change."""
    known = facts(site)
    return hashlib.sha256(json.dumps([known["key"], known["stamps"]]).encode()).hexdigest()


def training_data(site: SiteFile, made: Preparation | None = None) -> Examples:
    """The site's training data. made: how the columns of its table are scaled."""
    found = examples(site, "train", made)
    assert found is not None
    augment = facts(site)["augment"]
    # After the columns: site means are in `shift` already.
    return replace(found, augment=Augment(**{**augment, "site_means": tuple(augment["site_means"])}), bank=None)


def examples(site: SiteFile, split: str, made: Preparation | None = None) -> Examples | None:
    """A split as it is in the cache, or made of a table by a preparation; None if there is none."""
    known = facts(site)
    if split not in known["columns"]:
        return None
    found: dict[str, Any] = {n: _mapped(site.cache / f"{split}_{n}.npy") for n in known["columns"][split]}
    if known["table"] is not None:
        if made is None:
            raise UserError("this site has a table, and the server sent no preparation of its columns")
        # What follows compares it with this site's own names, and says where they differ.
        told = "this site tells nothing of its table, so that no preparation can be made for it"
        require(site.settings.summary, told)
        found["x"] = _mapped(_made_of_table(site.cache, known["table"], split, made))
    return Examples(**found)


def holding(site: SiteFile) -> Holding:
    """What its training data hold, in numbers."""
    found = {name: _mapped(site.cache / f"train_{name}.npy") for name in facts(site)["columns"]["train"]}
    columns: dict[str, Any] = {name: found.get(name) for name in ("group", "time")}
    return Examples(found["y"], found["y"], **columns).holdings()[0]  # only labels are counted


def prepare(site: SiteFile) -> dict[str, Any]:
    """Write the cache. Returns its description."""
    raw = load_unfitted(own_config(site))
    arrays, about = _of_examples(site) if raw is None else _of_table(site, raw)
    columns = {split: [name for name in found if name != "raw"] for split, found in arrays.items()}
    described = {"key": key(site), "stamps": _stamps(site), "columns": columns, **USUAL, **about}
    total = sum(rows.shape[0] for found in arrays.values() for rows in found.values())
    with writing_to(site.cache, "free some space and prepare again"):
        private_folder(site.cache)
        (site.cache / FACTS).unlink(missing_ok=True)
        _remove_examples(site.cache)
        with progress(f"preparing {site.settings.name}", total) as done:
            for split, found in arrays.items():
                for name, rows in found.items():
                    _write(site.cache / f"{split}_{name}.npy", rows, done)
        write_atomically(site.cache / FACTS, json.dumps(described).encode(), private=True)
    return described


def _of_examples(site: SiteFile) -> tuple[dict[str, dict[str, Rows]], dict[str, Any]]:
    """The arrays of the cache by split and column, and what it says of them."""
    splits = load_data(own_config(site))
    chosen = site.data.get("name") != "letor" or "standardise" in site.data or len(splits.train.parts) > 1
    told = "features would be scaled by this site's files alone, and those of other sites by theirs"
    require(chosen, f"{told}; say standardise = false in [data] to leave them as they are, or true")
    own, made = _own_splits(site, splits), splits.preparation
    image = made.image if made else None
    bits = image.bits if image else 0
    alike = "how many of them are used must be the same at all sites, and this one sees its own images alone"
    told = f"images have grey values of 16 bits: {alike}; say so in [data] of each site.toml (here bits = {bits})"
    require(not bits or bool(site.data.get("bits")), told)
    arrays = {
        split: {name: _whole(found) for name in COLUMNS if (found := getattr(part, name)) is not None}
        for split, part in {"train": own.train, **own.held_back}.items()
    }
    about = {
        "augment": asdict(own.train.augment),
        "fitted": splits.fitted,
        "labels": list(made.labels) if made else [],
    }
    return arrays, {**about, "images": made.to_text() if made and image else ""}


def _of_table(site: SiteFile, raw: RawTable) -> tuple[dict[str, dict[str, Rows]], dict[str, Any]]:
    """As `_of_examples`: a site's rows, unscaled, and what may be told of them."""
    number = _own_site(site, raw.order.names)
    arrays: dict[str, dict[str, Rows]] = {}
    for place, split in enumerate(SPLITS):
        rows = raw.order.rows[raw.order.part(number, place)]
        known = {"y": raw.y, **{name: column for name, column in raw.known.items() if name != "weight" or not place}}
        if len(rows):
            own = {"raw": Rows((len(rows), len(raw.columns)), raw.blocks(number, place))}
            arrays[split] = own | {name: _chosen(column, rows) for name, column in known.items()}
    require("train" in arrays, f"no row of site '{printable(site.settings.name)}' is trained on; give it some")
    table = {"columns": raw.columns, "texts": raw.texts, "label": predicted(raw.about)}
    return arrays, {"table": table, "summary": raw.summary(number).to_json()}


def _whole(found: Tensor) -> Rows:
    return Rows(tuple(found.shape), (chunk.numpy() for chunk in found.split(ROWS)))


def _chosen(column: np.ndarray, rows: np.ndarray) -> Rows:
    """These rows of a column of a table."""
    pieces = (wide(column[rows[start : start + ROWS]]) for start in range(0, len(rows), ROWS))
    return Rows((len(rows), *column.shape[1:]), pieces)


def _own_data(site: SiteFile) -> Table:
    """[data], with the files that its data set looks for by itself."""
    return files_below(site.folder, with_files(site.data))


def own_config(site: SiteFile) -> Config:
    """The data that a site's file names."""
    given = _own_data(site)
    if given.get("name") in NAMED:
        given.setdefault("called", site.settings.name)  # its draws are those that it would make among all sites
    return Config(data=given, risk={}, algorithm={}, run={})


def check_site(site: SiteFile) -> Findings:
    """What is found in the data that this site would train and evaluate on. Nothing leaves the site."""
    return check_data(own_config(site), partial(_own_splits, site))[0]


def _own_splits(site: SiteFile, splits: Splits) -> Splits:
    """The site's share of the data that its file names: its own rows; of splits without sites an even share."""
    named = splits.preparation is not None
    names = list(splits.names) if named else [""] * len(splits.train.parts)
    own, count = site.settings.part, len(names)
    if site.settings.name in names:
        own = names.index(site.settings.name)
    require(own < count, f"part is {own}, but the data have {count} client(s), 0 to {count - 1}")
    held: dict[str, Any] = dict.fromkeys(("validation", "test"))
    for name, found in splits.held_back.items():
        sited = named and found.site is not None
        rows = np.flatnonzero(found.site == own) if sited else _even_share(found, site.settings.part, count)
        held[name] = _only(site, found.take(rows)) if len(rows) else None
    return splits._replace(train=_only(site, splits.train.take(splits.train.parts[own])), **held)


def _only(site: SiteFile, found: Examples) -> Examples:
    return replace(found, site=np.zeros(len(found), np.int64), sites=(site.settings.name,))


def _own_site(site: SiteFile, names: Sequence[str]) -> int:
    """Which site of a table this is: the one with its name, or the only one. A number might be another's."""
    own = site.settings.name
    listed = ", ".join(printable(name, 40) for name in names[:MOST_NAMED])
    listed += ", ..." if len(names) > MOST_NAMED else ""
    told = f"this site is called '{own}', and its table holds the sites {listed}; name it like one of them"
    require(own in names or len(names) == 1, told)
    return list(names).index(own) if own in names else 0


def _even_share(found: Examples, part: int, parts: int) -> Indices:
    """Every so many-th example; of items of queries, every so many-th query as a whole."""
    if found.group is None:
        return np.arange(part, len(found), parts)
    number = np.unique(found.group.numpy(), return_inverse=True)[1]
    return np.flatnonzero(number % parts == part)


def key(site: SiteFile) -> str:
    """A hash of everything that the cache depends on, except for the data's files."""
    text = json.dumps([__version__, FORM, site.data, site.settings.part], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _stamps(site: SiteFile) -> dict[str, list[list[Any]]]:
    """Names, sizes and times of all files that the site's settings name, to notice changes."""
    found: dict[str, list[list[Any]]] = {}
    for value in (one for each in _own_data(site).values() for one in (each if isinstance(each, list) else [each])):
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


def _facts(site: SiteFile) -> dict[str, Any] | None:
    """The description of the cache, or None if there is none for these settings. An unreadable disk is an error."""
    try:
        known = json.loads(read_bytes(site.cache / FACTS))
    except UserError:
        raise
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return known if isinstance(known, dict) and known.get("key") == key(site) else None


def _make_private(folder: Path) -> None:
    """Allow only this user to read the data. A folder that also holds other files keeps its permissions."""
    found = list(folder.iterdir()) if folder.is_dir() else []
    ours = [path for path in found if OURS.fullmatch(path.name.removeprefix("."))]
    for path in [*ours, *([folder] if ours and len(ours) == len(found) else [])]:
        with suppress(OSError):  # another user owns it, or another process is replacing it
            path.chmod(path.stat().st_mode & 0o700)


def _made_of_table(cache: Path, table: Mapping[str, Any], split: str, made: Preparation) -> Path:
    """The file of a split's examples as a preparation makes them, written if there is none. Others are removed."""
    label = predicted(made.to_json())
    require(made.image is None, "this site has a table of numbers and categories, not of images")
    told = "the server's preparation is for the label {}, this site's is {}"
    require(label == table["label"], told.format(printable(label), printable(table["label"])))
    digest = hashlib.sha256(json.dumps(made.to_json()).encode()).hexdigest()[:16]
    target = cache / f"{split}_x-{digest}.npy"
    if not target.is_file():
        raw = np.load(cache / f"{split}_raw.npy", mmap_mode="r")
        recode = recoding(made, table["columns"], table["texts"])
        pieces = (made.apply(recode(raw[start : start + ROWS])) for start in range(0, len(raw), ROWS))
        with writing_to(cache, "free some space"):
            _remove_examples(cache, but=digest)
            _write(target, Rows((len(raw), made.width), pieces))
    return target


def _remove_examples(cache: Path, but: str = "") -> None:
    """What earlier preparations made: a server could fill the disk with them. Who has them mapped keeps them."""
    for path in cache.glob("*_x-*"):
        if OURS.fullmatch(path.name) and not path.name.endswith(f"_x-{but}.npy"):
            with suppress(OSError):
                path.unlink()


def _write(path: Path, rows: Rows, done: Callable[[int], None] = lambda count: None) -> None:
    """Write rows as an .npy file for this user alone. Rename it when complete: another process may have it mapped."""
    # Not by mapping: on a full disk, a write raises an error, and a mapping would kill the process.
    partial = path.with_name(f".{path.name}")
    with open_private(partial) as file:
        for number, piece in enumerate(rows.pieces):
            if not number:
                kind = np.lib.format.dtype_to_descr(piece.dtype)
                header = {"descr": kind, "fortran_order": False, "shape": rows.shape}
                np.lib.format.write_array_header_1_0(file, header)
            file.write(piece.tobytes())
            done(len(piece))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _mapped(path: Path) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the memory is read-only; nothing writes to it
        return torch.from_numpy(np.load(path, mmap_mode="r"))

"""A site's table on its disk: unscaled, and as examples once a server has sent the preparation of all sites."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fedxl.data.holdout import SPLITS
from fedxl.data.preparation import Preparation
from fedxl.data.rawtable import RawTable, recoding
from fedxl.data.source import NOTHING
from fedxl.data.summary import predicted
from fedxl.errors import UserError, printable, require
from fedxl.files import open_private, private_folder, write_atomically
from fedxl.progress import progress

FACTS = "data.json"  # the cache's own description of itself, written last: without it a cache is incomplete
PREFIXES = ("", *(f"{split}_" for split in SPLITS[1:]))  # of file names: training data have none
# Unscaled columns, and the examples that a preparation made of them, under its digest.
FILE = re.compile(rf"({'|'.join(PREFIXES)})(raw|x-[0-9a-f]{{16}})\.npy")
ROWS = 1024


def write(cache: Path, raw: RawTable, site: int, about: Mapping[str, Any], name: str) -> int:
    """Write a site's rows, and what may be told of them; the number of training examples."""
    parts = [raw.order.part(site, split) for split in range(len(SPLITS))]
    sizes: list[int] = [part.stop - part.start for part in parts]
    require(sizes[0] > 0, f"no row of site '{printable(name)}' is trained on; give it some")
    table = {
        "columns": raw.columns,
        "texts": raw.texts,
        "label": predicted(raw.about),
        "summary": raw.summary(site).to_json(),
    }
    facts = {
        **about,
        "means": False,
        "weights": raw.weights is not None,
        "queries": raw.queries is not None,
        "augment": asdict(NOTHING),
        "splits": [split for split, size in zip(SPLITS[1:], sizes[1:], strict=True) if size],
        "table": table,
    }
    with writing(cache, facts), progress(f"preparing {name}", sum(sizes)) as done:
        _remove_examples(cache)
        for split, (prefix, part, size) in enumerate(zip(PREFIXES, parts, sizes, strict=True)):
            if size:
                rows = raw.order.rows[part]
                write_array(cache / f"{prefix}raw.npy", (size, len(raw.columns)), raw.blocks(site, split), done)
                _write_whole(cache / f"{prefix}y.npy", raw.labels[rows].astype(np.int64))
                if raw.queries is not None:
                    _write_whole(cache / f"{prefix}queries.npy", raw.queries[rows].astype(np.int64))
        if raw.weights is not None:
            _write_whole(cache / "weights.npy", raw.weights[raw.order.rows[parts[0]]])
    return sizes[0]


@contextmanager
def writing(cache: Path, facts: Mapping[str, Any]) -> Iterator[None]:
    """Write a cache anew, and in the end its description."""
    try:
        private_folder(cache)
        (cache / FACTS).unlink(missing_ok=True)
        yield
        write_atomically(cache / FACTS, json.dumps(facts).encode(), private=True)
    except OSError as error:
        raise UserError(f"cannot write to {cache}: {error.strerror}; free some space and prepare again") from None


def examples(cache: Path, table: Mapping[str, Any], prefix: str, made: Preparation) -> Path:
    """The file of a split's examples as a preparation makes them, written if there is none. Others are removed."""
    label = predicted(made.to_json())
    require(made.image is None, "this site has a table of numbers and categories, not of images")
    told = "the server's preparation is for the label {}, this site's is {}"
    require(label == table["label"], told.format(printable(label), printable(table["label"])))
    digest = hashlib.sha256(json.dumps(made.to_json()).encode()).hexdigest()[:16]
    target = cache / f"{prefix}x-{digest}.npy"
    if target.is_file():
        return target
    raw = np.load(cache / f"{prefix}raw.npy", mmap_mode="r")
    recode = recoding(made, table["columns"], table["texts"])

    def made_of() -> Iterator[np.ndarray]:
        for start in range(0, len(raw), ROWS):
            yield made.apply(recode(raw[start : start + ROWS]))

    try:
        _remove_examples(cache, but=digest)
        write_array(target, (len(raw), made.width), made_of(), lambda count: None)
    except OSError as error:
        raise UserError(f"cannot write to {cache}: {error.strerror}; free some space") from None
    return target


def _remove_examples(cache: Path, but: str = "") -> None:
    """What earlier preparations made: a server could fill the disk with them. Who has them mapped keeps them."""
    for path in cache.iterdir():
        found = FILE.fullmatch(path.name)
        if found and found[2] not in ("raw", f"x-{but}"):
            with suppress(OSError):
                path.unlink()


def write_array(
    path: Path, shape: tuple[int, ...], pieces: Iterable[np.ndarray], done: Callable[[int], None]
) -> None:
    """Write rows as an .npy file for this user alone. Rename it when complete: another process may have it mapped."""
    # Not by mapping: on a full disk, a write raises an error, and a mapping would kill the process.
    partial = path.with_name(f".{path.name}")
    with open_private(partial) as file:
        for number, piece in enumerate(pieces):
            if not number:
                kind = np.lib.format.dtype_to_descr(piece.dtype)
                header = {"descr": kind, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
            file.write(piece.tobytes())
            done(len(piece))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _write_whole(path: Path, array: np.ndarray) -> None:
    write_array(path, array.shape, [array], lambda count: None)

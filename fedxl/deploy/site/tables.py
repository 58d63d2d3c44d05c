"""A site's table on its disk: unscaled, and as examples once a server has sent the preparation of all sites."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fedxl.data.augment import NOTHING
from fedxl.data.holdout import SPLITS
from fedxl.data.preparation import Preparation
from fedxl.data.rawtable import RawTable, recoding
from fedxl.data.summary import predicted
from fedxl.deploy.site.arrays import write_array
from fedxl.errors import UserError, printable, require
from fedxl.files import private_folder, write_atomically
from fedxl.progress import progress

FACTS = "data.json"  # the cache's own description of itself
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
    facts = {**about, "means": False, "weights": raw.weights is not None, "augment": asdict(NOTHING), "table": table}
    facts["queries"] = raw.queries is not None
    facts["splits"] = [split for split, size in zip(SPLITS[1:], sizes[1:], strict=True) if size]
    try:
        private_folder(cache)
        (cache / FACTS).unlink(missing_ok=True)
        _remove_examples(cache)
        with progress(f"preparing {name}", sum(sizes)) as done:
            for split, (prefix, part, size) in enumerate(zip(PREFIXES, parts, sizes, strict=True)):
                if size:
                    shape = (size, len(raw.columns))
                    write_array(cache / f"{prefix}raw.npy", shape, raw.blocks(site, split), done)
                    labels = raw.labels[raw.order.rows[part]].astype(np.int64)
                    write_array(cache / f"{prefix}y.npy", labels.shape, [labels], lambda count: None)
                    if raw.queries is not None:
                        of = raw.queries[raw.order.rows[part]].astype(np.int64)
                        write_array(cache / f"{prefix}queries.npy", of.shape, [of], lambda count: None)
            if raw.weights is not None:
                own = raw.weights[raw.order.rows[parts[0]]]
                write_array(cache / "weights.npy", own.shape, [own], lambda count: None)
        write_atomically(cache / FACTS, json.dumps(facts).encode(), private=True)
    except OSError as error:
        raise UserError(f"cannot write to {cache}: {error.strerror}; free some space and prepare again") from None
    return sizes[0]


def examples(cache: Path, table: Mapping[str, Any], prefix: str, made: Preparation) -> Path:
    """The file of a split's examples as a preparation makes them, written if there is none. Others are removed."""
    _require_fitting(table, made)
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


def _require_fitting(table: Mapping[str, Any], made: Preparation) -> None:
    """That a server's preparation is one of tables like this one."""
    label = predicted(made.to_json())
    require(made.image is None, "this site has a table of numbers and categories, not of images")
    told = "the server's preparation is for the label {}, this site's is {}"
    require(label == table["label"], told.format(printable(label), printable(table["label"])))


def _remove_examples(cache: Path, but: str = "") -> None:
    """What earlier preparations made: a server could fill the disk with them. Who has them mapped keeps them."""
    for path in cache.iterdir():
        found = FILE.fullmatch(path.name)
        if found and found[2] not in ("raw", f"x-{but}"):
            with suppress(OSError):
                path.unlink()

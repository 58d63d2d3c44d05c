"""What is in the files of tables and folders that examples no longer show: gaps, torn groups, damaged images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedxl.data.chunks import Chunks
from fedxl.data.features import Features
from fedxl.data.folder import FolderOptions, images_in
from fedxl.data.keys import Keys
from fedxl.data.resized import unreadable
from fedxl.data.table import Label, TableOptions, feature_names, image_paths, open_files, read_rows
from fedxl.errors import printable

FEW = 5  # columns that a line lists
ROWS = 2**14  # looked at together


class Inspected(NamedTuple):
    problems: list[str]
    remarks: list[str]
    facts: dict[str, Any]


def inspect_table(
    path: str | tuple[str, ...],
    label: Label,
    options: TableOptions = TableOptions(),  # noqa: B008 (frozen)
) -> Inspected:
    """The settings are those of the data set `table`."""
    files = open_files(path, label, options)
    names = [] if options.image else feature_names(files[0], label, options)
    features = Features(files, names, options.categorical, None)
    keys, _, chunks = read_rows(features, label, options)
    problems, remarks = _groups(keys, options.group)
    remarks += _repeated(keys, options.id)
    if options.image:
        folder = Path(os.path.commonpath([str(file.path.resolve().parent) for file in files]))
        damaged = unreadable(folder, image_paths(files, keys, options.image))
        return Inspected([*problems, *damaged], remarks, {"unreadable_images": len(damaged)})
    missing = _missing(names, chunks)
    some = {name: count for name, count in missing.items() if count}
    if some:
        few = [f"{printable(name, 40)} {count / len(keys.labels):.1%}" for name, count in list(some.items())[:FEW]]
        more = f" and {len(some) - FEW} more columns" if len(some) > FEW else ""
        remarks.append(f"values are missing: {', '.join(few)}{more}; the preparation fills them in")
    for name, text in features.among_numbers().items():
        if name not in options.categorical:
            told = f"column '{printable(name, 40)}' holds numbers, but also '{printable(text, 40)}'"
            remarks.append(f"{told}: all of it counts as categories; correct it, or name it in categorical")
    return Inspected(problems, remarks, {"missing_values": some})


def inspect_folder(path: str, options: FolderOptions = FolderOptions()) -> Inspected:  # noqa: B008 (frozen)
    """The settings are those of the data set `folder`."""
    damaged = unreadable(Path(path), images_in(Path(path)))
    return Inspected(damaged, [], {"unreadable_images": len(damaged)})


def _repeated(keys: Keys, column: str) -> list[str]:
    """Rows that predictions could not tell apart."""
    if not column:
        return []
    texts = keys.texts[column]
    empty, again = texts.null_count, len(texts) - texts.null_count - len(texts.drop_null().unique())
    told = [(empty, "have nothing"), (again, "repeat another row")]
    name = f"column '{printable(column, 40)}', which identifies rows"
    return [f"{count:,} of {len(texts):,} rows {what} in {name}" for count, what in told if count]


def _groups(keys: Keys, column: str) -> tuple[list[str], list[str]]:
    """Groups in two splits, which only a column of splits can bring about, and groups at two sites."""
    if keys.groups is None:
        return [], []
    name = f"of column '{printable(column, 40)}'"
    problems, remarks = [], []
    if keys.splits is not None and (crossing := _torn(keys.groups, keys.splits)):
        rows = " and ".join(f"{row + 1:,}" for row in crossing[0])
        problems.append(f"{len(crossing):,} groups {name} are in two splits, for example rows {rows}")
    if torn := _torn(keys.groups, keys.sites):
        remarks.append(f"{len(torn):,} groups {name} are at two sites")
    return problems, remarks


def _torn(groups: np.ndarray, places: np.ndarray) -> list[tuple[int, int]]:
    """Two rows in different places of each group that has such."""
    _, first, owner = np.unique(groups, return_index=True, return_inverse=True)
    other = np.flatnonzero(places != places[first[owner]])
    _, once = np.unique(groups[other], return_index=True)
    return [(int(first[owner[row]]), int(row)) for row in other[once]]


def _missing(names: Sequence[str], chunks: Chunks) -> dict[str, int]:
    """By column, in how many rows there is no value."""
    counts = np.zeros(len(names), np.int64)
    for rows in np.array_split(np.arange(chunks.count, dtype=np.int32), chunks.count // ROWS + 1):
        counts += np.isnan(chunks.take(rows)).sum(0)
    return dict(zip(names, counts.tolist(), strict=True))

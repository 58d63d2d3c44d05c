"""Your own table: CSV or Parquet files or data frames, of numbers and categories, or of the paths of images."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedxl.data.columns import File, in_memory, open_table, require_column, require_pyarrow
from fedxl.data.csv_blocks import Chunks, row_numbers
from fedxl.data.features import Features
from fedxl.data.federation import Splits
from fedxl.data.forms import Label as Value
from fedxl.data.forms import is_frame, quoted
from fedxl.data.holdout import Whole, check_shares, draw
from fedxl.data.keys import Keys, keys_of, positive_rows, role_names
from fedxl.data.preparation import Image, Preparation, Rows
from fedxl.data.rawtable import Order, RawTable, assemble
from fedxl.data.resized import within
from fedxl.errors import UserError, first_line, kind_of, printable, require
from fedxl.files import read_bytes
from fedxl.risks.several import label_names

Label = str | tuple[str, ...]  # the column of the label, or those of several
NEEDS = "a data frame that is to be prepared"
SITE = "site"  # the column that names the sites of several data frames


@dataclass(frozen=True)
class TableOptions:
    """Settings of tables."""

    positive: Value | None = None  # the label's value that is positive; not needed for 0 and 1, or true and false
    site: str = ""  # the column that names the site; "": one site for each file, called as the file or its folder
    called: str = ""  # the site's name, if there is one file and no such column; "": as the file
    split: str = ""  # the column that says train, validation or test; "": they are drawn
    group: str = ""  # the column of patients or the like: a group is never in two splits that are drawn
    query: str = ""  # the column that names the query of an item; then labels are grades, and queries stay whole
    id: str = ""  # the column that identifies a row in predictions; "": its number, from 1
    columns: tuple[str, ...] = ()  # to learn from; empty: all that have no other meaning
    drop: tuple[str, ...] = ()  # columns to leave out
    categorical: tuple[str, ...] = ()  # columns of numbers that are codes: categories, not amounts
    rare: int = 5  # what a site has fewer times is not told of it: its categories count as "other"
    image: str = ""  # the column of image paths, relative to the table's folder; then other columns are not used
    size: int = 64  # images become squares of so many pixels a side
    channels: int = 1  # 1: grey, 3: colour
    cache: str = ""  # where prepared images are kept; "": in the table's folder
    validation: float = 0.2  # the share of rows to draw
    test: float = 0.2
    delimiter: str = ""  # between columns of a CSV file; "": a comma, or a tab in .tsv files
    weight: str = ""  # the column that says how often a row is read in training, relative to its class at its site
    preparation: str = ""  # a preparation.json to use instead of fitting one
    seed: int = 0

    def __post_init__(self) -> None:
        check_shares(self.validation, self.test)
        require(1 <= self.rare <= 10**6, f"rare must lie between 1 and 1,000,000, got {self.rare}")
        require(self.seed >= 0, f"seed must not be negative, got {self.seed}")
        Image(self.size, self.channels)
        require(not (self.query and self.weight), "with query, rows are read by query; leave weight out")
        alone = not (self.query and (self.group or self.positive is not None))
        require(alone, "with query, a query is a group and labels are grades; leave group and positive out")
        require(
            not (self.image and self.columns), "with image, other columns are not learned from; leave columns out"
        )


def table(
    path: str | tuple[str, ...],
    label: str | tuple[str, ...],
    options: TableOptions = TableOptions(),  # noqa: B008 (frozen)
) -> Splits:
    """Your own CSV or Parquet files, with a label; numbers and categories, or images whose paths a column holds.

    path: a file, a list of files, or a pattern ("hospitals/*.csv"); label: the column to predict; it has two values.
    A list of columns: several labels, with the same two values in all, and empty cells where a label is not known.
    Numbers are standardised, and missing ones replaced by the mean, with a column that says so; each category that is
    not rare gets a column. Both are fitted on the training data alone.
    """
    return splits_of(open_files(path, label, options), label, options)


def splits_of(files: list[File], label: Label, options: TableOptions) -> Splits:
    """The examples of files whose columns were checked."""
    if options.image:
        return _images(files, label, options)
    raw = read_raw(files, label, options)
    made = raw.fitted() if not options.preparation else load_preparation(Path(options.preparation))
    return raw.splits(made)


def unfitted(path: str | tuple[str, ...], label: Label, options: TableOptions = TableOptions()) -> RawTable:  # noqa: B008
    """The same table before it is scaled, for sites that fit a preparation together."""
    require(not options.image, "images need no preparation of all sites")
    return read_raw(open_files(path, label, options), label, options)


def load_preparation(path: Path) -> Preparation:
    """The preparation in a file, such as a run's preparation.json."""
    try:
        return Preparation.from_text(read_bytes(path))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; preparation must name a preparation.json") from None


def open_files(path: str | tuple[str, ...], label: Label, options: TableOptions) -> list[File]:
    """The files, checked for the columns that settings name."""
    return check_columns([open_table(file, options.delimiter) for file in find(path)], label, options)


def check_columns(files: list[File], label: Label, options: TableOptions) -> list[File]:
    """The same files. Raises UserError if they lack a column that settings name, or have different columns."""
    several = () if isinstance(label, str) else label_names(label)
    require(not (several and options.query), "with query, a label is one column of grades; name one")
    named = [
        *(("label", name) for name in several or (label,)),
        *((role, getattr(options, role)) for role in ("site", "split", "group", "query", "id", "image", "weight")),
    ]
    named += [(many, name) for many in ("columns", "drop", "categorical") for name in getattr(options, many)]
    for file in files:
        for setting, name in named:
            if name:
                require_column(file, name, setting)
        for one, other in ((files[0], file), (file, files[0])):
            lacking = [name for name in one.columns if name not in (*other.columns, *options.drop)]
            if lacking and not options.columns:
                told = f"{other.path} lacks the column '{printable(lacking[0])}' that {one.path} has"
                raise UserError(f"{told}; name it in drop, or list what to use in columns")
    return files


def find(path: str | tuple[str, ...]) -> list[Path]:
    """The files that a path, a pattern or a list of both names, each once."""
    found: dict[str, Path] = {}
    for one in (path,) if isinstance(path, str) else path:
        require(bool(one) and "\0" not in one, "path must name a CSV or Parquet file")
        matches = sorted(glob.glob(one, recursive=True)) if glob.has_magic(one) and not Path(one).exists() else [one]
        require(bool(matches), f"no file matches {printable(one)}")
        found |= {os.path.realpath(match): Path(match) for match in matches}
    require(bool(found), "path must name a CSV or Parquet file")
    folder = next((file for file in found.values() if file.is_dir()), None)
    require(folder is None, f"{folder} is a folder; name its files: path = '{folder}/*.csv'")
    return list(found.values())


def file_sites(files: Sequence[File], called: str = "") -> list[str]:
    """A site's name for each file."""
    paths = [file.path for file in files]
    return [called] if len(files) == 1 and called else names_of(paths, "; name a column with the site: site = '...'")


def names_of(paths: Sequence[Path], hint: str = "; rename some") -> list[str]:
    """A name for each file: its own, or its folder's where all files are called alike."""
    for names in (
        [path.name.partition(".")[0] or path.name for path in paths],
        [path.resolve().parent.name for path in paths],
    ):
        if len(set(names)) == len(names):
            return names
    raise UserError(f"files of different folders have the same names{hint}")


def feature_names(file: File, label: Label, options: TableOptions) -> list[str]:
    """The columns to learn from."""
    roles = {"", *role_names(label, options)}
    doubled = [name for name in options.columns if name in roles or options.columns.count(name) > 1]
    require(not doubled, f"columns names '{''.join(doubled[:1])}', which is taken; name each column once")
    names = [n for n in options.columns or file.columns if n not in roles and n not in options.drop]
    require(
        bool(names),
        f"{file.path} has no column to learn from besides {quoted([label] if isinstance(label, str) else label)}",
    )
    return names


def read_raw(files: Sequence[File], label: Label, options: TableOptions) -> RawTable:
    """All rows of a table of features."""
    features = Features(files, feature_names(files[0], label, options), options.categorical, None)
    keys, order, chunks = read_rows(features, label, options)
    ids, about = identities(files, keys, options.id), _about(keys, label, options)
    named = (features.names, features.texts)
    texts, queries = keys.texts.get(options.query), keys.groups if options.query else None
    of = None if texts is None else lambda rows: [str(text) for text in texts.take(rows).to_pylist()]
    return RawTable(order, chunks, *named, keys.labels, ids, about, options.rare, keys.weights, queries, of)


def read_rows(features: Features, label: Label, options: TableOptions) -> tuple[Keys, Order, Chunks]:
    """One pass over all files: features as numbers, other columns as texts, which decide the order of rows."""
    import pyarrow as pa

    files, chunks = features.files, Chunks(len(features.names))
    found: dict[str, list[Any]] = {name: [] for name in role_names(label, options)}
    counts = [0] * len(files)
    for number, block, texts in features.blocks(list(found)):
        chunks.append(block)
        counts[number] += len(block)
        for name, column in texts.items():
            found[name].append(column)
    pa.default_memory_pool().release_unused()
    columns = {name: pa.chunked_array(pieces, pa.string()) for name, pieces in found.items()}
    keys = keys_of(files, counts, columns, label, options, file_sites(files, options.called))
    splits = keys.splits
    if splits is None:
        shares = (options.validation, options.test)
        splits = draw(keys.sites, positive_rows(keys.labels), keys.groups, keys.names, shares, options.seed)
    return keys, Order(splits, keys.sites, keys.names), chunks


def _about(keys: Keys, label: Label, options: TableOptions) -> dict[str, Any]:
    taken = {"site": options.site, "id": options.id, "delimiter": options.delimiter}
    named = {"label": label} if isinstance(label, str) else {"label": "", "labels": label}
    return {**named, "positive": keys.positive, "negative": keys.negative, **taken}


def identities(files: Sequence[File], keys: Keys, id: str) -> Callable[[Whole], Sequence[str]]:
    """What identifies rows: their text in the column `id`, or their number in their file."""
    if id:
        return lambda rows: ["" if text is None else text for text in keys.texts[id].take(rows).to_pylist()]
    return partial(row_numbers, np.cumsum(keys.counts), file_sites(files) if len(files) > 1 else [""])


def _images(files: Sequence[File], label: Label, options: TableOptions) -> Splits:
    """Images in the order of splits and sites, mapped into memory from the cache."""
    from fedxl.data.resized import resized

    keys, order, _ = read_rows(Features(files, [], (), None), label, options)
    order.parts()  # before an image is opened
    image = Image(options.size, options.channels, options.image)
    paths = image_paths(files, keys, options.image)
    folder = Path(os.path.commonpath([str(file.path.resolve().parent) for file in files]))
    cache = Path(options.cache) if options.cache else folder
    x = resized(folder, [paths[row] for row in order.rows], image.size, cache, "images", image.channels, stamped=True)
    made = Preparation(image=image, **_about(keys, label, options))
    x = x.reshape(len(x), image.channels, image.size, image.size) if image.channels == 1 else x
    ids = identities(files, keys, options.id)
    return assemble(
        order, torch.from_numpy(x), keys.labels, ids, made, keys.weights, keys.groups if options.query else None
    )


def image_paths(files: Sequence[File], keys: Keys, column: str) -> list[str]:
    """The path of each row's image below the folder that all files share."""
    texts = keys.texts[column].to_pylist()
    root = os.path.commonpath([str(file.path.resolve().parent) for file in files])
    paths, start = [], 0
    for file, count in zip(files, keys.counts, strict=True):
        below = os.path.relpath(file.path.resolve().parent, root)
        where = f"{file.path}: column '{printable(column)}'"
        paths += [os.path.normpath(os.path.join(below, within(text, where))) for text in texts[start : start + count]]
        start += count
    return paths


def from_frame(
    frame: Any,
    *,
    label: str | Sequence[str],
    positive: Value | None = None,
    site: str = "",
    split: str = "",
    group: str = "",
    query: str = "",
    id: str = "",
    columns: Sequence[str] = (),
    drop: Sequence[str] = (),
    categorical: Sequence[str] = (),
    rare: int = 5,
    validation: float = 0.2,
    test: float = 0.2,
    seed: int = 0,
) -> Splits:
    """The sites of a data frame with numbers and categories, and what is held back of each: what `fit` takes.

    Numbers are standardised, and missing ones replaced by the mean, with a column that says so; each category that is
    not rare gets a column. Both are fitted on the training data alone, and kept with the model of a run.

    Args:
        frame: A data frame of pandas or polars, an arrow table, or a dict of them by the sites' names.
        label: The column to predict, which has two values; or several columns, with the same two values in all, and
            nothing where a label is not known.
        positive: The value that counts as positive; not needed for 0 and 1, or booleans.
        site: The column that names the site, unless there is one data frame a site.
        split: The column that says train, validation or test; without it, they are drawn.
        group: The column of patients or the like: a group is never in two splits that are drawn.
        query: The column that names the query of an item. Then labels are grades of relevance, and splits are drawn
            query by query.
        id: The column that identifies a row in predictions; without it, its number.
        columns: What to learn from; all columns that have no other meaning if none is named.
        drop: Columns to leave out.
        categorical: Columns of numbers that are codes: categories, not amounts.
        rare: What a site has fewer times is not told of it: such categories count as "other".
        validation: The share of rows to validate on, if splits are drawn.
        test: The share of rows to test on, if splits are drawn.
        seed: Of the draws.
    """
    require_pyarrow(NEEDS)
    for name, given in (("columns", columns), ("drop", drop), ("categorical", categorical)):
        right = isinstance(given, (list, tuple)) and all(isinstance(one, str) for one in given)
        require(right, f"{name} must be a list of columns' names, such as ['age'], not {kind_of(given)}")
    rows, site = _one_table(frame, site)
    named = label if isinstance(label, str) else label_names(label)
    options = TableOptions(
        positive=positive, site=site, split=split, group=group, query=query, id=id, columns=tuple(columns),
        drop=tuple(drop), categorical=tuple(categorical), rare=rare, validation=validation, test=test, seed=seed,
    )  # fmt: skip
    return splits_of(check_columns([in_memory(rows)], named, options), named, options)


def prepared(frame: Any, preparation: Preparation) -> Rows:
    """New rows of a data frame, prepared as those of the run were."""
    require_pyarrow(NEEDS)
    return preparation.read(in_memory(_arrow(frame, "x")))


def _one_table(frame: Any, site: str) -> tuple[Any, str]:
    """All rows, and the column that names their site."""
    import pyarrow as pa

    if not isinstance(frame, Mapping):
        require(bool(site), "site must name the column with the sites; or give a dict of data frames by site")
        return _arrow(frame, "frame"), site
    require(not site, "site is for one data frame; of a dict, the names are the sites")
    require(len(frame) > 0, "a federation needs at least one site, and the dict of data frames is empty")
    tables = {str(name): _arrow(one, f"'{printable(name, 40)}'") for name, one in frame.items()}
    taken = {name for one in tables.values() for name in one.column_names}
    column = SITE
    while column in taken:
        column = f"{column}_"
    for name, one in tables.items():
        lacking = sorted(taken - set(one.column_names))
        require(not lacking, f"'{printable(name, 40)}' lacks the column '{printable(''.join(lacking[:1]), 40)}'")
    named = [one.append_column(column, pa.array([name] * len(one))) for name, one in tables.items()]
    try:
        return pa.concat_tables(named, promote_options="permissive"), column
    except pa.ArrowException as error:
        raise UserError(f"the data frames differ in a column: {printable(first_line(error))}") from None


def _arrow(frame: Any, what: str) -> Any:
    """A data frame as a table of arrow's, without its index."""
    import pyarrow as pa

    if isinstance(frame, pa.Table):
        return frame
    require(is_frame(frame), f"{what} must be a data frame, not {kind_of(frame)}")
    try:
        if hasattr(frame, "to_arrow"):  # of polars
            return frame.to_arrow()
        return pa.Table.from_pandas(frame.rename(columns=str), preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{what} cannot be read: {printable(first_line(error))}") from None

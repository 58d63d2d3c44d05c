"""Your own table: CSV or Parquet files or data frames, of numbers and categories, or of the paths of images."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedxl.data.examples import UNKNOWN, Examples, Splits
from fedxl.data.images import decoded, images_in, require_inside, within
from fedxl.data.inputs import is_frame
from fedxl.data.splits import Order, Whole, all_splits, draw
from fedxl.data.tables.prepare import Category, Preparation
from fedxl.data.tables.rawtable import Chunks, Features, RawTable, numbering
from fedxl.data.tables.read import File, find, in_memory, names_of, open_table, require_column, require_pyarrow
from fedxl.data.tables.roles import AMOUNTS, ROLES, Keys, TableOptions, amounts, keys_of, row_numbers
from fedxl.data.targets import Label as Value
from fedxl.data.targets import canonical, quoted
from fedxl.errors import UserError, first_line, kind_of, printable, require
from fedxl.files import read_bytes
from fedxl.risks.several import label_names

NEEDS = "a data frame that is to be prepared"
SITE = "site"  # the column that names the sites of several data frames
log = logging.getLogger("fedxl")  # one line on standard error, unless a program has it otherwise


def table(path: str | tuple[str, ...], options: TableOptions = TableOptions()) -> Splits:
    """Your own CSV or Parquet files, with a label; numbers and categories, or images whose paths a column holds.

    path: a file, a list of files, or a pattern ("hospitals/*.csv"); label: the column to predict; it has two values.
    A list of columns: several labels, with the same two values in all, and empty cells where a label is not known.
    Numbers are standardised, and missing ones replaced by the mean, with a column that says so; each category that is
    not rare gets a column. Both are fitted on the training data alone.
    """
    return splits_of(open_files(path, options), options)


def splits_of(files: list[File], options: TableOptions) -> Splits:
    """The examples of files whose columns were checked."""
    if options.image:
        return _images(files, options)
    return _prepared(read_raw(files, options), options)


def _prepared(raw: RawTable, options: TableOptions) -> Splits:
    made = load_preparation(Path(options.preparation)) if options.preparation else raw.fitted()
    return raw.splits(made)._replace(fitted=not options.preparation)


def unfitted(path: str | tuple[str, ...], options: TableOptions = TableOptions()) -> RawTable:
    """The same table before it is scaled, for sites that fit a preparation together."""
    require(not options.image, "images need no preparation of all sites")
    return read_raw(open_files(path, options), options)


def load_preparation(path: Path) -> Preparation:
    """The preparation in a file, such as a run's preparation.json."""
    try:
        return Preparation.from_text(read_bytes(path))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; preparation must name a preparation.json") from None


def open_files(path: str | tuple[str, ...], options: TableOptions) -> list[File]:
    """The files, checked for the columns that settings name."""
    return check_columns([open_table(file, options.delimiter) for file in find(path)], options)


def check_columns(files: list[File], options: TableOptions) -> list[File]:
    """The same files. Raises UserError if they lack a column that settings name, or have different columns."""
    labels = label_names(options.labels) if options.several else options.labels
    require(labels != ("",), "label must name the column to predict, or a list of such columns")
    named = [*(("label", name) for name in labels), *((role, getattr(options, role)) for role in ROLES)]
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


def file_sites(files: Sequence[File], called: str = "") -> list[str]:
    """A site's name for each file."""
    paths = [file.path for file in files]
    return [called] if len(files) == 1 and called else names_of(paths, "; name a column with the site: site = '...'")


def feature_names(file: File, options: TableOptions) -> list[str]:
    """The columns to learn from."""
    roles = {"", *options.roles}
    doubled = [name for name in options.columns if name in roles or options.columns.count(name) > 1]
    require(not doubled, f"columns names '{''.join(doubled[:1])}', which has another role; name each column once")
    names = [n for n in options.columns or file.columns if n not in roles and n not in options.drop]
    require(bool(names), f"{file.path} has no feature column besides {quoted(options.labels)}")
    return names


def read_raw(files: Sequence[File], options: TableOptions) -> RawTable:
    """All rows of a table of features."""
    features = Features(files, feature_names(files[0], options), options.categorical)
    keys, order, chunks = read_rows(features, options)
    ids, about = identities(files, keys, options.id), _about(keys, options)
    return RawTable(order, chunks, features.names, features.texts, keys.y, ids, about, options.rare, keys.columns)


def read_rows(features: Features, options: TableOptions) -> tuple[Keys, Order, Chunks]:
    """One pass over all files: features as numbers, other columns as texts, which decide the order of rows."""
    import pyarrow as pa

    files, chunks = features.files, Chunks(len(features.names))
    found: dict[str, list[Any]] = {name: [] for name in options.roles}
    counts = [0] * len(files)
    for number, block, texts in features.blocks(list(found)):
        chunks.append(block)
        counts[number] += len(block)
        for name, column in texts.items():
            found[name].append(column)
    pa.default_memory_pool().release_unused()
    columns = {name: pa.chunked_array(pieces, pa.string()) for name, pieces in found.items()}
    keys = keys_of(files, counts, columns, options, file_sites(files, options.called))
    splits = keys.splits
    if splits is None:
        shares = (options.validation, options.test)
        positive = np.asarray((keys.y > 0).any(1), np.int8)  # for any of its labels; of grades, above 0
        splits = draw(keys.sites, positive, keys.groups, keys.names, shares, options.seed)
    return keys, Order(splits, keys.sites, keys.names), chunks


def _about(keys: Keys, options: TableOptions) -> dict[str, Any]:
    named = {"label": "", "labels": options.labels} if options.several else {"label": options.labels[0]}
    values = {"positive": keys.positive, "negative": keys.negative}
    taken = {"site": options.site, "id": options.id, "delimiter": options.delimiter}
    return named | values | taken | ({"time": options.time} if options.time else {})


def identities(files: Sequence[File], keys: Keys, id: str) -> Callable[[Whole], Sequence[str]]:
    """What identifies rows: their text in the column `id`, or their number in their file."""
    if id:
        return lambda rows: ["" if text is None else text for text in keys.texts[id].take(rows).to_pylist()]
    return partial(row_numbers, np.cumsum(keys.counts), file_sites(files) if len(files) > 1 else [""])


def _images(files: Sequence[File], options: TableOptions) -> Splits:
    """Images in the order of splits and sites, mapped into memory from the cache."""
    keys, order, _ = read_rows(Features(files, []), options)
    x, image = options.load(order, *image_paths(files, keys, options.image), options.image)
    made, ids = Preparation(image=image, **_about(keys, options)), identities(files, keys, options.id)
    return all_splits(order, made, x, keys.y, ids, keys.columns)


def image_paths(files: Sequence[File], keys: Keys, column: str) -> tuple[Path, list[str]]:
    """The folder that all files share, and the path of each row's image below it."""
    texts = keys.texts[column].to_pylist()
    root = os.path.commonpath([str(file.path.resolve().parent) for file in files])
    paths, start = [], 0
    for file, count in zip(files, keys.counts, strict=True):
        below = os.path.relpath(file.path.resolve().parent, root)
        where = f"{file.path}: column '{printable(column)}'"
        paths += [os.path.normpath(os.path.join(below, within(text, where))) for text in texts[start : start + count]]
        start += count
    require_inside(Path(root), paths)
    return Path(root), paths


def read_new(made: Preparation, path: str | Path | File) -> Examples:
    """New examples of a file, or a folder of images, prepared as those of a run were.

    Labels and sites are not known if it has none.
    """
    if isinstance(path, File) or made.source == "table":
        return _new_table(made, path if isinstance(path, File) else _opened(made, Path(path)))
    files, classes = images_in(Path(path)), {made.positive: 1, made.negative: 0}
    # Labels are those of their folders, if all are called as the classes were.
    labels = [classes.get(canonical(Path(file).parent.name), UNKNOWN) for file in files]
    y = torch.tensor(labels if UNKNOWN not in labels else [UNKNOWN] * len(labels))
    return Examples(_pixels(made, Path(path), files), y[:, None], row=files)


def _opened(made: Preparation, path: Path) -> File:
    return open_table(path, made.delimiter, f"save it with {made.delimiter or ','!r} and decimal points")


def _new_table(made: Preparation, file: File) -> Examples:
    image = [made.image.column] if made.image else []
    names = [column.name for column in made.columns]
    for name in (*names, *image):
        require_column(file, name, advice=f"save it with {file.delimiter!r}, as training data were")
    roles = dict.fromkeys((made.label, *made.labels, made.site, made.id, made.time))
    others = [name for name in roles if name in file.columns]
    known = {column.name: list(column.values) if isinstance(column, Category) else None for column in made.columns}
    blocks: list[Any] = []
    texts: dict[str, list[str | None]] = {name: [] for name in (*others, *image)}
    features, values = Features([file], names, known=known), np.zeros(len(names), np.int64)
    for _, block, batch in features.blocks(list(texts)):
        blocks.append(made.apply(block))
        values += (~np.isnan(block)).sum(0)
        for name, column in batch.items():
            texts[name] += column.to_pylist()
    rows = sum(map(len, blocks))
    require(rows > 0, f"{file.path} holds no rows, only the names of its columns")
    for name, count in zip(names, values.tolist(), strict=True):
        if strange := features.strange[name]:
            _warn(file, name, f"{strange:,} of {rows:,} rows hold a category that is new or was rare in training")
        elif not count:
            _warn(file, name, f"all {rows:,} rows are empty, so that it says nothing")
    where = f"{file.path}: column '{printable(image[0])}'" if image else ""
    paths = [within(path, where) for path in texts[image[0]]] if image else []
    folder = file.path.resolve().parent
    require_inside(folder, paths)
    x = torch.from_numpy(np.concatenate(blocks)) if made.columns else _pixels(made, folder, paths)
    ids = texts[made.id] if made.id in texts else [str(number) for number in range(1, len(x) + 1)]
    sites, site = np.unique([text or "" for text in texts.get(made.site, ())], return_inverse=True)
    held: dict[str, Any] = {"site": site, "sites": tuple(sites.tolist())} if len(site) else {}
    y = _labels(made, texts, len(x), file.path)
    if made.time in texts and bool((y != UNKNOWN).all()):  # without events, times say nothing
        where = f"{file.path}: column '{printable(made.time)}'"
        held["time"] = torch.from_numpy(amounts(texts[made.time], where, *AMOUNTS["time"]))
    return Examples(x, y, row=[row or "" for row in ids], **held)


def _warn(file: File, name: str, what: str) -> None:
    log.warning("warning: %s: column '%s': %s", file.path, printable(name), what)


def _pixels(made: Preparation, folder: Path, paths: Sequence[str]) -> Tensor:
    assert made.image is not None
    return torch.from_numpy(decoded(folder, paths, made.image))


def _labels(made: Preparation, columns: Mapping[str, Sequence[str | None]], rows: int, path: Path) -> Tensor:
    """[n, L] 0 and 1, -1 where one is not known."""
    names, values = made.labels or (made.label,), {made.positive: 1, made.negative: 0}
    found = torch.full((rows, len(names)), UNKNOWN)
    for at, name in enumerate(names):
        words = [None if text is None else canonical(text) for text in columns.get(name, ())]
        strange = next((word for word in words if word is not None and word not in values), None)
        if strange is not None:
            told = f"{path}: column '{printable(name)}' holds '{printable(strange, 40)}'"
            more = ", and empty cells" if made.labels else ""
            raise UserError(f"{told}; the model knows {made.positive!r} and {made.negative!r}{more}")
        found[: len(words), at] = torch.tensor([UNKNOWN if word is None else values[word] for word in words])
    full = bool(made.labels) or len({*(found == UNKNOWN).flatten().tolist()}) < 2
    require(full, f"{path}: column '{printable(made.label)}' is empty in some rows; fill it, or leave it out")
    return found


def from_frame(
    frame: Any,
    *,
    label: str | Sequence[str] = "",
    positive: Value | None = None,
    time: str = "",
    event: str = "",
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
    preparation: str = "",
) -> Splits:
    """The sites of a data frame with numbers and categories, and what is held back of each: what `fit` takes.

    Numbers are standardised, and missing ones replaced by the mean, with a column that says so; each category that is
    not rare gets a column. Both are fitted on the training data alone, and kept with the model of a run.

    Args:
        frame: A data frame of pandas or polars, an arrow table, or a dict of them by the sites' names.
        label: The column to predict, which has two values; or several columns, with the same two values in all, and
            nothing where a label is not known.
        positive: The value that counts as positive; not needed for 0 and 1, or booleans.
        time: The column of the time of an event, or of the last look at a row that had none until then.
        event: In place of label, with time: the column that says whether the event was then (1) or not (0).
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
        preparation: The path of a preparation.json to use instead of fitting one.
    """
    require_pyarrow(NEEDS)
    for name, given in (("columns", columns), ("drop", drop), ("categorical", categorical)):
        right = isinstance(given, (list, tuple)) and all(isinstance(one, str) for one in given)
        require(right, f"{name} must be a list of columns' names, such as ['age'], not {kind_of(given)}")
    rows, site = _one_table(frame, site)
    options = TableOptions(
        label=label if isinstance(label, str) else label_names(label), positive=positive, time=time, event=event,
        site=site, split=split, group=group, query=query, id=id, columns=tuple(columns), drop=tuple(drop),
        categorical=tuple(categorical), rare=rare, validation=validation, test=test, seed=seed,
        preparation=preparation,
    )  # fmt: skip
    file = in_memory(rows)
    raw = read_raw(check_columns([file], options), options)
    for name, told in numbering(raw.columns, raw.texts, raw.chunks).items():
        _warn(file, name, told)
    return _prepared(raw, options)


def prepared(frame: Any, preparation: Preparation) -> Examples:
    """New rows of a data frame, prepared as those of the run were."""
    require_pyarrow(NEEDS)
    return read_new(preparation, in_memory(_arrow(frame, "x")))


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

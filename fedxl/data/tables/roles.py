"""The columns of a table that say what each row is: label, site, split, group and id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedxl.data.examples import UNKNOWN
from fedxl.data.images import ImageOptions
from fedxl.data.splits import SPLITS, WORDS, Codes, Whole, in_order
from fedxl.data.tables.read import LONGEST, File
from fedxl.data.targets import Label, as_number, canonical, quoted, text_grades, two_values
from fedxl.errors import UserError, printable, require
from fedxl.sampling import Floats, Indices

# Settings that name a column which says what a row is, besides the label.
ROLES = ("site", "split", "group", "query", "time", "id", "image", "weight")
LARGEST = 1e12  # of weights and times: far beyond any use, and sums of them are still exact enough
# Columns of numbers: the least that is right, and what is right.
AMOUNTS = {
    "weight": (float(np.nextafter(0, 1)), "a weight is a number above 0, and rows that must not count are left out"),
    "time": (0.0, "a time is a number from 0 on, and rows without one are left out"),
}


@dataclass(frozen=True)
class TableOptions(ImageOptions):
    """Settings of tables."""

    label: str | tuple[str, ...] = ""  # the column to predict, which has two values; or those of several labels
    positive: Label | None = None  # the label's value that is positive; not needed for 0 and 1, or true and false
    site: str = ""  # the column that names the site; "": one site per file, named after the file or its folder
    called: str = ""  # the site's name, if there is one file and no such column; "": as the file
    split: str = ""  # the column that says train, validation or test; "": they are drawn
    group: str = ""  # the column of patients or the like: a group is never in two splits that are drawn
    time: str = ""  # the column of the time of the event, or of the last look at a row that had none until then
    event: str = ""  # in place of label, with time: the column that says whether the event was then
    query: str = ""  # the column that names the query of an item; then labels are grades, and queries stay whole
    id: str = ""  # the column that identifies a row in predictions; "": its number, from 1
    columns: tuple[str, ...] = ()  # to learn from; empty: all that have no other meaning
    drop: tuple[str, ...] = ()  # columns to leave out
    categorical: tuple[str, ...] = ()  # columns of numbers that are codes: categories, not amounts
    rare: int = 5  # what a site has fewer times is not told of it: its categories count as "other"
    image: str = ""  # the column of image paths, relative to the table's folder; then other columns are not used
    delimiter: str = ""  # between columns of a CSV file; "": a comma, or a tab in .tsv files
    weight: str = ""  # the column that says how often a row is read in training, relative to its class at its site
    preparation: str = ""  # a preparation.json to use instead of fitting one

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.rare <= 10**6, f"rare must lie between 1 and 1,000,000, got {self.rare}")
        require(not (self.query and self.weight), "with query, rows are read by query; leave weight out")
        alone = not (self.query and (self.group or self.positive is not None))
        require(alone, "with query, a query is a group and labels are grades; leave group and positive out")
        require(not (self.query and self.time), "query and time cannot be combined; leave one out")
        require(bool(self.time) or not self.event, "event needs time, the column that says when; or name a label")
        require(not (self.label and self.event), "event is the label of time to event: leave label out")
        require(not (self.several and self.time), "with time, one column says whether there was an event")
        require(not (self.several and self.query), "with query, a label is one column of grades; name one")
        told = "with image, other columns are not features; leave columns out"
        require(not (self.image and self.columns), told)

    @property
    def several(self) -> bool:
        """Whether there are several labels, as a list of one column is, too."""
        return not isinstance(self.label, str)

    @property
    def labels(self) -> tuple[str, ...]:
        """The columns to predict."""
        named = self.event or self.label
        return (named,) if isinstance(named, str) else named

    @property
    def roles(self) -> list[str]:
        """The columns that say what a row is."""
        return [name for name in (*self.labels, *(getattr(self, role) for role in ROLES)) if name]


class Keys(NamedTuple):
    """What the rows of some files are, in their order."""

    y: Codes  # [n, L] 0 or 1, -1: not known; with queries, grades
    positive: str
    negative: str
    sites: Whole  # an index into `names`
    names: list[str]
    splits: Codes | None  # if a column says so
    groups: Whole | None  # numbered in the order of their first rows; queries, if there are any
    counts: list[int]  # rows of each file
    texts: Mapping[str, Any]  # arrow's, of the columns for ids, images and queries
    columns: Mapping[str, np.ndarray]  # of `Examples`: its group (of queries), time and weight, if columns say so


def keys_of(
    files: Sequence[File],
    counts: list[int],
    texts: Mapping[str, Any],
    options: TableOptions,
    file_sites: Sequence[str],
) -> Keys:
    """counts: rows of each file; texts: by column, arrow's texts of all rows.

    file_sites: the site of each file, which counts if no column names it.
    """
    for file, count in zip(files, counts, strict=True):
        require(count > 0, f"{file.path} holds no rows, only the names of its columns")
    where = str(files[0].path) if len(files) == 1 else f"{files[0].path} (and {len(files) - 1} more)"

    def coded(name: str, wanted: str, many: bool = False) -> tuple[Whole, list[str]]:
        """wanted: what each row needs; "": rows may be empty."""
        place = f"{where}: column '{printable(name)}'"
        if wanted and (gaps := texts[name].null_count):
            first = int(np.flatnonzero(texts[name].is_null().to_numpy())[0])
            text = _cell(files, counts, name, first)
            held = f"holds '{printable(text, 40)}', which counts as missing" if text else "is empty"
            told = f"{place} has no value in {gaps:,} of {len(texts[name]):,} rows"
            raise UserError(f"{told} (row {first + 1:,} {held}); each row needs {wanted}")
        return encode(texts[name], place, many)

    labels = options.labels
    columns = [coded(name, "" if options.several else "a label") for name in labels]
    y, value = _labels(columns, options, f"{where}: column{'s' * (len(labels) > 1)} {quoted(labels)}")
    one, other = ("", "") if options.query else value
    if options.site:
        sites, names = coded(options.site, "a site")
    else:
        sites, names = np.repeat(np.arange(len(files), dtype=np.int32), counts), list(file_sites)
    sites, names = in_order(sites, names)
    splits = None
    if options.split:
        codes, words = coded(options.split, "a split")
        for word in words:
            told = f"{where}: column '{printable(options.split)}' holds '{printable(word, 40)}'"
            require(word.lower() in WORDS, f"{told}; a split is {', '.join(SPLITS)}")
        splits = np.array([WORDS[word.lower()] for word in words], np.int8)[codes]
    known = {}
    for role, (least, rule) in AMOUNTS.items():
        if column := getattr(options, role):
            known[role] = amounts(texts[column].to_pylist(), f"{where}: column '{printable(column)}'", least, rule)
    group, wanted = (options.query, "a query") if options.query else (options.group, "a group")
    groups = coded(group, wanted, many=True)[0] if group else None
    return Keys(
        y=y,
        positive=one,
        negative=other,
        sites=sites,
        names=names,
        splits=splits,
        groups=groups,
        counts=counts,
        texts={name: texts[name] for name in (options.id, options.image, options.query) if name},
        columns=known if groups is None or not options.query else {"group": groups, **known},
    )


def _labels(
    columns: Sequence[tuple[Whole, list[str]]], options: TableOptions, where: str
) -> tuple[Codes, Mapping[str, int]]:
    """Labels [n, L], and the number that each text stands for, the same in all columns. Empty cells are unknown."""
    found = list(dict.fromkeys(word for _, words in columns for word in words))
    told = "leave a label's cell empty if it is not known, or set positive = 1 if -1 is negative"
    clear = options.positive is not None or bool(options.query) or len(columns) == 1 or "-1" not in found
    require(clear, f"{where} hold '-1'; {told}")
    value = text_grades(found, where) if options.query else two_values(found, options.positive, where)
    each = [np.array([*(value[word] for word in words), UNKNOWN], np.int8)[codes] for codes, words in columns]
    return np.stack(each, 1), value


def _cell(files: Sequence[File], counts: Sequence[int], name: str, row: int) -> str | None:
    """A row's text in a column, as it is written. row: among those of all files."""
    for file, count in zip(files, counts, strict=True):
        if row < count:
            return file.text(name, row)
        row -= count
    return None


def encode(column: Any, where: str, many: bool = False) -> tuple[Whole, list[str]]:
    """Values as indices of the different ones, in the order of their first rows, however texts write them.

    Empty rows get the number of different values. many: there may be as many as rows, as of groups.
    """
    encoded = column.combine_chunks().dictionary_encode()
    codes: Whole = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy(zero_copy_only=False)
    few = many or len(encoded.dictionary) <= max(1000, len(column) // 2)
    require(few, f"{where} differs in nearly every row")
    words = [canonical(text) for text in encoded.dictionary.to_pylist()]
    longest = max(map(len, words), default=0)
    told = f"{where} holds a text of {longest:,} characters; at most {LONGEST} are right"
    require(many or longest <= LONGEST, told)
    names = list(dict.fromkeys(words))
    index = {word: at for at, word in enumerate(names)}
    return np.array([*map(index.__getitem__, words), len(names)], np.int32)[codes], names


def amounts(texts: Sequence[str | None], where: str, least: float, rule: str) -> Floats:
    """Numbers from `least` on. Raises UserError for the first that is none."""
    values = np.array([as_number(text) for text in texts], np.float64)
    wrong = np.flatnonzero(~((values >= least) & (values <= LARGEST)))
    if len(wrong):
        shown = printable(str(texts[int(wrong[0])]), 40)
        raise UserError(f"{where} holds '{shown}' in row {wrong[0] + 1:,}; {rule}")
    return values


def row_numbers(ends: Indices, names: Sequence[str], rows: Whole) -> list[str]:
    """Rows' numbers in their files, from 1, as texts. ends: the number of rows up to the end of each file.

    >>> row_numbers(np.array([3, 5]), ["a", "b"], np.array([0, 4], np.int32))
    ['a:1', 'b:2']
    """
    files = np.searchsorted(ends, rows, side="right")
    numbers = (rows - np.concatenate([[0], ends])[files] + 1).tolist()
    if len(names) == 1:
        return list(map(str, numbers))
    return [f"{names[file]}:{number}" for file, number in zip(files.tolist(), numbers, strict=True)]

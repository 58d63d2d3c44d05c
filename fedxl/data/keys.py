"""The columns of a table that say what each row is: label, site, split, group and id."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedxl.data.columns import LONGEST, File
from fedxl.data.holdout import SPLITS, WORDS, Codes, Whole
from fedxl.data.labels import Value, canonical, two_values
from fedxl.data.table_labels import label_cells
from fedxl.errors import UserError, printable, require
from fedxl.risks.ranking import HIGHEST_GRADE
from fedxl.sampling import Floats

HEAVIEST = 1e12  # of weights: far beyond any use, and sums of them are still exact enough


class Keys(NamedTuple):
    """What the rows of some files are, in their order."""

    labels: Codes  # 0 or 1; with queries, grades; of several labels [n, L], with -1 where one is not known
    positive: str
    negative: str
    sites: Whole  # an index into `names`
    names: list[str]
    splits: Codes | None  # if a column says so
    groups: Whole | None  # numbered in the order of their first rows
    counts: list[int]  # rows of each file
    texts: dict[str, Any]  # arrow's, of the columns for ids, images and queries
    weights: Floats | None = None  # how often each row is read, if a column says so
    queries: Whole | None = None  # numbered in the order of their first rows


class Roles(NamedTuple):
    """Which column is what; "": none is."""

    label: str | tuple[str, ...]  # several labels have a column each
    site: str = ""
    split: str = ""
    group: str = ""
    id: str = ""
    image: str = ""
    weight: str = ""
    query: str = ""

    def names(self) -> list[str]:
        """All columns that are something."""
        label, *others = self
        return [name for name in (*((label,) if isinstance(label, str) else label), *others) if name]


def keys_of(
    files: Sequence[File],
    counts: list[int],
    texts: Mapping[str, Any],
    roles: Roles,
    positive: Value | None,
    file_sites: Sequence[str],
) -> Keys:
    """counts: rows of each file; texts: by column, arrow's texts of all rows.

    file_sites: the site of each file, which counts if no column names it.
    """
    for file, count in zip(files, counts, strict=True):
        require(count > 0, f"{file.path} holds no rows, only the names of its columns")
    where = str(files[0].path) if len(files) == 1 else f"{files[0].path} (and {len(files) - 1} more)"

    def coded(name: str, wanted: str, tidy: Callable[[str], str] = canonical) -> tuple[Whole, list[str]]:
        return encode(texts[name], f"{where}: column '{printable(name)}'", wanted, tidy)

    if isinstance(roles.label, str):
        codes, found = coded(roles.label, "a label")
        column = f"{where}: column '{printable(roles.label)}'"
        one, other = ("", "") if roles.query else two_values(found, positive, column)
        labels = _grades(found, column)[codes] if roles.query else (codes == found.index(one)).astype(np.int8)
    else:
        labels, one, other = label_cells(texts, roles.label, positive, where)
    if roles.site:
        sites, names = coded(roles.site, "a site")
    else:
        sites, names = np.repeat(np.arange(len(files), dtype=np.int32), counts), list(file_sites)
    sites, names = in_order(sites, names)
    return Keys(
        labels=labels,
        positive=one,
        negative=other,
        sites=sites,
        names=names,
        splits=_splits(*coded(roles.split, "a split"), where, roles.split) if roles.split else None,
        groups=coded(roles.group, "a group", str)[0] if roles.group else None,
        counts=counts,
        texts={name: texts[name] for name in (roles.id, roles.image, roles.query) if name},
        weights=_weights(texts[roles.weight], where, roles.weight) if roles.weight else None,
        queries=coded(roles.query, "a query", str)[0] if roles.query else None,
    )


def _grades(found: Sequence[str], where: str) -> Codes:
    """Grades of relevance of these texts; one line if one is none."""
    for text in found:
        right = text.isascii() and text.isdecimal() and len(text) < 4 and int(text) <= HIGHEST_GRADE
        told = f"{where} holds '{printable(text, 40)}'; with query, a label is a grade from 0 to {HIGHEST_GRADE}"
        require(right, told)
    return np.array([int(text) for text in found], np.int8)


def encode(column: Any, where: str, wanted: str, tidy: Callable[[str], str] = canonical) -> tuple[Whole, list[str]]:
    """Texts as indices of the different ones, in the order of their first rows; one line if one is missing."""
    if column.null_count:
        first = int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise UserError(
            f"{where} is empty in {column.null_count:,} of {len(column):,} rows (the first is row {first + 1:,}); "
            f"each row needs {wanted}"
        )
    encoded = column.combine_chunks().dictionary_encode()
    codes: Whole = encoded.indices.to_numpy(zero_copy_only=False)
    if tidy is str:  # of groups there may be as many as rows: their names are not looked at
        return codes, []
    require(len(encoded.dictionary) <= max(1000, len(column) // 2), f"{where} differs in nearly every row")
    index: dict[str, int] = {}
    places = np.empty(len(encoded.dictionary), np.int32)
    for at, text in enumerate(encoded.dictionary.to_pylist()):
        word = tidy(text)
        require(
            len(word) <= LONGEST, f"{where} holds a text of {len(word):,} characters; at most {LONGEST} are right"
        )
        places[at] = index.setdefault(word, len(index))
    return places[codes], list(index)


def in_order(sites: Whole, names: list[str]) -> tuple[Whole, list[str]]:
    """Sites by name, or by number if all are numbers, whatever the order of rows and files."""
    numbers = all(name.isdecimal() for name in names)
    order = sorted(range(len(names)), key=lambda at: (int(names[at]) if numbers else 0, names[at]))
    place = np.empty(len(names), np.int32)
    place[order] = np.arange(len(names))
    return place[sites], [names[at] for at in order]


def _weights(column: Any, where: str, name: str) -> Floats:
    """Positive numbers; one line for the first that is none."""
    values = np.array([_number(text) for text in column.to_pylist()], np.float64)
    wrong = np.flatnonzero(~((values > 0) & (values <= HEAVIEST)))
    if len(wrong):
        shown = printable(str(column[int(wrong[0])].as_py()), 40)
        told = f"{where}: column '{printable(name)}' holds '{shown}' in row {wrong[0] + 1:,}"
        raise UserError(f"{told}; a weight is a number above 0, and rows that must not count are left out")
    return values


def _number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan


def _splits(codes: Whole, found: Sequence[str], where: str, column: str) -> Codes:
    known = {text: WORDS.get(text.lower()) for text in found}
    for text, code in known.items():
        told = f"{where}: column '{printable(column)}' holds '{printable(text, 40)}'; a split is {', '.join(SPLITS)}"
        require(code is not None, told)
    return np.array([known[text] for text in found], np.int8)[codes]

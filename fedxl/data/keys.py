"""The columns of a table that say what each row is: label, site, split, group and id."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedxl.data.columns import LONGEST, File
from fedxl.data.forms import UNKNOWN, Label, quoted
from fedxl.data.holdout import SPLITS, WORDS, Codes, Whole
from fedxl.errors import UserError, printable, require
from fedxl.risks.ranking import HIGHEST_GRADE
from fedxl.sampling import Floats

if TYPE_CHECKING:
    from fedxl.data.table import TableOptions

HEAVIEST = 1e12  # of weights: far beyond any use, and sums of them are still exact enough
# What else Python takes for a number is a code: zeros in front are part of it, and underscores are.
NUMBER = re.compile(r"[+-]?(0|[1-9]\d*)?(\.\d*)?([eE][+-]?\d+)?", re.ASCII)
EXACT = 2**53  # beyond it, different whole numbers are one float
USUAL = {frozenset(("0", "1")): "1", frozenset(("-1", "1")): "1", frozenset(("false", "true")): "true"}


class Keys(NamedTuple):
    """What the rows of some files are, in their order."""

    labels: Codes  # 0 or 1; with queries, grades; of several labels [n, L], with -1 where one is not known
    positive: str
    negative: str
    sites: Whole  # an index into `names`
    names: list[str]
    splits: Codes | None  # if a column says so
    groups: Whole | None  # numbered in the order of their first rows; queries, if there are any
    counts: list[int]  # rows of each file
    texts: Mapping[str, Any]  # arrow's, of the columns for ids, images and queries
    weights: Floats | None  # how often each row is read, if a column says so


def role_names(label: str | tuple[str, ...], options: TableOptions) -> list[str]:
    """The columns that say what a row is."""
    roles = (options.site, options.split, options.group, options.id, options.image, options.weight, options.query)
    return [name for name in (*((label,) if isinstance(label, str) else label), *roles) if name]


def keys_of(
    files: Sequence[File],
    counts: list[int],
    texts: Mapping[str, Any],
    label: str | tuple[str, ...],
    options: TableOptions,
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

    one = other = ""
    if isinstance(label, str):
        codes, found = coded(label, "a label")
        column = f"{where}: column '{printable(label)}'"
        if options.query:
            labels = _grades(found, column)[codes]
        else:
            one, other = two_values(found, options.positive, column)
            labels = (codes == found.index(one)).astype(np.int8)
    else:
        labels, one, other = _several(
            [coded(name, "") for name in label], options.positive, f"{where}: columns {quoted(label)}"
        )
    if options.site:
        sites, names = coded(options.site, "a site")
    else:
        sites, names = np.repeat(np.arange(len(files), dtype=np.int32), counts), list(file_sites)
    sites, names = in_order(sites, names)
    group, wanted = (options.query, "a query") if options.query else (options.group, "a group")
    return Keys(
        labels=labels,
        positive=one,
        negative=other,
        sites=sites,
        names=names,
        splits=_splits(*coded(options.split, "a split"), where, options.split) if options.split else None,
        groups=coded(group, wanted, str)[0] if group else None,
        counts=counts,
        texts={name: texts[name] for name in (options.id, options.image, options.query) if name},
        weights=_weights(texts[options.weight], where, options.weight) if options.weight else None,
    )


def _several(coded: Sequence[tuple[Whole, list[str]]], positive: Label | None, where: str) -> tuple[Codes, str, str]:
    """Labels [n, L] of 1, 0 and -1 (not known), and what counts as positive and as negative in all columns."""
    found = list(dict.fromkeys(word for _, words in coded for word in words))
    require(
        positive is not None or "-1" not in found,
        f"{where} hold '-1'; leave a label's cell empty if it is not known, or set positive = 1 if -1 is negative",
    )
    one, other = two_values(found, positive, where)
    value = {one: 1, other: 0}
    labels = [np.array([*(value[word] for word in words), UNKNOWN], np.int8)[codes] for codes, words in coded]
    return np.stack(labels, 1), one, other


def positive_rows(labels: Codes) -> Codes:
    """1 for rows that are positive: for any of several labels; of grades, those above 0."""
    return (labels == 1).any(1).astype(np.int8) if labels.ndim == 2 else np.minimum(labels, 1)


def canonical(value: object) -> str:
    """A value as text, the same however a file writes it. Codes stay as they are: "007" is not "7".

    >>> [canonical(value) for value in (1, "1.0", True, "TRUE", " sick ", "007")]
    ['1', '1', 'true', 'true', 'sick', '007']
    """
    text = str(value).strip()
    if text.lower() in ("true", "false"):
        return text.lower()
    if not NUMBER.fullmatch(text):
        return text
    try:
        number = float(text)
    except ValueError:  # "." and the like
        return text
    if not math.isfinite(number) or abs(number) >= EXACT:
        return text
    return str(int(number)) if number == int(number) else repr(number)


def two_values(found: Sequence[str], positive: Label | None, where: str) -> tuple[str, str]:
    """(positive, negative) among the different labels of some data. Raises UserError if that cannot be told."""
    names = ", ".join(f"'{printable(text, 40)}'" for text in sorted(found)[:5])
    told = f"{where} holds {names}" + (f" and {len(found) - 5} more values" if len(found) > 5 else "")
    require(len(found) == 2, f"{told}; a label has two values: keep two, or drop the other rows")
    one, other = sorted(found)
    if positive is None:
        usual = USUAL.get(frozenset(found))
        require(usual is not None, f"{told}; say which one is positive: positive = '{one}' or '{other}'")
        assert usual is not None
        return usual, one if usual == other else other
    wanted = canonical(positive)
    require(wanted in found, f"{told}, but positive is {printable(positive)!r}, which never occurs")
    return wanted, one if wanted == other else other


def _grades(found: Sequence[str], where: str) -> Codes:
    """Grades of relevance of these texts."""
    for text in found:
        right = text.isascii() and text.isdecimal() and len(text) < 4 and int(text) <= HIGHEST_GRADE
        told = f"{where} holds '{printable(text, 40)}'; with query, a label is a grade from 0 to {HIGHEST_GRADE}"
        require(right, told)
    return np.array([int(text) for text in found], np.int8)


def encode(column: Any, where: str, wanted: str, tidy: Callable[[str], str] = canonical) -> tuple[Whole, list[str]]:
    """Texts as indices of the different ones, in the order of their first rows.

    wanted: what each row needs; "": rows may be empty, and get the number of different texts. tidy: `str` for groups,
    of which there may be as many as rows: their names are not looked at.
    """
    if wanted and column.null_count:
        first = int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise UserError(
            f"{where} is empty in {column.null_count:,} of {len(column):,} rows (the first is row {first + 1:,}); "
            f"each row needs {wanted}"
        )
    encoded = column.combine_chunks().dictionary_encode()
    codes: Whole = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy(zero_copy_only=False)
    if tidy is str:
        return codes, []
    require(len(encoded.dictionary) <= max(1000, len(column) // 2), f"{where} differs in nearly every row")
    index: dict[str, int] = {}
    places = np.empty(len(encoded.dictionary) + 1, np.int32)
    for at, text in enumerate(encoded.dictionary.to_pylist()):
        word = tidy(text)
        require(
            len(word) <= LONGEST, f"{where} holds a text of {len(word):,} characters; at most {LONGEST} are right"
        )
        places[at] = index.setdefault(word, len(index))
    places[-1] = len(index)
    return places[codes], list(index)


def in_order(sites: Whole, names: list[str]) -> tuple[Whole, list[str]]:
    """Sites by name, or by number if all are numbers, whatever the order of rows and files."""
    numbers = all(name.isdecimal() for name in names)
    order = sorted(range(len(names)), key=lambda at: (int(names[at]) if numbers else 0, names[at]))
    place = np.empty(len(names), np.int32)
    place[order] = np.arange(len(names))
    return place[sites], [names[at] for at in order]


def _weights(column: Any, where: str, name: str) -> Floats:
    """Positive numbers. Raises UserError for the first that is none."""
    values = np.array([as_number(text) for text in column.to_pylist()], np.float64)
    wrong = np.flatnonzero(~((values > 0) & (values <= HEAVIEST)))
    if len(wrong):
        shown = printable(str(column[int(wrong[0])].as_py()), 40)
        told = f"{where}: column '{printable(name)}' holds '{shown}' in row {wrong[0] + 1:,}"
        raise UserError(f"{told}; a weight is a number above 0, and rows that must not count are left out")
    return values


def as_number(text: str | None) -> float:
    """NaN for what is no number."""
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

"""What the training data of one site say of its columns: all that leaves a site to fit a common `Preparation`.

Counts, means and sums of squared deviations of numbers; counts of categories. Those of several sites merge exactly:
Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances (1979).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedxl.data.tables.read import LONGEST, MOST_COLUMNS, Block
from fedxl.errors import RefusedError, UserError, printable, refuse, require
from fedxl.risks.several import label_names

ROWS = 1024  # summed at a time: a site comes to the same bits wherever it sums, and squares take little memory
LARGEST = 1e30  # of a number: its square has room in every type, and nothing that was measured is larger
MOST_CATEGORIES = 256  # of one column
COUNT = 2**53
MOST_TEXT = 4_000_000  # characters of a summary as JSON
ABOUT = ("label", "positive", "negative", "site", "id", "delimiter", "time")
LABELS = "labels"  # beside them, if there are several: a list of their columns


class Numbers(NamedTuple):
    """A column of numbers at a site; 0 values and no mean if it has too few to tell."""

    present: int
    missing: int
    mean: float = 0.0
    squares: float = 0.0  # the sum of squared deviations from the mean


class Categories(NamedTuple):
    """A column of categories at a site: how often each occurs that is not rare."""

    counts: dict[str, int]


class Empty(NamedTuple):
    """A column without any value at a site: of either kind elsewhere."""


Told = Numbers | Categories | Empty
TYPES: Mapping[str, type[Told]] = {"numbers": Numbers, "categories": Categories, "empty": Empty}
KINDS = {kind: name for name, kind in TYPES.items()}


@dataclass(frozen=True)
class Summary:
    """What a site tells of its training data."""

    rows: int
    columns: Mapping[str, Told]
    about: Mapping[str, Any] = field(default_factory=dict)  # of `ABOUT`: the label's column and its values, and so on

    def to_json(self) -> str:
        columns = {name: [KINDS[type(told)], *told] for name, told in self.columns.items()}
        return json.dumps({"rows": self.rows, "columns": columns, "about": dict(self.about)})

    @classmethod
    def from_json(cls, text: str, examples: int) -> Summary:
        """What a site sent, if a site with so many examples can have sent it."""
        refuse(len(text) > MOST_TEXT, f"its summary has more than {MOST_TEXT:,} characters")
        try:
            content = json.loads(text)
            found = {str(name): TYPES[kind](*told) for name, (kind, *told) in content["columns"].items()}
            summary = cls(content["rows"], found, dict(content["about"]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise RefusedError("its summary of its columns cannot be read") from None
        _check(summary, examples)
        return summary


def summarize(
    blocks: Iterable[Block],
    names: Sequence[str],
    texts: Sequence[Sequence[str] | None],
    rare: int,
    about: Mapping[str, Any] = MappingProxyType({}),
) -> Summary:
    """The summary of one site's training rows, which come in blocks [rows, columns] of `ROWS` rows.

    NaN is a missing value; a category is an index into the `texts` of its column, which is None for numbers.
    rare: what occurs fewer times at the site is not told: a mean of two values would tell nearly both.
    """
    rows, (count, mean, squares) = 0, (np.zeros(len(names)) for _ in range(3))
    often = {at: np.zeros(len(known), np.int64) for at, known in enumerate(texts) if known is not None}
    for block in blocks:
        rows += len(block)
        count, mean, squares = _merged(count, mean, squares, *_moments(block))
        for at, counts in often.items():
            values = block[:, at]
            counts += np.bincount(values[~np.isnan(values)].astype(np.int64), minlength=len(counts))
    told: dict[str, Told] = {}
    for at, (name, known) in enumerate(zip(names, texts, strict=True)):
        if not count[at]:
            told[name] = Empty()
        elif known is not None:
            frequent = np.flatnonzero(often[at] >= rare).tolist()
            told[name] = _few(name, {known[code]: int(often[at][code]) for code in frequent})
        else:
            present, missing = int(count[at]), rows - int(count[at])
            all_of_it = Numbers(present, missing, float(mean[at]), float(squares[at]))
            told[name] = all_of_it if present >= rare else Numbers(0, missing)
    return Summary(rows, told, about)


def _moments(block: Block) -> tuple[Block, Block, Block]:
    """(count, mean, sum of squared deviations) of each column, missing values left out."""
    total, count = block.sum(0), np.full(block.shape[1], float(len(block)))
    if not np.isnan(total).any():  # nothing is missing, which need not be asked of every value
        apart = block - total / count
        return count, total / count, np.einsum("ij,ij->j", apart, apart)
    gone = np.isnan(block)
    count -= np.bincount(np.flatnonzero(gone) % block.shape[1], minlength=block.shape[1])
    apart = np.where(gone, 0.0, block)
    mean = apart.sum(0) / np.maximum(count, 1)
    apart -= mean
    np.copyto(apart, 0.0, where=gone)
    return count, mean, np.einsum("ij,ij->j", apart, apart)


def _merged(na: Any, ma: Any, qa: Any, nb: Any, mb: Any, qb: Any) -> tuple[Any, Any, Any]:
    """Chan et al.: the moments of two sets together from those of each, without cancellation."""
    n = na + nb
    least = n + (n == 0)
    delta = mb - ma
    return n, ma + delta * (nb / least), qa + qb + delta**2 * (na * nb / least)


def merge(summaries: Mapping[str, Summary]) -> Summary:
    """The summary of all sites' data together; by site, in a fixed order. Raises UserError if columns differ."""
    first, *_ = summaries
    names = list(summaries[first].columns)
    for site, summary in summaries.items():
        ours, theirs = {*names}, {*summary.columns}
        differ = ((first, site, ours - theirs), (site, first, theirs - ours))
        lacks = [
            f"{here} has a column '{printable(min(some))}', which {there} lacks"
            for here, there, some in differ
            if some
        ]
        require(not lacks, f"{', and '.join(lacks)}; rename a column, so that all sites have it, or name it in drop")
        told = f"{first} and {site} have the same columns in another order; list them in columns at both"
        require(names == list(summary.columns), told)
    columns = {name: _merge_column(name, {s: each.columns[name] for s, each in summaries.items()}) for name in names}
    require_one_label({site: each.about for site, each in summaries.items()})
    return Summary(sum(summary.rows for summary in summaries.values()), columns, summaries[first].about)


def require_one_label(about: Mapping[str, Mapping[str, Any]]) -> None:
    """That all sites predict the same."""
    told = {site: predicted(each) for site, each in about.items()}
    (first, ours), *others = told.items()
    for site, theirs in others:
        if theirs != ours:
            shown = ((", ".join(l) if isinstance(l, list) else l, p, n) for l, p, n in (ours, theirs))
            labels = (f"'{printable(l)}' ('{printable(p)}' or '{printable(n)}')" for l, p, n in shown)
            raise UserError(f"{first} predicts {next(labels)}, but {site} {next(labels)}")


def predicted(about: Mapping[str, Any]) -> list[Any]:
    """The label's column, or a list of those of several, and the values that are positive and negative, as JSON."""
    columns = list(about.get(LABELS, ())) or about.get("label", "")
    return [columns, about.get("positive", ""), about.get("negative", "")]


def _merge_column(name: str, told: Mapping[str, Told]) -> Told:
    known = {site: each for site, each in told.items() if not isinstance(each, Empty)}
    kinds = {type(each): site for site, each in reversed(known.items())}
    if len(kinds) > 1:
        where = " and ".join(f"{KINDS[kind]} at {site}" for kind, site in kinds.items())
        raise UserError(f"column '{printable(name)}' holds {where}; name it in categorical at every site, or in drop")
    if not known:
        return Empty()
    if Categories in kinds:
        counts: Counter[str] = Counter()
        for each in known.values():
            assert isinstance(each, Categories)
            counts.update(each.counts)
        return _few(name, counts)
    count, missing, mean, squares = 0, 0, 0.0, 0.0
    for each in known.values():
        assert isinstance(each, Numbers)
        n, m, q = _merged(count, mean, squares, each.present, each.mean, each.squares)
        count, missing, mean, squares = int(n), missing + each.missing, float(m), float(q)
    return Numbers(count, missing, mean, squares)


def _few(name: str, counts: Mapping[str, int]) -> Categories:
    """Categories in a fixed order."""
    if len(counts) > MOST_CATEGORIES:
        some = ", ".join(f"'{printable(text, 20)}'" for text in sorted(counts)[:3])
        told = f"column '{printable(name)}' has {len(counts):,} categories ({some}, ...)"
        raise UserError(f"{told}; at most {MOST_CATEGORIES} are used: name the column in drop, or raise rare")
    return Categories(dict(sorted(counts.items())))


def _check(summary: Summary, examples: int) -> None:
    """Refuse numbers that no honest site can have; all sites' data would be scaled by them."""
    # Of several labels, a row may have none that is known: then it is no example, and scales columns all the same.
    more = LABELS in summary.about and _whole(summary.rows) and summary.rows > examples
    wrong = not _whole(summary.rows) or (summary.rows != examples and not more)
    refuse(wrong, f"its summary is of {printable(summary.rows)} rows, but it has {examples} examples")
    about = {**summary.about}
    labels = about.pop(LABELS, [])
    try:
        named = isinstance(labels, list) and bool(label_names(labels or ["label"]))
    except UserError:
        named = False
    texts = all(isinstance(text, str) and len(text) <= LONGEST for text in about.values())
    right = texts and named and {*about} <= {*ABOUT}
    refuse(not right, "what its summary says of its label cannot be read")
    taken = [*labels, *(about.get(role) for role in ("label", "site", "id", "time"))]
    twice = any(name in taken for name in summary.columns)
    refuse(twice, "its summary has a column that is its label, its site, its id or its time, too")
    count = len(summary.columns)
    refuse(not 0 < count <= MOST_COLUMNS, f"its summary has {count} columns")
    for name, told in summary.columns.items():
        right = 0 < len(name) <= LONGEST
        if isinstance(told, Numbers):
            right &= _whole(told.present) and _whole(told.missing) and told.present + told.missing <= summary.rows
            right = right and _finite(told.mean, LARGEST)
            # No value is beyond LARGEST, so no sum of squared deviations is beyond this but for rounding.
            right = right and _finite(told.squares, LARGEST**2 * told.present * (1 + 1e-6))
            right = right and told.squares >= 0 and (told.present > 0 or told.mean == told.squares == 0)
        elif isinstance(told, Categories):
            right &= isinstance(told.counts, dict) and len(told.counts) <= MOST_CATEGORIES
            right = right and all(0 < len(text) <= LONGEST and _whole(n) for text, n in told.counts.items())
            right = right and sum(told.counts.values()) <= summary.rows
        refuse(not right, f"its summary of column '{printable(name, 60)}' cannot be that of its data")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= COUNT


def _finite(value: Any, most: float) -> bool:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return real and abs(value) <= most  # NaN is not; a whole number of any length can be compared

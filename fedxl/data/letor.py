"""Items of queries from files in the format of LETOR (SVMlight with qid), as ranking data sets are published.

A line is an item: its grade, its query, its features by number, and perhaps a comment.

    2 qid:10 1:0.5 2:0 46:0.07 # doc 31
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedxl import sampling
from fedxl.data.federation import Federation, Split, Splits
from fedxl.data.forms import as_array, features
from fedxl.data.holdout import SPLITS, TEST, TRAIN, VALIDATION, Stream, check_shares
from fedxl.data.source import TensorSource, checked_tensors
from fedxl.data.table import find, names_of
from fedxl.errors import UserError, kind_of, printable, require, unknown
from fedxl.progress import progress
from fedxl.risks.ranking import HIGHEST_GRADE
from fedxl.sampling import Indices, Purpose

Scatter = Literal["queries", "items"]
MOST_FEATURES = 4096
LONGEST = 2**20  # bytes of a line
MOST_NUMBERS = 2**32  # of all items together: 16 GiB
MOST_QUERY = 2**53


@dataclass(frozen=True)
class LetorOptions:
    """Settings of ranking data."""

    validation_path: str | tuple[str, ...] = ""  # files to validate on; "": queries are drawn
    test_path: str | tuple[str, ...] = ""  # files to test on; "": queries are drawn
    validation: float = 0.2  # the share of queries to draw
    test: float = 0.2
    clients: int = 0  # over how many clients items are spread; 0: each file is a client
    scatter: Scatter = "queries"  # what is spread over clients: whole queries, or each query's items
    standardise: bool = True  # whether features are centred and scaled, by what all training items have
    seed: int = 0

    def __post_init__(self) -> None:
        check_shares(self.validation, self.test)
        require(0 <= self.clients <= 10**6, f"clients must lie between 0 and 1,000,000, got {self.clients}")
        require(self.seed >= 0, f"seed must not be negative, got {self.seed}")
        if self.scatter not in get_args(Scatter):
            raise unknown("scatter", self.scatter, get_args(Scatter))


class Lines(NamedTuple):
    """The items of some files."""

    x: npt.NDArray[np.float32]  # [n, features]
    grades: Indices
    queries: Indices
    files: Indices  # the file that each item is from


def letor(path: str | tuple[str, ...], options: LetorOptions = LetorOptions()) -> Splits:  # noqa: B008 (frozen)
    """Items of queries with grades of relevance, in LETOR's format: "2 qid:10 1:0.5 2:0 # comment".

    path: a file, a list of files, or a pattern. A query that two files name is one query, at two clients. Features
    that a line leaves out are 0.
    """
    require(bool(path), "path must name a file in LETOR's format")
    files = find(path)
    lines, given = read_letor(files), {VALIDATION: options.validation_path, TEST: options.test_path}
    drawn = {VALIDATION: options.validation, TEST: options.test}
    splits = _draw(lines.queries, options.seed, {split: 0.0 if given[split] else drawn[split] for split in given})
    train = Lines(*(each[splits == TRAIN] for each in lines))
    held = {
        split: read_letor(find(where)) if where else Lines(*(each[splits == split] for each in lines))
        for split, where in given.items()
    }
    width = max(each.x.shape[1] for each in (train, *held.values()))
    shift, scale, used = np.zeros(width), np.ones(width), train.x.shape[1]
    if options.standardise:
        shift[:used], spread = train.x.mean(0, dtype=np.float64), train.x.std(0, dtype=np.float64)
        scale[:used] = np.where(spread > 0, spread, 1.0)  # 1 for a feature that is always the same

    def source(items: Lines) -> TensorSource:
        x = np.pad(items.x, ((0, 0), (0, width - items.x.shape[1])))
        scaled = torch.from_numpy(((x - shift) / scale).astype(np.float32))
        return TensorSource(scaled, torch.from_numpy(items.grades), queries=torch.from_numpy(items.queries))

    validation, test = (_split(source(items)) if len(items.x) else None for items in held.values())

    parts, names = _parts(train, options, files)
    return Splits(Federation(source(train), parts), validation, test, names)


def _split(source: TensorSource) -> Split:
    return Split(source.x, source.labels, queries=source.queries)


def read_letor(paths: Sequence[Path]) -> Lines:
    """All items of these files. Raises UserError for the first line that is wrong."""
    grades, queries, files, widths, at = (array("q") for _ in range(5))  # a few bytes per number
    values = array("f")
    for number, path in enumerate(paths):
        try:
            with path.open("rb") as file, progress(f"reading {path.name}", path.stat().st_size, bytes=True) as done:
                count = unseen = 0
                while line := file.readline(LONGEST + 1):
                    count, unseen = count + 1, unseen + len(line)
                    where = f"{path}, line {count:,}"
                    require(len(line) <= LONGEST, f"{where} has more than {LONGEST:,} bytes")
                    if item := _item(line, where):
                        grades.append(item[0])
                        queries.append(item[1])
                        files.append(number)
                        widths.append(len(item[2]))
                        at.extend(item[2])
                        values.extend(item[3])
                    if unseen > LONGEST:
                        done(unseen)
                        unseen = 0
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    rows, width = len(grades), max(at, default=0)
    require(rows > 0, f"{paths[0]} holds no items")
    require(width > 0, f"{paths[0]} holds no features")
    require(rows * width <= MOST_NUMBERS, f"{paths[0]}: {rows:,} items of {width:,} features are too many")
    x = np.zeros((rows, width), np.float32)
    x[np.repeat(np.arange(rows), widths), np.frombuffer(at, np.int64) - 1] = np.frombuffer(values, np.float32)
    return Lines(x, *(np.array(each, np.int64) for each in (grades, queries, files)))


def _item(line: bytes, where: str) -> tuple[int, int, list[int], list[float]] | None:
    """Grade, query, and features with their numbers; None for an empty line or a comment."""
    try:
        words = line.partition(b"#")[0].decode("ascii").split()
    except UnicodeDecodeError:
        raise UserError(f"{where} is not plain ASCII; a line reads '2 qid:10 1:0.5 2:0.1'") from None
    if not words:
        return None
    grade = _whole(words[0], HIGHEST_GRADE, f"{where}: the grade")
    mark, colon, query = words[1].partition(":") if len(words) > 1 else ("", "", "")
    require(mark == "qid" and bool(colon), f"{where} names no query; a line reads '2 qid:10 1:0.5 2:0.1'")
    numbers, features, last = [], [], 0
    for word in words[2:]:
        number, colon, value = word.partition(":")
        place = _whole(number, MOST_FEATURES, f"{where}: the number of a feature")
        require(place > last, f"{where}: features are numbered from 1 upwards, found {place} after {last}")
        try:
            feature = float(value)
        except ValueError:
            feature = math.nan
        right = bool(colon) and "_" not in value and abs(feature) <= 3e38
        require(right, f"{where}: feature {place} is '{printable(value, 40)}', which is no number")
        numbers.append(place)
        features.append(feature)
        last = place
    return grade, _whole(query, MOST_QUERY, f"{where}: qid"), numbers, features


def _whole(text: str, most: int, what: str) -> int:
    right = text.isascii() and text.isdecimal() and len(text) <= 20
    number = int(text) if right else -1
    require(0 <= number <= most, f"{what} must be a whole number up to {most:,}, found '{printable(text, 40)}'")
    return number


def _draw(queries: Indices, seed: int, shares: dict[int, float]) -> npt.NDArray[np.int8]:
    """The split of each item; a query is in one split as a whole."""
    known, which = np.unique(queries, return_inverse=True)
    order = sampling.generator(seed, Purpose.DATA, 0, Stream.TABLE).permutation(len(known))
    split = np.full(len(known), TRAIN, np.int8)
    start = 0
    for of, share in shares.items():
        count = round(share * len(known))
        require(not share or count > 0, f"{len(known)} queries are too few to draw {SPLITS[of]} queries of them")
        split[order[start : start + count]] = of
        start += count
    require(start < len(known), "no query is left to train on; lower validation or test")
    return split[which]


def _parts(train: Lines, options: LetorOptions, files: Sequence[Path]) -> tuple[list[Indices], list[str]]:
    """The items of each client, and the clients' names."""
    if not options.clients:
        parts = [np.flatnonzero(train.files == number) for number in range(len(files))]
        names = names_of(files)
    else:
        rng = sampling.generator(options.seed, Purpose.DATA, 1, Stream.TABLE)
        known, which = np.unique(train.queries, return_inverse=True)
        if options.scatter == "queries":
            of = rng.permutation(np.arange(len(known)) % options.clients)[which]
        else:  # dealt out query by query, in a random order, on from where the last query ended
            dealt = np.lexsort((rng.permutation(len(which)), which))
            of = np.empty(len(which), np.int64)
            of[dealt] = np.arange(len(which)) % options.clients
        parts = [np.flatnonzero(of == client) for client in range(options.clients)]
        names = [str(client) for client in range(options.clients)]
    without = [name for name, part in zip(names, parts, strict=True) if not len(part)]
    told = f"no item of client '{printable(''.join(without[:1]))}' is trained on"
    require(not without, f"{told}; take fewer clients, or hold back less")
    return parts, names


Ranked = tuple[Any, Any, Any]  # examples, grades, queries


def from_queries(
    clients: Mapping[str, Ranked] | Sequence[Ranked], validation: Ranked | None = None, test: Ranked | None = None
) -> Splits:
    """The clients of a federation that ranks items within queries: what `fit` takes.

    Args:
        clients: Each has triples (x, grades, queries), in a list or by the clients' names: rows of features, grades
            of relevance (0: not relevant, 1, 2, ...), and the query of each row, a whole number. Rows of one query
            may lie at several clients.
        validation: Such a triple to choose the best round on.
        test: Such a triple to evaluate the chosen model on.
    """
    names = tuple(map(str, clients)) if isinstance(clients, Mapping) else ()
    each = list(clients.values()) if isinstance(clients, Mapping) else list(clients)
    require(len(each) > 0, "a federation needs at least one client")
    held = [ranked(client, names[at] if names else f"client {at}") for at, client in enumerate(each)]
    shapes = {tuple(source.x.shape[1:]) for source in held}
    require(len(shapes) == 1, f"clients hold examples of different shapes: {sorted(map(list, shapes))}")
    ends = np.cumsum([len(source) for source in held])
    parts = [np.arange(end - len(source), end) for source, end in zip(held, ends, strict=True)]
    x, labels, queries = (torch.cat([getattr(one, leaf) for one in held]) for leaf in ("x", "labels", "queries"))
    train = Federation(TensorSource(x, labels, queries=queries), parts)
    held_back = (("validation", validation), ("test", test))
    splits = [None if data is None else _split(ranked(data, where)) for where, data in held_back]
    return Splits(train, splits[0], splits[1], names)


def ranked(data: Any, where: str) -> TensorSource:
    """Checked examples with their grades and queries."""
    right = isinstance(data, (tuple, list)) and len(data) == 3
    require(right, f"{where} must be a triple (x, grades, queries), not {kind_of(data)}")
    x, grades, queries = data
    grades, queries = whole(grades, f"{where}: grades"), whole(queries, where)
    source = checked_tensors(features(x, where).x, (grades > 0).astype(np.int64), where)
    require(len(queries) == len(source), f"{where}: {len(source)} examples but {len(queries)} queries")
    low, high = int(grades.min()), int(grades.max())
    right = low >= 0 and high <= HIGHEST_GRADE
    require(right, f"{where}: grades lie between 0 and {HIGHEST_GRADE}, found {low} to {high}")
    return replace(source, labels=torch.from_numpy(grades), queries=torch.from_numpy(queries))


def whole(values: Any, where: str) -> np.ndarray:
    """Whole numbers, one for each example."""
    array = as_array(values, where)
    plain = array.ndim == 1 and array.dtype.kind in "biuf"
    require(plain, f"{where} must be whole numbers, one for each example")
    exact = array.dtype.kind != "f" or bool(np.isfinite(array).all() and (array == np.floor(array)).all())
    require(exact, f"{where} must be whole numbers, found others")
    return np.asarray(array, np.int64)


def count_relevant(grades: Tensor, queries: Tensor) -> int:
    """How many queries hold a relevant item."""
    return len(torch.unique(queries[grades > 0]))

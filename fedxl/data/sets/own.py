"""Your own data: a NumPy .npz file, folders of images, or items of queries.

Headers of .npz files are checked before memory is taken for their arrays. Folders are named by the class of their
images, and perhaps by site and split. Items of queries are in the format of LETOR (SVMlight with qid), as ranking
data sets are published. A line is an item: its grade, its query, its features by number, and perhaps a comment.

    2 qid:10 1:0.5 2:0 46:0.07 # doc 31
"""

from __future__ import annotations

import io
import math
import os
import warnings
import zipfile
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch

from fedxl import sampling
from fedxl.data.examples import Examples, Splits
from fedxl.data.images import ImageOptions, images_in
from fedxl.data.inputs import as_examples
from fedxl.data.splits import TEST, TRAIN, VALIDATION, WORDS, Order, Shares, Stream, all_splits, draw, sites_of
from fedxl.data.tables.prepare import Preparation
from fedxl.data.tables.read import find, names_of
from fedxl.data.targets import Label, canonical, encoder, two_values
from fedxl.errors import UserError, printable, require, require_known
from fedxl.progress import progress
from fedxl.risks.ranking import HIGHEST_GRADE
from fedxl.sampling import Indices, Purpose

ARRAYS = ("x", "y", "client", "x_validation", "y_validation", "x_test", "y_test")
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
HEADER = 2**16  # bytes that may hold an array's type and shape
DIMENSIONS = 16
PLAIN = "biufcSU"  # kinds of dtypes: numbers and strings
DEFLATED = 1032  # the most that deflate can expand a file


def npz(path: str) -> Splits:
    """Arrays x, y and client, one row per example; optionally x_validation, y_validation, x_test and y_test.

    y may have a column for each of several labels, with NaN or -1 where one is not known.
    """
    arrays = read(Path(path), f"there is no file {path}; data.path must name an .npz file")
    missing = [name for name in ("x", "y", "client") if name not in arrays]
    require(not missing, f"{path} lacks the array(s) {', '.join(missing)}; it must hold x, y and client")
    for name in arrays:
        require_known(f"array in {path}", name, ARRAYS)
    train, client = _checked(arrays, "x", "y", path), arrays["client"]
    whole = client.shape == (len(train),) and np.issubdtype(client.dtype, np.integer)
    require(whole, f"{path}: client must hold one integer for each of the {len(train)} examples")
    # Clients are renumbered from 0, in the order of the given numbers.
    known, site = np.unique(client, return_inverse=True)
    train = replace(train, site=site, sites=tuple(map(str, known.tolist())))
    held = []
    for x, y in (("x_validation", "y_validation"), ("x_test", "y_test")):
        for one, other in ((x, y), (y, x)):
            require(one in arrays or other not in arrays, f"{path} holds {other} but no {one}")
        held.append(_checked(arrays, x, y, path) if x in arrays else None)
    return Splits(train, held[0], held[1])


def _checked(arrays: dict[str, np.ndarray], x: str, y: str, path: str) -> Examples:
    for name in (x, y):
        require(arrays[name].dtype.kind in "biuf", f"{path}: {name} must hold numbers, not {arrays[name].dtype}")
    several = arrays[y].shape[1] if arrays[y].ndim == 2 and arrays[y].shape[1] > 1 else 0
    return as_examples(floats(arrays[x]), labels(arrays[y]), f"{path}: {x}", encoder(labels=several))


def floats(array: np.ndarray) -> torch.Tensor:
    """Examples in single precision; bytes stay bytes."""
    if array.dtype == np.uint8:
        return torch.from_numpy(array)
    with np.errstate(over="ignore"):  # values that are too large become infinite, and are reported as such
        return torch.from_numpy(array.astype(np.float32))


def labels(array: np.ndarray) -> torch.Tensor:
    """Labels in types that torch has, without turning an invalid label into a valid one."""
    return torch.from_numpy(array.astype(np.int64 if np.can_cast(array.dtype, np.int64) else np.float64))


def read(path: Path, absent: str) -> dict[str, np.ndarray]:
    """All arrays of an .npz file: numbers and strings only. `absent` is the error if there is no such file."""
    try:
        # A device or a pipe may never end.
        require(path.is_file() or not path.exists(), f"{path} is not a file; it must be an .npz file")
        with zipfile.ZipFile(path) as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about headers written by Python 2
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            require(len(members) == len(archive.infolist()), f"{path} holds two arrays of the same name")
            needs, room = sum(_size(archive, info) for info in members.values()), _room()
            free = f"but only {room / 2**30:,.1f} GB of memory are free"
            require(needs <= room, f"{path} holds {needs / 2**30:,.1f} GB of arrays, {free}")
            arrays = {}
            for name, info in members.items():
                with archive.open(info) as file:
                    array = np.lib.format.read_array(file, allow_pickle=False)
                arrays[name] = array.astype(array.dtype.newbyteorder("="), copy=False)  # this machine's byte order
            return arrays
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(absent) from None
    except Exception as error:  # a damaged archive may raise anything
        raise UserError(f"cannot read {path} as an .npz file of plain arrays: {error or 'it is damaged'}") from None


def _size(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    """Bytes of memory for an array, and for its conversion to floats, by its header.

    Raises ValueError if it is not an array, or claims more than its bytes can hold.
    """
    if not info.filename.endswith(".npy"):
        raise ValueError(f"it holds '{info.filename}', which is not an array")
    times = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: DEFLATED}.get(info.compress_type, 0)
    with archive.open(info) as file:
        start = io.BytesIO(file.read(HEADER))
    version = np.lib.format.read_magic(start)
    if version not in HEADERS:
        raise ValueError(f"'{info.filename}' has the unknown format version {version}")
    shape, _, dtype = HEADERS[version](start)
    if dtype.kind not in PLAIN or dtype.hasobject:
        raise ValueError(f"'{info.filename}' holds {dtype}, which are neither numbers nor strings")
    size = math.prod(shape) * dtype.itemsize
    fits = start.tell() + size == info.file_size <= times * (info.compress_size + 1)
    if not fits or len(shape) > DIMENSIONS or min(shape, default=0) < 0:
        raise ValueError(f"'{info.filename}' does not match its header, {dtype} {list(shape)}")
    return size + (0 if dtype == np.uint8 else 4 * math.prod(shape))


def _room() -> int:
    """Bytes of memory that are available."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))  # a container's limit; "max" means none
    return min(found)


LEVELS = "ROOT/CLASS, ROOT/SITE/CLASS, ROOT/SPLIT/CLASS or ROOT/SITE/SPLIT/CLASS (site and split in either order)"


@dataclass(frozen=True)
class FolderOptions(ImageOptions):
    """Settings of folders of images."""

    positive: Label | None = None  # the class that is positive; not needed for 0 and 1, or true and false
    group: str = ""  # what ends a patient's (or the like's) name in file names ("_": p7_1.png): never in two splits
    called: str = ""  # the site's name, if folders name none


def folder(path: str, options: FolderOptions = FolderOptions()) -> Splits:
    """Your own images in a folder for each class: path/CLASS/*.png.

    Above the classes there may be folders for sites, and for train, validation and test. There are two classes.
    Splits are drawn where no folder names them, at every site and in both classes alike.
    """
    root = Path(path)
    files = images_in(root)
    places = [_place(file, root) for file in files]
    classes = [canonical(place[0]) for place in places]
    value = two_values(sorted({*classes}), options.positive, f"{root}: the folders of classes")
    alone = options.called or root.resolve().name
    sites, names = sites_of([place[1] or alone for place in places])
    y = np.array([value[each] for each in classes], np.int8)
    told = [place[2].lower() for place in places]
    if all(told):
        splits = np.array([WORDS[split] for split in told], np.int8)
    elif any(told):
        without = files[told.index("")]
        raise UserError(f"{printable(without)} is in no folder called train, validation or test, but others are")
    else:
        groups, mark = None, options.group
        if mark:  # what an image's name begins with, whichever class it is in
            odd = next((file for file in files if mark not in Path(file).name), "")
            line = f"{printable(odd)} has no '{printable(mark)}' in its name, which ends the group's name"
            require(not odd, line)
            of = [Path(file).name.partition(mark)[0] for file in files]
            groups = np.unique(of, return_inverse=True)[1].astype(np.int32)
        splits = draw(sites, y, groups, names, (options.validation, options.test), options.seed)
    order = Order(splits, sites, names)
    x, image = options.load(order, root, files)
    one, other = value
    made = Preparation(image=image, label="class", positive=one, negative=other, source="folder")
    return all_splits(order, made, x, y[:, None], lambda rows: [files[row] for row in rows.tolist()], {})


def _place(file: str, root: Path) -> tuple[str, str, str]:
    """(class, site, split) of an image, from the folders that it is in."""
    *above, kind = Path(file).parts[:-1] or ("",)
    splits = [name for name in above if name.lower() in WORDS]
    sites = [name for name in above if name.lower() not in WORDS]
    right = bool(kind) and kind.lower() not in WORDS and len(splits) <= 1 and len(sites) <= 1
    require(right, f"{root / file} is not where an image should be: {LEVELS}")
    return kind, "".join(sites), "".join(splits)


Scatter = Literal["queries", "items"]
MOST_FEATURES = 4096
LONGEST = 2**20  # bytes of a line
MOST_NUMBERS = 2**32  # of all items together: 16 GiB
MOST_QUERY = 2**53


@dataclass(frozen=True)
class LetorOptions(Shares):
    """Settings of ranking data, of which whole queries are drawn."""

    validation_path: str | tuple[str, ...] = ""  # files to validate on; "": queries are drawn
    test_path: str | tuple[str, ...] = ""  # files to test on; "": queries are drawn
    clients: int = 0  # over how many clients items are spread; 0: each file is a client
    scatter: Scatter = "queries"  # what is spread over clients: whole queries, or each query's items
    standardise: bool = True  # whether features are centred and scaled, by what all training items have

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.clients <= 10**6, f"clients must lie between 0 and 1,000,000, got {self.clients}")
        require_known("scatter", self.scatter, get_args(Scatter))


class Lines(NamedTuple):
    """The items of some files."""

    x: npt.NDArray[np.float32]  # [n, features]
    grades: Indices
    queries: Indices
    files: Indices  # the file that each item is from


def letor(path: str | tuple[str, ...], options: LetorOptions = LetorOptions()) -> Splits:
    """Items of queries with grades of relevance, in LETOR's format: "2 qid:10 1:0.5 2:0 # comment".

    path: a file, a list of files, or a pattern. A query that two files name is one query, at two clients. Features
    that a line leaves out are 0.
    """
    require(bool(path), "path must name a file in LETOR's format")
    files = find(path)
    lines, given = read_letor(files), {VALIDATION: options.validation_path, TEST: options.test_path}
    shares = (0.0 if options.validation_path else options.validation, 0.0 if options.test_path else options.test)
    splits = _drawn(lines, shares, options.seed)
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

    def examples(items: Lines) -> Examples:
        x = np.pad(items.x, ((0, 0), (0, width - items.x.shape[1])))
        scaled = torch.from_numpy(((x - shift) / scale).astype(np.float32))
        return Examples(scaled, torch.from_numpy(items.grades)[:, None], group=torch.from_numpy(items.queries))

    validation, test = (examples(items) if len(items.x) else None for items in held.values())
    found = examples(train).share_out(*_parts(train, options, files))
    return Splits(found, validation, test, fitted=options.standardise)


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


def _drawn(items: Lines, shares: tuple[float, float], seed: int) -> npt.NDArray[np.int8]:
    """The split of each item; a query is in one split as a whole."""
    _, query = np.unique(items.queries, return_inverse=True)
    one_site = np.zeros(len(query), np.int32)
    found = draw(one_site, np.minimum(items.grades, 1).astype(np.int8), query.astype(np.int32), [""], shares, seed)
    for name, split, share in (("validation", VALIDATION, shares[0]), ("test", TEST, shares[1])):
        some = not share or bool((found == split).any())
        require(some, f"{query.max() + 1} queries are too few to draw {name} queries of them")
    require(bool((found == TRAIN).any()), "no query is left to train on; lower validation or test")
    return found


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

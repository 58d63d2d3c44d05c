"""Patients of real hospitals, split as they were treated.

Sandercock, Niewada, Czlonkowska, The International Stroke Trial database (Trials 12:101, 2011). Janosi, Steinbrunn,
Pfisterer, Detrano, Heart Disease (UCI Machine Learning Repository, 1988). TCGA-BRCA as du Terrail et al. prepared it
(FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic Healthcare Settings, NeurIPS 2022).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch

from fedxl.data.examples import Splits
from fedxl.data.sets.download import rows_of
from fedxl.data.splits import TEST, TRAIN, Codes, Order, Shares, Whole, all_splits, draw, sites_of
from fedxl.data.targets import as_number
from fedxl.errors import UserError, printable, require, require_known
from fedxl.sampling import Floats, Indices

LARGEST = 2**26  # bytes of a file's text; the largest published one has 8 million
TRAINED = 0.66  # the share of patients that FLamby trains on
TEST_SEED = 0  # draws the test part of a set that is published without one: it is the same for every seed
FLAMBY = "https://github.com/owkin/FLamby/tree/main/flamby/datasets/fed_tcga_brca"
UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
IST = "https://doi.org/10.7488/ds/104"


class Published(NamedTuple):
    """A file as it was published."""

    names: tuple[str, ...]  # that it may have, its owners' first
    sha256: str  # of its text: unpacked, with ? for gaps; empty: not known
    source: str


IST_FILES = (
    Published(("ist.csv.gz", "ist.csv"), "fbcdc7630f89f62d8ce3cbdc4c48b2909c91745b40ad7ab20150d75b13012f25", IST),
    Published(("IST_corrected.csv",), "", IST),
)
HEART_FILES = {
    name: Published((f"processed.{name}.data", f"heart_{name}.data"), sha256, UCI)
    for name, sha256 in {
        "cleveland": "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
        "hungarian": "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
        "switzerland": "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
        "va": "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
    }.items()
}
BRCA_TABLE = Published(
    ("brca.csv", "tcga_brca.csv"), "07cb53423f7d579d33cfdbf2cba57b2aee75318b85866c68ce39a75b1f1ba020", FLAMBY
)
BRCA_SPLIT = Published(
    ("train_test_split.csv", "tcga_brca_split.csv"),
    "1249c6543a4060ff0fdaf8510fc37017755836db6c9fc5e6af96057c36510990",
    FLAMBY,
)

# What patients of the stroke trial were at randomisation. A category's first value is its reference; the others are
# a feature each.
NUMBERS = ("RDELAY", "AGE", "RSBP")
CATEGORIES = {
    "RCONSC": ("F", "D", "U"), "SEX": ("M", "F"), "RSLEEP": ("N", "Y"), "RATRIAL": ("N", "Y", ""),
    "RCT": ("N", "Y"), "RVISINF": ("N", "Y"), "RHEP24": ("N", "Y", ""), "RASP3": ("N", "Y", ""),
    **{f"RDEF{number}": ("N", "Y", "C") for number in range(1, 9)}, "STYPE": ("PACS", "LACS", "TACS", "POCS", "OTH"),
}  # fmt: skip
DIED = {"YES": 1, "NO": 0, "1": 1, "0": 0}
OUTCOMES = ("died14", "ID14")  # names of the column that says who died within 14 days


def ist(
    root: str = "data", test: float = 0.3, validation: float = 0.2, checksum: bool = True, seed: int = 0
) -> Splits:
    """International Stroke Trial: who died within 14 days, by what was known at randomisation; 466 hospitals.

    root: where IST_corrected.csv is, the published table, or ist.csv.gz, the 20 columns of it that are read;
    test: the share of patients to test on, drawn alike at every hospital and the same for every seed; validation: the
    share of the others that is held back, drawn by the seed; checksum: whether ist.csv must be the known file.
    """
    Shares(validation, test, seed)  # checks them
    file = next((each for each in IST_FILES if _path(each, Path(root))), IST_FILES[1])
    where, rows = _table(file, Path(root), checksum, ("HOSPNUM", *NUMBERS, *CATEGORIES))
    outcome = next((name for name in OUTCOMES if name in rows[0]), "")
    require(bool(outcome), f"{where} lacks the column {' or '.join(OUTCOMES)}")
    dummies = [_dummies(rows, name, values, where) for name, values in CATEGORIES.items()]
    y = _codes(rows, outcome, DIED, where).astype(np.int8)
    at, names = sites_of([row["HOSPNUM"] for row in rows])
    codes = draw(at, y, None, names, (0.0, test), TEST_SEED)
    x = np.concatenate((_scaled(_numbers(rows, NUMBERS, where), codes != TEST), *dummies), 1)
    return _splits(x, y, codes, (at, names), [str(number) for number in range(len(rows))], validation, seed)


def heart(
    root: str = "data", validation: float = 0.2, by_site: bool = True, checksum: bool = True, seed: int = 0
) -> Splits:
    """UCI heart disease at four hospitals, as in Fed-Heart-Disease: 13 features, FLamby's training and test parts.

    Three columns with many gaps are left out, and then patients with a gap. Chest pain and resting ECG become
    dummies. Of each hospital 66 % of the patients train.

    root: where processed.cleveland.data and the three others are; validation: the share of training patients that is
    held back, drawn by the seed; by_site: whether features are centred and scaled at each hospital, as in FLamby, or
    as those of all; checksum: whether files must be the published ones.
    """
    # This takes a second, which users of other data need not wait for.
    from sklearn.model_selection import train_test_split

    Shares(validation, 0.0, seed)  # checks them
    tables, codes, ids = [], [], []
    for name, file in HEART_FILES.items():
        table = _heart_table(*_text(file, Path(root), checksum))
        tables.append(table)
        ids += [f"{name} {number}" for number in range(len(table))]
        sick, all_ = table[:, -1] > 0, np.arange(len(table))
        stratify = sick if min(sick.sum(), (~sick).sum()) > 2 else None
        parts = train_test_split(all_, test_size=1 - TRAINED, train_size=TRAINED, random_state=43, stratify=stratify)
        codes.append(np.where(np.isin(all_, parts[1]), TEST, TRAIN).astype(np.int8))
    whole, split = np.concatenate(tables), np.concatenate(codes)
    names = list(HEART_FILES)
    at = np.repeat(np.arange(len(names)), [len(table) for table in tables]).astype(np.int32)
    x, y = _with_dummies(whole[:, :-1], (2, 6)), (whole[:, -1] > 0).astype(np.int8)
    for own in [at == site for site in range(len(names))] if by_site else [at >= 0]:
        x[own] = _scaled(x[own], split[own] != TEST)
    return _splits(x, y, split, (at, names), ids, validation, seed)


Clients = Literal["regions", "sites"]


def tcga_brca(
    root: str = "data",
    clients: Clients = "regions",
    validation: float = 0.2,
    standardise: bool = True,
    checksum: bool = True,
    seed: int = 0,
) -> Splits:
    """Fed-TCGA-BRCA: overall survival with breast cancer in days, 39 covariates, FLamby's training and test parts.

    root: where FLamby's brca.csv and train_test_split.csv are; clients: its 6 regions, or 37 tissue source sites
    (characters 6 and 7 of a patient's code); validation: the share of training patients that is held back, drawn by
    the seed; standardise: whether age, the one covariate that is not 0 or 1, is centred and scaled, unlike FLamby's;
    checksum: whether files must be the published ones.
    """
    Shares(validation, 0.0, seed)  # checks them
    require_known("clients", clients, get_args(Clients))
    where, rows = _table(BRCA_SPLIT, Path(root), checksum, ("pid", "fold", "fold2"))
    split = {row["pid"]: row for row in rows}
    folds = {row["fold"] for row in split.values()}
    require(folds == {"train", "test"}, f"{where}: fold must be train or test, found {', '.join(sorted(folds))}")
    where, rows = _table(BRCA_TABLE, Path(root), checksum, ("pid", "E", "T"))
    rows = [row for row in rows if row["pid"] in split]
    lacking = len(split) - len(rows)
    require(lacking == 0, f"{where} lacks {lacking} of the {len(split)} patients of {BRCA_SPLIT.names[0]}")
    features = [name for name in rows[0] if name not in ("pid", "E", "T")]
    require(len(features) == 39, f"{where} must hold 39 covariates, found {len(features)}")
    x, (event, time) = _numbers(rows, features, where), _numbers(rows, ("E", "T"), where).T
    right = bool(np.isin(event, (0, 1)).all()) and bool((time >= 0).all())
    require(right, f"{where}: E must be 0 or 1, and T not negative")
    known = [split[row["pid"]] for row in rows]
    codes = np.array([TEST if each["fold"] == "test" else TRAIN for each in known], np.int8)
    regions = clients == "regions"
    sites = sites_of([each["fold2"].rpartition("_")[2] if regions else each["pid"][5:7] for each in known])
    if standardise:
        x[:, :1] = _scaled(x[:, :1], codes != TEST)
    ids = [row["pid"] for row in rows]
    return _splits(x, event.astype(np.int8), codes, sites, ids, validation, seed, standardise, {"time": time})


# Files.


def _path(file: Published, root: Path) -> Path | None:
    return next((root / name for name in file.names if (root / name).is_file()), None)


def _text(file: Published, root: Path, checksum: bool) -> tuple[Path, str]:
    """Where a file is, and its text. Raises UserError unless it is there and, if asked, as it was published."""
    path = _path(file, root)
    if path is None:
        raise UserError(f"there is no {file.names[0]} in {root}; get it from {file.source}")
    try:
        require(path.stat().st_size <= LARGEST, f"{path} is too large to be {file.names[0]}")
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as opened:
            content = opened.read(LARGEST + 1)
        require(len(content) <= LARGEST, f"{path} is too large to be {file.names[0]}")
        content = content.replace(b"NaN", b"?")
        text = content.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    found = hashlib.sha256(content).hexdigest()
    same = not checksum or file.sha256 in ("", found)
    told = f"{path} is not {file.names[0]} as published: the sha256 of its text is {found}, not {file.sha256}"
    require(same, f"{told}; get it from {file.source}, or set checksum = false")
    return path, text


def _table(file: Published, root: Path, checksum: bool, columns: Sequence[str]) -> tuple[Path, list[dict[str, str]]]:
    """Where a CSV file is, and its rows, which have these columns among others."""
    path, text = _text(file, root, checksum)
    return path, rows_of(io.StringIO(text), path, columns)


def _numbers(rows: Sequence[Mapping[str, str]], names: Sequence[str], where: Path) -> Floats:
    """[n, columns] of these columns."""
    return np.array([[_number(row[name], f"{where}, {name}") for name in names] for row in rows])


def _number(text: str, where: str) -> float:
    value = as_number(text)
    require(math.isfinite(value), f"{where}: a value must be a number, not '{printable(text, 40)}'")
    return value


def _codes(rows: Sequence[Mapping[str, str]], name: str, values: Mapping[str, int], where: Path) -> Indices:
    """The number that stands for each text of a column, in capital letters."""
    found = [row[name].strip().upper() for row in rows]
    strange = next((row[name] for row, text in zip(rows, found, strict=True) if text not in values), None)
    told = f"{where}, {name}: a value must be {', '.join(value or 'empty' for value in values)}"
    require(strange is None, f"{told}, not '{printable(strange or '', 40)}'")
    return np.array([values[text] for text in found])


def _dummies(rows: Sequence[Mapping[str, str]], name: str, values: Sequence[str], where: Path) -> Floats:
    """[n, values but the first] 1 for the value that a row has."""
    codes = _codes(rows, name, {value: at for at, value in enumerate(values)}, where)
    return np.eye(len(values))[codes, 1:]


def _heart_table(where: Path, text: str) -> Floats:
    """[patients, 10 features and the diagnosis] of patients without a gap."""
    rows = [line.split(",") for line in text.split()]
    require(bool(rows) and all(len(row) == 14 for row in rows), f"{where} must hold rows of 14 values")
    kept = [[*row[:10], row[13]] for row in rows]
    found = np.array([[_number(each, str(where)) for each in row] for row in kept if "?" not in row])
    require(len(found) > 1, f"{where} has no two rows without a gap")
    return found


# Features and splits.


def _with_dummies(x: Floats, columns: tuple[int, ...]) -> Floats:
    """These columns at the end, a feature for every value but the least."""
    rest = np.delete(x, columns, 1)
    more = [x[:, column, None] == np.unique(x[:, column])[1:] for column in columns]
    return np.concatenate((rest, *more), 1).astype(np.float64)


def _scaled(x: Floats, by: npt.NDArray[np.bool_]) -> Floats:
    """Centred and scaled, by the mean and the standard deviation of these rows; the latter is 1 where all agree."""
    spread = x[by].std(0, ddof=1)
    return np.asarray((x - x[by].mean(0)) / np.where(spread > 0, spread, 1.0))


def _splits(
    x: Floats, y: Codes, codes: Codes, sites: tuple[Whole, list[str]], ids: Sequence[str],
    validation: float, seed: int, fitted: bool = True, known: Mapping[str, Floats] = MappingProxyType({}),
) -> Splits:  # fmt: skip
    """The patients by split. A share of those in training validates, drawn by site and class."""
    at, names = sites
    rest = np.flatnonzero(codes == TRAIN)
    codes[rest] = draw(at[rest], y[rest], None, names, (validation, 0.0), seed)
    order = Order(codes, at, names)
    features = torch.from_numpy(x[order.rows].astype(np.float32))
    splits = all_splits(order, None, features, y[:, None], lambda rows: [ids[row] for row in rows.tolist()], known)
    return splits._replace(fitted=fitted)

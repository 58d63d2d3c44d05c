"""Patients of hospitals, from small files in the published formats that the tests write themselves."""

from __future__ import annotations

import csv
import gzip
import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.model_selection import train_test_split

from fedxl import UserError
from fedxl.config.experiment import Config, execute, load_data
from fedxl.data import heart, ist, tcga_brca
from fedxl.data.examples import Examples, Splits
from fedxl.data.sets import hospitals
from fedxl.deploy.provision.settings import SiteFile, SiteSettings
from fedxl.deploy.site import cache

COLUMNS = [
    "patient", "HOSPNUM", "RDELAY", "RCONSC", "SEX", "AGE", "RSLEEP", "RATRIAL", "RCT", "RVISINF", "RHEP24", "RASP3",
    "RSBP", *(f"RDEF{number}" for number in range(1, 9)), "STYPE", "died14",
]  # fmt: skip


def patients(count: int = 120, hospitals_: int = 6) -> list[dict[str, Any]]:
    """Of the stroke trial: hospital 1 has no death, and hospital 10 comes after hospital 9."""
    rng, rows = np.random.default_rng(0), []
    for number in range(count):
        hospital = [1, 2, 9, 10, 11, 30][number % hospitals_]
        row = {name: str(rng.choice(values)) for name, values in hospitals.CATEGORIES.items()}
        row |= {"patient": number, "HOSPNUM": hospital, "RDELAY": rng.integers(1, 48), "AGE": rng.integers(30, 95)}
        rows.append(
            row | {"RSBP": rng.integers(90, 220), "died14": "yes" if hospital > 1 and number % 4 == 1 else "no"}
        )
    return rows


def as_csv(rows: list[dict[str, Any]], columns: list[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_ist(root: Path, rows: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    rows = patients() if rows is None else rows
    (root / "ist.csv.gz").write_bytes(gzip.compress(as_csv(rows, COLUMNS).encode()))
    return rows


def write_heart(root: Path, gap: str = "?", name: str = "processed.{}.data") -> dict[str, str]:
    """Four files as UCI has them. The third has two healthy patients, too few to be spread."""
    rng, texts = np.random.default_rng(1), {}
    for number, site in enumerate(hospitals.HEART_FILES):
        lines = []
        for patient in range(40):
            row = [
                rng.integers(30, 80),
                patient % 2,
                rng.integers(1, 5),
                95 + rng.integers(90),
                rng.integers(100, 400),
            ]
            row += [
                patient % 3 // 2,
                rng.integers(0, 3),
                rng.integers(80, 190),
                rng.integers(2),
                round(rng.normal(), 1),
            ]
            sick = rng.integers(1, 5) if (patient > 1 if number == 2 else patient % 2) else 0
            words = [str(each) for each in [*row, gap, gap, gap, sick]]
            if patient % 10 == 7:
                words[4] = gap
            lines.append(",".join(words))
        texts[site] = "\n".join(lines) + "\n"
        (root / name.format(site)).write_text(texts[site])
    return texts


def write_brca(root: Path, count: int = 180) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The table and the split, in different orders; two patients of the table are in no part."""
    rng = np.random.default_rng(2)
    codes = [f"TCGA-{'ABCDEFGHI'[number % 9]}{number % 3}-{number:04d}" for number in range(count + 2)]
    table = pd.DataFrame({"pid": codes, "age_at_index": rng.integers(30, 90, len(codes))})
    for number in range(38):
        table[f"feature, {number}"] = rng.integers(0, 2, len(codes))
    table["E"], table["T"] = rng.integers(0, 2, len(codes)).astype(float), rng.integers(0, 3000, len(codes)) * 1.0
    fold = np.where(np.arange(count) % 5 == 4, "test", "train")
    split = pd.DataFrame({"pid": codes[:count], "fold": fold})
    split["fold2"] = [f"{each}_{number % 9 // 3}" for number, each in enumerate(fold)]
    table.to_csv(root / "brca.csv", index=False)
    split.sample(frac=1, random_state=0).to_csv(root / "train_test_split.csv", index=False)
    return table.set_index("pid"), split.set_index("pid")


def everything(splits: Splits) -> list[Examples]:
    return [splits.train, *splits.held_back.values()]


def same(first: Examples | None, second: Examples | None) -> bool:
    assert first is not None
    assert second is not None
    return first.fingerprint() == second.fingerprint() and np.array_equal(first.site, second.site)


def test_stroke_patients_are_at_their_hospitals(tmp_path):
    rows = write_ist(tmp_path)
    splits = ist(str(tmp_path), checksum=False)
    assert splits.names == ("1", "2", "9", "10", "11", "30"), "by number"
    assert [len(part) for part in everything(splits)] == [69, 15, 36]
    assert sum(int(part.y.sum()) for part in everything(splits)) == sum(row["died14"] == "yes" for row in rows)
    assert splits.train.holdings()[0].positives == 0
    test = splits.test
    for place, row in enumerate(test.row):
        assert test.sites[test.site[place]] == str(rows[int(row)]["HOSPNUM"])
        assert int(test.y[place, 0]) == (rows[int(row)]["died14"] == "yes")


def test_what_a_stroke_patient_was_at_randomisation(tmp_path):
    rows = write_ist(tmp_path)
    splits = ist(str(tmp_path), checksum=False)
    tested = {int(row) for row in splits.test.row}
    assert splits.train.shape == (3 + sum(len(values) - 1 for values in hospitals.CATEGORIES.values()),)
    ages = np.array([float(row["AGE"]) for number, row in enumerate(rows) if number not in tested])
    for x, number in zip(splits.test.x, splits.test.row, strict=True):
        row = rows[int(number)]
        assert float(x[1]) == pytest.approx((row["AGE"] - ages.mean()) / ages.std(ddof=1), abs=1e-5)
        wanted = [row[name] == value for name, values in hospitals.CATEGORIES.items() for value in values[1:]]
        assert x[3:].tolist() == [float(each) for each in wanted]


def test_the_published_table_of_the_stroke_trial_does_as_well(tmp_path):
    rows = write_ist(tmp_path)
    wide = tmp_path / "wide"
    wide.mkdir()
    more = [{**row, "COUNTRY": "UK", "ID14": int(row["died14"] == "yes")} for row in rows]
    columns = ["COUNTRY", *(name for name in COLUMNS if name != "died14"), "ID14"]
    (wide / "IST_corrected.csv").write_text(as_csv(more, columns))
    narrow = ist(str(tmp_path), checksum=False)
    for mine, other in zip(everything(narrow), everything(ist(str(wide))), strict=True):
        assert same(mine, other)


@pytest.mark.parametrize("name", ["ist", "heart", "tcga_brca"])
def test_a_seed_draws_validation_data_and_nothing_else(name, tmp_path):
    {"ist": write_ist, "heart": write_heart, "tcga_brca": write_brca}[name](tmp_path)
    config = Config({"name": name, "root": str(tmp_path), "checksum": False}, {}, {}, run={"seed": 3})
    read = {"ist": ist, "heart": heart, "tcga_brca": tcga_brca}[name]
    first, other = load_data(config), read(str(tmp_path), checksum=False, seed=4)
    again, whole = (read(str(tmp_path), checksum=False, seed=3, **more) for more in ({}, {"validation": 0.0}))
    for mine, same_again in zip(everything(first), everything(again), strict=True):
        assert same(mine, same_again), "the seed is the run's"
    assert set(first.validation.row) != set(other.validation.row)
    assert same(first.test, other.test)
    assert same(first.test, whole.test)
    assert whole.validation is None
    assert len(whole.train) == len(first.train) + len(first.validation)
    assert len(first.validation) / len(whole.train) == pytest.approx(0.2, abs=0.06)
    rows = {tuple(x.tolist()) for x in first.train.x} | {tuple(x.tolist()) for x in first.validation.x}
    assert rows == {tuple(x.tolist()) for x in whole.train.x}


@pytest.mark.parametrize("by_site", [True, False])
def test_heart_disease_is_prepared_as_in_flamby(by_site, tmp_path):
    """Against pandas, as its description has it."""
    texts = write_heart(tmp_path)
    frames = []
    for text in texts.values():
        frame = pd.read_csv(io.StringIO(text), header=None).replace("?", np.nan).drop(columns=[10, 11, 12])
        frames.append(frame.dropna().apply(pd.to_numeric))
    assert [len(frame) for frame in frames] == [36] * 4
    whole = pd.get_dummies(pd.concat(frames, ignore_index=True), columns=[2, 6], drop_first=True).astype(float)
    sick, x = (whole.pop(13) > 0).to_numpy(), whole.to_numpy()
    begins, trained = np.cumsum([0, *(len(frame) for frame in frames)]), np.zeros(len(x), bool)
    for site, (first, last) in enumerate(pairwise(begins)):
        y = sick[first:last]
        more = {"train_size": 0.66, "test_size": 0.34, "random_state": 43, "stratify": None if site == 2 else y}
        trained[first + train_test_split(np.arange(last - first), **more)[0]] = True
    for first, last in pairwise(begins) if by_site else [(0, len(x))]:
        own = slice(first, last)
        known = x[own][trained[own]]
        x[own] = (x[own] - known.mean(0)) / np.where(known.std(0, ddof=1) > 0, known.std(0, ddof=1), 1)
    splits = heart(str(tmp_path), validation=0, by_site=by_site, checksum=False)
    assert splits.names == ("cleveland", "hungarian", "switzerland", "va")
    for part, which in ((splits.train, trained), (splits.test, ~trained)):
        np.testing.assert_allclose(part.x.numpy(), x[which], atol=1e-5)
        assert part.y[:, 0].tolist() == sick[which].astype(int).tolist()
    assert splits.test.row[0].startswith("cleveland ")


@pytest.mark.parametrize("name", ["ist", "heart", "tcga_brca"])
def test_features_scaled_by_private_means_are_not_trained_on_in_private(name, tmp_path):
    """Every row moves the means, and with them the features of all others."""
    {"ist": write_ist, "heart": write_heart, "tcga_brca": write_brca}[name](tmp_path)
    private = {"level": "free", "pool_u": "server", "dp_clip": 0.1, "dp_noise": 1.0, "dp_score_noise": 1.0}
    data = {"name": name, "root": str(tmp_path), "checksum": False}
    config = Config(data, {"name": "auroc", "scores": "sigmoid"}, {"name": "fedxl2", **private}, run={"rounds": 1})
    with pytest.raises(UserError, match="columns must not be scaled by their own means"):
        execute(config, None)
    settings = SiteSettings(name=load_data(config).names[0])
    site = SiteFile(settings, data, tmp_path / "site")
    assert cache.facts(site)["fitted"]
    if name == "tcga_brca":
        assert not tcga_brca(str(tmp_path), standardise=False, checksum=False).fitted


def test_gaps_may_be_nan(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    write_heart(first)
    write_heart(second, "NaN", "heart_{}.data")
    for mine, other in zip(*(everything(heart(str(root), checksum=False)) for root in (first, second)), strict=True):
        assert same(mine, other)


@pytest.mark.parametrize("clients", ["regions", "sites"])
def test_breast_cancer_has_flambys_parts_and_times(clients, tmp_path):
    table, split = write_brca(tmp_path)
    splits = tcga_brca(str(tmp_path), clients, standardise=False, checksum=False)
    assert len(splits.names) == {"regions": 3, "sites": 9}[clients]
    assert set(splits.test.row) == set(split.index[split.fold == "test"])
    assert set(splits.validation.row) <= set(split.index[split.fold == "train"])
    for part in splits.held_back.values():
        own = table.loc[list(part.row)]
        assert part.time.tolist() == own["T"].tolist()
        assert part.y[:, 0].tolist() == own["E"].tolist()
        assert part.x.tolist() == own.drop(columns=["E", "T"]).to_numpy(float).tolist()
        of = split.loc[list(part.row)].fold2.str[-1] if clients == "regions" else [code[5:7] for code in part.row]
        assert [part.sites[site] for site in part.site] == list(of)
    everybody = sorted(splits.train.time.tolist() + splits.validation.time.tolist() + splits.test.time.tolist())
    assert everybody == sorted(table.loc[split.index, "T"])


def test_ages_are_scaled_by_those_of_training_patients(tmp_path):
    table, split = write_brca(tmp_path)
    splits = tcga_brca(str(tmp_path), checksum=False)
    known = table.loc[split.index[split.fold == "train"], "age_at_index"]
    wanted = (table.loc[list(splits.test.row), "age_at_index"] - known.mean()) / known.std()
    np.testing.assert_allclose(splits.test.x[:, 0].numpy(), wanted, atol=1e-5)
    assert set(splits.test.x[:, 1:].flatten().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("read", "file", "source"),
    [
        (ist, "IST_corrected.csv", "https://doi.org/10.7488/ds/104"),
        (heart, "processed.cleveland.data", "https://archive.ics.uci.edu"),
        (tcga_brca, "train_test_split.csv", "https://github.com/owkin/FLamby"),
    ],
)
def test_a_missing_file_is_named_with_where_to_get_it(read, file, source, tmp_path):
    with pytest.raises(UserError, match=f"there is no {file} in {tmp_path}; get it from {source}"):
        read(str(tmp_path))


@pytest.mark.parametrize(("read", "write"), [(ist, write_ist), (heart, write_heart), (tcga_brca, write_brca)])
def test_another_file_is_told_by_its_checksum(read, write, tmp_path):
    write(tmp_path)
    told = "as published: the sha256 of its text is [0-9a-f]{64}, not [0-9a-f]{64}; get it from https://[^ ]*, or set"
    with pytest.raises(UserError, match=told) as error:
        read(str(tmp_path))
    assert "\n" not in str(error.value)


def test_checksums_are_those_of_unpacked_text(tmp_path):
    text = as_csv(patients(), COLUMNS)
    (tmp_path / "ist.csv").write_text(text)
    plain = ist(str(tmp_path), checksum=False)
    (tmp_path / "ist.csv").unlink()
    write_ist(tmp_path)
    assert same(plain.test, ist(str(tmp_path), checksum=False).test)
    known = [*hospitals.IST_FILES[:1], *hospitals.HEART_FILES.values(), hospitals.BRCA_TABLE, hospitals.BRCA_SPLIT]
    assert all(len(bytes.fromhex(file.sha256)) == 32 for file in known)
    assert len({file.sha256 for file in known}) == len(known)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"SEX": "X"}, "SEX: a value must be M, F, not 'X'"),
        ({"AGE": "old"}, "AGE: a value must be a number, not 'old'"),
        ({"AGE": "inf"}, "AGE: a value must be a number, not 'inf'"),
        ({"died14": "maybe"}, "died14: a value must be YES, NO, 1, 0, not 'maybe'"),
    ],
)
def test_a_wrong_value_is_named(changed, line, tmp_path):
    rows = patients()
    rows[7] |= changed
    write_ist(tmp_path, rows)
    with pytest.raises(UserError, match=line):
        ist(str(tmp_path), checksum=False)


def test_damaged_files_are_one_line(tmp_path):
    packed = tmp_path / "ist.csv.gz"
    text = as_csv(patients(), COLUMNS)
    header, first = text.splitlines()[:2]
    wrong = {
        "cannot read": gzip.compress(text.encode())[:-40],
        "lacks the column died14 or ID14": gzip.compress(text.replace("died14", "died").encode()),
        "lacks the column.s. HOSPNUM": gzip.compress(text.replace("HOSPNUM", "HOSPITAL").encode()),
        "has no rows": gzip.compress(f"{header}\n".encode()),
        "every row must have 23 values": gzip.compress(f"{header}\n{first},more\n".encode()),
    }
    for line, content in wrong.items():
        packed.write_bytes(content)
        with pytest.raises(UserError, match=line):
            ist(str(tmp_path), checksum=False)
    write_heart(tmp_path)
    (tmp_path / "processed.va.data").write_text("63,1,4\n")
    with pytest.raises(UserError, match=r"processed\.va\.data must hold rows of 14 values"):
        heart(str(tmp_path), checksum=False)
    table, _ = write_brca(tmp_path)
    table.iloc[1:].reset_index().to_csv(tmp_path / "brca.csv", index=False)
    with pytest.raises(UserError, match=r"lacks 1 of the 180 patients of train_test_split\.csv"):
        tcga_brca(str(tmp_path), checksum=False)
    table.assign(T=-1.0).reset_index().to_csv(tmp_path / "brca.csv", index=False)
    with pytest.raises(UserError, match="E must be 0 or 1, and T not negative"):
        tcga_brca(str(tmp_path), checksum=False)
    with pytest.raises(UserError, match="unknown clients 'region'; did you mean 'regions'"):
        tcga_brca(str(tmp_path), "region")


def test_features_are_in_single_precision(tmp_path):
    write_heart(tmp_path)
    assert {part.x.dtype for part in everything(heart(str(tmp_path), checksum=False))} == {torch.float32}

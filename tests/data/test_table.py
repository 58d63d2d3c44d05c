"""Tables: numbers against scikit-learn, splits by group, rubbish in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import StandardScaler

from fedxl import UserError
from fedxl.data.check import inspect_table
from fedxl.data.examples import UNKNOWN
from fedxl.data.tables.prepare import Category, Number, Preparation
from fedxl.data.tables.rawtable import Features
from fedxl.data.tables.read import BLOCK, open_table
from fedxl.data.tables.roles import TableOptions, row_numbers
from fedxl.data.tables.table import from_frame, read_new, read_rows, table
from fedxl.data.tables.table import load_preparation as load
from fedxl.options import call
from tests.data.tables import SITES, frame, write_sites

pytest.importorskip("pyarrow", reason="needs fedxl[table]")


def read(path: Any, **changes: Any):
    options = {"label": "sick", "positive": "yes", "rare": 1, **changes}
    return call(table, {"path": str(path) if isinstance(path, Path) else path, **options}, "data")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    frame().to_csv(tmp_path / "all.csv", index=False)
    return tmp_path / "all.csv"


def everything(splits) -> tuple[torch.Tensor, torch.Tensor]:
    held = [split for split in (splits.validation, splits.test) if split is not None]
    each = [splits.train, *held]
    return torch.cat([split.x for split in each]), torch.cat([split.y for split in each])


def test_columns_become_what_scikit_learn_makes_of_the_training_rows(path):
    data = frame()
    splits = read(path, site="site", drop=["patient"])
    test = [int(row) - 1 for row in splits.test.row]
    held = {*test, *(int(row) - 1 for row in splits.validation.row)}
    train = [row for row in range(len(data)) if row not in held]
    numbers = data[["age", "dose", "smoker"]].astype(float)
    imputer = SimpleImputer(add_indicator=True).fit(numbers.iloc[train])
    scaler = StandardScaler().fit(numbers.iloc[train])
    filled = imputer.transform(numbers.iloc[test])
    expected = np.c_[(filled[:, :3] - scaler.mean_) / scaler.scale_, filled[:, 3:]]
    made = splits.preparation
    assert [column.name for column in made.columns] == ["age", "dose", "smoker", "ward"]
    assert made.places() == [[0], [1, 3], [2], [4, 5, 6, 7]], "last is what is other or missing"
    np.testing.assert_allclose(splits.test.x[:, :4], expected, atol=1e-5)
    dummies = pd.get_dummies(data.ward)[["er", "icu", "ward 1"]].iloc[test].to_numpy(float)
    assert made.columns[3].values == ("er", "icu", "ward 1")
    np.testing.assert_array_equal(splits.test.x[:, 4:7], dummies)
    assert splits.test.y[:, 0].tolist() == (data.sick.iloc[test] == "yes").astype(int).tolist()
    assert [splits.names[site] for site in splits.test.site] == data.site.iloc[test].tolist()
    for column, mean, scale in zip(made.columns[:3], scaler.mean_, scaler.scale_, strict=True):
        assert column.mean == pytest.approx(mean, rel=1e-12)
        # A mean of a million times the spread: sums of squares without centring would keep four digits.
        assert column.scale == pytest.approx(scale, rel=1e-9)


def test_parquet_and_csv_are_alike(path, tmp_path):
    data = frame()
    data.to_parquet(tmp_path / "all.parquet")
    data.assign(ward=data.ward.astype("category")).to_parquet(tmp_path / "coded.parquet")
    first = read(path, site="site", drop=["patient"])
    for name in ("all.parquet", "coded.parquet"):
        second = read(tmp_path / name, site="site", drop=["patient"])
        assert second.preparation == first.preparation
        for one, other in zip(everything(first), everything(second), strict=True):
            assert torch.equal(one, other)


def test_one_file_a_site_is_the_same_as_one_for_all(path, tmp_path):
    by_column = read(path, site="site", drop=["patient"])
    paths = write_sites(tmp_path / "sites", frame())
    for given in (paths, str(tmp_path / "sites" / "*.csv")):
        by_file = read(given, drop=["patient"])
        assert by_file.names == by_column.names == SITES
        assert by_file.preparation.columns == by_column.preparation.columns
        for one, other in zip(everything(by_file), everything(by_column), strict=True):
            assert torch.equal(one, other)
    for name in SITES:
        (tmp_path / "folders" / name).mkdir(parents=True)
        Path(tmp_path / "sites" / f"{name}.csv").rename(tmp_path / "folders" / name / "patients.csv")
    assert read(str(tmp_path / "folders" / "*" / "patients.csv")).names == SITES, "called as their folders"


def test_a_site_draws_by_itself_what_it_draws_among_others(path, tmp_path):
    paths = write_sites(tmp_path / "sites", frame())
    among = read(paths, group="patient", seed=3)
    for number, name in enumerate(SITES):
        alone = read(paths[number], group="patient", seed=3)
        rows = [row for row, site in zip(among.test.row, among.test.site, strict=True) if site == number]
        assert [f"{name}:{row}" for row in alone.test.row] == rows


def test_groups_are_in_one_split_and_shares_hold_in_every_stratum(path):
    data = frame()
    splits = read(path, site="site", group="patient", validation=0.3, test=0.1)
    of = dict.fromkeys(range(len(data)), "train")
    for name in ("validation", "test"):
        of |= dict.fromkeys((int(row) - 1 for row in getattr(splits, name).row), name)
    assert data.groupby("patient").apply(lambda rows: len({of[row] for row in rows.index}) == 1).all()
    count = pd.Series(of).value_counts(normalize=True)
    assert count["validation"] == pytest.approx(0.3, abs=0.05)
    assert count["test"] == pytest.approx(0.1, abs=0.05)
    shares = data.assign(held=[of[row] == "validation" for row in data.index]).groupby(["sick"]).held.mean()
    assert abs(shares["yes"] - shares["no"]) < 0.12
    other = read(path, site="site", group="patient", validation=0.3, test=0.1, seed=1)
    assert other.test.row != splits.test.row
    assert read(path, site="site", group="patient", validation=0.3, test=0.1).test.row == splits.test.row


def test_a_column_of_splits_decides(tmp_path):
    data = frame().assign(part=(["Training", "VAL", "test"] * 80))
    data.to_csv(tmp_path / "t.csv", index=False)
    splits = read(tmp_path / "t.csv", split="part", drop=["patient"])
    assert [int(row) % 3 for row in splits.validation.row] == [2] * 80
    assert len(splits.train.parts[0]) == 80
    data[data.part != "test"].to_csv(tmp_path / "t.csv", index=False)
    assert read(tmp_path / "t.csv", split="part", drop=["patient"]).test is None


def test_new_rows_are_read_without_the_training_data(path, tmp_path):
    splits = read(path, site="site", id="patient")
    (tmp_path / "preparation.json").write_text(splits.preparation.to_text())
    made = load(tmp_path / "preparation.json")
    assert made == splits.preparation
    new = frame(30, seed=9)
    new.loc[0, ["age", "ward"]] = np.nan, "never seen"
    new.drop(columns=["sick", "site"]).to_csv(tmp_path / "new.csv", index=False)
    rows = read_new(made, tmp_path / "new.csv")
    assert (rows.y == UNKNOWN).all()
    assert rows.site is None
    assert rows.row == new.patient.tolist()
    assert rows.x[0, 0] == 0, "a missing number is the mean"
    assert rows.x[0, -4:].tolist() == [0, 0, 0, 1], "an unknown category is other"
    everyone = read_new(made, path)
    assert [everyone.sites[at] for at in everyone.site] == frame().site.tolist()
    assert everyone.y[:, 0].tolist() == (frame().sick == "yes").astype(int).tolist()
    again = read(path, site="site", id="patient", preparation=str(tmp_path / "preparation.json"))
    assert torch.equal(again.test.x, splits.test.x)
    for change, line in (
        ({"age": "old"}, "held numbers in the training data"),
        ({"sick": "maybe"}, "the model knows 'yes' and 'no'"),
    ):
        frame().assign(**change).to_csv(tmp_path / "new.csv", index=False)
        with pytest.raises(UserError, match=line):
            read_new(made, tmp_path / "new.csv")
    new.drop(columns="age").to_csv(tmp_path / "new.csv", index=False)
    with pytest.raises(UserError, match="lacks the column 'age', which the model reads"):
        read_new(made, tmp_path / "new.csv")


@pytest.mark.parametrize(
    ("labels", "positive", "first"),
    [
        ([1, 0], None, 1), ([0.0, 1.0], 1, 0), ([True, False], None, 1), ([True, False], True, 1), ([-1, 1], None, 0),
        (["b", "a"], "b", 1), (["1", "2"], 2, 0),
    ],
)  # fmt: skip
def test_labels_of_every_kind(tmp_path, labels, positive, first):
    pd.DataFrame({"x": range(20), "y": labels * 10}).to_csv(tmp_path / "t.csv", index=False)
    splits = read(tmp_path / "t.csv", label="y", positive=positive, validation=0.0, test=0.0)
    assert splits.train.y[:, 0][:2].tolist() == [first, 1 - first]


def test_numbers_that_are_codes_can_be_categories(tmp_path):
    pd.DataFrame({"code": [1, 2, 3, 4] * 10, "y": [0, 1] * 20}).to_csv(tmp_path / "t.csv", index=False)
    made = read(tmp_path / "t.csv", label="y", positive=None, categorical=["code"]).preparation
    assert made.columns == (Category("code", ("1", "2", "3", "4")),)


def test_codes_that_differ_stay_apart(tmp_path):
    codes, sites = ["007", "07", "7", "1_0", "10"], ["12345678901234567890", "12345678901234567891", "012", "12"]
    rows = [(code, site, number % 2) for number in range(10) for code in codes for site in sites]
    pd.DataFrame(rows, columns=["code", "site", "y"]).to_csv(tmp_path / "t.csv", index=False)
    splits = read(tmp_path / "t.csv", label="y", positive=None, categorical=["code"], site="site")
    assert splits.preparation.columns == (Category("code", tuple(sorted(codes))),)
    assert sorted(splits.names) == sorted(sites)


def test_what_has_another_meaning_is_not_learned_from():
    for role in ("label", "site", "id"):
        with pytest.raises(UserError, match="column 'age', which has another meaning"):
            Preparation(columns=(Number("age", 0.0, 1.0),), **{role: "age"})


def test_ids_that_repeat_are_a_remark(tmp_path):
    (tmp_path / "t.csv").write_text(GOOD.replace("1,a", "1,"))
    found = inspect_table(str(tmp_path / "t.csv"), TableOptions(label="sick", positive="yes", id="w"))
    assert "20 of 40 rows have nothing in column 'w', which identifies rows" in found.remarks
    assert "19 of 40 rows repeat another row in column 'w', which identifies rows" in found.remarks


def test_a_column_that_begins_empty_is_known_further_down(tmp_path):
    rows = BLOCK // 4
    data = pd.DataFrame({"late": [""] * rows + ["7", "9"] * 50, "word": [""] * rows + ["a", "b"] * 50, "x": 1})
    data.assign(y=[0, 1] * (len(data) // 2)).to_csv(tmp_path / "t.csv", index=False)
    made = read(tmp_path / "t.csv", label="y", positive=None, validation=0.0, test=0.0).preparation
    assert made.columns[0] == Number("late", 8.0, 1.0, True)
    assert made.columns[1] == Category("word", ("a", "b"))
    constant = made.apply(np.array([[8.0, 0, 1.0], [8.0, 0, 1e6]]))[:, 1]
    assert np.abs(constant).max() < 1e-20, "what is constant becomes 0, and does not blow up elsewhere"


def test_numbers_of_sixteen_digits_are_scaled_as_others(tmp_path):
    """Time stamps in microseconds vary by a billionth of their size; nanoseconds of a day by less."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=400)
    stamps = {"micro": 1.7e15 + 1e6 * x, "nano": (1.7e18 + 1e6 * x).round(), "still": np.full(400, 1.7e18)}
    pd.DataFrame({**stamps, "y": (x > 0).astype(int)}).to_csv(tmp_path / "t.csv", index=False)
    found = read(tmp_path / "t.csv", label="y", positive=None, validation=0.0, test=0.0).train.x.numpy()
    for column in found[:, :2].T:
        np.testing.assert_allclose(column, (x - x.mean()) / x.std(), atol=1e-3)
    assert np.abs(found[:, 2]).max() < 1e-12


def test_a_group_is_one_however_its_number_is_written(tmp_path):
    """Ten patients in 40 rows of two hospitals, one of which writes 7.0 or " 7" for 7; "007" is another patient."""
    names = [str, lambda n: f"{n}.0", lambda n: f" {n}", lambda n: f"00{n}"]
    rows = [f"{name(1 + n)},{n},{'yes' if n % 2 else 'no'}" for name in names for n in range(10)]
    (tmp_path / "t.csv").write_text("\n".join(["patient,x,sick", *rows]))
    files = [open_table(tmp_path / "t.csv")]
    options = TableOptions(label="sick", group="patient", positive="yes")
    keys, _, _ = read_rows(Features(files, ["x"]), options)
    assert keys.groups.tolist() == [*range(10)] * 3 + [*range(10, 20)]


def test_categories_that_are_called_by_numbers_are_categories(tmp_path):
    """As pandas writes them: a Parquet file keeps that they are no amounts."""
    pytest.importorskip("pyarrow", reason="needs fedxl[table]")
    data = frame()
    data["code"] = pd.Series([3, 7, 11, 3] * (len(data) // 4 + 1))[: len(data)].astype("category")
    data.to_parquet(tmp_path / "all.parquet")
    made = read(tmp_path / "all.parquet", site="site", drop=["patient"]).preparation
    assert {column.name: column for column in made.columns}["code"].values == ("11", "3", "7")
    same = from_frame(data, label="sick", positive="yes", site="site", drop=["patient"], rare=1).preparation
    assert same.columns == made.columns
    data.to_csv(tmp_path / "new.csv", index=False)
    assert torch.equal(read_new(made, tmp_path / "new.csv").x, read_new(made, tmp_path / "all.parquet").x)


def test_new_rows_that_say_less_than_training_rows_are_told(tmp_path, caplog):
    """By column: categories that training did not have, and columns without any value."""
    data = frame()
    data.to_csv(tmp_path / "all.csv", index=False)
    made = read(tmp_path / "all.csv", site="site", drop=["patient"]).preparation
    read_new(made, tmp_path / "all.csv")
    assert not caplog.messages
    data["ward"] = ["elsewhere"] * 3 + [None] * 2 + list(data["ward"][5:])
    data["dose"] = None
    data.to_csv(tmp_path / "new.csv", index=False)
    read_new(made, tmp_path / "new.csv")
    dose, ward = caplog.messages
    assert f"column 'dose': all {len(data)} rows are empty" in dose
    assert f"column 'ward': 3 of {len(data)} rows hold a category that is new or was rare in training" in ward


def test_new_rows_with_another_delimiter_are_told_what_is_right(tmp_path):
    data = frame()
    data.to_csv(tmp_path / "all.csv", index=False)
    made = read(tmp_path / "all.csv", site="site", drop=["patient"]).preparation
    data.to_csv(tmp_path / "new.csv", index=False, sep=";")
    with pytest.raises(UserError, match="separate its columns by ';'; save it with ',', as training data were"):
        read_new(made, tmp_path / "new.csv")
    data.to_csv(tmp_path / "new.csv", index=False, sep=";", decimal=",")
    with pytest.raises(UserError, match=r"columns separated by ';'\? save it with ',' and decimal points"):
        read_new(made, tmp_path / "new.csv")
    data.to_csv(tmp_path / "all.csv", index=False, sep=";")
    made = read(tmp_path / "all.csv", site="site", drop=["patient"], delimiter=";").preparation
    with pytest.raises(UserError, match=r"held numbers in the training data.*\(a text is.* decimal commas\)"):
        read_new(made, tmp_path / "new.csv")
    data.to_csv(tmp_path / "new.csv", index=False)
    with pytest.raises(UserError, match="separate its columns by ','; save it with ';', as training data were"):
        read_new(made, tmp_path / "new.csv")


def test_rare_values_are_not_told(tmp_path):
    data = pd.DataFrame({"w": ["a"] * 15 + ["b"] * 4 + ["c"], "x": [1.0, 2.0] + [np.nan] * 18, "z": range(20)})
    data.assign(y=[0, 1] * 10).to_csv(tmp_path / "t.csv", index=False)
    options = {"label": "y", "positive": None, "validation": 0.0, "test": 0.0}
    made = read(tmp_path / "t.csv", rare=4, drop=["x"], **options).preparation
    assert made.columns[0] == Category("w", ("a", "b"))
    with pytest.raises(UserError, match=r"column 'x' has .*no values"):
        read(tmp_path / "t.csv", rare=4, **options)


def test_a_column_of_weights_follows_its_rows(tmp_path):
    """The weight is told by the value, so that a weight of another row would be found out."""
    rows = "".join(f"{i},{1 + i % 7},{'yes' if i % 2 else 'no'},s{i % 3}\n" for i in range(60))
    (tmp_path / "t.csv").write_text("x,often,sick,site\n" + rows)
    splits = read(tmp_path / "t.csv", weight="often", site="site")
    (column,) = splits.preparation.columns
    train = splits.train
    values = torch.round(train.x[:, 0].double() * column.scale + column.mean)
    assert torch.equal(train.weight, 1 + values % 7)
    assert read(tmp_path / "t.csv", site="site", drop=["often"]).train.weight is None


HEAD = "x,w,sick\n"
GOOD = HEAD + "1,a,yes\n2,b,no\n" * 20
SPLIT = "x,w,sick,z\n" + "1,train,yes,5\n2,test,no,6\n" * 20
ANSWERS = ("yes", "no")
RUBBISH: list[tuple[str, str | bytes, dict[str, Any], str]] = [
    ("empty file", "", {}, "is empty"),
    ("header only", HEAD, {}, "holds no rows"),
    ("doubled names", "x,x,sick\n1,2,yes\n", {}, "two columns called 'x'"),
    ("empty name", ",w,sick\n1,2,yes\n", {}, "a column is called ''"),
    ("three labels", GOOD + "3,a,perhaps\n", {}, "holds 'no', 'perhaps', 'yes'; a label has two"),
    ("one label", HEAD + "1,a,yes\n" * 9, {}, "holds 'yes'; a label has two"),
    ("no positive", GOOD, {"positive": "ill"}, "positive is 'ill', which never occurs"),
    ("which positive", GOOD, {"positive": None}, "positive = 'no' or 'yes'"),
    ("missing labels", GOOD + "3,a,\n", {}, r"has no value in 1 of 41 rows \(row 41 is empty\)"),
    ("labels that count as missing", GOOD + "3,a,None\n", {}, "row 41 holds 'None', which counts as missing"),
    ("missing site", GOOD.replace("1,a", "1,"), {"site": "w"}, "has no value in 20 of 40 rows"),
    ("unknown column", GOOD, {"group": "pateint"}, "unknown column in .*group"),
    ("text among numbers", GOOD.replace("2,b", "2.5,b") + "1,a,yes\n" * (BLOCK // 4) + "old,a,no\n", {}, "'old'"),
    ("ragged", GOOD + "1,2\n", {}, "row 41 has 2 columns, the first line has 3"),
    ("a text", HEAD + "".join(f"{i},a,{ANSWERS[i % 2]}\n" for i in range(50)) + "old,a,no\n", {"rare": 2}, "numbers"),
    ("decimal commas", GOOD.replace(",", ";").replace("1;", "1,5;"), {}, "delimiter = ';'"),
    ("not UTF-8", GOOD.encode() + b"1,\xff\xfe,yes\n", {}, "UTF-8"),
    ("UTF-16", GOOD.encode("utf-16"), {}, "but as UTF-16; save it as UTF-8"),
    ("long text", GOOD + f"1,{'x' * 1000},yes\n", {}, "1,000 characters"),
    ("endless field", GOOD + f"1,{'x' * 2 * BLOCK},yes\n", {}, "more than 2097 kB"),
    ("open quotation", GOOD + '1,"a,yes\n' + "1,a,yes\n" * 200_000, {}, "quotation mark missing"),
    ("dates", GOOD.replace("1,a", "2020-01-02,a").replace("2,b", "2020-01-03,b"), {}, "dates"),
    ("infinity", GOOD + "inf,a,yes\n", {}, "beyond 1e\\+30"),
    ("semicolons", GOOD.replace(",", ";"), {}, "delimiter = ';'"),
    ("names as texts", HEAD + "".join(f"1,n{i},{ANSWERS[i % 2]}\n" for i in range(10_001)), {}, "drop, or, .*= 'w'"),
    ("ids as texts", HEAD + "".join(f"1,n{i},{ANSWERS[i % 2]}\n" for i in range(99)), {"rare": 2}, "name it: id ="),
    ("categories", HEAD + "".join(f"1,n{i % 300},{ANSWERS[i % 2]}\n" for i in range(3000)), {}, "300 categories"),
    ("strange split", GOOD, {"split": "w"}, "holds 'a'; a split is train"),
    ("no training rows", SPLIT, {"split": "w", "site": "x"}, "no row of site '2' is trained on"),
    ("no training images", SPLIT, {"split": "w", "site": "x", "image": "z"}, "no row of site '2' is trained on"),
    ("nothing to learn from", GOOD, {"drop": ["x", "w"]}, "no feature column besides"),
    ("empty column", GOOD.replace("1,a", ",a").replace("2,b", ",b"), {}, "column 'x' has .*no values"),
    ("weight of a text", GOOD, {"weight": "w"}, "holds 'a' in row 1; a weight is a number above 0"),
    ("weight of nothing", GOOD + "0,a,yes\n", {"weight": "x"}, "holds '0' in row 41; a weight is a number above 0"),
    ("no weight", GOOD + ",a,yes\n", {"weight": "x"}, "holds 'None' in row 41; a weight is"),
    ("no label", GOOD, {"label": ""}, "label must name the column to predict"),
    ("shares", GOOD, {"validation": 0.6, "test": 0.5}, "nothing is left"),
    ("delimiter", GOOD, {"delimiter": ",,"}, "one character"),
    ("binary", bytes(range(256)) * 10, {}, "."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "options", "line"), [case[1:] for case in RUBBISH], ids=[case[0] for case in RUBBISH]
)
def test_rubbish_is_told_in_one_line(tmp_path, text, options, line):
    (tmp_path / "t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=line) as told:
        read(tmp_path / "t.csv", **options)
    assert len(str(told.value).splitlines()) == 1


def test_files_that_do_not_fit_together(tmp_path):
    for name, text in (("a", GOOD), ("b", GOOD.replace("1,", "low,").replace("2,", "high,"))):
        (tmp_path / f"{name}.csv").write_text(text)
    with pytest.raises(UserError, match=r"column 'x' holds numbers in .*a.csv and texts in .*b.csv"):
        read(str(tmp_path / "*.csv"))
    assert read(str(tmp_path / "*.csv"), categorical=["x"]).preparation.columns[0].values == ("1", "2", "high", "low")
    (tmp_path / "b.csv").write_text(GOOD.replace("x,w", "z,w"))
    with pytest.raises(UserError, match=r"b.csv lacks the column 'x'"):
        read(str(tmp_path / "*.csv"))


@pytest.mark.parametrize(
    ("path", "line"),
    [("none.csv", "there is no file"), ("*.none", "no file matches"), (".", "is a folder"), ("t.xlsx", "cannot tell"),
     ([], "must name"), ("", "must name"), ("bad.parquet", "cannot read")],
)  # fmt: skip
def test_files_that_are_not_there(tmp_path, monkeypatch, path, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.xlsx").write_text(GOOD)
    (tmp_path / "bad.parquet").write_text(GOOD)
    with pytest.raises(UserError, match=line):
        read(path)


def test_options_are_checked_at_once():
    for wrong in ({"rare": 0}, {"size": 2}, {"channels": 2}, {"seed": -1}, {"validation": 1.0}):
        with pytest.raises(UserError):
            TableOptions(**wrong)
    assert Preparation(columns=(Number("x", 0.0, 1.0),)).width == 1


def test_row_numbers_are_those_of_each_file():
    ends, rows = np.array([3, 3, 7]), np.array([6, 0, 2, 3], np.int32)
    assert row_numbers(ends, ["a", "b", "c"], rows) == ["c:4", "a:1", "a:3", "c:1"]
    assert row_numbers(np.array([9]), [""], rows) == ["7", "1", "3", "4"]
    assert row_numbers(ends, ["a"], rows[:0]) == []

"""`from_frame` gives what the table of the same rows gives, and says in one line what a data frame lacks."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import fedxl
from fedxl.data.tables.prepare import Preparation
from fedxl.data.tables.roles import TableOptions
from fedxl.data.tables.table import table
from fedxl.errors import UserError

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")


def rows(count: int = 120) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    age = rng.normal(50, 10, count)
    return pd.DataFrame(
        {
            "age": np.where(rng.random(count) < 0.1, np.nan, age),
            "sex": pd.Categorical(rng.choice(["f", "m"], count)),
            "visits": rng.integers(0, 9, count),
            "patient": [f"p{number}" for number in rng.integers(0, 60, count)],
            "hospital": rng.choice(["north", "south"], count),
            "finding": np.where(age + rng.normal(0, 5, count) > 50, "sick", "well"),
        },
        index=rng.permutation(count),  # which says nothing
    )


OPTIONS = {"label": "finding", "positive": "sick", "group": "patient"}


def same(one, other) -> None:
    assert one.names == other.names
    assert one.preparation.to_json()["columns"] == other.preparation.to_json()["columns"]
    assert torch.equal(one.train.x, other.train.x)
    assert torch.equal(one.train.y[:, 0], other.train.y[:, 0])
    assert [part.tolist() for part in one.train.parts] == [part.tolist() for part in other.train.parts]
    for split in ("validation", "test"):
        assert torch.equal(getattr(one, split).x, getattr(other, split).x)
        assert list(getattr(one, split).row) == list(getattr(other, split).row)


def test_a_frame_gives_what_its_file_gives(tmp_path):
    frame = rows()
    frame.to_csv(tmp_path / "rows.csv", index=False)
    options = TableOptions(label="finding", positive="sick", group="patient", site="hospital")
    same(fedxl.from_frame(frame, site="hospital", **OPTIONS), table(str(tmp_path / "rows.csv"), options))


def test_the_same_words_are_missing_in_files_and_frames(tmp_path):
    frame = rows().assign(sex=np.resize(["none", "NA", "?", "None", "null", "f"], 120), sure=["none", "yes"] * 60)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    frame.to_parquet(tmp_path / "rows.parquet", index=False)
    options = {**OPTIONS, "label": "sure", "positive": "yes", "site": "hospital"}
    whole = fedxl.from_frame(frame, **options)
    (sex,) = (column for column in whole.preparation.columns if column.name == "sex")
    assert sex.values == ("f", "none")
    for name in ("rows.csv", "rows.parquet"):
        same(whole, table(str(tmp_path / name), TableOptions(**options)))
    with pytest.raises(UserError, match="row 2 holds 'NA', which counts as missing"):
        fedxl.from_frame(frame, **{**options, "label": "sex"})


def test_a_column_that_numbers_rows_is_named(caplog):
    frame = rows().assign(case=np.arange(120) * 7)
    fedxl.from_frame(frame, site="hospital", **OPTIONS)
    (line,) = caplog.messages
    assert "column 'case': differs in every row: if it identifies rows, name it: id = 'case'" in line
    fedxl.from_frame(frame, site="hospital", id="case", **OPTIONS)
    assert len(caplog.messages) == 1


def test_a_frame_for_each_site_and_an_arrow_table_give_the_same():
    import pyarrow as pa

    frame = rows().sort_values("hospital", kind="stable")
    whole = fedxl.from_frame(frame, site="hospital", **OPTIONS)
    apart = {name: part.drop(columns="hospital") for name, part in frame.groupby("hospital")}
    same(whole, fedxl.from_frame(apart, **OPTIONS))
    same(whole, fedxl.from_frame(pa.Table.from_pandas(frame, preserve_index=False), site="hospital", **OPTIONS))


def test_a_column_called_site_stays_a_feature():
    parts = {name: rows(60).assign(site=np.arange(60.0)).drop(columns="hospital") for name in ("a", "b")}
    splits = fedxl.from_frame(parts, **OPTIONS)
    assert splits.names == ("a", "b")
    assert "site" in [column.name for column in splits.preparation.columns]


def test_fit_takes_it_whole_and_keeps_the_preparation(tmp_path):
    splits = fedxl.from_frame(rows(), site="hospital", **OPTIONS)
    width = splits.train.x.shape[1]
    torch.manual_seed(0)
    algorithm = fedxl.FeDXL1(fedxl.auroc(), lr=0.1)
    result = fedxl.fit(nn.Linear(width, 1), splits, algorithm, rounds=5, local_steps=4, device="cpu", out=tmp_path)
    assert result.metrics["test"]["auroc"] > 0.7
    assert set(result.scores["test"].by_site()) == {"north", "south"}
    kept = json.loads((tmp_path / "preparation.json").read_text())
    assert Preparation.from_json(kept) == splits.preparation
    assert fedxl.advise(splits).facts.sites == 2


MISTAKES = {
    "no frame": (lambda f: ([1, 2], {}), "frame must be a data frame, not a list"),
    "no frame of a site": (lambda f: ({"north": 3}, {"site": ""}), "'north' must be a data frame, not an int"),
    "no sites": (lambda f: (f, {"site": ""}), "site must name the column with the sites; or give a dict"),
    "sites twice": (lambda f: ({"north": f}, {}), "site is for one data frame; of a dict, the names are the sites"),
    "nobody": (lambda f: ({}, {"site": ""}), "a federation needs at least one site"),
    "another label": (lambda f: (f, {"label": "findings"}), "(label) 'findings'; did you mean 'finding'"),
    "another positive": (lambda f: (f, {"positive": "ill"}), "positive is 'ill', which never occurs"),
    "no positive": (lambda f: (f, {"positive": None}), "say which one is positive: positive = 'sick' or 'well'"),
    "three labels": (lambda f: (f.assign(finding=["a", "b", "c"] * 40), {}), "a label has two values"),
    "one name for many": (lambda f: (f, {"drop": "age"}), "drop must be a list of columns' names, such as ['age']"),
    "columns that differ": (
        lambda f: ({"a": f, "b": f.drop(columns="age")}, {"site": ""}),
        "'b' lacks the column 'age'",
    ),
    "types that differ": (
        lambda f: ({"a": f, "b": f.assign(age="old")}, {"site": ""}),
        "the data frames differ in a column",
    ),
    "objects": (lambda f: (f.assign(age=[[1], {}] * 60), {}), "frame cannot be read"),
    "columns twice": (lambda f: (pd.concat([f, f[["age"]]], axis=1), {}), "frame cannot be read: Duplicate"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_is_one_line(mistake):
    frame, options = MISTAKES[mistake][0](rows())
    with pytest.raises(UserError) as error:
        fedxl.from_frame(frame, **{"site": "hospital", **OPTIONS, **options})
    assert MISTAKES[mistake][1] in str(error.value)
    assert "/" not in str(error.value), "no path of a temporary file"

"""Several label columns of a table: what arrays with the same labels come to, and rubbish in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedxl
from fedxl import UserError
from fedxl.config.experiment import Config, build_model, build_risk, execute, load_data
from fedxl.data.check import check, inspect_table
from fedxl.data.examples import UNKNOWN
from fedxl.data.tables.prepare import Preparation
from fedxl.data.tables.roles import TableOptions
from fedxl.data.tables.summary import Summary
from fedxl.data.tables.table import load_preparation, read_new, table
from fedxl.errors import RefusedError
from fedxl.training.settings import Hooks
from tests.data.tables import SITES, frame

pytest.importorskip("pyarrow", reason="needs fedxl[table]")
LABELS = ("mass", "nodule", "edema")
QUIET = Hooks(say=lambda line: None)


def labelled(rows: int = 240) -> pd.DataFrame:
    """The usual table with three findings; site b has never looked for the second, and cells are missing."""
    rng, data = np.random.default_rng(3), frame(rows).drop(columns=["sick", "patient"])
    for number, name in enumerate(LABELS):
        data[name] = (data.age + 5 * rng.normal(size=rows) > 50 + 4 * number).astype(float)
        data.loc[rng.random(rows) < 0.1, name] = np.nan
    data.loc[data.site == "b", "nodule"] = np.nan
    data["part"] = np.where(np.arange(rows) % 4 == 3, "test", np.where(np.arange(rows) % 4 == 2, "val", "train"))
    return data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    labelled().to_csv(tmp_path / "all.csv", index=False)
    return tmp_path / "all.csv"


def settings(path: Path, **changes: Any) -> dict[str, Any]:
    return {"name": "table", "path": str(path), "label": list(LABELS), "site": "site", "split": "part", **changes}


def experiment(path: Path, risk_labels: Any = LABELS, **changes: Any) -> Config:
    return Config(
        data=settings(path, **changes),
        model={"name": "mlp", "hidden": [4]},
        risk={"name": "pauc", "labels": risk_labels},
        algorithm={"name": "fedxl2", "lr": 0.2},
        run={"rounds": 2, "local_steps": 2, "batch1": 6, "batch2": 6, "device": "cpu", "executor": "loop"},
    )


def arrays(data: pd.DataFrame) -> np.ndarray:
    return np.where(data[list(LABELS)].isna(), -1, data[list(LABELS)]).astype(np.int64)


def test_labels_are_those_of_the_file_row_by_row(path):
    data, splits = labelled(), load_data(experiment(path))
    for word, split in (("val", splits.validation), ("test", splits.test)):
        rows = [int(row) - 1 for row in split.row]
        assert sorted(rows) == np.flatnonzero(data.part == word).tolist()
        np.testing.assert_array_equal(split.y.numpy(), arrays(data)[rows])
    for site, part in zip(SITES, splits.train.parts, strict=True):
        mine = data[(data.site == site) & (data.part == "train")]
        np.testing.assert_array_equal(splits.train.y[torch.as_tensor(part)].numpy(), arrays(mine))
    assert splits.preparation.labels == LABELS
    assert not {*LABELS} & {column.name for column in splits.preparation.columns}
    assert Preparation.from_text(splits.preparation.to_text()) == splits.preparation


def test_training_on_a_table_is_training_on_its_arrays(path):
    found = execute(experiment(path), hooks=QUIET)
    splits = load_data(experiment(path))
    rows = [torch.as_tensor(part) for part in splits.train.parts]
    clients = [(splits.train.x[part], splits.train.y[part]) for part in rows]
    held = {name: (split.x, split.y) for name, split in (("validation", splits.validation), ("test", splits.test))}
    algorithm = fedxl.FeDXL2(fedxl.several(fedxl.partial_auc(), LABELS), lr=0.2)
    network = build_model(experiment(path), splits.train.shape, build_risk(experiment(path)))
    expected = fedxl.fit(
        network, clients, algorithm, rounds=2, local_steps=2, batch_size=6, device="cpu", executor="loop",
        hooks=QUIET, **held,
    )  # fmt: skip
    for name, tensor in expected.weights.params.items():
        assert torch.equal(found.weights.params[name], tensor)
    assert found.metrics["test"] == expected.metrics["test"]
    assert found.scores["test"].labels == found.form.labels == LABELS


def test_splits_that_are_drawn_have_rows_of_every_kind(path):
    """A row with any positive label is positive: the draw takes the same share of both kinds at each site."""
    data = labelled()
    splits = load_data(experiment(path, split="", drop=["part"]))
    any_positive = (arrays(data) == 1).any(1)
    rows = np.array([int(row) - 1 for row in splits.test.row])
    for site in SITES:
        for kind in (True, False):
            here = (data.site == site).to_numpy() & (any_positive == kind)
            assert abs(here[rows].sum() - 0.2 * here.sum()) <= 1


def test_words_and_data_frames(path):
    data, wanted = labelled(), load_data(experiment(path))
    told = data.assign(**{name: data[name].map({1.0: "yes", 0.0: "no"}) for name in LABELS})
    found = fedxl.from_frame(told, label=LABELS, positive="yes", site="site", split="part")
    assert torch.equal(found.train.y, wanted.train.y)
    assert torch.equal(found.test.x, wanted.test.x)
    assert (found.preparation.positive, found.preparation.negative) == ("yes", "no")


def test_new_rows_are_read_with_the_labels_they_have(path, tmp_path):
    made, data = load_data(experiment(path)).preparation, labelled(40)
    data.drop(columns="nodule").to_csv(tmp_path / "new.csv", index=False)
    expected = arrays(data)
    expected[:, 1] = -1
    np.testing.assert_array_equal(read_new(made, tmp_path / "new.csv").y, expected)
    data.drop(columns=list(LABELS)).to_csv(tmp_path / "new.csv", index=False)
    assert (read_new(made, tmp_path / "new.csv").y == UNKNOWN).all()
    data.assign(mass="perhaps").to_csv(tmp_path / "new.csv", index=False)
    with pytest.raises(UserError, match=r"'mass' holds 'perhaps'; the model knows '1' and '0', and empty cells"):
        read_new(made, tmp_path / "new.csv")


def test_a_table_with_several_labels_is_inspected(path):
    options = TableOptions(label=LABELS, site="site", split="part")
    assert inspect_table(str(path), options).problems == []
    found = check(load_data(experiment(path)))
    data = labelled()
    for site, count in zip(SITES, found.by_site["test"], strict=True):
        here = arrays(data[(data.site == site) & (data.part == "test")])
        assert count == (len(here), (here == 1).any(1).sum())


@pytest.mark.parametrize(
    ("change", "options", "line"),
    [
        (lambda t: t, {"label": ["mass", "mass"]}, "two labels have the same name"),
        (lambda t: t, {"label": []}, "labels must be 1 to"),
        (lambda t: t, {"label": ["mass", "masses"]}, "'masses'"),
        (lambda t: t, {"columns": ["age", "mass"]}, "columns names 'mass', which has another role"),
        (lambda t: t, {"query": "ward"}, "with query, a label is one column of grades"),
        (lambda t: t.assign(mass=2), {}, "columns 'mass', 'nodule', 'edema' holds '0', '1', '2'"),
        (lambda t: t.assign(mass=t.mass.fillna(-1)), {}, "hold '-1'; leave a label's cell empty"),
        (lambda t: t.assign(mass=np.arange(len(t)) + 1e3), {}, "holds '0', '1', '1000'"),
        (lambda t: t.assign(**dict.fromkeys(LABELS, 1)), {}, "a label has two values"),
        (lambda t: t, {"positive": "yes"}, "positive is 'yes', which never occurs"),
    ],
)
def test_rubbish_is_told_in_one_line(tmp_path, change, options, line):
    change(labelled()).to_csv(tmp_path / "all.csv", index=False)
    with pytest.raises(UserError, match=line):
        load_data(experiment(tmp_path / "all.csv", **options))


def test_labels_must_be_those_of_the_risk_in_order(path, tmp_path):
    with pytest.raises(UserError, match=r'in the same order: labels = \["mass", "nodule", "edema"\]'):
        execute(experiment(path, ["nodule", "mass", "edema"]), hooks=QUIET)
    kept = tmp_path / "preparation.json"
    kept.write_text(load_data(experiment(path)).preparation.to_text())
    again = table(str(path), TableOptions(label=LABELS, site="site", split="part", preparation=str(kept)))
    assert again.preparation == load_preparation(kept)
    with pytest.raises(
        UserError, match="the preparation is for the labels 'mass', 'nodule', 'edema', and the table has"
    ):
        table(str(path), TableOptions(label=LABELS[::-1], site="site", split="part", preparation=str(kept)))


def test_a_hostile_preparation_is_refused():
    made = {"columns": [{"kind": "number", "name": "age", "mean": 0.0, "scale": 1.0}], "image": None, "form": 1}
    for labels in (["age"], ["a", "a"], [""], ["x"] * 5000, ["x" * 1000], "mass", [1]):
        with pytest.raises(UserError, match="cannot read the preparation"):
            Preparation.from_json({**made, "labels": labels})
    with pytest.raises(UserError, match="one label or several"):
        Preparation.from_json({**made, "label": "sick", "labels": ["mass"]})


def test_a_hostile_summary_is_refused():
    """Of several labels a row may have none, so that there are more rows than examples; never fewer."""

    def told(labels: Any, rows: int = 10) -> str:
        about = {"label": "", "positive": "1", "negative": "0", "labels": labels}
        return json.dumps({"rows": rows, "columns": {"age": ["numbers", 10, 0, 1.0, 1.0]}, "about": about})

    assert Summary.from_json(told(["mass", "nodule"]), 10).about["labels"] == ["mass", "nodule"]
    assert Summary.from_json(told(["mass", "nodule"], 12), 10).rows == 12
    with pytest.raises(RefusedError, match="its summary is of 10 rows"):
        Summary.from_json(told(["mass"]), 11)
    for labels in ("mass", [1], ["x" * 1000], ["x"] * 2, list(map(str, range(5000))), {"mass": 1}, None):
        with pytest.raises(RefusedError, match="says of its label cannot be read"):
            Summary.from_json(told(labels), 10)
    with pytest.raises(RefusedError, match="a column that is its label"):
        Summary.from_json(told(["mass", "age"]), 10)

"""Files in LETOR's format, against scikit-learn's reader; queries over clients; hostile files."""

from __future__ import annotations

import runpy

import numpy as np
import pytest
from sklearn.datasets import load_svmlight_file
from torch import nn

import fedxl
from fedxl import UserError
from fedxl.config.experiment import execute, load_data, read
from fedxl.data.sets.own import LetorOptions, letor
from fedxl.data.tables.roles import TableOptions
from fedxl.data.tables.table import table, unfitted
from studies.retrieval import digits
from tests.examples.test_examples import EXAMPLES

RNG = np.random.default_rng(0)


def write(path, queries=range(20), items=6, features=5, seed=0):
    """Items whose first feature says how relevant they are; some features are left out."""
    rng, lines = np.random.default_rng(seed), ["# a comment", ""]
    for query in queries:
        for item in range(items):
            grade = int(rng.integers(0, 4))
            numbers = [1, *(1 + np.flatnonzero(rng.random(features - 1) < 0.7) + 1)]
            pairs = " ".join(f"{number}:{grade if number == 1 else rng.normal():.4f}" for number in numbers)
            lines.append(f"{grade} qid:{query} {pairs} # doc {item}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_items_are_those_of_scikit_learns_reader(tmp_path):
    path = write(tmp_path / "train.txt")
    splits = letor(str(path), LetorOptions(validation=0.0, test=0.0, standardise=False))
    x, y, query = load_svmlight_file(str(path), query_id=True)
    train = splits.train
    np.testing.assert_allclose(train.x.numpy(), x.toarray(), atol=1e-6)
    assert train.y[:, 0].tolist() == y.tolist()
    assert train.group.tolist() == query.tolist()
    assert splits.validation is splits.test is None
    scaled = letor(str(path), LetorOptions(validation=0.0, test=0.0)).train.x.numpy()
    np.testing.assert_allclose(scaled, (x.toarray() - x.toarray().mean(0)) / x.toarray().std(0), atol=1e-5)


def test_a_query_is_in_one_split(tmp_path):
    splits = letor(str(write(tmp_path / "train.txt")), LetorOptions(seed=1))
    each = [set(part.tolist()) for part in (splits.train.group, splits.validation.group, splits.test.group)]
    assert [len(part) for part in each] == [12, 4, 4]
    assert len(set.union(*each)) == 20


def test_queries_or_items_are_spread_over_clients(tmp_path):
    path = str(write(tmp_path / "train.txt"))
    whole = letor(path, LetorOptions(clients=3)).train
    held = [set(whole.group.numpy()[part].tolist()) for part in whole.parts]
    assert [len(queries) for queries in held] == [4, 4, 4]
    assert len(set.union(*held)) == 12
    apart = letor(path, LetorOptions(clients=3, scatter="items")).train
    for part in apart.parts:
        assert np.bincount(apart.group.numpy()[part], minlength=20).max() == 2
    assert sorted(np.concatenate(apart.parts)) == list(range(72))


def test_each_file_is_a_client_and_a_query_may_be_in_two(tmp_path):
    for name in ("north", "south"):
        write(tmp_path / f"{name}.txt", range(5), seed=len(name))
    write(tmp_path / "held.dat", range(3), features=7)
    held = str(tmp_path / "held.dat")
    splits = letor(str(tmp_path / "*.txt"), LetorOptions(validation_path=held, test_path=held))
    assert splits.names == ("north", "south")
    assert [len(set(splits.train.group.numpy()[part].tolist())) for part in splits.train.parts] == [5, 5]
    assert splits.train.x.shape == (60, 7), "as many features as any file has"
    assert splits.validation.x.shape == (18, 7)


def test_a_config_trains_on_it(tmp_path):
    config = tmp_path / "ranking.toml"
    config.write_text(
        f'[data]\nname = "letor"\npath = "{write(tmp_path / "train.txt")}"\nclients = 2\nscatter = "items"\n'
        '[risk]\nname = "listwise"\nqueries = 2\n[algorithm]\nname = "fedxl2"\nlr = 0.5\n[model]\nname = "linear"\n'
        "[run]\nrounds = 5\nlocal_steps = 4\nbatch1 = 4\nbatch2 = 8\neval_every = 1\n"
    )
    result = execute(read(config))
    assert result.metrics["test"]["ndcg@5"] > 0.9, "one feature is the grade"


def test_the_example_makes_files_that_its_config_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "make_queries.py"), run_name="__main__")
    splits = load_data(read(EXAMPLES / "ranking.toml"))
    train, parts = splits.train, splits.train.parts
    assert len(parts) == 5
    assert len(train) == 3000
    held = [set(train.group.numpy()[part].tolist()) for part in parts]
    assert len(set.union(*held)) == 100
    assert sum(map(len, held)) > 400, "most archives have items of a query"
    assert splits.validation.x.shape == (40 * 30, 64)
    expected = digits(np.random.default_rng(0))[0]
    order = np.concatenate([np.flatnonzero(expected.kinds == archive) for archive in range(5)])
    np.testing.assert_allclose(train.x.numpy(), expected.x[order], atol=1e-4)
    assert train.y[:, 0].tolist() == expected.grades[order].tolist()


WRONG = {
    "x qid:1 1:2": "the grade must be a whole number up to 30, found 'x'",
    "31 qid:1 1:2": "the grade must be a whole number",
    "-1 qid:1 1:2": "the grade must be a whole number",
    "1 1:2 2:3": "names no query",
    "1": "names no query",
    "1 qid:a 1:2": "qid must be a whole number",
    "1 qid:99999999999999999999999 1:2": "qid must be a whole number",
    "1 qid:1 2:1 1:2": "numbered from 1 upwards, found 1 after 2",
    "1 qid:1 0:1": "numbered from 1 upwards",
    "1 qid:1 5000:1": "number of a feature must be a whole number up to 4,096",
    "1 qid:1 1:nan": "feature 1 is 'nan', which is no number",
    "1 qid:1 1:1_0": "which is no number",
    "1 qid:1 1:1e39": "which is no number",
    "1 qid:1 1": "which is no number",
    "1 qid:1 1:ä": "not plain ASCII",
    "1 qid:1": "holds no features",
    "# nothing": "holds no items",
    "1 qid:1 1:" + "1" * 2**20: "has more than",
}


@pytest.mark.parametrize("line", list(WRONG), ids=lambda line: line[:20])
def test_a_wrong_line_is_named(line, tmp_path):
    path = tmp_path / "wrong.txt"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=WRONG[line]) as caught:
        letor(str(path))
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 400


def test_settings_that_cannot_be(tmp_path):
    path = str(write(tmp_path / "train.txt", range(4)))
    for build, told in (
        (lambda: letor(path, LetorOptions(scatter="rows")), "unknown scatter"),
        (lambda: LetorOptions(clients=-1), "clients must lie"),
        (lambda: letor(path, LetorOptions(validation=0.1)), "too few to draw validation queries"),
        (lambda: letor(path, LetorOptions(clients=5)), "no item of client"),
        (lambda: letor(""), "path must name a file"),
        (lambda: letor(str(tmp_path / "none.txt")), "cannot read"),
    ):
        with pytest.raises(UserError, match=told):
            build()


def test_a_table_names_the_query_of_each_row(tmp_path):
    """The same items as a table with a column of queries; a query may be at two sites, and stays in one split."""
    rows = ["city,query,grade,size"]
    for query in "abcdefghij":
        rows += [
            f"{city},{query},{grade},{grade + RNG.normal():.3f}" for city in ("n", "s") for grade in (0, 2, 1, 0)
        ]
    path = tmp_path / "items.csv"
    path.write_text("\n".join(rows))
    splits = table(str(path), TableOptions(label="grade", site="city", query="query"))
    train = splits.train
    assert train.x.shape[1] == 1
    assert sorted(set(train.y[:, 0].tolist())) == [0, 1, 2]
    each = [set(part.tolist()) for part in (train.group, splits.validation.group, splits.test.group)]
    assert [len(part) for part in each] == [6, 2, 2]
    assert len(set.union(*each)) == 10
    north, south = (set(train.group.numpy()[part].tolist()) for part in splits.train.parts)
    assert north == south == each[0]
    risk = fedxl.listwise(queries=2)
    result = fedxl.fit(nn.Linear(1, 1), splits, fedxl.FeDXL2(risk), rounds=2, local_steps=2, batch_size=4)
    assert "ndcg@10" in result.metrics["test"]
    for options in ({"group": "city"}, {"positive": 1}):
        with pytest.raises(UserError, match="leave group and positive out"):
            TableOptions(query="query", **options)
    for label, told in (("city", "a label is a grade from 0 to 30"), ("size", "a label is a grade")):
        with pytest.raises(UserError, match=told):
            table(str(path), TableOptions(label=label, query="query"))
    raw = unfitted(str(path), TableOptions(label="grade", site="city", query="query"))
    validation = raw.held_back(raw.fitted())["validation"]
    assert validation.group.tolist() == splits.validation.group.tolist(), "a server's own table keeps them"

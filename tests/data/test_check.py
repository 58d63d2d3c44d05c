"""`check`: what would make training wrong is found where it was put, and nothing where there is nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedxl.data import digits
from fedxl.data.check import Count, Findings, check, inspect_table
from fedxl.data.examples import Examples, Splits
from fedxl.data.inputs import as_splits, from_times
from fedxl.data.tables.roles import TableOptions
from fedxl.data.tables.table import table


def drawn(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=generator), torch.arange(count) % 2


def good() -> Splits:
    clients = {"north": drawn(10, 1), "south": drawn(20, 2)}
    return as_splits(clients, validation={"north": drawn(6, 3), "south": drawn(8, 4)}, test=drawn(12, 5))


def test_counts_by_site_and_split():
    found = check(good())
    assert (found.problems, found.remarks) == ([], [])
    assert found.counts == {"train": Count(30, 15), "validation": Count(14, 7), "test": Count(12, 6)}
    assert found.by_site == {"train": [Count(10, 5), Count(20, 10)], "validation": [Count(6, 3), Count(8, 4)]}
    told = found.to_json()
    assert told["sites"][1] == {
        "name": "south",
        "train": {"examples": 20, "positives": 10},
        "validation": {"examples": 8, "positives": 4},
    }
    assert told["train"] == {"examples": 30, "positives": 15}


def test_columns_of_a_few_examples_tell_no_label():
    x, y = torch.eye(2).repeat(4, 1), torch.arange(8) % 2
    assert "follows from" not in " ".join(check(as_splits([(x, y)])).remarks)
    assert "follows from" in " ".join(check(as_splits([(x, y), (x, y)])).remarks)


def test_the_digits_are_fit_to_train_on():
    assert check(digits()).problems == []


def with_labels(splits: Splits, label: int) -> Splits:
    return splits._replace(train=replace(splits.train, y=torch.full_like(splits.train.y, label)))


def with_x(splits: Splits, change) -> Splits:
    x = splits.train.x.clone()
    change(x)
    return splits._replace(train=replace(splits.train, x=x))


def copied(splits: Splits, into: str) -> Splits:
    """The first two examples of the second site, in another split."""
    x, y = splits.train.x[10:12], splits.train.y[10:12]
    held = getattr(splits, into)
    return splits._replace(**{into: Examples(torch.cat([held.x, x]), torch.cat([held.y, y]))})


def test_what_would_make_training_wrong():
    splits = good()
    validation, other = splits.validation, Examples(torch.randn(5, 3), torch.arange(5)[:, None] % 2)
    endless = replace(validation, x=validation.x / 0)
    cases = {
        "no training example is positive": with_labels(splits, 0),
        "no training example is negative": with_labels(splits, 1),
        "1 training examples hold NaN or infinity": with_x(splits, lambda x: x[3].fill_(float("nan"))),
        "14 validation examples hold NaN or infinity": splits._replace(validation=endless),
        "validation holds one class only": splits._replace(validation=replace(validation, y=validation.y * 0)),
        "test holds examples of shape [3], training of [4]": splits._replace(test=other),
        "2 of 14 test examples are in train, too: #12 = south #0, #13 = south #1": copied(splits, "test"),
    }  # fmt: skip
    for told, wrong in cases.items():
        problems = check(wrong).problems
        assert len(problems) == 1, (told, problems)
        assert told in problems[0]


def test_what_is_worth_a_look():
    splits = good()
    cases = {
        "2 of 16 validation examples are in train, too": copied(splits, "validation"),
        "there are no test data": splits._replace(test=None),
        "no validation data: the last round is the result": splits._replace(validation=None),
        "test holds one class only": splits._replace(test=replace(splits.test, y=splits.test.y * 0)),
        "validation holds one class only at north, so it cannot judge a model there": splits._replace(
            validation=replace(splits.validation, y=splits.validation.y * (torch.arange(14)[:, None] > 5))
        ),
        "1 column is constant in training: 'column 2'": with_x(splits, lambda x: x[:, 2].fill_(7)),
        "follows from 'column 1' alone": with_x(splits, lambda x: x[:, 1].copy_(5 - splits.train.y[:, 0])),
        "1 training examples are at more than one site": with_x(splits, lambda x: x[0].copy_(x[20])),
        "1 training examples repeat another one of their own site": with_x(splits, lambda x: x[0].copy_(x[5])),
    }
    for told, odd in cases.items():
        found = check(odd)
        assert found.problems == []
        assert [line for line in found.remarks if told in line], (told, found.remarks)


def test_a_column_that_numbers_rows_may_be_their_id(tmp_path):
    pytest.importorskip("pyarrow", reason="needs fedxl[table]")
    rows = "".join(f"{n},{n % 50},{n / 3},{n % 2}\n" for n in range(120))
    (tmp_path / "t.csv").write_text("case,age,size,sick\n" + rows)
    found = inspect_table(str(tmp_path / "t.csv"), TableOptions(label="sick"))
    assert list(found.remarks) == ["column 'case' differs in every row: if it identifies rows, name it: id = 'case'"]


def test_constant_columns_of_a_table_are_called_by_their_names(tmp_path):
    """A network's inputs are in another order than the columns: numbers, gaps, categories."""
    pytest.importorskip("pyarrow", reason="needs fedxl[table]")
    rows = [f"{'abc'[n % 3]},7,{'' if n % 4 else n},same,{'no' if n % 2 else 'yes'},{n % 2}" for n in range(120)]
    (tmp_path / "t.csv").write_text("\n".join(["word,still,age,one,well,sick", *rows]))
    splits = table(str(tmp_path / "t.csv"), TableOptions(label="sick", rare=1))
    found = check(splits)
    assert found.facts["constant_columns"] == ["still", "one"]
    assert "the label of every training example follows from 'well' alone" in " ".join(found.remarks)
    places = splits.preparation.places()
    assert places[:3] == [[3, 4, 5, 6], [0], [1, 2]], "the age, and whether it is missing, before the words"


def test_a_site_alone_may_hold_one_class():
    found = check(with_labels(good(), 0), whole=False)
    assert found.problems == []
    assert "no training example is positive" in found.remarks


def test_coarse_rows_coincide_by_chance_and_that_is_no_problem():
    generator = torch.Generator().manual_seed(0)

    def coarse(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(0, 2, (count, 3), generator=generator).float(), torch.arange(count) % 2

    found = check(as_splits([coarse(50), coarse(50)], validation=coarse(30), test=coarse(30)))
    assert found.problems == []
    assert "30 of 30 test examples are in train, too; probably by chance: 100% of" in found.remarks[0]


def test_blank_images_and_images_of_other_types():
    pixels = torch.randint(1, 255, (20, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels[4] = 9
    y = torch.arange(20)[:, None] % 2
    # The same image as bytes in training and as floats in the test data.
    test = Examples(pixels[:3].float() / 255, y[:3])
    found = check(Splits(Examples(pixels[:10], y[:10]), Examples(pixels[10:], y[10:]), test))
    assert "1 training images have one colour" in found.remarks
    assert [line for line in found.problems if "3 of 3 test examples are in train, too" in line]


def test_findings_without_data_are_json_too():
    empty = Findings(["cannot read the image a.png"])
    assert empty.to_json()["problems"] == ["cannot read the image a.png"]


@pytest.mark.parametrize("count", [1, 2])
def test_tiny_clients_are_checked(count):
    x, y = drawn(count, 0)
    assert check(as_splits([(x, y)])).counts["train"] == Count(count, count // 2)


def test_a_text_among_numbers_is_a_remark(tmp_path):
    rows = "".join(f"{i % 9},{'ab'[i % 2]},{i % 7 if i % 10 else 'unknown'},{i % 2}\n" for i in range(100))
    (tmp_path / "t.csv").write_text("n,w,age,y\n" + rows)
    found = inspect_table(str(tmp_path / "t.csv"), TableOptions(label="y")).remarks
    assert found == [
        "column 'age' holds numbers, but also 'unknown': all of it counts as categories; correct it, or name it in "
        "categorical"
    ]
    assert not inspect_table(str(tmp_path / "t.csv"), TableOptions(label="y", categorical=("age",))).remarks


def test_of_time_to_event_only_events_must_be_there():
    def splits(events, held):
        clients = {"a": (np.arange(8.0).reshape(4, 2), [1, 2, 3, 4], events)}
        return from_times(clients, validation=(np.ones((2, 2)), [1, 2], held), test=(np.ones((2, 2)), [1, 3], held))

    whole = check(splits([1, 1, 1, 1], [1, 1]))
    assert whole.timed
    said = [*whole.problems, *whole.remarks]
    assert not any("class" in line or "negative" in line for line in said), "nobody needs to be censored"
    nobody = check(splits([0, 0, 0, 0], [0, 0]))
    none = " ".join([*nobody.problems, *nobody.remarks])
    for told in (
        "no training example has an event",
        "validation holds no event, so it cannot",
        "test holds no event",
    ):
        assert told in none

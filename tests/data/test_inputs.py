"""Clients' data in every form that `fit` takes give the same federation; every mistake is one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from fedxl.data.examples import Examples, Splits
from fedxl.data.inputs import as_splits, from_arrays
from fedxl.errors import UserError

pd = pytest.importorskip("pandas")

X = np.random.default_rng(0).integers(-9, 9, size=(12, 5)).astype(np.float32)
Y = np.arange(12) % 2
FRAME = pd.DataFrame(X, columns=list("abcde"))
LABELS = pd.Series(Y)
TEXTS = ["sick" if label else "well" for label in Y]


class Items(Dataset):
    """A Dataset of whatever a function of the index gives."""

    def __init__(self, item: Callable[[int], Any], count: int = 12) -> None:
        self.item, self.count = item, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index >= self.count:
            raise IndexError
        return self.item(index)


class Endless(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(5), 1)])


class Unmeasured(Dataset):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(5), 1


def own(index: int) -> tuple[torch.Tensor, int]:
    return torch.from_numpy(X[index]), int(Y[index])


FORMS: dict[str, Any] = {
    "tensors": (torch.from_numpy(X), torch.from_numpy(Y)),
    "arrays": (X, Y),
    "a data frame": (FRAME, LABELS),
    "a frame of both": (FRAME, pd.DataFrame({"y": Y})),
    "a frame with nullable numbers": (FRAME.astype("Float64"), LABELS.astype("Int64")),
    "lists": (X.tolist(), Y.tolist()),
    "a list of tensors": (list(torch.from_numpy(X)), list(torch.from_numpy(Y))),
    "features with a gradient": (torch.from_numpy(X).requires_grad_(), Y),
    "integers": (X.astype(np.int64), Y),
    "small integers": (X.astype(np.int8), Y),
    "another byte order": (X.astype(">f4"), Y.astype(">i8")),
    "a view backwards": (X[::-1][::-1], Y[::-1][::-1]),
    "long doubles": (X.astype(np.longdouble), Y),
    "floats of 8 bits": (torch.from_numpy(X).to(torch.float8_e4m3fn), Y),
    "-1 and 1": (X, 2 * Y - 1),
    "booleans": (X, Y.astype(bool)),
    "floats": (X, Y.astype(np.float64)),
    "a column of labels": (X, Y[:, None]),
    "a TensorDataset": TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
    "a Subset": Subset(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), range(12)),
    "a Dataset": Items(own),
    "a part of a Dataset": Subset(Items(own), list(range(12))),
    "Datasets in a row": ConcatDataset([Items(own, 6), Subset(Items(own), range(6, 12))]),
    "a Dataset of arrays": Items(lambda index: (X[index], Y[index])),
}


@pytest.mark.parametrize("form", list(FORMS))
def test_every_form_gives_the_same_examples(form):
    federation = from_arrays([FORMS[form], FORMS[form]])
    assert torch.equal(federation.x.double(), torch.from_numpy(np.concatenate([X, X])).double())
    assert not federation.x.requires_grad
    assert federation.y[:, 0].tolist() == [*Y, *Y]
    assert [part.tolist() for part in federation.parts] == [list(range(12)), list(range(12, 24))]


LABELLED: dict[str, tuple[Any, Any]] = {
    "texts": (TEXTS, "sick"),
    "an array of texts": (np.array(TEXTS), "sick"),
    "categories": (pd.Series(TEXTS, dtype="category"), "sick"),
    "other numbers": (Y + 1, 2),
    "the other way round": (1 - Y, 0),
    "booleans the other way round": (Y == 0, False),
}


@pytest.mark.parametrize("form", list(LABELLED))
def test_which_label_is_positive_is_said_once(form):
    labels, positive = LABELLED[form]
    splits = as_splits([(X, labels)], positive, validation=(X, labels))
    assert splits.train.y[:, 0].tolist() == splits.validation.y[:, 0].tolist() == Y.tolist()


def test_clients_with_one_class_have_the_label_of_the_others():
    federation = from_arrays({"north": (X[:2], ["sick", "sick"]), "south": (X[:2], ["well", "well"])}, "sick")
    assert federation.y[:, 0].tolist() == [1, 1, 0, 0]


def test_names_of_clients_go_with_their_data():
    held = {"south": (X[:3], Y[:3]), "north": (X[3:5], Y[3:5])}
    splits = as_splits({"north": (X, Y), "south": (X, Y), 7: (X, Y)}, validation=held, test=[(X, Y)] * 3)
    assert splits.names == ("north", "south", "7")
    # In the order of the clients, whatever the order of what is held back.
    assert splits.validation.site.tolist() == [0, 0, 1, 1, 1]
    assert torch.equal(splits.validation.x, torch.from_numpy(np.concatenate([X[3:5], X[:3]])))
    assert splits.test.site.tolist() == [0] * 12 + [1] * 12 + [2] * 12


def test_splits_and_federations_pass_as_they_are():
    splits = as_splits({"north": (X, Y)}, validation=(X, Y))
    assert splits.validation.site is None
    again = as_splits(splits, test=Examples(torch.from_numpy(X), torch.from_numpy(Y)[:, None]))
    assert again.names == ("north",)
    assert again.validation is splits.validation
    assert again.test is not None
    assert as_splits(splits.train) == Splits(splits.train)


def test_numbers_of_different_precision_meet():
    assert from_arrays([(X, Y), (X.astype(np.int64), Y)]).x.dtype == torch.float32
    assert from_arrays([(X, Y), (X.astype(np.float64), Y)]).x.dtype == torch.float64
    assert from_arrays([(X.astype(np.int16), Y), (X.astype(np.int64), Y)]).x.dtype == torch.int64
    assert from_arrays([(X > 0, Y)]).x.dtype == torch.float32


def test_images_of_pillow_become_bytes_channels_first():
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, size=(12, 4, 6, 3), dtype=np.uint8)
    colour = from_arrays([Items(lambda index: (image.fromarray(pixels[index]), int(Y[index])))])
    assert torch.equal(colour.x, torch.from_numpy(pixels).permute(0, 3, 1, 2))
    grey = from_arrays([Items(lambda index: (image.fromarray(pixels[index, ..., 0]), int(Y[index])))])
    assert torch.equal(grey.x, torch.from_numpy(pixels[:, None, :, :, 0]))
    assert float(grey.fetch(torch.tensor([0])).max()) <= 1
    for item, told in (
        (lambda index: (image.new("RGBA", (4, 4)), 0), "item 0 is an image of mode RGBA; convert it to L or RGB"),
        (lambda index: (image.new("L", (4 + index, 4)), 0), "item 1 is torch.uint8 of shape"),
    ):
        with pytest.raises(UserError, match=told):
            from_arrays([Items(item)])


def used() -> Any:
    empty = iter([(X, Y)])
    next(empty)
    return empty


CLIENTS: dict[str, tuple[Any, str]] = {
    "one Dataset": (FORMS["a TensorDataset"], "clients is one Dataset; give one for each client"),
    "one Dataset of one's own": (Items(own), "clients is one Dataset; give one for each client"),
    "a DataLoader": (DataLoader(Items(own)), "clients is a DataLoader; give its Dataset, loader.dataset"),
    "DataLoaders": ([DataLoader(Items(own))], "client 0 is a DataLoader; give its Dataset"),
    "a data frame": (FRAME, "clients is one data frame; use fit(model, fedxl.from_frame("),
    "data frames": ([FRAME], "client 0 is a data frame; give a pair (x, y), or use fedxl.from_frame"),
    "a column": (LABELS, "client 0 must be a pair (x, y) or a torch Dataset, not an int"),
    "a dict of x and y": ({"x": X, "y": Y}, "clients is one dict of 'x', 'y'; clients must be a list with one pair"),
    "a dict without labels": ({"north": X}, "client 'north' must be a pair (x, y) or a torch Dataset, not a ndarray"),
    "a dict of dicts": ({"north": {"x": X}}, "client 'north' must be a pair (x, y)"),
    "a pair": ((X, Y), "clients is one pair (x, y)"),
    "a list of x and one of y": (([X, X], [Y, Y]), "clients is a list of x and a list of y; give list(zip(xs, ys))"),
    "a name that controls a terminal": ({"a\x1b[2J": (X, Y)}, "a client's name has at most 200 printable characters"),
    "a name too long": ({"a" * 201: (X, Y)}, "a client's name has at most 200 printable characters"),
    "a pair of lists": (
        (X.tolist(), Y.tolist()),
        "client 0 must be a pair (x, y) or a torch Dataset, not a list of 12",
    ),
    "a tensor": (torch.from_numpy(X), "clients must be a list with one pair (x, y)"),
    "nothing": (None, "clients must be a list with one pair (x, y) or torch Dataset for each client, or a dict"),
    "a number": (3, "not an int"),
    "a path": ("data.csv", "not a str"),
    "a network": (torch.nn.Linear(5, 1), "not a Linear; the order is fit(model, clients, algorithm)"),
    "nobody": ([], "a federation needs at least one client"),
    "a generator read before": (used(), "a generator that was read before is empty: give a list"),
    "three things": ([(X, Y, Y)], "client 0 must be a pair (x, y) or a torch Dataset, not a tuple of 3"),
    "other shapes": ([(X, Y), (X[:, :3], Y)], "clients hold examples of different shapes: [[3], [5]]"),
    "bytes and floats": ([(X, Y), (X.astype(np.uint8), Y)], "different types: torch.float32, torch.uint8"),
    "two of one name": ({1: (X, Y), "1": (X, Y)}, "two clients have the same name among '1', '1'"),
    "no name": ({" ": (X, Y)}, "a client's name must not be empty"),
    "columns in another order": (
        [(FRAME, LABELS), (FRAME[list("bacde")], LABELS)],
        "client 1 has other columns than the clients before, or in another order",
    ),
    "three labels": ([(X, TEXTS), (X, ["ill"] * 12)], "client 0: labels are 'sick', 'well'; say which value"),
    "an IterableDataset": ([Endless()], "client 0 is an IterableDataset, which cannot be indexed"),
    "a Dataset without length": ([Unmeasured()], "its Dataset has no length; define __len__"),
    "an empty Dataset": ([Items(own, 0)], "client 0 has no examples; leave it out or give it some"),
    "a Dataset of dicts": ([Items(lambda i: {"x": X[i]})], "item 0 of its Dataset must be a pair (x, y), not a dict"),
    "a Dataset of other shapes": (
        [Items(lambda i: (X[i][: 3 + i], 0))],
        "item 1 is torch.float32 of shape [4], item 0",
    ),
    "a Dataset of texts": (
        [Items(lambda i: ("a.png", 0))],
        "item 0: examples must be a tensor, an array or a data frame, not a str",
    ),
    "three tensors": ([TensorDataset(*[torch.zeros(3, 2)] * 3)], "must hold two tensors, x and y, not 3"),
}


@pytest.mark.parametrize("mistake", list(CLIENTS))
def test_a_mistake_in_the_clients_is_one_line(mistake):
    clients, told = CLIENTS[mistake]
    with pytest.raises(UserError) as error:
        from_arrays(clients)
    assert told in str(error.value)


PAIRS: dict[str, tuple[Any, Any, str]] = {
    "labels first": (Y, X, "examples and labels seem exchanged; give (x, y), the labels last"),
    "no labels": (X, None, "labels must be an array, a tensor or a list, not None"),
    "no examples": (None, Y, "examples must be a tensor, an array or a data frame, not None"),
    "one-hot labels": (X, np.eye(2)[Y], "got shape [12, 2]; they look one-hot: give y.argmax(1)"),
    "two labels each": (X, np.ones((12, 2)), "labels must be one number per example, got shape [12, 2]"),
    "too few labels": (X, Y[:5], "12 examples but 5 labels"),
    "NaN for labels": (X, np.where(Y, np.nan, 0), "6 of 12 labels are missing; drop these examples"),
    "missing texts": (X, ["sick", None] * 6, "6 of 12 labels are missing"),
    "missing nullable numbers": (X, pd.Series([1, None] * 6, dtype="Int64"), "6 of 12 labels are missing"),
    "three labels": (
        X,
        np.arange(12) % 3,
        "labels must be 0 or 1 (or -1 and 1), found 2; for other values, say which",
    ),
    "unknown labels": (X, np.arange(12) % 3 - 1, "labels are -1, 0 and 1; leave out those that are unknown"),
    "texts": (X, TEXTS, "labels are 'sick', 'well'; say which value is positive, once: positive='sick'"),
    "complex labels": (X, torch.from_numpy(Y) + 0j, "labels are complex numbers"),
    "sparse labels": (X, torch.from_numpy(Y).to_sparse(), "labels are sparse; give y.to_dense()"),
    "ragged labels": (X, [[0], [1, 1]], "labels must be one value for each example"),
    "a generator of labels": (X, (y for y in Y), "labels must be an array, a tensor or a list, not a generator"),
    "a number": (X, 1, "labels must be an array, a tensor or a list, not an int"),
    "complex numbers": (torch.from_numpy(X) + 0j, Y, "examples are complex numbers; give real ones"),
    "complex arrays": (X + 0j, Y, "examples must be numbers, not complex"),
    "objects": (X.astype(object), Y, "examples must be numbers, not Python objects"),
    "words": (X.astype(str), Y, "examples must be numbers, not texts"),
    "dates": (X.astype("M8[D]"), Y, "examples must be numbers, not dates"),
    "a sparse tensor": (torch.from_numpy(X).to_sparse(), Y, "examples are sparse; give x.to_dense()"),
    "nowhere": (torch.from_numpy(X).to("meta"), Y, "on the device 'meta', which holds no numbers"),
    "a masked array": (np.ma.masked_greater(X, 3), Y, "examples are a masked array; fill in what is masked"),
    "ragged rows": ([[1, 2], [3]], [0, 1], "examples must be arrays of numbers, all of one shape"),
    "ragged tensors": ([torch.zeros(2), torch.zeros(3)], [0, 1], "examples have different shapes: [2], [3]"),
    "a single column": (X[:, 0], Y, "examples must be rows of features or images, got shape [12]"),
    "paths": ("x.npy", "y.npy", "examples must be a tensor, an array or a data frame, not a str"),
    "NaN": (np.where(X > 5, np.nan, X), Y, "examples hold NaN or infinity; drop or impute them"),
    "a column of words": (
        FRAME.assign(sex="f"),
        LABELS,
        "column 'sex' holds no numbers; drop or encode them, or give all",
    ),
    "categories": (FRAME.assign(sex=pd.Categorical(["m", "f"] * 6)), LABELS, "column 'sex' holds no numbers"),
    "a column of dates": (FRAME.assign(day=pd.Timestamp(0)), LABELS, "column 'day' holds no numbers"),
    "gaps": (FRAME.assign(b=pd.array([1, None] * 6, dtype="Int64")), LABELS, "column 'b' holds missing values"),
    "a column twice": (pd.concat([FRAME, FRAME[["a"]]], axis=1), LABELS, "the data frame has two columns 'a'"),
    "no columns": (FRAME[[]], LABELS, "the data frame has no columns"),
    "another index": (FRAME, LABELS[::-1], "x and y have different indexes, so their rows may not match"),
}


@pytest.mark.parametrize("mistake", list(PAIRS))
def test_a_mistake_in_a_pair_is_one_line(mistake):
    x, y, told = PAIRS[mistake]
    with pytest.raises(UserError) as error:
        from_arrays([(x, y)])
    assert str(error.value).startswith("client 0")
    assert told in str(error.value)


def test_a_sparse_matrix_of_scipy_is_told():
    sparse = pytest.importorskip("scipy.sparse")
    with pytest.raises(UserError, match=r"examples are a sparse matrix; give x.toarray\(\)"):
        from_arrays([(sparse.csr_matrix(X), Y)])


@pytest.mark.parametrize(
    ("labels", "positive", "told"),
    [
        ([TEXTS], "ill", "labels are 'sick', 'well', and positive is 'ill', which is not one of them"),
        ([["well"] * 12], "ill", "no label is 'ill'; they are 'well'"),
        ([Y], "sick", "positive is 'sick', but labels are 0, 1"),
        ([TEXTS], 1, "positive is 1, but labels are 'sick', 'well'"),
        ([TEXTS], ["sick"], "positive must be one value of the labels, not a list"),
        ([[*TEXTS[:11], "fine"]], "sick", "labels are 'fine', 'sick', 'well'; they must be two values"),
        ([TEXTS, ["ill"] * 12], "sick", "the same two values everywhere"),
    ],
)
def test_a_mistake_in_positive_is_one_line(labels, positive, told):
    with pytest.raises(UserError) as error:
        from_arrays([(X, y) for y in labels], positive)
    assert told in str(error.value)


HELD: dict[str, tuple[Any, str]] = {
    "a client that is not there": ({"west": (X, Y)}, "validation has data of 'west', and no client is called that"),
    "nothing by name": ({}, "validation is empty; leave it out"),
    "too many": ([(X, Y)] * 3, "validation is a list of 3, but there are 2 clients"),
    "a DataLoader": (DataLoader(Items(own)), "validation is a DataLoader; give its Dataset"),
    "no labels": (X, "validation must be a pair (x, y) or a torch Dataset, not a ndarray"),
    "other columns": ((FRAME[list("bacde")], LABELS), "validation has other columns than the clients"),
    "texts": ((X, TEXTS), "validation: labels are 'sick', 'well'; say which value is positive"),
    "by name, without labels": ({"north": X}, "validation of north must be a pair (x, y)"),
}


@pytest.mark.parametrize("mistake", list(HELD))
def test_a_mistake_in_held_back_data_is_one_line(mistake):
    data, told = HELD[mistake]
    with pytest.raises(UserError) as error:
        as_splits({"north": (FRAME, LABELS), "south": (FRAME, LABELS)}, validation=data)
    assert told in str(error.value)


@pytest.mark.parametrize("split", ["validation", "test"])
@pytest.mark.parametrize(("one", "other", "third"), [("sick", "well", "unclear"), (2, 1, 7), (1, 0, 0.5)])
def test_a_third_label_in_held_back_data_is_not_negative(split, one, other, third):
    clients = [(X, [one, other] * 6), (X, [one] * 12)]
    assert len(as_splits(clients, positive=one, **{split: (X, [other, one] * 6)}).held_back[split]) == 12
    with pytest.raises(
        UserError, match=f"{split} has the label '?{third}'?, which no client has; drop these examples"
    ):
        as_splits(clients, positive=one, **{split: (X, [third, one] * 6)})

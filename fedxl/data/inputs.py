"""Data as people hold them (tensors, arrays, data frames, lists, Datasets), as `Examples` of one or many clients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from fedxl.data.examples import Examples, Splits
from fedxl.data.targets import Encoder, Label, as_array, dense, encoder, grades, listed, quoted, whole_numbers
from fedxl.errors import UserError, kind_of, printable, require
from fedxl.progress import progress

Pair = tuple[Any, Any]  # x and y: tensors, arrays, data frames or lists
Clients = Mapping[str, Pair | Dataset[Any]] | Iterable[Pair | Dataset[Any]]
# To validate or test on: of nobody in particular, by name, or a list with one for each client.
HeldBack = Examples | Pair | Dataset[Any] | Mapping[str, Pair | Dataset[Any]] | list[Pair | Dataset[Any]]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KINDS = {"O": "Python objects", "U": "texts", "S": "texts", "T": "texts", "M": "dates", "m": "times", "c": "complex"}
LONGEST = 200  # characters of a name
FEW = 4  # shapes that a message lists
MANY = 1000  # items of a Dataset from which on progress is shown
MODES = ("L", "RGB")
ONE_EACH = "clients must be a list with one pair (x, y) or torch Dataset for each client, or a dict of them by name"


class Inputs(NamedTuple):
    x: Tensor  # [n, ...]
    columns: tuple[str, ...] = ()  # of a data frame


def features(x: Any, where: str) -> Inputs:
    """One row for each example, as a tensor on the CPU that needs no gradient. Types stay, as far as torch has them.

    >>> features([[1, 2], [3, 4]], "client 0").x.shape
    torch.Size([2, 2])
    """
    if is_frame(x):
        return _frame(x, where)
    if isinstance(x, (list, tuple)) and len(x) > 0 and all(isinstance(row, Tensor) for row in x):
        shapes = sorted({tuple(row.shape) for row in x})
        told = ", ".join(str(list(shape)) for shape in shapes[:FEW]) + (", ..." if len(shapes) > FEW else "")
        require(len(shapes) == 1, f"{where}: examples have different shapes: {told}")
        x = torch.stack(list(x))
    if isinstance(x, Tensor):
        x = dense(x, f"{where}: examples", "x")
        # Floats of 8 bits torch stores, and hardly computes with.
        odd = x.dtype == torch.bool or (x.is_floating_point() and x.dtype not in FLOATS)
        return Inputs(x.float() if odd else x)
    require(not hasattr(x, "toarray"), f"{where}: examples are a sparse matrix; give x.toarray()")
    right = hasattr(x, "__array__") or isinstance(x, (list, tuple))
    require(right, f"{where}: examples must be a tensor, an array or a data frame, not {kind_of(x)}")
    try:
        array = np.asanyarray(x)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{where}: examples must be arrays of numbers, all of one shape") from None
    require(not isinstance(array, np.ma.MaskedArray), f"{where}: examples are a masked array; fill in what is masked")
    return Inputs(as_tensor(np.asarray(array), f"{where}: examples"))


def is_frame(x: Any) -> bool:
    """Whether it is a table with named columns, as pandas and polars have them."""
    return hasattr(x, "columns") and hasattr(x, "to_numpy")


def as_tensor(array: npt.NDArray[Any], what: str) -> Tensor:
    """An array as a tensor, in a type that torch has."""
    require(array.dtype.kind in "biuf", f"{what} must be numbers, not {KINDS.get(array.dtype.kind, array.dtype)}")
    if array.dtype.kind == "u" and array.itemsize > 1:
        array = array.astype(np.float64 if array.itemsize == 8 else np.int64)
    elif array.dtype.kind == "f" and array.itemsize > 8:
        array = array.astype(np.float64)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the memory may be read-only; nothing writes to it
        tensor = torch.from_numpy(array)
    return tensor.float() if tensor.dtype == torch.bool else tensor


def _frame(frame: Any, where: str) -> Inputs:
    names = tuple(map(str, frame.columns))
    twice = sorted({name for name in names if names.count(name) > 1})
    require(not twice, f"{where}: the data frame has two columns {quoted(twice)}")
    require(len(names) > 0, f"{where}: the data frame has no columns")
    columns = {}
    for name, key in zip(names, frame.columns, strict=True):
        series, kind = frame[key], getattr(frame[key].dtype, "kind", "")
        nullable = hasattr(series.dtype, "na_value") and kind in "biuf" and kind  # of pandas; missing ones are NaN
        columns[name] = np.asarray(series.to_numpy(dtype=np.float64, na_value=np.nan) if nullable else series)
    strange = [name for name, values in columns.items() if values.dtype.kind not in "biuf"]
    advice = "or give all data to fedxl.from_frame, which"
    require(not strange, f"{where}: {_hold(strange)} no numbers; drop or encode them, {advice} encodes categories")
    gaps = [name for name, values in columns.items() if values.dtype.kind == "f" and np.isnan(values).any()]
    require(not gaps, f"{where}: {_hold(gaps)} missing values; fill them in, {advice} does")
    return Inputs(as_tensor(np.stack(list(columns.values()), 1), f"{where}: examples"), names)


def _hold(names: Sequence[str]) -> str:
    return f"column {quoted(names)} holds" if len(names) == 1 else f"columns {quoted(names)} hold"


def as_examples(x: Any, y: Any, where: str, encode: Encoder = encoder()) -> Examples:  # noqa: B008 (a function)
    """Examples in any form that `features` takes, with their labels, checked."""
    x = features(x, where).x
    # Whether what should be labels are rows, and what should be rows are labels.
    shape = None if isinstance(y, Tensor) and y.is_nested else getattr(y, "shape", None)
    exchanged = x.ndim == 1 and shape is not None and len(shape) >= 2 and shape[0] == len(x)
    require(not exchanged, f"{where}: examples and labels seem exchanged; give (x, y), the labels last")
    require(x.ndim >= 2, f"{where}: examples must be rows of features or images, got shape {list(x.shape)}")
    require(len(x) > 0, f"{where} has no examples; leave it out or give it some")
    labels = encode(y, where)
    require(len(x) == len(labels), f"{where}: {len(x)} examples but {len(labels)} labels")
    require(x.numel() > 0, f"{where}: examples of shape {list(x.shape[1:])} hold no numbers")
    found = Examples(x, labels)
    found.require_usable(where)  # labels are as `encode` makes them
    return found


# The data of many clients.


class _Opened(NamedTuple):
    examples: Examples
    columns: tuple[str, ...] = ()
    labels: Any = None  # as they were given


def as_splits(
    clients: Examples | Splits | Clients,
    positive: Label | None = None,
    labels: int = 0,
    validation: HeldBack | None = None,
    test: HeldBack | None = None,
) -> Splits:
    """What `fit` is given, in any form. labels: how many each example has, in columns; 0: one."""
    encode, negative = encoder(positive, labels), set[Any]()
    if isinstance(clients, Splits):
        splits = clients
    elif isinstance(clients, Examples):
        splits = Splits(clients)
    else:
        _require_many(clients)
        names, opened = _open_all(clients, partial(_open, encode=encode))
        found, columns = _joined(opened, names)
        if positive is not None and not labels:
            negative = _negative(found, opened, positive)
        splits = Splits(found, columns=columns)
    for name, data in (("validation", validation), ("test", test)):
        if data is not None:
            held: Any = {name: _held_back(data, name, splits, encode, negative)}
            splits = splits._replace(**held)
    return splits


def from_arrays(clients: Clients, positive: Label | None = None, labels: int = 0) -> Examples:
    """The clients' own data: pairs (x, y) or Datasets, in a list or by name."""
    return as_splits(clients, positive, labels).train


Triple = tuple[Any, Any, Any]  # examples, and two columns: grades and queries, or times and events


def from_queries(
    clients: Mapping[str, Triple] | Sequence[Triple], validation: Triple | None = None, test: Triple | None = None
) -> Splits:
    """The clients of a federation that ranks items within queries: what `fit` takes.

    Args:
        clients: Each has triples (x, grades, queries), in a list or by the clients' names: rows of features, grades
            of relevance (0: not relevant, 1, 2, ...), and the query of each row, a whole number. Rows of one query
            may lie at several clients.
        validation: Such a triple to choose the best round on.
        test: Such a triple to evaluate the chosen model on.
    """
    return _from_triples(clients, validation, test, "grades, queries", ranked)


def from_times(
    clients: Mapping[str, Triple] | Sequence[Triple], validation: Triple | None = None, test: Triple | None = None
) -> Splits:
    """The clients of a federation that learns the time to an event: what `fit` takes.

    Args:
        clients: Each has triples (x, times, events), in a list or by the clients' names: rows of features, times
            from 0 on, and whether the event was then (1) or the example was last seen then, without it (0).
        validation: Such a triple to choose the best round on.
        test: Such a triple to evaluate the chosen model on.
    """
    return _from_triples(clients, validation, test, "times, events", timed)


def _from_triples(
    clients: Mapping[str, Triple] | Sequence[Triple], validation: Triple | None, test: Triple | None, named: str,
    read: Callable[[Any, Any, Any, str], Examples],
) -> Splits:  # fmt: skip
    def opened(data: Any, where: str) -> _Opened:
        right = isinstance(data, (tuple, list)) and len(data) == 3
        require(right, f"{where} must be a triple (x, {named}), not {kind_of(data)}")
        x, first, second = data
        return _Opened(read(x, first, second, where))

    names, held = _open_all(clients, opened)
    later = {"validation": validation, "test": test}
    found = {name: None if data is None else opened(data, name).examples for name, data in later.items()}
    return Splits(_joined(held, names)[0], found["validation"], found["test"])


def ranked(x: Any, y: Any, queries: Any, where: str) -> Examples:
    """Checked examples with their grades and queries."""
    group, found = whole_numbers(queries, where), as_examples(x, y, where, grades)
    require(len(group) == len(found), f"{where}: {len(found)} examples but {len(group)} queries")
    return replace(found, group=torch.from_numpy(group))


def timed(x: Any, times: Any, events: Any, where: str) -> Examples:
    """Checked examples with their times and events."""
    found = as_examples(x, events, where)
    time = as_array(times, where)
    plain = time.ndim == 1 and time.dtype.kind in "biuf" and len(time) == len(found)
    require(plain, f"{where}: times must be {len(found)} numbers, one for each example")
    time = time.astype(np.float64)
    wrong = int((~(np.isfinite(time) & (time >= 0))).sum())
    require(wrong == 0, f"{where}: {wrong} of {len(time)} times are negative or not finite; drop or correct them")
    return replace(found, time=torch.from_numpy(time))


def _held_back(data: Any, where: str, splits: Splits, encode: Encoder, negative: set[Any]) -> Examples:
    """Held-back data: of nobody in particular, or by the clients' names, or a list with one for each of them.

    negative: the clients' other label, if which one is positive was said.
    """
    if isinstance(data, Examples):
        return data
    clients, columns = splits.names, tuple(splits.columns)
    if isinstance(data, Mapping):
        named = {str(name): held for name, held in data.items()}
        strange = [name for name in named if name not in clients]
        require(not strange, f"{where} has data of {quoted(strange)}, and no client is called that")
        require(len(named) > 0, f"{where} is empty; leave it out")
        held = [(name, named[name]) for name in clients if name in named]
    elif isinstance(data, list) and data and all(_is_holder(item) for item in data):
        told = f"{where} is a list of {len(data)}, but there are {len(clients)} clients"
        require(len(data) == len(clients), f"{told}; give one pair (x, y), or one for each client")
        held = list(zip(clients, data, strict=True))
    else:
        held = [("", data)]
    opened = [_open(item, f"{where} of {name}" if name else where, encode) for name, item in held]
    found, own = _joined(opened, tuple(name for name, _ in held))
    more = _others(opened) - negative if negative else set()
    told = f"{where} has the label {listed(np.array([*more], object))}, which no client has"
    require(not more, f"{told}; drop these examples, or merge their label with another")
    told = f"{where} has other columns than the clients, or in another order: give frame[{list(columns)[:3]}...]"
    require(not columns or not own or own == columns, told)
    of = np.array([clients.index(name) for name, _ in held if name], np.int64)
    assert found.site is not None
    return replace(found, site=of[found.site] if len(of) else None, sites=splits.train.sites if len(of) else ())


def _open_all(clients: Any, open: Callable[[Any, str], _Opened]) -> tuple[tuple[str, ...], list[_Opened]]:
    """The clients' names, if they have some, and their data."""
    names = _names(clients) if isinstance(clients, Mapping) else ()
    each = list(clients.values() if isinstance(clients, Mapping) else clients)
    empty = "a federation needs at least one client (a generator that was read before is empty: give a list)"
    require(len(each) > 0, empty)
    return names, [open(data, _called(number, names)) for number, data in enumerate(each)]


def _open(data: Any, where: str, encode: Encoder) -> _Opened:
    _require_no_loader(data, where)
    if isinstance(data, Dataset):
        data = read(data, where)
    if isinstance(data, Examples):
        return _Opened(data, labels=data.y)
    require(not is_frame(data), f"{where} is a data frame; give a pair (x, y), or use fedxl.from_frame")
    many = isinstance(data, (tuple, list))
    told = f"{kind_of(data)} of {len(data)}" if many else kind_of(data)
    require(many and len(data) == 2, f"{where} must be a pair (x, y) or a torch Dataset, not {told}")
    x, y = data
    mine, theirs = getattr(x, "index", None), getattr(y, "index", None)
    if hasattr(mine, "equals") and hasattr(theirs, "equals") and len(x) == len(y):  # of pandas
        same = bool(mine.equals(theirs))  # type: ignore[union-attr]
        require(same, f"{where}: x and y have different indexes, so their rows may not match; give y.loc[x.index]")
    found = features(x, where)
    return _Opened(as_examples(found.x, y, where, encode), found.columns, y)


def _negative(found: Examples, opened: Sequence[_Opened], positive: Label) -> set[Any]:
    """The label that is not positive. Each client has been checked alone; all of them together must agree, too."""
    labels = [as_array(one.labels, "labels").ravel() for one in opened]
    seen = listed(np.concatenate([values[:1000].astype(object) for values in labels]))
    require(bool(found.y.any()), f"no label is {printable(repr(positive), 40)}; they are {seen}")
    others = _others(opened)
    require(len(others) <= 1, f"labels of different clients are {seen}; they must be the same two values everywhere")
    return others


def _others(opened: Sequence[_Opened]) -> set[Any]:
    """The different labels that count as negative. Those of one part are the same."""
    each = ((as_array(one.labels, "labels").ravel(), one.examples.y[:, 0].numpy()) for one in opened)
    return {values[y == 0][:1].tolist()[0] for values, y in each if (y == 0).any()}


def _joined(opened: Sequence[_Opened], names: tuple[str, ...]) -> tuple[Examples, tuple[str, ...]]:
    """All examples in one record, if they are of one kind, and the columns of their data frames."""
    each = [one.examples for one in opened]
    shapes = {one.shape for one in each}
    require(len(shapes) == 1, f"clients hold examples of different shapes: {sorted(map(list, shapes))[:4]}")
    # An array has no names to compare: its columns are taken to be in order.
    columns = next((one.columns for one in opened if one.columns), ())
    for number, one in enumerate(opened):
        same = one.columns in ((), columns)
        require(same, f"{_called(number, names)} has other columns than the clients before, or in another order")
    types = [one.x.dtype for one in each]
    mixed = torch.uint8 in types and len(set(types)) > 1  # bytes are pixels, which other numbers are not
    require(not mixed, f"clients hold examples of different types: {', '.join(sorted({*map(str, types)}))}")
    kind = reduce(torch.promote_types, types)
    x = each[0].x if len(each) == 1 else torch.cat([one.x.to(kind) for one in each])
    groups, times = (
        [found for one in each if (found := getattr(one, name)) is not None] for name in ("group", "time")
    )
    site = np.repeat(np.arange(len(each)), [len(one) for one in each])
    group, time = (torch.cat(found) if found else None for found in (groups, times))
    return Examples(x, torch.cat([one.y for one in each]), site, names, group=group, time=time), columns


def _require_many(clients: Any) -> None:
    """Raises UserError for what is one client's data, or no data at all."""
    _require_no_loader(clients, "clients")
    told = "clients is one Dataset; give one for each client, such as [Subset(dataset, rows) for rows in ...]"
    require(not isinstance(clients, Dataset), told)
    told = 'clients is one data frame; use fit(model, fedxl.from_frame(frame, label="...", site="..."), algorithm)'
    require(not is_frame(clients), told)
    order = "; the order is fit(model, clients, algorithm)" if isinstance(clients, nn.Module) else ""
    arrays = isinstance(clients, (str, bytes, Tensor, np.ndarray))
    require(isinstance(clients, Iterable) and not arrays and not order, f"{ONE_EACH}, not {kind_of(clients)}{order}")
    if isinstance(clients, (tuple, list)) and len(clients) == 2:
        x, y = (len(getattr(item, "shape", None) or ()) for item in clients)
        require(x < 2 or y != 1, f"clients is one pair (x, y); {ONE_EACH}: [(x, y)]")
        if all(isinstance(items, list) for items in clients):
            xs, ys = ([len(getattr(item, "shape", ())) for item in items] for items in clients)
            two_lists = len(xs) == len(ys) > 0 and min(xs) >= 2 and set(ys) == {1}
            require(not two_lists, "clients is a list of x and a list of y; give list(zip(xs, ys))")
    if isinstance(clients, Mapping) and {str(name).lower() for name in clients} <= {"x", "y", "data", "labels"}:
        require(len(clients) == 0, f"clients is one dict of {quoted(list(clients))}; {ONE_EACH}")


def _is_holder(item: Any) -> bool:
    return isinstance(item, Dataset) or (isinstance(item, tuple) and len(item) == 2)


def _names(clients: Mapping[Any, Any]) -> tuple[str, ...]:
    names = tuple(map(str, clients))
    require(len(set(names)) == len(names), f"two clients have the same name among {quoted(names)}")
    require(all(name.strip() for name in names), "a client's name must not be empty")
    odd = next((name for name in names if len(name) > LONGEST or not name.isprintable()), "")
    require(not odd, f"a client's name has at most {LONGEST} printable characters, not '{printable(odd, 40)}'")
    return names


def _called(number: int, names: Sequence[str]) -> str:
    return f"client '{printable(names[number], 60)}'" if names else f"client {number}"


def read(dataset: Dataset[Any], where: str) -> tuple[Tensor, Any]:
    """All (x, y) of a map-style Dataset. Each item is read once: what its transforms draw at random is drawn once.

    PIL images become bytes [channels, height, width]; other items must be tensors or arrays of one shape and type.
    """
    told = f"{where} is an IterableDataset, which cannot be indexed; give a map-style Dataset or a pair (x, y)"
    require(not isinstance(dataset, IterableDataset), told)
    tensors = _tensors(dataset)
    if tensors is not None:
        require(len(tensors) == 2, f"{where}: its TensorDataset must hold two tensors, x and y, not {len(tensors)}")
        return tensors[0], tensors[1]
    try:
        count = len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        raise UserError(f"{where}: its Dataset has no length; define __len__") from None
    require(count > 0, f"{where} has no examples; leave it out or give it some")
    x: Tensor | None = None
    labels = []
    with progress(f"reading {where}", count) if count >= MANY else nullcontext(lambda number: None) as done:
        for index in range(count):
            item = dataset[index]
            pair = isinstance(item, (tuple, list)) and len(item) == 2
            require(pair, f"{where}: item {index} of its Dataset must be a pair (x, y), not {kind_of(item)}")
            example = _example(item[0], f"{where}: item {index}")
            if x is None:
                x = torch.empty((count, *example.shape), dtype=example.dtype)
            told = f"item {index} is {example.dtype} of shape {list(example.shape)}, item 0 {x.dtype} of"
            told = f"{where}: {told} {list(x.shape[1:])}; bring all to one shape and type"
            require(example.shape == x.shape[1:] and example.dtype == x.dtype, told)
            x[index] = example
            one = isinstance(item[1], (Tensor, np.ndarray)) and math.prod(item[1].shape) == 1
            labels.append(item[1].item() if one else item[1])
            done(1)
    assert x is not None
    return x, labels


def _require_no_loader(data: Any, where: str) -> None:
    """Raises UserError for a DataLoader, whose batches and shuffling are the run's own business."""
    told = f"{where} is a DataLoader; give its Dataset, loader.dataset: fit draws its own batches (batch_size=)"
    require(not isinstance(data, DataLoader), told)


def _tensors(dataset: Dataset[Any]) -> tuple[Tensor, ...] | None:
    """The tensors of a TensorDataset, or of a part of one, without a loop over examples."""
    if isinstance(dataset, Subset):
        whole = _tensors(dataset.dataset)
        return None if whole is None else tuple(tensor[torch.as_tensor(dataset.indices)] for tensor in whole)
    return dataset.tensors if type(dataset) is TensorDataset else None


def _example(x: Any, where: str) -> Tensor:
    """An item of a Dataset."""
    if hasattr(x, "getbands") and hasattr(x, "mode"):  # of PIL, which need not be installed
        require(x.mode in MODES, f"{where} is an image of mode {x.mode}; convert it to {' or '.join(MODES)}")
        pixels = np.array(x)
        return torch.from_numpy(pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1)))
    return features(x, where).x

"""The data of many holders in any form that `fit` takes, put together: who they are, and what each holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from fedxl.data.forms import Columns, Label, as_array, as_tensor, features, is_frame, listed, quoted
from fedxl.data.source import TensorSource, checked_tensors
from fedxl.errors import UserError, kind_of, printable, require
from fedxl.progress import progress

LONGEST = 200  # characters of a name
ONE_EACH = "clients must be a list with one pair (x, y) or torch Dataset for each client, or a dict of them by name"


class Holdings(NamedTuple):
    """All examples in one place, and how many of them each holder has, one holder after the other."""

    source: TensorSource
    sizes: list[int]
    names: tuple[str, ...]  # empty: holders have numbers alone
    columns: tuple[str, ...]  # of their data frames

    @property
    def sites(self) -> np.ndarray:
        """The holder of each example."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)


class _Opened(NamedTuple):
    source: TensorSource
    columns: tuple[str, ...]
    labels: Any  # as they were given


def gather(clients: Any, positive: Label | Columns | None = None) -> Holdings:
    """What these clients hold: a mapping from names, or any iterable, of pairs (x, y) or Datasets."""
    _require_many(clients)
    names = _names(clients) if isinstance(clients, Mapping) else ()
    held = list(clients.values() if isinstance(clients, Mapping) else clients)
    require(
        len(held) > 0,
        "a federation needs at least one client (a generator that was read before is empty: give a list)",
    )
    opened = [_open(data, _called(number, names), positive) for number, data in enumerate(held)]
    found = _joined(opened, names)
    if positive is not None and not isinstance(positive, Columns):
        _require_two_values(found, opened, positive)
    return found


def gather_split(data: Any, where: str, clients: Sequence[str], columns: Sequence[str], positive: Any) -> Holdings:
    """Held-back data: of nobody in particular, or by the clients' names, or a list with one for each of them."""
    loader_of(data, where)
    if isinstance(data, Mapping):
        named = {str(name): held for name, held in data.items()}
        strange = [name for name in named if name not in clients]
        require(not strange, f"{where} has data of {quoted(strange)}, and no client is called that")
        require(len(named) > 0, f"{where} is empty; leave it out")
        held = [(name, named[name]) for name in clients if name in named]
    elif isinstance(data, list) and data and all(_is_holder(item) for item in data):
        require(
            len(data) == len(clients),
            f"{where} is a list of {len(data)}, but there are {len(clients)} clients; give one pair (x, y), or one "
            "for each client",
        )
        held = list(zip(clients, data, strict=True))
    else:
        held = [("", data)]
    opened = [_open(item, f"{where} of {name}" if name else where, positive) for name, item in held]
    found = _joined(opened, tuple(name for name, _ in held))
    require(
        not columns or not found.columns or found.columns == tuple(columns),
        f"{where} has other columns than the clients, or in another order: give frame[{list(columns)[:3]}...]",
    )
    return found


def _open(data: Any, where: str, positive: Label | Columns | None) -> _Opened:
    """One holder's data, checked."""
    loader_of(data, where)
    if isinstance(data, Dataset):
        data = read(data, where)
    require(not is_frame(data), f"{where} is a data frame; give a pair (x, y), or use fedxl.from_frame")
    if getattr(data, "_fields", ())[:2] == ("x", "y"):  # a Split
        data = data[:2]
    many = isinstance(data, (tuple, list))
    told = f"{kind_of(data)} of {len(data)}" if many else kind_of(data)
    require(many and len(data) == 2, f"{where} must be a pair (x, y) or a torch Dataset, not {told}")
    x, y = data
    _require_aligned(x, y, where)
    found = features(x, where)
    return _Opened(checked_tensors(found.x, y, where, positive), found.columns, y)


def _require_two_values(found: Holdings, opened: Sequence[_Opened], positive: Label) -> None:
    """Each client has been checked alone; all of them together must agree, too."""
    labels = [as_array(one.labels, "labels").ravel() for one in opened]
    seen = listed(np.concatenate([values[:1000].astype(object) for values in labels]))
    require(bool(found.source.labels.any()), f"no label is {printable(repr(positive), 40)}; they are {seen}")
    encoded = (part.numpy() for part in found.source.labels.split(found.sizes))
    others = {values[int(part.argmin())] for values, part in zip(labels, encoded, strict=True) if (part == 0).any()}
    require(len(others) <= 1, f"labels of different clients are {seen}; they must be the same two values everywhere")


def _joined(opened: Sequence[_Opened], names: tuple[str, ...]) -> Holdings:
    """All examples in one source, if they are of one kind."""
    shapes = {tuple(one.source.x.shape[1:]) for one in opened}
    require(len(shapes) == 1, f"clients hold examples of different shapes: {sorted(shapes)[:4]}")
    # An array has no names to compare: its columns are taken to be in order.
    columns = next((one.columns for one in opened if one.columns), ())
    for number, one in enumerate(opened):
        same = one.columns in ((), columns)
        require(same, f"{_called(number, names)} has other columns than the clients before, or in another order")
    types = [one.source.x.dtype for one in opened]
    mixed = torch.uint8 in types and len(set(types)) > 1  # bytes are pixels, which other numbers are not
    require(not mixed, f"clients hold examples of different types: {', '.join(sorted({*map(str, types)}))}")
    kind = reduce(torch.promote_types, types)
    x = [one.source.x.to(kind) for one in opened]
    labels = [one.source.labels for one in opened]
    joint = TensorSource(x[0] if len(x) == 1 else torch.cat(x), torch.cat(labels))
    return Holdings(joint, [len(one) for one in labels], names, columns)


def _require_many(clients: Any) -> None:
    """Raises UserError for what is one holder's data, or no data at all."""
    loader_of(clients, "clients")
    require(
        not isinstance(clients, Dataset),
        "clients is one Dataset; give one for each client, such as [Subset(dataset, rows) for rows in ...]",
    )
    require(
        not is_frame(clients),
        'clients is one data frame; use fit(model, fedxl.from_frame(frame, label="...", site="..."), algorithm)',
    )
    order = "; the order is fit(model, clients, algorithm)" if isinstance(clients, nn.Module) else ""
    arrays = isinstance(clients, (str, bytes, Tensor, np.ndarray))
    require(isinstance(clients, Iterable) and not arrays and not order, f"{ONE_EACH}, not {kind_of(clients)}{order}")
    require(not _is_one_pair(clients), f"clients is one pair (x, y); {ONE_EACH}: [(x, y)]")
    require(not _is_two_lists(clients), "clients is a list of x and a list of y; give list(zip(xs, ys))")
    if isinstance(clients, Mapping) and {str(name).lower() for name in clients} <= {"x", "y", "data", "labels"}:
        require(len(clients) == 0, f"clients is one dict of {quoted(list(clients))}; {ONE_EACH}")


def _is_one_pair(clients: Any) -> bool:
    """Whether somebody forgot the list around the only client."""
    if not isinstance(clients, (tuple, list)) or len(clients) != 2:
        return False
    x, y = (getattr(item, "shape", None) for item in clients)
    return x is not None and y is not None and len(x) >= 2 and len(y) == 1


def _is_two_lists(clients: Any) -> bool:
    """Whether the pairs are the wrong way in: ([x, x, ...], [y, y, ...])."""
    if not isinstance(clients, (tuple, list)) or len(clients) != 2 or not all(isinstance(c, list) for c in clients):
        return False
    xs, ys = ([len(getattr(item, "shape", ())) for item in items] for items in clients)
    return len(xs) == len(ys) > 0 and min(xs) >= 2 and set(ys) == {1}


def _is_holder(item: Any) -> bool:
    return isinstance(item, Dataset) or (isinstance(item, tuple) and len(item) == 2)


def _require_aligned(x: Any, y: Any, where: str) -> None:
    """Of pandas: rows and labels that belong together have the same index."""
    mine, theirs = getattr(x, "index", None), getattr(y, "index", None)
    if not (hasattr(mine, "equals") and hasattr(theirs, "equals")) or len(x) != len(y):
        return
    same = bool(mine.equals(theirs))  # type: ignore[union-attr]
    require(same, f"{where}: x and y have different indexes, so their rows may not match; give y.loc[x.index]")


def _names(clients: Mapping[Any, Any]) -> tuple[str, ...]:
    names = tuple(map(str, clients))
    require(len(set(names)) == len(names), f"two clients have the same name among {quoted(names)}")
    require(all(name.strip() for name in names), "a client's name must not be empty")
    odd = next((name for name in names if len(name) > LONGEST or not name.isprintable()), "")
    require(not odd, f"a client's name has at most {LONGEST} printable characters, not '{printable(odd, 40)}'")
    return names


def _called(number: int, names: Sequence[str]) -> str:
    return f"client '{printable(names[number], 60)}'" if names else f"client {number}"


MANY = 1000  # items from which on progress is shown
MODES = ("L", "RGB")


def read(dataset: Dataset[Any], where: str) -> tuple[Tensor, Any]:
    """All (x, y) of a map-style Dataset. Each item is read once: what its transforms draw at random is drawn once.

    PIL images become bytes [channels, height, width]; other items must be tensors or arrays of one shape and type.
    """
    require(
        not isinstance(dataset, IterableDataset),
        f"{where} is an IterableDataset, which cannot be indexed; give a map-style Dataset or a pair (x, y)",
    )
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
    shown = progress(f"reading {where}", count) if count >= MANY else nullcontext(lambda number: None)
    with shown as done:
        for index in range(count):
            item = dataset[index]
            pair = isinstance(item, (tuple, list)) and len(item) == 2
            require(pair, f"{where}: item {index} of its Dataset must be a pair (x, y), not {kind_of(item)}")
            example = _example(item[0], f"{where}: item {index}")
            if x is None:
                x = torch.empty((count, *example.shape), dtype=example.dtype)
            require(
                example.shape == x.shape[1:] and example.dtype == x.dtype,
                f"{where}: item {index} is {example.dtype} of shape {list(example.shape)}, item 0 {x.dtype} of "
                f"{list(x.shape[1:])}; bring all to one shape and type",
            )
            x[index] = example
            one = isinstance(item[1], (Tensor, np.ndarray)) and math.prod(item[1].shape) == 1
            labels.append(item[1].item() if one else item[1])
            done(1)
    assert x is not None
    return x, labels


def loader_of(data: Any, where: str) -> None:
    """Raises UserError if it is a DataLoader, whose batches and shuffling are the run's own business."""
    require(
        not isinstance(data, DataLoader),
        f"{where} is a DataLoader; give its Dataset, loader.dataset: fit draws its own batches (batch_size=)",
    )


def _tensors(dataset: Dataset[Any]) -> tuple[Tensor, ...] | None:
    """The tensors of a TensorDataset, or of a part of one, without a loop over examples."""
    if isinstance(dataset, Subset):
        whole = _tensors(dataset.dataset)
        return None if whole is None else tuple(tensor[torch.as_tensor(dataset.indices)] for tensor in whole)
    return dataset.tensors if type(dataset) is TensorDataset else None


def _example(x: Any, where: str) -> Tensor:
    if isinstance(x, Tensor):
        return x.detach()
    if hasattr(x, "getbands") and hasattr(x, "mode"):  # of PIL, which need not be installed
        require(x.mode in MODES, f"{where} is an image of mode {x.mode}; convert it to {' or '.join(MODES)}")
        pixels = np.array(x)
        return torch.from_numpy(pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1)))
    right = hasattr(x, "__array__") or isinstance(x, (list, tuple))
    require(right, f"{where} must be a tensor, an array or a PIL image, not {kind_of(x)}")
    try:
        return as_tensor(np.asarray(x), where)
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, UserError) else UserError(f"{where} must be an array of numbers") from None

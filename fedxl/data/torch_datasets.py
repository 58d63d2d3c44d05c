"""A client's `torch.utils.data.Dataset`, read once into memory."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from fedxl.data.feature_forms import as_tensor
from fedxl.errors import UserError, kind_of, require
from fedxl.progress import progress

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
            labels.append(_label(item[1]))
            done(1)
    assert x is not None
    return x, labels


def loader_of(data: Any, where: str) -> None:
    """One line if it is a DataLoader, whose batches and shuffling are the run's own business."""
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


def _label(y: Any) -> Any:
    """A tensor or an array of one number as that number."""
    one = (isinstance(y, Tensor) and y.numel() == 1) or (isinstance(y, np.ndarray) and y.size == 1)
    return y.item() if one else y

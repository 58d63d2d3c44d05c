"""Data sets by name. Each is a function of its settings that returns `Splits`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedxl.data.arrays import npz
from fedxl.data.chexpert import chexpert
from fedxl.data.cifar import cifar10, cifar100
from fedxl.data.digits import digits
from fedxl.data.federation import Federation, Split, Splits, from_arrays
from fedxl.data.folder import folder
from fedxl.data.letor import letor
from fedxl.data.medmnist import medmnist
from fedxl.data.rawtable import RawTable
from fedxl.data.table import table, unfitted

__all__ = [
    "DATASETS",
    "NAMED",
    "UNFITTED",
    "Federation",
    "Split",
    "Splits",
    "chexpert",
    "cifar10",
    "cifar100",
    "digits",
    "folder",
    "from_arrays",
    "letor",
    "medmnist",
    "npz",
    "table",
]

# Data sets whose examples depend on the training data of all sites: a function that reads them before that is known.
UNFITTED: Mapping[str, Callable[..., RawTable]] = {"table": unfitted}
NAMED = ("table", "folder")  # data sets whose sites have names; `called` names one that is alone
DATASETS: Mapping[str, Callable[..., Splits]] = {
    "digits": digits,
    "table": table,
    "folder": folder,
    "npz": npz,
    "letor": letor,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "medmnist": medmnist,
    "chexpert": chexpert,
}

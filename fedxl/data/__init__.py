"""Data sets by name. Each is a function of its settings that returns `Splits`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedxl.data.examples import Examples, Splits
from fedxl.data.inputs import from_arrays
from fedxl.data.sets.digits import digits
from fedxl.data.sets.hospitals import heart, ist, tcga_brca
from fedxl.data.sets.own import folder, letor, npz
from fedxl.data.sets.published import chexpert, cifar10, cifar100, medmnist
from fedxl.data.tables.rawtable import RawTable
from fedxl.data.tables.table import table, unfitted

__all__ = [
    "DATASETS", "NAMED", "UNFITTED", "Examples", "Splits", "chexpert", "cifar10", "cifar100", "digits", "folder",
    "from_arrays", "heart", "ist", "letor", "medmnist", "npz", "table", "tcga_brca",
]  # fmt: skip
# Data sets whose examples depend on the training data of all sites: a function that reads them before that is known.
UNFITTED: Mapping[str, Callable[..., RawTable]] = {"table": unfitted}
NAMED = ("table", "folder")  # data sets whose sites have names; `called` names one that is alone
DATASETS: Mapping[str, Callable[..., Splits]] = {
    read.__name__: read
    for read in (digits, table, folder, npz, letor, cifar10, cifar100, medmnist, chexpert, ist, heart, tcga_brca)
}

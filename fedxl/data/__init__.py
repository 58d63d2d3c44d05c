"""Data sets by name: each a function from its settings to `Splits`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedxl.data.arrays import npz
from fedxl.data.digits import digits
from fedxl.data.federation import Splits

DATASETS: Mapping[str, Callable[..., Splits]] = {"digits": digits, "npz": npz}

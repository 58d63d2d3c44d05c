"""All algorithms by name. A line here enrols one in the command line and in the shared test suite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fedxl.algorithms.codasca import CODASCA
from fedxl.algorithms.fedxl import FeDXL1, FeDXL2
from fedxl.algorithms.local_pair import SOX, CentralizedSGD, LocalPair
from fedxl.algorithms.local_sgd import LocalSGD
from fedxl.algorithms.protocol import Algorithm

__all__ = [
    "ALGORITHMS",
    "CODASCA",
    "SOX",
    "CentralizedSGD",
    "FeDXL1",
    "FeDXL2",
    "LocalPair",
    "LocalSGD",
    "Method",
]


class Method(NamedTuple):
    build: Callable[..., Algorithm]
    summary: str
    centralized: bool = False  # all data in one place: the reference, not a federated method
    local_pairs: bool = False  # both sides of a pair must be at one client


ALGORITHMS: Mapping[str, Method] = {
    "fedxl1": Method(FeDXL1, "FeDXL for linear outer functions (AUROC), pairs across all clients"),
    "fedxl2": Method(FeDXL2, "FeDXL for any outer function (partial AUC, AP, ...), pairs across all clients"),
    "local_pair": Method(LocalPair, "the same risk over pairs within each client, models averaged", local_pairs=True),
    "local_sgd": Method(LocalSGD, "cross entropy, models averaged (FedAvg)"),
    "codasca": Method(CODASCA, "min-max AUC with control variates"),
    "sgd": Method(CentralizedSGD, "centralised mini-batch SGD for linear outer functions", centralized=True),
    "sox": Method(SOX, "centralised SOX for any outer function", centralized=True),
}

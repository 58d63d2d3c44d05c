"""All algorithms by name. A line here enrols one in the command line and in the shared test suite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedxl.algorithms.codasca import CODASCA
from fedxl.algorithms.descent import Descent
from fedxl.algorithms.fedxl import FeDXL1, FeDXL2
from fedxl.algorithms.level import Level
from fedxl.algorithms.local_pair import SOX, CentralizedSGD, LocalPair
from fedxl.algorithms.local_sgd import LocalSGD
from fedxl.algorithms.pool import Pooling
from fedxl.algorithms.protocol import Algorithm, Phase
from fedxl.errors import kind_of, require, unknown
from fedxl.options import call
from fedxl.risks import XRisk

__all__ = [
    "ALGORITHMS",
    "CODASCA",
    "SOX",
    "Algorithm",
    "CentralizedSGD",
    "Descent",
    "FeDXL1",
    "FeDXL2",
    "Level",
    "LocalPair",
    "LocalSGD",
    "Phase",
    "Pooling",
    "build",
]

ALGORITHMS: Mapping[str, Callable[..., Algorithm]] = {
    "fedxl1": FeDXL1,
    "fedxl2": FeDXL2,
    "local_pair": LocalPair,
    "local_sgd": LocalSGD,
    "codasca": CODASCA,
    "sgd": CentralizedSGD,
    "sox": SOX,
}


def build(name: str, risk: XRisk, **settings: Any) -> Algorithm:
    """An algorithm from its settings by their flat names, as in the [algorithm] table of a config.

    >>> from fedxl import auroc
    >>> build("fedxl1", auroc(), lr=0.5, level="free").lr
    0.5
    """
    require(isinstance(name, str), f"name must be an algorithm's, such as 'fedxl2', not {kind_of(name)}")
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    return call(ALGORITHMS[name], settings, "algorithm", {"risk": risk})

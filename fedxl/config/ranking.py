"""What an experiment needs of sites if it ranks items within queries."""

from __future__ import annotations

from fedxl.algorithms import ALGORITHMS
from fedxl.config.experiment import Config, build_risk
from fedxl.options import accepted
from fedxl.risks import KNOWN_RISKS


def pools_queries(config: Config) -> bool:
    """Whether scores of one query meet across sites. Of risks and algorithms outside fedxl nothing is known."""
    algorithm = ALGORITHMS.get(str(config.algorithm.get("name")))
    if algorithm is None or str(config.risk.get("name")) not in KNOWN_RISKS:
        return False
    return "pool_rounds" in accepted(algorithm) and bool(build_risk(config).queries)

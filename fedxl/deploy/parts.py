"""What server and sites build alike from a run's config: network, risk and algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from fedxl.algorithms import ALGORITHMS
from fedxl.algorithms.protocol import Algorithm
from fedxl.config.experiment import Config, build_model, build_risk
from fedxl.errors import require, unknown
from fedxl.models import Score, scorer
from fedxl.options import call
from fedxl.risks import XRisk
from fedxl.training.problem import DTYPES, Population, Settings, build_algorithm

CPU = torch.device("cpu")


class Parts(NamedTuple):
    run: Settings
    risk: XRisk
    model: nn.Module
    score: Score
    algorithm: Algorithm
    options: Mapping[str, Any]


def build(config: Config, shape: tuple[int, ...], population: Population, device: torch.device = CPU) -> Parts:
    """A network for examples of this shape, and the algorithm that trains it."""
    run = call(Settings, config.run, "run")
    options = dict(config.algorithm)
    name = options.pop("name")
    if name not in ALGORITHMS:
        raise unknown("algorithm", str(name), ALGORITHMS)
    require(not ALGORITHMS[name].centralized, f"{name} wants all data in one place; that is not what sites are for")
    risk = build_risk(config)
    model = build_model(config, shape, risk).to(device, DTYPES[run.dtype])
    score = scorer(model, True, run.precision)
    algorithm = build_algorithm(ALGORITHMS[name], score, risk, population, options, run.weighting)
    return Parts(run, risk, model, score, algorithm, options)

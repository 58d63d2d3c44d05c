"""`fedxl advise`, and the lists `fedxl algorithms`, `risks` and `metrics`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from fedxl.algorithms import ALGORITHMS
from fedxl.cli.output import Overrides
from fedxl.config import experiment as configs
from fedxl.metrics import METRICS
from fedxl.risks import KNOWN_RISKS


def advise(
    config: Annotated[Path, typer.Argument(help="The experiment, a TOML file.")],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: facts, settings, lines and flags.")] = False,
) -> None:
    """Recommend an algorithm, weighting, norm, local steps and learning rate for the sites of a config."""
    found = configs.advise(configs.read(config, overrides or []))
    print(json.dumps(found.as_json(), indent=2) if as_json else found)


def algorithms() -> None:
    """List the algorithms (algorithm.name in a config)."""
    list_summaries(ALGORITHMS)


def risks() -> None:
    """List the risks (risk.name in a config)."""
    list_summaries(KNOWN_RISKS)


def metrics() -> None:
    """List the metrics (run.metrics in a config)."""
    print_table({name + "@LIMIT" * metric.takes_limit: metric.summary for name, metric in METRICS.items()})


def print_table(lines: Mapping[str, str]) -> None:
    width = max(map(len, lines))
    for name, line in lines.items():
        print(f"{name:<{width}}  {line}")


def list_summaries(kinds: Mapping[str, object]) -> None:
    """Each name with the first line of its docstring."""
    print_table({name: (inspect.getdoc(kind) or "").splitlines()[0] for name, kind in kinds.items()})

"""`fedxl data check`: a config's data, looked at before anything is trained on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedxl.config.experiment import Config, advise, load_data
from fedxl.data.check import Findings, Inspected, check, inspect_folder, inspect_table
from fedxl.data.federation import Splits
from fedxl.errors import UserError
from fedxl.options import call
from fedxl.training.advice import Advice

# Of data sets whose files tell more than the examples made of them. Each takes the data set's own settings.
INSPECTORS: Mapping[str, Callable[..., Inspected]] = {"table": inspect_table, "folder": inspect_folder}


def check_data(config: Config, part: Callable[[Splits], Splits] | None = None) -> tuple[Findings, Splits | None]:
    """What is found in the data, and the data themselves, unless their files are so damaged that they cannot be read.

    part: what is looked at, if that is not all data of the federation.
    """
    options = dict(config.data)
    inspector = INSPECTORS.get(options.pop("name", ""))
    seen = call(inspector, options, "data") if inspector else Inspected([], [], {})
    try:
        splits = load_data(config)
        splits = part(splits) if part else splits
    except UserError:
        if not seen.problems:
            raise
        return Findings((), [], [], {}, {}, seen.problems, seen.remarks, seen.facts), None
    return check(splits, seen.problems, seen.remarks, whole=part is None, **seen.facts), splits


def check_config(config: Config) -> tuple[Findings, Advice | None]:
    """What is found in the data, and what fits them, if they can be trained on."""
    findings, splits = check_data(config)
    both = splits is not None and all(
        sum(side) > 0 for side in zip(*(held[:2] for held in splits.train.holdings()), strict=True)
    )
    return findings, advise(config, splits) if both else None


def as_json(findings: Findings, advice: Advice | None) -> dict[str, Any]:
    return findings.to_json() | ({"advice": advice.as_json()} if advice else {})

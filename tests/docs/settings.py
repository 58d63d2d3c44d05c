"""Settings that a page shows, often parts of a file: the readers of the real files take them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedxl.config import experiment as configs
from fedxl.data import DATASETS
from fedxl.deploy.provision.settings import ServerSettings, SiteSettings
from fedxl.experiments.tune import plan
from fedxl.options import call
from fedxl.registry import find
from fedxl.toml import read
from fedxl.training.settings import Settings
from tests.docs.pages import ROOT

WHOLE = configs.read(ROOT / "examples" / "digits.toml")
SHAPE = (3, 8, 8)


def check_settings(text: str, file: Path) -> None:
    """UserError if a setting is unknown, or has a wrong type or value. An example fills in what a part leaves out."""
    file.write_text(text)
    tables = read(file)
    if "server" in tables:
        call(ServerSettings, {"sites": ["a", "b"], **tables.pop("server")}, "server")
    if "site" in tables:
        call(SiteSettings, {"name": "a", **tables.pop("site")}, "site")
    tune = tables.pop("tune", None)
    given = {name: table if "name" in table else {**getattr(WHOLE, name), **table} for name, table in tables.items()}
    whole = replace(WHOLE, **given)
    file.write_text(configs.dump(whole))
    assert configs.read(file).tables() == json.loads(json.dumps(whole.tables()))
    check_experiment(whole)
    if tune is not None:
        file.write_text(text)
        plan.plan(whole, *plan.read(file, {}))


def check_experiment(config: configs.Config) -> None:
    """All of it but the data themselves, which need not be on this machine."""
    name, options = str(config.data["name"]), {key: it for key, it in config.data.items() if key != "name"}
    call(unread(find("data set", name, DATASETS)), options, "data")
    configs.build_algorithm(config)
    settings: Settings = call(Settings, config.run, "run")
    settings.selects_by(configs.build_risk(config))
    configs.build_network(config.model, SHAPE, ())


def unread(load: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes the settings of a data set, and reads nothing."""

    @functools.wraps(load)
    def read_nothing(**options: Any) -> None:
        return None

    return read_nothing

"""What is searched: for each setting a distribution, from the config's [tune.space] or our defaults."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedxl import registry
from fedxl.algorithms import ALGORITHMS
from fedxl.algorithms.step import PairDescent
from fedxl.config.experiment import SECTIONS, Config, Table, build_risk
from fedxl.errors import require, unknown
from fedxl.options import accepted
from fedxl.risks import KNOWN_RISKS
from fedxl.training.settings import Settings

MOST = 1000  # choices of one setting


@dataclass(frozen=True)
class Range:
    """Numbers between two ends: uniform, uniform in the logarithm, or whole."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def at(self, share: float) -> float | int:
        """The number at this share of the way, for a share in [0, 1)."""
        if self.whole:
            return int(self.low) + int(share * (int(self.high) - int(self.low) + 1))
        if self.log:
            return self.rounded(math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low))))
        return self.rounded(self.low + share * (self.high - self.low))

    def rounded(self, value: float) -> float:
        """To four digits, within the ends: more would only be harder to read."""
        return min(max(float(f"{value:.4g}"), float(self.low)), float(self.high))

    def as_json(self) -> Table:
        kind = "whole" if self.whole else "log" if self.log else "uniform"
        return {kind: [self.low, self.high]}


@dataclass(frozen=True)
class Choice:
    """One of several values, all as likely."""

    values: tuple[Any, ...]

    def at(self, share: float) -> Any:
        return self.values[int(share * len(self.values))]

    def as_json(self) -> list[Any]:
        return list(self.values)


Distribution = Range | Choice
Space = dict[str, Distribution]  # by dotted names: "algorithm.lr"


def draw(space: Mapping[str, Distribution], seed: int, algorithm: str, number: int) -> dict[str, Any]:
    """The settings of a trial. They depend on nothing but these arguments, so that a search can be resumed."""
    stream = np.random.default_rng([seed, zlib.crc32(algorithm.encode()), number])
    shares = dict(zip(sorted(space), stream.random(len(space)), strict=True))
    return {name: distribution.at(float(shares[name])) for name, distribution in space.items()}


def parse(value: Any, where: str) -> Distribution:
    """A distribution as TOML says it: a list of values, or {log = [0.01, 1.0]}, uniform or whole."""
    form = (
        f"'{where}' must be a list of values, or {{log = [0.01, 1.0]}}, {{uniform = [0.0, 1.0]}}, {{whole = [1, 64]}}"
    )
    if isinstance(value, list):
        require(1 <= len(value) <= MOST, f"'{where}' must list between 1 and {MOST} values")
        return Choice(tuple(value))
    require(isinstance(value, dict) and len(value) == 1, form)
    (kind, ends), *_ = value.items()
    numbers = isinstance(ends, list) and len(ends) == 2 and all(_number(end) for end in ends)
    require(kind in ("log", "uniform", "whole") and numbers, form)
    low, high = ends
    require(low < high, f"'{where}' must have its smaller end first, got {ends}")
    require(kind != "log" or low > 0, f"'{where}' must lie above 0 to be searched in the logarithm, got {ends}")
    require(
        kind != "whole" or all(isinstance(end, int) for end in ends), f"'{where}' must have whole ends, got {ends}"
    )
    return Range(low, high, log=kind == "log", whole=kind == "whole")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def spaces(config: Config, algorithms: Sequence[str], table: Table) -> dict[str, Space]:
    """What is searched for each algorithm.

    table: [tune.space]. Its tables are sections of a config, for all algorithms that have the setting, and names of
    algorithms with sections in them. Empty: our defaults.
    """
    for name in table:
        if name not in SECTIONS and name not in algorithms:
            raise unknown("table", name, [*SECTIONS, *algorithms], section="tune.space.")
    shared = _flat({name: part for name, part in table.items() if name in SECTIONS}, "tune.space")
    for setting in shared:
        _require_known(setting, algorithms, config, "tune.space.")
    found: dict[str, Space] = {}
    for name in algorithms:
        own = _flat(table.get(name, {}), f"tune.space.{name}")
        for setting in own:
            _require_known(setting, [name], config, f"tune.space.{name}.")
        fitting = {setting: each for setting, each in shared.items() if setting_of(name, config, setting)}
        found[name] = {**fitting, **own} if table else defaults(name, config)
        require(bool(found[name]), f"[tune.space] holds no setting of {name}")
    return found


def _flat(tables: Any, where: str) -> Space:
    require(isinstance(tables, dict), f"'{where}' must be a table of sections, as [{where}.algorithm]")
    found: Space = {}
    for section, table in tables.items():
        if section not in SECTIONS:
            raise unknown("section", section, SECTIONS, section=f"{where}.")
        require(isinstance(table, dict), f"'{where}.{section}' must be a table of settings")
        require(section != "data", f"'{where}.data' would tune on other data; trials must be compared on the same")
        for key, value in table.items():
            fixed = section == "run" and key in ("rounds", "seed", "select", "eval_every")
            require(not fixed, f"'{where}.run.{key}' must be the same in all trials")
            found[f"{section}.{key}"] = parse(value, f"{where}.{section}.{key}")
    return found


def _require_known(setting: str, algorithms: Sequence[str], config: Config, where: str) -> None:
    if any(setting_of(name, config, setting) for name in algorithms):
        return
    section, _, key = setting.partition(".")
    known = {each for name in algorithms for each in (_options(section, name, config) or ())} - {"risk", "name"}
    raise unknown("setting", key, known, section=f"{where}{section}.")


def setting_of(algorithm: str, config: Config, setting: str) -> bool:
    """Whether a run with this algorithm has the setting."""
    section, _, key = setting.partition(".")
    known = _options(section, algorithm, config)
    return known is None or (key in known and key not in ("risk", "name"))


def _options(section: str, algorithm: str, config: Config) -> Mapping[str, Any] | None:
    """What can be set in a section; None: it is checked when the run is built."""
    if section == "algorithm":
        return accepted(registry.find("algorithm", algorithm, ALGORITHMS))
    if section == "run":
        return accepted(Settings)
    if section == "risk" and config.risk["name"] in KNOWN_RISKS:
        return accepted(KNOWN_RISKS[config.risk["name"]])
    return None


RATE = Range(0.003, 3.0, log=True)
SHRINK = Choice((0.0, 1e-4, 1e-3, 1e-2))
WEIGHT = Range(0.05, 1.0, log=True)
LAM = Range(0.3, 5.0, log=True)


def defaults(algorithm: str, config: Config) -> Space:
    """Learning rate and weight decay; where pairs are optimised through estimates u, also gamma, beta and lam."""
    kind = registry.find("algorithm", algorithm, ALGORITHMS)
    found: Space = {"algorithm.lr": RATE, "algorithm.weight_decay": SHRINK}
    pairs = isinstance(kind, type) and issubclass(kind, PairDescent)
    if pairs and not build_risk(config).linear:
        found |= {"algorithm.gamma": WEIGHT, "algorithm.beta": WEIGHT, "risk.lam": LAM}
    return {name: each for name, each in found.items() if setting_of(algorithm, config, name)}

"""What a search does: the settings of [tune], what is searched, and the rungs that trials climb."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedxl import metrics, registry, toml
from fedxl.algorithms import ALGORITHMS
from fedxl.algorithms.step import PairDescent
from fedxl.config.experiment import SECTIONS, TUNE, Config, Table, build_algorithm, build_risk
from fedxl.errors import require, unknown
from fedxl.options import accepted, call
from fedxl.risks import KNOWN_RISKS
from fedxl.training.settings import Settings

Sampler = Literal["random", "halving", "optuna"]
BOUNDS = {"trials": (1, 10_000), "seeds": (1, 100), "eta": (2, 100), "shortest": (1, 10**9), "seed": (0, 2**32)}
FIXED = ("rounds", "seed", "select", "eval_every")  # settings of runs, by which trials are compared
FIRST_SEED = 1000  # of trials: the results that the chosen settings are used for should be of other seeds


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """Section [tune]; the same budget for each algorithm."""

    algorithms: tuple[str, ...] = ()  # whose settings are searched; none: the config's own
    trials: int = 16  # for each algorithm
    seeds: int = 1  # runs of each trial; its value is their mean
    sampler: Sampler = "halving"  # random: all trials to the end; halving: the best of them; optuna: drawn by TPE
    eta: int = 3  # of halving: one in eta trials goes on to eta times as many rounds
    shortest: int = 1  # of halving: rounds of the first rung, at least; too few favour what is good early
    seed: int = 0  # of the search

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            require(low <= value <= high, f"{name} must lie between {low} and {high:,}, got {value}")
        twice = {name for name in self.algorithms if self.algorithms.count(name) > 1}
        require(not twice, f"algorithms names {', '.join(sorted(twice))} twice")


class Rung(NamedTuple):
    """So many trials of each algorithm train up to this round."""

    trials: int
    rounds: int


@dataclass(frozen=True)
class Plan:
    """A search: what is the same when it is resumed."""

    config: Config
    settings: TuneSettings
    spaces: dict[str, Space]  # by algorithm
    metric: str  # of the validation data; "-name": less is better

    @property
    def rungs(self) -> list[Rung]:
        run = call(Settings, self.config.run, "run")
        tune = self.settings
        if tune.sampler != "halving":
            return [Rung(tune.trials, run.rounds)]
        return ladder(tune.trials, run.rounds, tune.eta, run.eval_every, tune.shortest)

    @property
    def budget(self) -> int:
        """Rounds of training for each algorithm, if none of its trials fails."""
        before = [0, *(rung.rounds for rung in self.rungs)]
        climbed = zip(self.rungs, before, strict=False)
        return self.settings.seeds * sum(rung.trials * (rung.rounds - below) for rung, below in climbed)

    def as_json(self) -> Table:
        """What must be the same; more trials may be asked for later, unless they decide who goes on."""
        tune = asdict(self.settings)
        tune.pop("algorithms")
        if self.settings.sampler != "halving":
            tune.pop("trials")
        spaces = self.spaces.items()
        space = {name: {setting: each.as_json() for setting, each in found.items()} for name, found in spaces}
        return {"config": self.config.tables(), "tune": tune, "space": space, "metric": self.metric}

    def configure(self, algorithm: str, chosen: dict[str, Any], run: Table | None = None) -> Config:
        """The config with another algorithm and the settings that a trial has chosen."""
        tables = {name: dict(table) for name, table in self.config.tables().items()}
        tables["algorithm"] = _algorithm(self.config, algorithm)
        tables["run"] |= run or {}
        for setting, value in chosen.items():
            section, _, key = setting.partition(".")
            tables[section][key] = value
        return Config(**tables)


def plan(config: Config, tune: TuneSettings, space: Table) -> Plan:
    """A search, checked before the first run."""
    algorithms = tune.algorithms or (str(config.algorithm["name"]),)
    for name in algorithms:
        registry.find("algorithm", name, ALGORITHMS)
    found = spaces(config, algorithms, space)
    run = call(Settings, config.run, "run")
    first = Config(**{**config.tables(), "algorithm": _algorithm(config, algorithms[0])})
    metric = run.selects_by(build_algorithm(first).risk)
    searched = sorted({setting for each in found.values() for setting in each if setting.startswith("risk.")})
    why = f"trials cannot be compared by their risk, which {', '.join(searched)} changes; set run.select"
    require(metrics.key(metric) != "risk" or not searched, why)
    return Plan(config, tune, found, metric)


def read(path: Path, given: Table) -> tuple[TuneSettings, Table]:
    """Section [tune] of a config, with what the command line gives put in; and its [tune.space]."""
    table = dict(toml.read(path).get(TUNE, {}))
    space = table.pop("space", {})
    require(isinstance(space, dict), "'tune.space' must be a table, [tune.space]")
    return call(TuneSettings, {**table, **given}, TUNE), space


def ladder(trials: int, rounds: int, eta: int, eval_every: int, shortest: int = 1) -> list[Rung]:
    """The rungs of successive halving (Jamieson and Talwalkar 2016): one in eta trials goes on, eta times as long.

    Rungs end at evaluations: they are whole multiples of `eval_every` rounds, except for the last. The first one has
    at least `shortest` rounds.

    >>> ladder(16, 40, 3, 5)
    [Rung(trials=16, rounds=5), Rung(trials=5, rounds=15), Rung(trials=1, rounds=40)]
    >>> ladder(16, 40, 3, 5, shortest=10)
    [Rung(trials=16, rounds=15), Rung(trials=5, rounds=40)]
    >>> ladder(4, 10, 3, 10)
    [Rung(trials=4, rounds=10)]
    """
    found = [Rung(trials, rounds)]
    for power in range(1, 64):
        count = trials // eta**power
        below = eval_every * math.ceil(rounds / eta**power / eval_every)
        if count < 1 or not shortest <= below < found[0].rounds:
            break
        longer = [Rung(max(1, trials // eta ** (i + 1)), rung.rounds) for i, rung in enumerate(found)]
        found = [Rung(trials, below), *longer]
    return found


def _algorithm(config: Config, name: str) -> Table:
    """Its section: of the settings that the config gives another algorithm, those that it has, too."""
    given = config.algorithm
    if given["name"] == name:
        return dict(given)
    return {"name": name, **{key: v for key, v in given.items() if setting_of(name, config, f"algorithm.{key}")}}


MOST = 1000  # choices of one setting


@dataclass(frozen=True)
class Range:
    """Numbers between two ends."""

    low: float
    high: float
    kind: Literal["uniform", "log", "whole"] = "uniform"  # log: uniform in the logarithm

    def at(self, share: float) -> float | int:
        """The number at this share of the way, for a share in [0, 1)."""
        if self.kind == "whole":
            return int(self.low) + int(share * (int(self.high) - int(self.low) + 1))
        if self.kind == "log":
            return self.rounded(math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low))))
        return self.rounded(self.low + share * (self.high - self.low))

    def rounded(self, value: float) -> float | int:
        """To four digits, within the ends: more would only be harder to read. Whole numbers stay as they are."""
        if self.kind == "whole":
            return int(value)
        return min(max(float(f"{value:.4g}"), float(self.low)), float(self.high))

    def as_json(self) -> Table:
        return {self.kind: [self.low, self.high]}


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


def draw(space: Mapping[str, Distribution], seed: int, number: int) -> dict[str, Any]:
    """The settings of a trial. They depend on nothing but these arguments, so that a search can be resumed.

    Each setting has a stream of its own: algorithms that search the same one try the same values of it.
    """
    streams = {name: np.random.default_rng([seed, zlib.crc32(name.encode()), number]) for name in space}
    return {name: distribution.at(float(streams[name].random())) for name, distribution in space.items()}


def parse(value: Any, where: str) -> Distribution:
    """A distribution as TOML says it: a list of values, or {log = [0.01, 1.0]}, uniform or whole."""
    forms = "{log = [0.01, 1.0]}, {uniform = [0.0, 1.0]}, {whole = [1, 64]}"
    form = f"'{where}' must be a list of values, or {forms}"
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
    whole = all(isinstance(end, int) for end in ends)
    require(kind != "whole" or whole, f"'{where}' must have whole ends, got {ends}")
    return Range(low, high, kind)


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
            require(section != "run" or key not in FIXED, f"'{where}.run.{key}' must be the same in all trials")
            found[f"{section}.{key}"] = parse(value, f"{where}.{section}.{key}")
    return found


def _require_known(setting: str, algorithms: Sequence[str], config: Config, where: str) -> None:
    if any(setting_of(name, config, setting) for name in algorithms):
        return
    section, _, key = setting.partition(".")
    known = {each for name in algorithms for each in (_options(section, name, config) or ())}
    raise unknown("setting", key, known, section=f"{where}{section}.")


def setting_of(algorithm: str, config: Config, setting: str) -> bool:
    """Whether a run with this algorithm has the setting."""
    section, _, key = setting.partition(".")
    known = _options(section, algorithm, config)
    return known is None or key in known


def _options(section: str, algorithm: str, config: Config) -> set[str] | None:
    """What can be set in a section; None: it is checked when the run is built."""
    if section == "algorithm":
        return {*accepted(registry.find("algorithm", algorithm, ALGORITHMS))} - {"risk", "name"}
    if section == "run":
        return {*accepted(Settings)}
    if section == "risk" and config.risk["name"] in KNOWN_RISKS:
        return {*accepted(KNOWN_RISKS[config.risk["name"]])} - {"name"}
    return None


RATE = Range(0.003, 3.0, "log")
SHRINK = Choice((0.0, 1e-4, 1e-3, 1e-2))
WEIGHT = Range(0.05, 1.0, "log")
LAM = Range(0.3, 5.0, "log")


def defaults(algorithm: str, config: Config) -> Space:
    """Learning rate and weight decay; where pairs are optimised through estimates u, also gamma, beta and lam."""
    kind = registry.find("algorithm", algorithm, ALGORITHMS)
    found: Space = {"algorithm.lr": RATE, "algorithm.weight_decay": SHRINK}
    pairs = isinstance(kind, type) and issubclass(kind, PairDescent)
    if pairs and not build_risk(config).linear:
        found |= {"algorithm.gamma": WEIGHT, "algorithm.beta": WEIGHT, "risk.lam": LAM}
    return {name: each for name, each in found.items() if setting_of(algorithm, config, name)}

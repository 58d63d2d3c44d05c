"""What a search does: the settings of [tune], the rungs that trials climb, and the identity of a search."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedxl import metrics, registry, toml
from fedxl.algorithms import ALGORITHMS
from fedxl.config.experiment import TUNE, Config, Table, build_algorithm
from fedxl.errors import require
from fedxl.experiments.tune.space import Space, setting_of, spaces
from fedxl.options import call
from fedxl.training.settings import Settings

Sampler = Literal["random", "halving", "optuna"]
BOUNDS = {"trials": (1, 10_000), "seeds": (1, 100), "eta": (2, 100), "shortest": (1, 10**9), "seed": (0, 2**32)}
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
    algorithms: tuple[str, ...]
    spaces: dict[str, Space]
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
        return {
            "config": self.config.tables(),
            "tune": tune,
            "space": {
                name: {setting: each.as_json() for setting, each in space.items()}
                for name, space in self.spaces.items()
            },
            "metric": self.metric,
        }

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
    risk = build_algorithm(_with(config, algorithms[0])).risk
    metric = run.selects_by(risk)
    searched = sorted({setting for each in found.values() for setting in each if setting.startswith("risk.")})
    comparable = metrics.key(metric) != "risk" or not searched
    require(
        comparable, f"trials cannot be compared by their risk, which {', '.join(searched)} changes; set run.select"
    )
    return Plan(config, tune, algorithms, found, metric)


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
        found = [
            Rung(trials, below),
            *(Rung(max(1, trials // eta ** (i + 1)), r.rounds) for i, r in enumerate(found)),
        ]
    return found


def _with(config: Config, algorithm: str) -> Config:
    return Config(**{**config.tables(), "algorithm": _algorithm(config, algorithm)})


def _algorithm(config: Config, name: str) -> Table:
    """Its section: of the settings that the config gives another algorithm, those that it has, too."""
    given = config.algorithm
    if given["name"] == name:
        return dict(given)
    return {"name": name, **{key: v for key, v in given.items() if setting_of(name, config, f"algorithm.{key}")}}

"""`fedxl.tune`: what `fedxl tune` does, for a network, data and an algorithm as `fit` takes them."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedxl import display
from fedxl.algorithms.protocol import Algorithm
from fedxl.config.file import Config
from fedxl.errors import kind_of, require
from fedxl.experiments.compare import Network, network
from fedxl.experiments.tune import outcome
from fedxl.experiments.tune.plan import FIXED, Distribution, Plan, Sampler, Space, TuneSettings, draw, parse
from fedxl.experiments.tune.search import Search, best_of, in_words, ranked, shown
from fedxl.experiments.tune.trials import Trial, require_validation
from fedxl.files import as_path
from fedxl.options import accepted, call, flatten
from fedxl.reporting.notebook import page, write_svg
from fedxl.reporting.page import Row, Table, columns
from fedxl.training.fit import require_algorithm, simulation
from fedxl.training.settings import Settings
from fedxl.training.simulation import Simulation

Tunable = Algorithm | Callable[..., Algorithm]
OF_DATA = ("validation", "test", "positive", "augment")  # arguments of `fit` that the splits hold, once they are made


def tune(
    model: Network,
    clients: Any,
    algorithm: Tunable,
    space: Mapping[str, Any],
    *,
    trials: int = 16,
    seeds: int = 1,
    sampler: Sampler = "halving",
    out: str | Path | None = None,
    **settings: Any,
) -> Tuned:
    """Search settings on validation data, as `fedxl tune` does. Test data are not used.

    Args:
        model: A network, or a function that builds one, which is called with torch's seed set to each run's.
        clients: The data, as for `fit`.
        algorithm: An algorithm whose settings are searched, or a function of the searched settings that returns one,
            such as `lambda lr, lam: fedxl.FeDXL2(fedxl.partial_auc(lam=lam), lr=lr)`.
        space: By setting, of the algorithm by its flat name or of `fedxl.Settings`: a pair `(low, high)`, of whole
            numbers, else in the logarithm if low is above 0; a list of values; or `{"uniform": [0.1, 0.9]}`.
        trials: How many settings are tried.
        seeds: Runs of each trial, to average.
        sampler: halving (the best go on), random (all to the end) or optuna (TPE).
        out: A folder for the trials; the same call continues them. By default nothing is kept.
        settings: What else `fit` takes: validation, batch_size, rounds, ...
    """
    given = {"trials": trials, "seeds": seeds, "sampler": sampler}
    options = call(TuneSettings, given, "tune")
    named = isinstance(space, Mapping) and len(space) > 0
    require(named, "space must name the settings to search, as {'lr': (0.01, 1)}")
    found: Space = {_setting(name): _distribution(value, name) for name, value in space.items()}
    fixed = [name for name in ("out", "resume", "hooks", "progress") if name in settings]
    require(not fixed, f"{', '.join(fixed)}: not for trials")
    work = _Work(model, clients, algorithm, settings)
    first = work.simulation(draw(found, options.seed, 1), {})  # checks all there is to check
    require_validation(first)
    kept = {name: value for name, value in settings.items() if name not in OF_DATA}
    work = _Work(model, first.splits._replace(test=None), algorithm, kept)
    run = {name: getattr(first.problem.settings, name) for name in ("rounds", "eval_every", "seed")}
    about = hashlib.sha256(json.dumps(first.description, sort_keys=True).encode()).hexdigest()[:12]
    name = str(first.description["algorithm.name"])
    config = Config({"name": "given", "digest": about}, {"name": "given"}, {"name": name}, {"name": "given"}, run)
    plan = Plan(config, options, {name: found}, first.problem.select)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) if out is None else as_path(out, "out")
        ended = Search(plan, folder, build=work.build)()
    best = best_of(ended[name])
    require(best is not None, outcome.ALL_FAILED)
    assert best is not None
    return Tuned(work.made_of(best.settings), _of(best.settings, "run"), best, plan, ended[name])


@dataclass(frozen=True)
class _Work:
    """What all trials share."""

    model: Network
    clients: Any
    algorithm: Tunable
    settings: Mapping[str, Any]

    def build(self, config: Config) -> tuple[Simulation, Mapping[str, str]]:
        """A run of a trial: what `trials.built` is for configs."""
        chosen = {f"algorithm.{key}": value for key, value in config.algorithm.items() if key != "name"}
        return self.simulation(chosen, config.run), {}

    def simulation(self, chosen: Mapping[str, Any], run: Mapping[str, Any]) -> Simulation:
        given: dict[str, Any] = {**self.settings, **_of(chosen, "run"), **run}
        start = network(self.model, int(given.get("seed", 0)))
        return simulation(start, self.clients, self.made_of(chosen), lambda line: None, **given)

    def made_of(self, chosen: Mapping[str, Any]) -> Algorithm:
        """The algorithm with these settings."""
        own = _of(chosen, "algorithm")
        if not isinstance(self.algorithm, Algorithm):
            require(callable(self.algorithm), "algorithm must be an algorithm, or a function that returns one")
            risk = (
                inspect.signature(self.algorithm).parameters.get("risk") if isinstance(self.algorithm, type) else None
            )
            told = f"algorithm is {kind_of(self.algorithm)}; give an object, such as FeDXL2(risk), or a function"
            require(risk is None or risk.default is not inspect.Parameter.empty, told)
            found = call(self.algorithm, own, "space")
            require_algorithm(found)
            return found
        flat = {name: value for name, value in flatten(self.algorithm).items() if name != "risk"}
        return call(type(self.algorithm), {**flat, **own}, "space", {"risk": self.algorithm.risk})


def _setting(name: str) -> str:
    """With its section, by which trials know it."""
    require(name not in FIXED, f"'{name}' must be the same in all trials")
    return f"run.{name}" if name in accepted(Settings) else f"algorithm.{name}"


def _of(chosen: Mapping[str, Any], section: str) -> dict[str, Any]:
    return {name.partition(".")[2]: value for name, value in chosen.items() if name.startswith(f"{section}.")}


def _distribution(value: Any, name: str) -> Distribution:
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(end, (int, float)) for end in value):
        kind = "whole" if all(isinstance(end, int) for end in value) else "log" if value[0] > 0 else "uniform"
        value = {kind: list(value)}
    return parse(value, name)


@dataclass(frozen=True, eq=False, repr=False)
class Tuned:
    """What a search came to."""

    algorithm: Algorithm  # with the best settings
    run: Mapping[str, Any]  # those of the best settings that `fit` takes itself
    best: Trial
    plan: Plan
    trials: Sequence[Trial]

    @property
    def table(self) -> list[dict[str, Any]]:
        """A row per trial, the best first and failed ones last: settings, metric, rounds trained, why it failed."""
        ended = ranked(self.trials)
        return [self._row(trial) for trial in (*ended, *(each for each in self.trials if each not in ended))]

    def to_frame(self) -> Any:
        """The table as a data frame of pandas."""
        return display.frame(self.table)

    def _row(self, trial: Trial) -> dict[str, Any]:
        found = outcome.numbers(self.plan, trial)
        settings = {name.partition(".")[2]: value for name, value in trial.settings.items()}
        measured = {self.plan.metric.removeprefix("-"): found["value"]}
        return {"trial": trial.number, **settings, **measured, "rounds": found["rounds"], "failed": found["failed"]}

    def __repr__(self) -> str:
        value = f"validation {shown(self.best.value, self.plan.metric)}"
        return f"{in_words(self.best.settings)}: {value}, the best of {len(self.trials)} trials"

    def _repr_html_(self) -> str:
        rows = [Row.of(*map(_text, each.values())) for each in self.table]
        caption = "Trials, the best first. The best of many looks better on validation data than it is."
        *heads, last = columns(*self.table[0])
        return page(repr(self), [Table(caption, [*heads, last._replace(numeric=False)], rows)])

    def plot(self) -> Drawing:
        """The best metric so far by trial, and the metric against each setting. It needs `fedxl[report]`."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "tune.svg"
            outcome.picture(self.plan, {self.best.algorithm: list(self.trials)}, self.best, path)
            return Drawing(path.read_text(encoding="utf-8"))


@dataclass(frozen=True, repr=False)
class Drawing:
    """A picture that a notebook shows."""

    svg: str

    def __repr__(self) -> str:
        return "Drawing; save(path) writes an SVG file"

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> Path:
        """Write it into an SVG file."""
        return write_svg(path, self.svg)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

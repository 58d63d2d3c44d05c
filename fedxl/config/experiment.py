"""Experiments as TOML: [data], [model], [risk], [algorithm] and [run], each with the options of what it names."""

from __future__ import annotations

import inspect
import json
import math
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedxl import registry, sampling, toml
from fedxl.algorithms import ALGORITHMS
from fedxl.algorithms.protocol import Algorithm, DataFacts
from fedxl.config.file import FILES
from fedxl.config.file import SECTIONS as SECTIONS
from fedxl.config.file import TUNE as TUNE
from fedxl.config.file import Config as Config
from fedxl.config.file import Table as Table
from fedxl.data import DATASETS, UNFITTED
from fedxl.data.check import Findings, check, inspect_folder, inspect_table
from fedxl.data.examples import Splits
from fedxl.data.tables.rawtable import RawTable
from fedxl.errors import UserError, require, unknown
from fedxl.models import LIBRARIES, MODELS, TwoViews, uncompiled, with_parts
from fedxl.models.libraries import library_of
from fedxl.options import accepted, call
from fedxl.risks import KNOWN_RISKS, XRisk, several
from fedxl.training import advice
from fedxl.training.advice import Advice
from fedxl.training.problem import Problem, assemble
from fedxl.training.result import Result
from fedxl.training.settings import Hooks, Settings
from fedxl.training.simulation import Simulation
from fedxl.training.trainer import train

if TYPE_CHECKING:
    from fedxl.engine.ranks.team import Team


def read(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a file, with `section.key=value` overrides put in."""
    tables = toml.read(path, (*SECTIONS, TUNE))
    tables.pop(TUNE, None)
    for override in overrides:
        _override(tables, override)
    for name in ("data", "risk", "algorithm"):
        require("name" in tables.get(name, {}), f"{path} needs a section [{name}] with a name")
    for name, table in tables.items():
        toml.require_plain(table, name)
        require(isinstance(table.get("name", ""), str), f"'{name}.name' must be a text, not {table.get('name')!r}")
    require_settings_in_place(tables)
    return Config(**tables)


def _override(tables: dict[str, Table], text: str) -> None:
    form = "section.key=value, for example algorithm.lr=0.1"
    key, value = parse_assignment(text, form)
    section, dot, name = key.partition(".")
    require(bool(dot and name), f"'{text}' must read {form}")
    if section not in SECTIONS:
        raise unknown("section", section, SECTIONS)
    tables.setdefault(section, {})[name] = value


def parse_assignment(text: str, form: str) -> tuple[str, Any]:
    """`key=value`. Raises UserError, which says the form, for anything else."""
    key, equals, value = text.partition("=")
    require(bool(equals and key.strip()), f"'{text}' must read {form}")
    return key.strip(), toml.parse_value(value)


def dump(config: Config) -> str:
    """The config as TOML; `read` gives the same config back."""
    lines = []
    for section, table in config.tables().items():
        lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in table.items()), ""]
    text = "\n".join(lines)
    assert tomllib.loads(text) == json.loads(json.dumps(config.tables()))
    return text


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)} = {_toml(item)}' for key, item in value.items())}}}"
    # JSON's texts, numbers and booleans are TOML's, too.
    return json.dumps(value, ensure_ascii=False)


def load_data(config: Config) -> Splits:
    """The data set that a config names, or `package.module:function` of your own that returns `Splits`."""
    name, load, options = _named(config.data, "data", DATASETS)
    if draws_from_run_seed(config):
        options["seed"] = config.run.get("seed", 0)
    try:
        splits = call(load, options, "data")
    except OSError as error:  # of whatever the settings name, on whatever disk
        raise UserError(f"[data] cannot read the data: {error}") from error
    registry.require_type(splits, Splits, name)
    return splits  # type: ignore[no-any-return]


def draws_from_run_seed(config: Config) -> bool:
    """Whether what the data set draws, such as a split, follows run.seed: it has a seed, and [data] sets none."""
    _, load, options = _named(config.data, "data", DATASETS)
    return "seed" in accepted(load) and "seed" not in options


def with_files(data: Table) -> Table:
    """[data] of one of our data sets, with those files, too, that it looks for unless others are named."""
    load = DATASETS.get(str(data.get("name")))
    known = inspect.signature(load).parameters if load else {}
    usual = {name: known[name].default for name in FILES if name in known}
    return {**{name: value for name, value in usual.items() if isinstance(value, str) and value}, **data}


def load_unfitted(config: Config) -> RawTable | None:
    """The same data before they are scaled as those of all sites; None if they do not depend on other sites."""
    name, _, options = _named(config.data, "data", DATASETS)
    if name not in UNFITTED or options.get("image") or options.get("preparation"):
        return None
    options.setdefault("seed", config.run.get("seed", 0))
    return call(UNFITTED[name], options, "data")


def build_risk(config: Config) -> XRisk:
    """The risk that a config names, or one of your own: an XRisk, or a function that returns one."""
    name, found, options = _named(
        config.risk, "risk", KNOWN_RISKS, lambda it: callable(it) or isinstance(it, XRisk), "an XRisk, or a function"
    )
    if isinstance(found, XRisk):
        require(not options, f"'{name}' is an XRisk as it is and takes no options, not {', '.join(options)}")
        return found
    own = accepted(found)
    labels = [option for option in options if option in ("labels", "label_weights") and option not in own]
    given = {option: options.pop(option) for option in labels}
    risk = call(found, options, "risk")
    registry.require_type(risk, XRisk, name)
    return call(_with_labels, given, "risk", ours={"risk": risk}) if given else risk


def _with_labels(risk: XRisk, labels: int | Sequence[str], label_weights: Sequence[float] = ()) -> XRisk:
    """labels: how many there are, or their names. label_weights: how much each counts; empty: the same."""
    return several(risk, labels, label_weights)


def build_model(config: Config, shape: tuple[int, ...], risk: XRisk) -> nn.Module:
    """The network of a config; its first weights are drawn from the run's seed."""
    seed = sampling.torch_seed(int(config.run.get("seed", 0)), sampling.Purpose.WEIGHTS)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return build_network(config.model, shape, risk.score_shape, bool(risk.pairing.labels))


def build_network(
    table: Table, shape: tuple[int, ...], score_shape: tuple[int, ...], labels: bool = False
) -> nn.Module:
    """A network by name, or `package.module:factory` of your own; labels: whether its scores are those of labels."""
    name, found, options = _network_named(table)
    known, library = accepted(found), library_of(name)
    own = registry.own(name) and not library
    parts = {each: options.pop(each) for each in accepted(with_parts) if each in options and each not in known}
    views = bool(score_shape) and not labels and not own  # each embedded by the network
    ours: dict[str, Any] = {"shape": shape[1:] if views else shape}
    ours["outputs"] = math.prod(score_shape) // (2 if views else 1)
    if own:
        ours = {each: value for each, value in ours.items() if each in known and each not in options}
    elif library:
        ours["name"] = name.removeprefix(f"{library}:")
    model = call(found, options, "model", ours)  # an error inside one's own factory keeps its traceback
    registry.require_type(model, nn.Module, name)
    model = call(with_parts, parts, "model", ours={"model": uncompiled(model)})
    return TwoViews(model) if views else model


def _network_named(table: Table) -> tuple[str, Callable[..., Any], Table]:
    """The name of a network, what builds it, and its options."""
    table = {"name": "mlp", **table}
    if library := library_of(str(table["name"])):
        return str(table["name"]), LIBRARIES[library], {key: table[key] for key in table if key != "name"}
    return _named(table, "model", MODELS)


def build_algorithm(config: Config) -> Algorithm:
    """The algorithm that a config names, or a class of your own, with its risk and hyper-parameters."""
    name, build, options = _named(config.algorithm, "algorithm", ALGORITHMS)
    require("risk" in accepted(build), f"the algorithm '{name}' must take its risk as the argument 'risk'")
    algorithm: Algorithm = call(build, options, "algorithm", ours={"risk": build_risk(config)})
    right = isinstance(algorithm, Algorithm) and isinstance(algorithm.risk, XRisk)
    require(right, f"'{name}' gave a {type(algorithm).__name__}, not an algorithm with its risk")
    return algorithm


def build_problem(
    config: Config, shape: tuple[int, ...], facts: DataFacts, device: torch.device | None = None
) -> Problem:
    """What server and sites build alike: a network for examples of this shape, and the algorithm that trains it."""
    settings = call(Settings, config.run, "run")  # first: the network is built with the run's seed
    algorithm = build_algorithm(config)
    model = build_model(config, shape, algorithm.risk)
    return assemble(model, algorithm, settings, facts, device)


def simulate(config: Config, announce: Callable[[str], None], test: bool = True, processes: int = 1) -> Simulation:
    """All that a config names, put together and checked: nothing is begun yet, and nothing written.

    test: whether to evaluate on test data in the end; trials of tuning must not. processes: how many run each cohort.
    """
    settings = call(Settings, config.run, "run")
    algorithm = build_algorithm(config)
    splits = load_data(config)
    model = build_model(config, splits.train.shape, algorithm.risk)
    sections = {name: table for name, table in config.tables().items() if name in ("data", "model", "risk")}
    given = splits if test else splits._replace(test=None)
    return Simulation(model, given, algorithm, settings, announce, sections, processes)


def advise(config: Config, splits: Splits | None = None) -> Advice:
    """What fits the federation that a config names, by its counts. splits: its data, if they have been read."""
    settings = call(Settings, config.run, "run")
    _, factory, _ = _network_named(config.model)
    risk, train = build_risk(config), (splits or load_data(config)).train
    found = advice.advise(train, risk, (settings.batch1, settings.batch2), accepted(factory))
    return replace(found, in_toml=True)


def execute(config: Config, out: Path | None = None, resume: bool = False, hooks: Hooks | None = None) -> Result:
    """Run a config from data to result."""
    hooks = hooks or Hooks()
    simulation = simulate(config, hooks.say)
    with simulation.threads():
        return train(simulation, hooks, out, resume, files={} if resume else {"config.toml": dump(config)})


def execute_on(
    team: Team, device: str, config: Config, out: Path | None, resume: bool, hooks: Hooks | None = None
) -> Result:
    """Run a config in one of several processes, on its device. All come to the same result; the first writes it."""
    # Not before it is needed: nothing else loads torch.distributed.
    from fedxl.training.ranked import hooks_on, opening, split_up

    hooks = hooks_on(team, hooks or Hooks())
    here = replace(config, run={**config.run, "device": device, **({} if team.leads else {"track": []})})
    simulation = team.together(lambda: simulate(here, hooks.say, processes=team.size))
    files = {} if resume else {"config.toml": dump(config)}
    return train(split_up(simulation, team, hooks.say), hooks, out, resume, files, opening(team))


def _named(
    table: Table,
    section: str,
    known: Mapping[str, Any],
    right: Callable[[Any], bool] = callable,
    wanted: str = "a function or a class",
) -> tuple[str, Any, Table]:
    """The name in a section, what it stands for, and the other settings, its options."""
    options = dict(table)
    require("name" in options, f"section [{section}] needs a name")
    name = str(options.pop("name"))
    found = registry.find("data set" if section == "data" else section, name, known, right, wanted)
    return name, found, options


# Of data sets whose files tell more than the examples made of them. Each takes the data set's own settings.
INSPECTORS: Mapping[str, Callable[..., Findings]] = {"table": inspect_table, "folder": inspect_folder}


def check_data(config: Config, part: Callable[[Splits], Splits] | None = None) -> tuple[Findings, Splits | None]:
    """What is found in the data, or in a part of them, and the data themselves unless their files cannot be read."""
    options = dict(config.data)
    inspector = INSPECTORS.get(options.pop("name", ""))
    seen = call(inspector, options, "data") if inspector else Findings()
    try:
        splits = load_data(config)
        splits = part(splits) if part else splits
    except UserError:
        if not seen.problems:
            raise
        return seen, None
    return check(splits, seen, whole=part is None), splits


def check_config(config: Config) -> tuple[Findings, Advice | None]:
    """What is found in the data, and what fits them, if they can be trained on."""
    findings, splits = check_data(config)
    both = splits is not None and all(
        sum(side) > 0 for side in zip(*(held[:2] for held in splits.train.holdings()), strict=True)
    )
    return findings, advise(config, splits) if both else None


def check_json(findings: Findings, advice: Advice | None) -> dict[str, Any]:
    return findings.to_json() | ({"advice": advice.as_json()} if advice else {})


TABLES: Mapping[str, Mapping[str, Any]] = {
    "data": DATASETS,
    "model": MODELS,
    "risk": KNOWN_RISKS,
    "algorithm": ALGORITHMS,
}
OURS = {"model": ("model", "shape", "outputs"), "algorithm": ("risk",)}  # filled in, and no settings


def require_settings_in_place(tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises UserError for a setting that its own section does not know, and another one does.

    >>> require_settings_in_place({"algorithm": {"name": "fedxl2"}, "run": {"lr": 0.1}})
    Traceback (most recent call last):
    fedxl.errors.UserError: unknown setting 'run.lr'; lr belongs in [algorithm]
    """
    known = {section: _known(section, tables.get(section, {}).get("name")) for section in (*TABLES, "run")}
    for section, table in tables.items():
        own = known.get(section)
        strange = [key for key in table if own is not None and key != "name" and key not in own]
        for key in strange:
            # Many data sets have a seed or clients of their own; the later sections are the more general ones.
            homes = [other for other, names in known.items() if names is not None and key in names]
            if homes:
                raise UserError(f"unknown setting '{section}.{key}'; {key} belongs in [{homes[-1]}]")


def _known(section: str, name: Any) -> Collection[str] | None:
    """What a section takes; None if that is not known here: of one's own, or of a name that does not exist."""
    if section == "run":
        return set(accepted(Settings))
    named = name or ("mlp" if section == "model" else "")
    build = TABLES[section].get(named) if isinstance(named, str) else None
    more = accepted(with_parts) if section == "model" else ()
    return None if build is None else {*accepted(build), *more} - {*OURS.get(section, ())}

"""The server's side of a run: from the first hello to the model."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fedxl.algorithms.protocol import DataFacts
from fedxl.config.experiment import Config, build_problem, build_risk, load_data, load_unfitted
from fedxl.data.examples import Examples, facts_about
from fedxl.data.tables.prepare import Preparation
from fedxl.data.tables.rawtable import RawTable
from fedxl.deploy import Say
from fedxl.deploy.protocol.envelope import Carrier, RunHeader
from fedxl.deploy.provision.settings import ServerFile
from fedxl.deploy.server.backbone import deliver
from fedxl.deploy.server.directory import Directory, SiteFacts
from fedxl.deploy.server.engine import SiteEngine
from fedxl.deploy.server.examiner import BinsOfRun, SiteExaminer
from fedxl.deploy.server.secure import SecureEngine
from fedxl.errors import UserError, require
from fedxl.files import write_atomically
from fedxl.reporting.text import evaluation_in_words, sites_in_words
from fedxl.training.evaluate import Examiner, HeldBack, check_selection, require_like
from fedxl.training.privacy import require_given
from fedxl.training.problem import (
    Problem,
    check_data,
    check_labels,
    check_queries,
    check_ranked,
    check_timed,
    match_types,
    require_for_sites,
)
from fedxl.training.result import Result
from fedxl.training.rounds import Task
from fedxl.training.run_folder import STATUS, STOPPED_EARLY, Form, Member, is_run, read_run
from fedxl.training.settings import Hooks, Progress, Settings
from fedxl.training.simulation import flattened, frozen_digest
from fedxl.training.trainer import train


def run(server: ServerFile, carrier: Carrier, say: Say) -> Result | None:
    """`serve` as a process of its own does it: it says after each round how far it is."""

    def show(progress: Progress) -> None:
        fresh = progress.record if progress.record and progress.record["round"] == progress.round else {}
        told = evaluation_in_words(fresh, "validation")
        say(f"round {progress.round} of {progress.rounds}{sites_in_words(progress.remarks)}  {told}".rstrip())

    torch.set_num_threads(1)
    return serve(server, carrier, Hooks(show, say))


def serve(server: ServerFile, carrier: Carrier, hooks: Hooks | None = None) -> Result | None:
    """A whole run, from the first hello to the model; goes on from its last checkpoint if there is one.

    None if the run had finished before: then its model goes to sites that lack it, and nothing is tested again.
    """
    hooks = hooks or Hooks()
    settings = server.settings
    # A site keeps its state after two rounds: the server must never have to go back by more.
    config = replace(server.config, run={**server.config.run, "checkpoint_every": 1})
    known = server.out / "sites.json"
    run_id, told = _begun(known)
    own = _own_data(config) if settings.evaluate == "server" else {}  # first: a mistake there shows at the start
    directory = Directory(carrier, settings, hooks.say, told, status=server.out / STATUS)
    directory.wait_for_all()
    made, facts = directory.preparation(), directory.told
    shapes = {each.shape if made is None else (made.width,) for each in facts.values()}
    require(len(shapes) == 1, f"sites hold examples of different shapes: {', '.join(map(str, sorted(shapes)))}")
    shape = shapes.pop()
    weighting, pairing = config.run.get("weighting", "clients"), build_risk(config).pairing
    facts_of_all = facts_about(list(facts.values()), weighting, pairing)
    problem = build_problem(config, shape, facts_of_all, torch.device("cpu"))
    kept = made or directory.images()
    _check_run(problem, str(config.algorithm["name"]), made)
    _check_sites(problem, facts, kept.labels if kept is not None else ())
    # What follows from all sites' data goes to sites only if the algorithm needs it.
    needed = _told(facts_of_all, problem.algorithm.facts_read) if problem.uses_facts else {}
    frozen = frozen_digest(problem.model)
    prepared = made.to_text() if made is not None else ""
    head = RunHeader(run_id, json.dumps(_sections(config)), json.dumps(needed), prepared, **frozen)
    if _has_finished(server.out, problem.settings):
        hooks.say(f"the run in {server.out} has finished; it is neither continued nor tested again")
        if settings.deliver:
            deliver(directory, head, server.out)
        return None
    engine = (SecureEngine if settings.secure else SiteEngine)(directory, problem, head, server.out)
    server.out.mkdir(parents=True, exist_ok=True)
    write_atomically(known, json.dumps({"run": run_id, "sites": directory.facts}, indent=1).encode())
    described = {"sites": settings.sites, "evaluate": settings.evaluate}
    task = Task(
        problem=problem,
        engine=engine,
        examiner=_examiner(engine, config, own, shape, BinsOfRun(server.out / "bins.json", settings.bins), made),
        num_clients=len(facts),
        cohort=problem.settings.cohort,
        plan=engine.plan,
        members=[Member(name, each.positives, each.negatives) for name, each in facts.items()],
        form=Form(shape, problem.settings.dtype, problem.risk.score_shape, labels=problem.label_names),
        description=flattened(
            {**config.tables(), "run": asdict(problem.settings), "server": described, "task": frozen}
        ),
        preparation=kept,  # for predictions on new files
        may_miss=True,
    )
    resuming = any((server.out / name).exists() for name in ("checkpoints", "metrics.jsonl"))
    result = train(task, hooks, server.out, resume=resuming)
    if settings.deliver and not result.interrupted:
        deliver(directory, head, server.out)
    return result


def _has_finished(run: Path, settings: Settings) -> bool:
    found = read_run(run) if is_run(run) else None
    if found is None or found.done is None:
        return False
    early = found.done.get(STOPPED_EARLY) and found.settings.get("run.patience") == settings.patience
    return bool(early) or found.done.get("round") == settings.rounds


def _sections(config: Config) -> dict[str, Any]:
    """The experiment as sites get it."""
    run = {
        key: value for key, value in config.run.items() if key not in ("track", "tracking_uri")
    }  # the server's own
    return {name: table for name, table in config.tables().items() if name != "data"} | {"run": run}


def _told(facts: DataFacts, names: Sequence[str]) -> dict[str, Any]:
    """What a site is told of all sites' data, as JSON."""
    found = {**facts._asdict(), "pairs": None if facts.pairs is None else facts.pairs.to_json()}
    return {name: found[name] for name in names if found[name] is not None}


def _check_run(problem: Problem, name: str, made: Preparation | None) -> None:
    """Raises UserError if the run cannot have sites as clients. name: of its algorithm."""
    settings, algorithm = problem.settings, problem.algorithm
    traced = settings.participation == "trace"
    require(not traced, "participation = 'trace' is for simulations; a server asks the sites that it can reach")
    require(not algorithm.centralized, f"{name} needs all data in one place, so it cannot run across sites")
    measured = settings.train_metrics
    require(not measured, "train_metrics needs the training data, which the server does not have")
    require_for_sites(problem)
    require_given(algorithm, made is not None)


def _check_sites(problem: Problem, facts: Mapping[str, SiteFacts], labels: Sequence[str]) -> None:
    """Raises UserError unless the data of all sites are what the risk needs. labels: as the data name them."""
    risk, held = problem.risk, list(facts.values())
    check_data(problem, held)
    pooled = risk.pairing.timed and not problem.algorithm.local_pairs
    for name, each in facts.items():
        many = len(each.by_label("all")) if each.labels else 0
        require(many == risk.labels, f"{name} has {many or 1} label(s), and the risk is for {risk.labels or 1}")
        check_ranked(problem, each.relevant is not None, f"the data of {name}")
        check_timed(problem, each.times_told is not None, f"the data of {name}")
        told = 'does not share event times; its site.toml may say times = "bins" in [site]'
        require(not pooled or each.times is not None, f"{name} {told}")
    check_labels(problem, held, labels)


def _own_data(config: Config) -> RawTable | Mapping[str, Examples]:
    """What the server holds back itself. How a table becomes examples follows from the sites."""
    if not config.data:
        return {}
    return load_unfitted(config) or load_data(config).held_back


def _examiner(
    engine: SiteEngine,
    config: Config,
    own: RawTable | Mapping[str, Examples],
    shape: tuple[int, ...],
    bins: BinsOfRun,
    made: Preparation | None,
) -> Examiner:
    """The server itself on its own data, if it has any, or the sites on theirs."""
    problem = engine.problem
    found, select = problem.evaluator, problem.select
    if engine.settings.evaluate == "sites":
        check_selection(select, found)
        return SiteExaminer(engine.directory, found, select, engine.backbone, bins, lambda: engine.pooled)
    if isinstance(own, RawTable):
        own = load_data(config).held_back if made is None else own.held_back(made)
    # Sites that have numbers alone are not those of this federation.
    data = {name: each if each.sites else replace(each, site=None) for name, each in own.items()}
    check_queries(problem, data)
    probe = torch.zeros(1, *shape, dtype=problem.dtype)
    for name, each in data.items():
        require_like(name, each, probe, problem.num_labels, len(each.sites), bool(problem.label_names))
    if "validation" in data:
        check_selection(select, found, data["validation"])
    return HeldBack(found, {name: match_types(problem, each) for name, each in data.items()})


def _begun(path: Path) -> tuple[str, dict[str, SiteFacts]]:
    """The number of the run in this folder and what its sites said of themselves, or those of a new one."""
    try:
        content = json.loads(path.read_text())
        facts = {
            name: SiteFacts(p, n, tuple(shape), *more) for name, (p, n, shape, *more) in content["sites"].items()
        }
        return str(content["run"]), facts
    except FileNotFoundError:
        return secrets.token_hex(8), {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {path}: {error}; remove the folder to begin anew") from None

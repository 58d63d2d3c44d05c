"""The server's side of a run: from the first hello to the model."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedxl.config.experiment import Config, build_problem, load_data, load_unfitted
from fedxl.data.federation import facts_about
from fedxl.data.participation import Plan
from fedxl.data.preparation import Preparation
from fedxl.deploy.protocol.envelope import Carrier, RunHeader
from fedxl.deploy.provision.settings import ServerFile
from fedxl.deploy.server.curves import GridBook
from fedxl.deploy.server.directory import Directory, SiteFacts
from fedxl.deploy.server.engine import GridEngine
from fedxl.deploy.server.examiner import SiteExaminer
from fedxl.deploy.server.secure import SecureEngine
from fedxl.deploy.storage import SEED_FILE, kept_seed
from fedxl.errors import UserError, require
from fedxl.files import write_atomically
from fedxl.training.evaluate import Examiner, HeldBack, check_selection, held_back
from fedxl.training.members import Form, Member
from fedxl.training.participants import check_label_names, check_labels
from fedxl.training.problem import Problem, check_data, check_held_back, check_ranked, require_own_lists
from fedxl.training.result import Result
from fedxl.training.settings import Hooks
from fedxl.training.simulation import flattened
from fedxl.training.trainer import train


@dataclass
class ServerTask:
    """The parts of a run whose clients are sites: there is no training data here."""

    problem: Problem
    engine: GridEngine
    examiner: Examiner
    num_clients: int
    cohort: int
    plan: Plan
    members: Sequence[Member]
    form: Form
    description: dict[str, Any]
    preparation: Preparation | None = None


def serve(
    server: ServerFile,
    carrier: Carrier,
    hooks: Hooks | None = None,
    keys: Mapping[int, str] | None = None,
    limits: Mapping[str, int] | None = None,
) -> Result:
    """A whole run, from the first hello to the model; goes on from its last checkpoint if there is one.

    keys: whose key each node has shown; None in Flower's own simulation, where nobody shows any.
    limits: the most examples that each site may say it has.
    """
    hooks = hooks or Hooks()
    settings = server.settings
    # A site keeps its state after two rounds: the server must never have to go back by more.
    config = replace(server.config, run={**server.config.run, "checkpoint_every": 1})
    known = server.out / "sites.json"
    run_id, facts = _begun(known)
    directory = Directory(carrier, settings, hooks.say, facts, keys=keys, limits={} if limits is None else limits)
    directory.wait_for_all()
    made = directory.preparation()
    each = {facts.shape if made is None else (made.width,) for facts in directory.facts.values()}
    require(len(each) == 1, f"sites hold examples of different shapes: {', '.join(map(str, sorted(each)))}")
    shape = each.pop()
    each_site = [directory.facts[name] for name in settings.sites]
    facts_of_all = facts_about(each_site, config.run.get("weighting", "clients"))
    problem = build_problem(config, shape, facts_of_all, torch.device("cpu"))
    name = str(config.algorithm["name"])
    traced = problem.settings.participation == "trace"
    require(not traced, "participation = 'trace' is for simulations; a server asks the sites that it can reach")
    require(not problem.algorithm.centralized, f"{name} wants all data in one place; that is not what sites are for")
    sections = {name: table for name, table in config.tables().items() if name != "data"}
    # Where the server's metrics go is none of the sites' business.
    sections["run"] = {key: value for key, value in config.run.items() if key not in ("track", "tracking_uri")}
    # What follows from all sites' data goes to sites only if the algorithm needs it.
    needed = facts_of_all._asdict() if problem.uses_facts else {}
    prepared = made.to_text() if made is not None else ""
    _check_labels(problem, directory)
    kept = made or directory.images()
    check_label_names(problem.label_names, kept.labels if kept is not None else ())
    for name in settings.sites:
        check_ranked(problem, directory.facts[name].relevant is not None, f"the data of {name}")
    require_own_lists(problem)
    head = RunHeader(run_id, json.dumps(sections), json.dumps(needed), prepared)
    secret = kept_seed(server.out / SEED_FILE) if settings.private_draws else 0
    kind = SecureEngine if settings.secure else GridEngine
    engine = kind(directory, problem, head, secret)
    if isinstance(engine, SecureEngine):
        engine.remember_in(server.out)
    known.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(known, json.dumps({"run": run_id, "sites": directory.facts}, indent=1).encode())
    task = _task(engine, config, shape, GridBook(server.out / "grids.json", settings.bins), made)
    task = replace(task, preparation=kept)  # for predictions on new files; the examiner has the tables' alone
    resuming = any((server.out / name).exists() for name in ("checkpoints", "metrics.jsonl"))
    return train(task, hooks, server.out, resume=resuming)


def _task(
    engine: GridEngine, config: Config, shape: tuple[int, ...], grids: GridBook, made: Preparation | None
) -> ServerTask:
    problem, settings = engine.problem, engine.settings
    told = "train_metrics needs the training data, which the server does not have"
    require(not problem.settings.train_metrics, told)
    facts = {name: engine.directory.facts[name] for name in settings.sites}
    check_data(problem, list(facts.values()))
    described = {"sites": settings.sites, "evaluate": settings.evaluate}
    return ServerTask(
        problem=problem,
        engine=engine,
        examiner=_examiner(engine, config, shape, grids, made),
        num_clients=len(facts),
        cohort=problem.settings.cohort,
        plan=engine.plan,
        members=[Member(name, each.positives, each.negatives) for name, each in facts.items()],
        form=Form(shape, problem.settings.dtype, problem.risk.score_shape, labels=problem.label_names),
        description=flattened({**config.tables(), "run": asdict(problem.settings), "server": described}),
        preparation=made,
    )


def _check_labels(problem: Problem, directory: Directory) -> None:
    """Raises UserError unless all sites have the labels of the risk, and each can be trained."""
    risk, facts = problem.risk, {name: directory.facts[name] for name in directory.settings.sites}
    for name, each in facts.items():
        many = len(each.by_label("all")) if each.labels else 0
        require(many == risk.labels, f"{name} has {many or 1} label(s), and the risk is for {risk.labels or 1}")
    if risk.labels:
        first, second = (np.stack([each.by_label(side) for each in facts.values()]) for side in risk.sides)
        check_labels(first, second, problem.label_names, problem.needs_both_sides)


def _examiner(
    engine: GridEngine, config: Config, shape: tuple[int, ...], grids: GridBook, made: Preparation | None
) -> Examiner:
    """The server itself on its own data, if it has any, or the sites on theirs."""
    problem = engine.problem
    found, select = problem.evaluator, problem.select
    if engine.settings.evaluate == "sites":
        check_selection(select, found)
        return SiteExaminer(engine.directory, found, select, engine.head, grids, lambda: engine.pooled)
    if not config.data:
        return HeldBack(found, {})
    table = load_unfitted(config) if made is not None else None
    if table is not None and made is not None:
        validation, test = table.held_back(made)
    else:
        _, validation, test, *_ = load_data(config)
    pairs = {"validation": validation, "test": test}
    check_held_back(problem, pairs)
    sources = held_back(pairs, torch.zeros(1, *shape, dtype=problem.dtype), problem.risk.labels)
    if "validation" in sources:
        check_selection(select, found, sources["validation"])
    return HeldBack(found, sources)


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

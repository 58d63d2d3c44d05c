"""The server's side of a run: from the first hello to the model."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from fedxl.config.experiment import Config, build_problem, load_data, load_unfitted
from fedxl.data.examples import facts_about
from fedxl.data.tables.prepare import Preparation
from fedxl.deploy.protocol.envelope import Carrier, RunHeader
from fedxl.deploy.provision.settings import ServerFile
from fedxl.deploy.server.directory import Directory, SiteFacts
from fedxl.deploy.server.engine import SiteEngine
from fedxl.deploy.server.examiner import BinsOfRun, SiteExaminer
from fedxl.deploy.server.secure import SecureEngine
from fedxl.deploy.storage import SEED_FILE, kept_seed
from fedxl.errors import UserError, require
from fedxl.files import write_atomically
from fedxl.training.evaluate import Examiner, HeldBack, check_selection, require_like
from fedxl.training.problem import (
    Problem,
    check_data,
    check_labels,
    check_queries,
    check_ranked,
    match_types,
    require_own_lists,
)
from fedxl.training.result import Result
from fedxl.training.rounds import Task
from fedxl.training.run_folder import Form, Member
from fedxl.training.settings import Hooks
from fedxl.training.simulation import flattened
from fedxl.training.trainer import train


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
    run_id, told = _begun(known)
    directory = Directory(carrier, settings, hooks.say, told, keys=keys, limits={} if limits is None else limits)
    directory.wait_for_all()
    made = directory.preparation()
    facts = {name: directory.facts[name] for name in settings.sites}
    shapes = {each.shape if made is None else (made.width,) for each in facts.values()}
    require(len(shapes) == 1, f"sites hold examples of different shapes: {', '.join(map(str, sorted(shapes)))}")
    shape = shapes.pop()
    facts_of_all = facts_about(list(facts.values()), config.run.get("weighting", "clients"))
    problem = build_problem(config, shape, facts_of_all, torch.device("cpu"))
    name = str(config.algorithm["name"])
    traced = problem.settings.participation == "trace"
    require(not traced, "participation = 'trace' is for simulations; a server asks the sites that it can reach")
    require(not problem.algorithm.centralized, f"{name} wants all data in one place; that is not what sites are for")
    measured = problem.settings.train_metrics
    require(not measured, "train_metrics needs the training data, which the server does not have")
    sections = {name: table for name, table in config.tables().items() if name != "data"}
    # Where the server's metrics go is none of the sites' business.
    sections["run"] = {key: value for key, value in config.run.items() if key not in ("track", "tracking_uri")}
    # What follows from all sites' data goes to sites only if the algorithm needs it.
    needed = facts_of_all._asdict() if problem.uses_facts else {}
    prepared = made.to_text() if made is not None else ""
    check_data(problem, list(facts.values()))
    kept = made or directory.images()
    _check_labels(problem, facts, kept.labels if kept is not None else ())
    for site, each in facts.items():
        check_ranked(problem, each.relevant is not None, f"the data of {site}")
    require_own_lists(problem)
    head = RunHeader(run_id, json.dumps(sections), json.dumps(needed), prepared)
    secret = kept_seed(server.out / SEED_FILE) if settings.private_draws else 0
    engine = (SecureEngine if settings.secure else SiteEngine)(directory, problem, head, secret)
    if isinstance(engine, SecureEngine):
        engine.remember_in(server.out)
    known.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(known, json.dumps({"run": run_id, "sites": directory.facts}, indent=1).encode())
    bins = BinsOfRun(server.out / "bins.json", settings.bins)
    form = Form(shape, problem.settings.dtype, problem.risk.score_shape, labels=problem.label_names)
    described = {"sites": settings.sites, "evaluate": settings.evaluate}
    description = flattened({**config.tables(), "run": asdict(problem.settings), "server": described})
    task = Task(
        problem=problem,
        engine=engine,
        examiner=_examiner(engine, config, shape, bins, made),
        num_clients=len(facts),
        cohort=problem.settings.cohort,
        plan=engine.plan,
        members=[Member(name, each.positives, each.negatives) for name, each in facts.items()],
        form=form,
        description=description,
        preparation=kept,  # for predictions on new files
    )
    resuming = any((server.out / name).exists() for name in ("checkpoints", "metrics.jsonl"))
    return train(task, hooks, server.out, resume=resuming)


def _check_labels(problem: Problem, facts: Mapping[str, SiteFacts], of_data: Sequence[str]) -> None:
    """Raises UserError unless all sites have the labels of the risk, and each can be trained."""
    risk = problem.risk
    for name, each in facts.items():
        many = len(each.by_label("all")) if each.labels else 0
        require(many == risk.labels, f"{name} has {many or 1} label(s), and the risk is for {risk.labels or 1}")
    check_labels(problem, list(facts.values()), of_data)


def _examiner(
    engine: SiteEngine, config: Config, shape: tuple[int, ...], bins: BinsOfRun, made: Preparation | None
) -> Examiner:
    """The server itself on its own data, if it has any, or the sites on theirs."""
    problem = engine.problem
    found, select = problem.evaluator, problem.select
    if engine.settings.evaluate == "sites":
        check_selection(select, found)
        return SiteExaminer(engine.directory, found, select, engine.head, bins, lambda: engine.pooled)
    if not config.data:
        return HeldBack(found, {})
    table = load_unfitted(config) if made is not None else None
    data = table.held_back(made) if table is not None and made is not None else load_data(config).held_back
    # Sites that have numbers alone are not those of this federation.
    data = {name: each if each.sites else replace(each, site=None) for name, each in data.items()}
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

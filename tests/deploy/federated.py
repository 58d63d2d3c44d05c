"""A federation for tests of deployment: four sites with digits, and a carrier that passes bytes in one process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from fedxl import tree
from fedxl.config.experiment import Config, simulate
from fedxl.deploy.protocol.envelope import Envelope, Failure, Kind
from fedxl.deploy.provision.settings import ServerFile, ServerSettings, SiteFile, SiteSettings
from fedxl.deploy.server import serve as server
from fedxl.deploy.site import requests, secure
from fedxl.deploy.storage import SEED_FILE, kept_seed
from fedxl.engine.drawing import NO_SECRETS, Secrets
from fedxl.errors import for_others
from fedxl.risks import RISKS
from fedxl.training.result import Result
from fedxl.training.settings import Hooks
from fedxl.training.trainer import train

SITES = ("a", "b", "c", "d")
DATA = {"name": "digits", "clients": 4, "one_class": 1, "seed": 3}
MODELS = ("mlp", "cnn", "linear", "tests.deploy.test_sites:normed_scores")  # that sites of these tests allow
QUIET = Hooks(say=lambda line: None)
ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedxl1": {"risk": {"name": "auroc"}, "lr": 0.2},
    "fedxl2": {"risk": {"name": "pauc"}, "lr": 0.2, "pool_rounds": 2},
    "local_pair": {"risk": {"name": "pauc"}, "lr": 0.2},
    "local_sgd": {"risk": {"name": "pauc"}, "lr": 0.2, "milestones": [6]},
    "codasca": {"risk": {"name": "auroc"}, "lr": 0.2},
}


def config(algorithm: str, **run: Any) -> Config:
    options = dict(ALGORITHMS[algorithm])
    return Config(
        data=dict(DATA),
        model={"name": "mlp", "hidden": [8]},
        risk=options.pop("risk"),
        algorithm={"name": algorithm, **options},
        run={
            "rounds": 4, "local_steps": 3, "batch1": 4, "batch2": 5, "cohort": 3, "eval_every": 2, "dtype": "float64",
            "checkpoint_every": 1, "executor": "loop", "device": "cpu", "seed": 5, **run,
        },
    )  # fmt: skip


def site_file(folder: Path, number: int, **changes: Any) -> SiteFile:
    allowed: dict[str, Any] = {"models": MODELS, "risks": tuple(RISKS), "algorithms": tuple(ALGORITHMS)}
    settings = SiteSettings(name=SITES[number], part=number, device="cpu", **{**allowed, **changes})
    return SiteFile(settings, dict(DATA), folder / SITES[number])


class InProcess:
    """Calls each site as its own process would be called. Tensors go through bytes; a fault may be put in between."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.sites = {100 + number: site_file(folder, number, **settings) for number in range(len(SITES))}
        self.away: set[int] = set()
        self.faults: dict[tuple[int, int], Any] = {}  # by (site, round): a Failure, or what becomes of an reply
        self.waiting: dict[str, Envelope | Failure] = {}
        self.sent: list[tuple[int, Mapping[str, Any]]] = []

    def nodes(self) -> Sequence[int]:
        return [node for node in self.sites if node not in self.away]

    def send(self, envelopes: Mapping[int, Envelope], kind: Kind, seconds: float) -> Mapping[str, int]:
        tickets = {}
        for node in sorted(envelopes, reverse=True):  # replies arrive in another order than the sites'
            ticket = f"{kind} {node} {len(self.sent)}"
            self.sent.append((node, envelopes[node].facts))
            tickets[ticket] = node
            reply = self._handle(node, kind, copied(envelopes[node]))
            if reply is not None:
                self.waiting[ticket] = reply
        return tickets

    def _handle(self, node: int, kind: Kind, request: Envelope) -> Envelope | Failure | None:
        fault = self.faults.pop((node - 100, request.facts["round"]), None) if kind == "train" else None
        if isinstance(fault, Failure) or fault == "silence":
            return None if fault == "silence" else fault
        try:
            mine = self.sites[node]
            handlers = {"train": requests.train, "evaluate": requests.evaluate, "secure": secure.step}
            handler = handlers.get(kind)
            reply = handler(mine, request) if handler else requests.hello(mine)
        except ValueError as error:
            return Failure(for_others(error))
        return copied(fault(reply) if fault else reply)

    def replies(self, tickets: Sequence[str]) -> Iterable[tuple[str, Envelope | Failure]]:
        return [(ticket, self.waiting.pop(ticket)) for ticket in tickets if ticket in self.waiting]

    def forget(self, tickets: Sequence[str]) -> None:
        for ticket in tickets:
            self.waiting.pop(ticket, None)


def copied(envelope: Envelope) -> Envelope:
    return Envelope(dict(envelope.facts), load(save({name: t.clone() for name, t in envelope.tensors.items()})))


def deployed(
    folder: Path,
    experiment: Config,
    carrier: Any = None,
    hooks: Hooks = QUIET,
    keys: Mapping[int, str] | None = None,
    limits: Mapping[str, int] | None = None,
    **settings: Any,
) -> Result:
    known = ServerSettings(sites=SITES, **{"deadline": 5.0, "join": 5.0, **settings})
    task = ServerFile(known, experiment, folder / "server")
    return server.serve(task, carrier or InProcess(folder), hooks, keys, limits)


def simulated(experiment: Config, secrets: Secrets = NO_SECRETS) -> Result:
    simulation = simulate(experiment, QUIET.say)
    simulation.engine = replace(simulation.engine, secrets=secrets)
    return train(simulation, QUIET, None, False)


def secrets_of(run: Path, sites: Path, names: Sequence[str] = SITES) -> Secrets:
    """What server and sites keep to themselves: the seeds in a run's folder, and in the folders of its sites."""
    known = json.loads((run / "sites.json").read_text())
    own = {number: sites / name / "state" / known["run"] / SEED_FILE for number, name in enumerate(names)}
    pool = run / SEED_FILE
    return Secrets(
        {number: kept_seed(path) for number, path in own.items() if path.exists()},
        kept_seed(pool) if pool.exists() else 0,
    )


def assert_same(found: Result, expected: Result) -> None:
    """The whole state of the server, to the last bit."""
    mine, theirs = tree.pack(found.server), tree.pack(expected.server)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)

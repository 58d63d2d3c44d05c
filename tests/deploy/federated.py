"""A federation for tests of deployment: four sites with digits, and a carrier that passes bytes in one process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedxl import tree
from fedxl.config.experiment import Config, simulate
from fedxl.deploy.protocol import envelope as protocol
from fedxl.deploy.protocol.envelope import Envelope, Failure, Kind
from fedxl.deploy.protocol.message import decode, encode
from fedxl.deploy.provision.settings import ServerFile, ServerSettings, SiteFile, SiteSettings, read_server
from fedxl.deploy.server import serve as server
from fedxl.deploy.site.requests import HANDLERS
from fedxl.deploy.storage import SEED_FILE, kept_seed
from fedxl.engine.drawing import NO_SECRETS, Secrets
from fedxl.errors import for_others
from fedxl.risks import RISKS
from fedxl.training.result import Result
from fedxl.training.run_writer import load_latest
from fedxl.training.settings import Hooks
from fedxl.training.trainer import train

SITES = ("a", "b", "c", "d")
DATA = {"name": "digits", "clients": 4, "one_class": 1, "seed": 3}
MODELS = ("mlp", "cnn", "linear", "tests.deploy.test_sites:normed_scores")  # that sites of these tests allow
QUIET = Hooks(say=lambda line: None)
STILL = 600.0  # seconds without anything happening, after which a test gives up
ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedxl1": {"risk": {"name": "auroc"}, "lr": 0.2},
    "fedxl2": {"risk": {"name": "pauc"}, "lr": 0.2, "pool_rounds": 2},
    "local_pair": {"risk": {"name": "pauc"}, "lr": 0.2},
    "local_sgd": {"risk": {"name": "pauc"}, "lr": 0.2, "milestones": [6]},
    "codasca": {"risk": {"name": "auroc"}, "lr": 0.2},
}


def file_sizes(folder: Path) -> dict[Path, int]:
    """Sizes of all files below a folder. Unlike `rglob`, this passes over what vanishes meanwhile."""
    sizes = {}
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            with suppress(OSError):
                sizes[path] = path.stat().st_size
    return sizes


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
        self.sites = {str(100 + number): site_file(folder, number, **settings) for number in range(len(SITES))}
        self.keys: Mapping[str, str] = {}  # by node: the site that owns its key
        self.limits: Mapping[str, int] | None = None
        self.away: set[str] = set()
        self.faults: dict[tuple[int, int], Any] = {}  # by (site, round): a Failure, or what becomes of an reply
        self.waiting: dict[str, Envelope | Failure] = {}
        self.sent: list[tuple[str, Mapping[str, Any]]] = []

    def nodes(self) -> Mapping[str, str]:
        return {node: self.keys.get(node, "") for node in self.sites if node not in self.away}

    def approved(self) -> Mapping[str, int] | None:
        return self.limits

    def wait(self, seconds: float) -> None:
        protocol.time.sleep(min(seconds, protocol.POLL))  # by the server's clock, which a test may have replaced

    def send(self, envelopes: Mapping[str, Envelope], kind: Kind, seconds: float) -> Mapping[str, str]:
        tickets = {}
        for node in sorted(envelopes, reverse=True):  # replies arrive in another order than the sites'
            ticket = f"{kind} {node} {len(self.sent)}"
            self.sent.append((node, envelopes[node].facts))
            tickets[ticket] = node
            reply = self._handle(node, kind, copied(envelopes[node]))
            if reply is not None:
                self.waiting[ticket] = reply
        return tickets

    def _handle(self, node: str, kind: Kind, request: Envelope) -> Envelope | Failure | None:
        fault = self.faults.pop((int(node) - 100, request.facts["round"]), None) if kind == "train" else None
        if isinstance(fault, Failure) or fault == "silence":
            return None if fault == "silence" else fault
        try:
            reply = HANDLERS[kind](self.sites[node], request)
        except ValueError as error:
            return Failure(for_others(error))
        return copied(fault(reply) if fault else reply)

    def replies(self, tickets: Sequence[str]) -> Iterable[tuple[str, Envelope | Failure]]:
        return [(ticket, self.waiting.pop(ticket)) for ticket in tickets if ticket in self.waiting]

    def forget(self, tickets: Sequence[str]) -> None:
        for ticket in tickets:
            self.waiting.pop(ticket, None)


def copied(envelope: Envelope) -> Envelope:
    return decode(b"".join(encode(envelope)), 1000.0)


def deployed(
    folder: Path,
    experiment: Config,
    carrier: Any = None,
    hooks: Hooks = QUIET,
    keys: Mapping[str, str] | None = None,
    limits: Mapping[str, int] | None = None,
    **settings: Any,
) -> Result:
    """A run over a carrier. keys: the site of each node, as its key shows; limits: the most examples of each site."""
    known = ServerSettings(sites=SITES, **{"deadline": 5.0, "join": 5.0, "deliver": 0.0, **settings})
    task = ServerFile(known, experiment, folder / "server")
    carrier = carrier or InProcess(folder)
    if keys is not None:
        carrier.keys = keys
    if limits is not None:
        carrier.limits = limits
    found = server.serve(task, carrier, hooks)
    assert found is not None, "the run had finished before"
    return found


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


def assert_equals_simulator(place: Path, experiment: Config, tolerance: float = 1e-12) -> None:
    """All of the server's state in a federation's folder, compared with a simulation with the same secrets."""
    run = place / "server" / "run"
    found, complaints = load_latest(run / "checkpoints")
    assert found
    assert not complaints
    algorithm = read_server(place / "server" / "server.toml").config.algorithm
    secrets = secrets_of(run, place / "sites")
    assert secrets.pool, "`fedxl deploy init` switches it on"
    expected = tree.pack(simulated(replace(experiment, algorithm=algorithm), secrets).server)
    for name, tensor in expected.items():
        mine = found.tensors[f"server.{name}"]
        torch.testing.assert_close(mine, tensor, rtol=0, atol=tolerance, equal_nan=True, msg=name)

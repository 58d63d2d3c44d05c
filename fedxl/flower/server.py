"""The server's side: an engine whose clients are sites on a network, under the same loop over rounds as any other."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedxl import __version__, tree, wire
from fedxl.algorithm import Batch, Fresh, RoundOf, Share, local_round
from fedxl.checkpoint import write_atomically
from fedxl.config import Config, load_data
from fedxl.data.federation import Weighting, shares
from fedxl.engine.trace import outline
from fedxl.errors import UserError, first_line, require
from fedxl.evaluate import Evaluator
from fedxl.flower.envelope import Carrier, Envelope, Failure, Order
from fedxl.flower.parts import Parts, build
from fedxl.flower.settings import Server, ServerSettings
from fedxl.models import scorer
from fedxl.risk import Side
from fedxl.run import Hooks, Result, train
from fedxl.sampling import Indices
from fedxl.task import DTYPES, Task
from fedxl.wire import RefusedError

POLL = 0.5  # seconds
GRACE = 60.0  # seconds that a round waits for sites that are not connected, if others are
AGAIN = 30.0  # seconds after which a node whose hello was refused is asked again
KEYS = "nodes.json"  # which node has shown which site's key, as Flower has numbered them


class Facts(NamedTuple):
    """What a site has said of itself."""

    positives: int
    negatives: int
    shape: tuple[int, ...]

    def count(self, side: Side) -> int:
        return {"positive": self.positives, "negative": self.negatives, "all": sum(self[:2]), "none": 0}[side]


@dataclass
class Directory:
    """Which node is which site, and what each holds. Facts are asked for once a run; nodes come and go."""

    carrier: Carrier
    settings: ServerSettings
    say: Callable[[str], None]
    facts: dict[str, Facts] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # by node
    asked: dict[str, int] = field(default_factory=dict)  # tickets of hellos on their way
    refused: dict[int, float] = field(default_factory=dict)  # nodes, and when their hello was
    keys: Mapping[int, str] = field(default_factory=dict)  # whose key a node has shown, where that is known

    def nodes(self) -> dict[str, int]:
        """The sites that can be reached now. Says hello to nodes not met before, without waiting for them."""
        here = set(self.carrier.nodes())
        # Whoever was away is met anew: it may have come back with another version, or other data.
        self.names = {node: name for node, name in self.names.items() if node in here}
        self.refused = {node: since for node, since in self.refused.items() if time.monotonic() < since + AGAIN}
        new = here - self.names.keys() - self.refused.keys() - set(self.asked.values())
        if new:
            letter = Envelope({"version": __version__}, {})
            self.asked |= self.carrier.send(dict.fromkeys(new, letter), "hello", self.settings.join)
        for ticket, answer in self.carrier.answers(list(self.asked)).items():
            self._meet(self.asked.pop(ticket), answer)
        return {name: node for node, name in self.names.items() if node in here}

    def wait_for_all(self) -> None:
        """Until every site of the list has said hello: how much each counts depends on all of them."""
        deadline = time.monotonic() + self.settings.join
        while lacking := [name for name in self.settings.sites if name not in self.facts]:
            self.nodes()
            late = time.monotonic() > deadline
            require(not late, f"no word of {', '.join(lacking)} within {self.settings.join:g} s; are they running?")
            time.sleep(POLL)

    def _meet(self, node: int, answer: Envelope | Failure) -> None:
        if isinstance(answer, Failure):
            self.say(f"a node did not say hello: {answer.reason}")
            return
        try:
            name, found = self._read(node, answer)
        except (RefusedError, KeyError, TypeError, ValueError, OverflowError) as error:
            self.say(f"a node's hello was refused: {first_line(error)}")
            self.refused[node] = time.monotonic()
            return
        self.names = {n: other for n, other in self.names.items() if other != name} | {node: name}
        self.facts[name] = found
        self.say(f"site {name} is here: {found.positives} positives, {found.negatives} negatives")

    def _read(self, node: int, answer: Envelope) -> tuple[str, Facts]:
        facts = answer.facts
        name = str(facts["site"])
        if self.keys and self.keys.get(node) != name:
            raise RefusedError(f"it says it is '{name}', but its key is that of '{self.keys.get(node)}'")
        if name not in self.settings.sites:
            raise RefusedError(f"'{name}' is not among the sites {', '.join(self.settings.sites)}")
        if facts["version"] != __version__:
            raise RefusedError(f"{name} runs fedxl {facts['version']}, the server {__version__}")
        found = Facts(int(facts["positives"]), int(facts["negatives"]), tuple(int(n) for n in facts["shape"]))
        if min(found.positives, found.negatives) < 0 or found.positives + found.negatives < 1:
            raise RefusedError(f"{name} says it has {found.positives} positives and {found.negatives} negatives")
        if found != self.facts.get(name, found):
            raise RefusedError(f"{name} had other data when this run began: {self.facts[name]}, now {found}")
        return name, found

    def positive_share(self, weighting: Weighting) -> float:
        """How likely an example is positive where every client, or every example, counts the same."""
        each = [self.facts[name] for name in self.settings.sites]
        if weighting == "samples":
            return sum(one.positives for one in each) / sum(one.count("all") for one in each)
        return sum(one.positives / one.count("all") for one in each) / len(each)


class Standing(NamedTuple):
    """What the server knows of its sites besides their facts; part of a checkpoint."""

    base: dict[str, Tensor]  # the last round of each site that was taken, -1: none
    visits: dict[str, Tensor]  # how many of its rounds were taken


@dataclass
class GridEngine:
    """Runs rounds at sites. Whoever answers well and in time is aggregated; private states never come here."""

    carrier: Carrier
    settings: ServerSettings
    directory: Directory
    parts: Parts
    config: str  # what sites are told of the experiment
    run_id: str
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        sites, run = self.settings.sites, self.parts.run
        self.reading = self.parts.algorithm.reading(run.batch1, run.batch2)
        each = [self.directory.facts[name] for name in sites]
        first, second = ([facts.count(side) for facts in each] for side in self.reading[:2])
        dtype = DTYPES[run.dtype]
        self.shares: Share = tree.map(lambda leaf: leaf.to(dtype), shares(first, second, run.weighting))
        self.base, self.visits = dict.fromkeys(sites, -1), dict.fromkeys(sites, 0)
        self.dropped: list[dict[str, Any]] = []
        self._like: dict[bool, Any] = {}

    def run_round(self, algorithm: RoundOf, server: Any, round: int, cohort: Indices) -> Any:
        """The updates of whoever answered, stacked in the order of the sites' numbers."""
        for attempt in range(1, self.settings.patience + 1):
            taken = self._attempt(algorithm, server, round, [int(number) for number in cohort])
            if len(taken) >= min(self.settings.minimum, len(cohort)):
                break
            self.say(f"round {round}: only {len(taken)} of at least {self.settings.minimum} updates, try {attempt}")
        else:
            raise UserError(
                f"round {round} had fewer than {self.settings.minimum} updates {self.settings.patience} times; "
                "see that sites are running, then start the server again: it goes on from its last checkpoint"
            )
        for number in taken:
            name = self.settings.sites[number]
            self.base[name], self.visits[name] = round, self.visits[name] + 1
        return tree.stack([taken[number] for number in sorted(taken)])

    def _attempt(self, algorithm: RoundOf, server: Any, round: int, cohort: Sequence[int]) -> dict[int, Any]:
        deadline = time.monotonic() + self.settings.deadline
        # Somebody must be there; the others are given a while, for after a restart nobody has been met yet.
        enough = time.monotonic() + min(GRACE, self.settings.deadline / 2)
        while True:
            nodes = self.directory.nodes()
            numbers = {nodes[name]: n for n in cohort if (name := self.settings.sites[n]) in nodes}
            now = time.monotonic()
            if len(numbers) == len(cohort) or now >= (enough if numbers else deadline):
                break
            time.sleep(POLL)
        for number in set(cohort) - set(numbers.values()):
            self._drop(round, number, "it is not connected")
        state = wire.flatten(Order(server, tree.map(lambda leaf: leaf[0], self.shares)), self.settings.wire)
        letters = {node: self._letter(state, round, number) for node, number in numbers.items()}
        waiting = dict(self.carrier.send(letters, "train", self.settings.deadline)) if letters else {}
        taken: dict[int, Any] = {}
        while waiting and time.monotonic() < deadline:
            for ticket, answer in self.carrier.answers(list(waiting)).items():
                number = numbers[waiting.pop(ticket)]
                try:
                    taken[number] = self._checked(algorithm, server, round, number, answer)
                except RefusedError as error:
                    self._drop(round, number, str(error))
            time.sleep(POLL if waiting else 0)
        for node in waiting.values():
            self._drop(round, numbers[node], f"no answer within {self.settings.deadline:g} s")
        return taken

    def _letter(self, state: Mapping[str, Tensor], round: int, number: int) -> Envelope:
        """The same tensors for everyone, held once, but for the share."""
        name = self.settings.sites[number]
        facts = {
            "version": __version__,
            "run": self.run_id,
            "config": self.config,
            "wire": self.settings.wire,
            "round": round,
            "number": number,
            "base": self.base[name],
            "visits": self.visits[name],
        }
        share = {f"share.{key}": leaf[number] for key, leaf in self.shares._asdict().items()}
        return Envelope(facts, {**state, **share})

    def _checked(self, algorithm: RoundOf, server: Any, round: int, number: int, answer: Envelope | Failure) -> Any:
        """The update in an answer, if it is one that this site can have come to."""
        if isinstance(answer, Failure):
            raise RefusedError(answer.reason)
        if answer.facts.get("round") != round or answer.facts.get("site") != self.settings.sites[number]:
            raise RefusedError("it answers something else than was asked")
        if note := answer.facts.get("note"):
            self.say(f"round {round}, {self.settings.sites[number]}: {note}")
        steps = self.parts.run.local_steps
        longest = steps * max(self.reading.size1, self.reading.size2, 1)
        template = self._template(algorithm, server)
        update = wire.restore(template, answer.tensors, longest, unknown=("u",))
        share = tree.map(lambda leaf: leaf[number], self.shares)
        counted = [*zip(tree.leaves(update.share)[1:], tree.leaves(share)[1:], strict=True)]
        more = update.share.model > share.model * (1 + 1e-6) or update.share.model < 0
        if more or any(not torch.equal(found, told) for found, told in counted):
            raise RefusedError("it counts itself differently than it was told")
        if not 0 <= int(update.steps) <= steps:
            raise RefusedError(f"it says it did {int(update.steps)} steps of {steps}")
        # Round 0 pools scores alone; the server finds their first inner estimates itself.
        u_matters = algorithm is self.parts.algorithm and not self.parts.risk.linear
        for side, told, size in (
            ("first", share.first, self.reading.size1),
            ("second", share.second, self.reading.size2),
        ):
            mass = float(share.model * told)
            _require_sane_scores(getattr(update, side, None), side, self._uploaded(size), mass, u_matters)
        return update

    def _uploaded(self, size: int) -> int:
        """How many scores of a side a client uploads, of `size` a step."""
        every = self.parts.run.local_steps * size
        some = int(getattr(self.parts.algorithm, "uploads", 0))
        return some if 0 < some < every else every

    def _template(self, algorithm: RoundOf, server: Any) -> Any:
        """What an update looks like, found by doing a step without numbers."""
        prelude = algorithm is not self.parts.algorithm
        if prelude not in self._like:
            self._like[prelude] = _outline(self.parts, self.reading, algorithm, server, self.directory)
        return self._like[prelude]

    def _drop(self, round: int, number: int, reason: str) -> None:
        name = self.settings.sites[number]
        self.say(f"round {round}: nothing from {name}: {reason}")
        self.dropped.append({"round": round, "site": name, "reason": reason})

    def remarks(self) -> dict[str, Any]:
        """Who was left out since this was last asked, and why."""
        dropped, self.dropped = self.dropped, []
        return {"dropped": dropped} if dropped else {}

    @property
    def population(self) -> Standing:
        return Standing(*({name: torch.tensor(n) for name, n in table.items()} for table in (self.base, self.visits)))

    def restore(self, server: Any, tensors: dict[str, Tensor]) -> None:
        base, visits = tree.unpack(self.population, tensors)
        self.base = {name: int(number) for name, number in base.items()}
        self.visits = {name: int(number) for name, number in visits.items()}


def _require_sane_scores(side: Any, name: str, count: int, mass: float, u_matters: bool) -> None:
    """A site's part of the pool: as many scores as it was asked for, weighing what it weighs, all alike."""
    if side is None:
        return
    if {len(leaf) for leaf in side} != {count}:
        raise RefusedError(f"its scores ({name}) and what belongs to them are not {count}")
    even = bool((side.weight == side.weight[0]).all()) and 0 <= float(side.weight[0]) * count <= mass * (1 + 1e-5)
    if not even or bool((side.age != 0).any()):
        raise RefusedError(f"the weights or ages of its scores ({name}) are none that it was given")
    u = getattr(side, "u", None)
    if u is not None and u_matters:
        bad = ~torch.isfinite(u).flatten(1).all(1) if u.ndim > 1 else ~torch.isfinite(u)
        if bool((bad & (side.weight > 0)).any()):
            raise RefusedError("its inner estimates hold NaN or infinity")


def _outline(parts: Parts, reading: Any, algorithm: RoundOf, server: Any, directory: Directory) -> Any:
    dtype = DTYPES[parts.run.dtype]
    shape = next(iter(directory.facts.values())).shape
    size1, size2 = reading.size1, reading.size2

    def step() -> Any:
        one, rows = torch.ones((), dtype=dtype), torch.zeros(size1, dtype=torch.int64)
        x, y = torch.zeros(size1 + size2, *shape, dtype=dtype), torch.zeros(size1 + size2, dtype=dtype)
        like = tree.map(torch.zeros_like, server)
        lag1, lag2 = rows, torch.zeros(size2, dtype=torch.int64)
        fresh = Fresh(x, y, rows) if reading.fresh else ()
        batch = Batch(x, y, rows, algorithm.passive(like, lag1, lag2), fresh)
        client = parts.algorithm.init_client(like, 1)
        return local_round(algorithm, like, client, Share(one, one, one), [batch])[1]

    return tree.map(lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype), outline(step, ()))


class ServerTask(Task):
    """The parts of a run whose clients are sites: there is no training data here, perhaps some to validate on."""

    def __init__(self, parts: Parts, engine: GridEngine, config: Config, shape: tuple[int, ...]) -> None:
        run = parts.run
        require(not run.train_metrics, "train_metrics needs the training data, which the server does not have")
        self.run, self.risk, self.model, self.algorithm = run, parts.risk, parts.model, parts.algorithm
        self.device, self.dtype = torch.device("cpu"), DTYPES[run.dtype]
        self.num_clients, self.cohort = len(engine.settings.sites), run.cohort
        for side in engine.reading[:2]:
            held = side == "none" or any(facts.count(side) for facts in engine.directory.facts.values())
            require(held, f"the algorithm needs {side} examples, and no site holds any")
        require(run.cohort <= self.num_clients, f"cohort is {run.cohort}, but there are {self.num_clients} sites")
        self.engine = engine  # type: ignore[assignment]
        self.probe = torch.zeros(1, *shape, dtype=self.dtype)
        held_back: dict[str, Any] = {}
        if config.data:
            splits = load_data(config)
            held_back = {"validation": splits.validation, "test": splits.test}
        self.sources = self._sources(held_back)
        self.select = run.select or parts.risk.metric
        self.evaluator = Evaluator(scorer(self.model, False), self.risk, self._limits(), self.dtype)
        self._check_selection()
        tables = {name: table for name, table in config.tables().items() if name != "run"}
        flat = {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}
        flat |= {f"run.{key}": value for key, value in asdict(run).items()}
        flat["server.sites"] = list(engine.settings.sites)
        self.description = json.loads(json.dumps(flat, default=str))


def serve(server: Server, carrier: Carrier, hooks: Hooks | None = None) -> Result:
    """A whole run, from the first hello to the model; goes on from its last checkpoint if there is one."""
    hooks = hooks or Hooks()
    settings = server.settings
    # A site keeps its state after two rounds: the server must never have to go back by more.
    config = replace(server.config, run={**server.config.run, "checkpoint_every": 1})
    known = server.out / "sites.json"
    run_id, facts = _begun(known)
    directory = Directory(carrier, settings, hooks.say, facts, keys=read_keys(server.folder))
    directory.wait_for_all()
    each = {facts.shape for facts in directory.facts.values()}
    require(len(each) == 1, f"sites hold examples of different shapes: {', '.join(map(str, sorted(each)))}")
    shape = each.pop()
    parts = build(config, shape, directory)
    told = {name: table for name, table in config.tables().items() if name != "data"}
    if hasattr(parts.algorithm, "positive_share"):
        # Sites know their own share of positives only.
        told["algorithm"] = {**told["algorithm"], "positive_share": parts.algorithm.positive_share}
    engine = GridEngine(carrier, settings, directory, parts, json.dumps(told), run_id, hooks.say)
    _begin(known, run_id, directory.facts)
    task = ServerTask(parts, engine, config, shape)
    begun = any((server.out / name).exists() for name in ("checkpoints", "metrics.jsonl"))
    return train(task, hooks, server.out, resume=begun)


def read_keys(folder: Path) -> dict[int, str]:
    """Which site's key a node has shown; empty where nobody has shown any, as in Flower's own simulation."""
    try:
        return {int(node): str(name) for name, node in json.loads((folder / KEYS).read_text()).items()}
    except FileNotFoundError:
        return {}


def _begun(path: Path) -> tuple[str, dict[str, Facts]]:
    """The number of the run in this folder and what its sites said of themselves, or those of a new one."""
    try:
        content = json.loads(path.read_text())
        facts = {name: Facts(p, n, tuple(shape)) for name, (p, n, shape) in content["sites"].items()}
        return str(content["run"]), facts
    except FileNotFoundError:
        return secrets.token_hex(8), {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {path}: {error}; remove the folder to begin anew") from None


def _begin(path: Path, run_id: str, facts: Mapping[str, Facts]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"run": run_id, "sites": facts}, indent=1).encode())

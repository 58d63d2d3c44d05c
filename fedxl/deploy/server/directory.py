"""Who is who on the network: which node is which site, and what each site has said of itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedxl import __version__
from fedxl.data.federation import Weighting
from fedxl.deploy.protocol.envelope import Carrier, Envelope, Failure, pause
from fedxl.deploy.provision.settings import ServerSettings
from fedxl.errors import first_line, printable, require
from fedxl.risks import Side
from fedxl.wire import RefusedError

GRACE = 60.0  # seconds that a round waits for sites that are not connected, if others are
AGAIN = 30.0  # seconds after which a node whose hello was refused is asked again


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
    heard: str = ""  # why a hello was refused, the last one
    keys: Mapping[int, str] | None = None  # whose key a node has shown; None: nobody shows any
    limits: Mapping[str, int] = field(default_factory=dict)  # the most examples that a site may claim; absent: any

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
        for ticket, answer in self.carrier.answers(list(self.asked)):
            self._meet(self.asked.pop(ticket), answer)
        return {name: node for node, name in self.names.items() if node in here}

    def wait_for_all(self) -> None:
        """Until every site of the list has said hello: how much each counts depends on all of them."""
        deadline = time.monotonic() + self.settings.join
        while lacking := [name for name in self.settings.sites if name not in self.facts]:
            self.nodes()
            late = time.monotonic() > deadline
            why = f" (the last thing heard: {self.heard})" if self.heard else ""
            missing = f"no word of {', '.join(lacking)} within {self.settings.join:g} s; are they running?{why}"
            require(not late, missing)
            pause()

    def gather(self, names: Collection[str]) -> dict[str, int]:
        """Those of these sites that can be reached. Somebody must be; the others are given a while to come."""
        deadline = time.monotonic() + self.settings.deadline
        # After a restart nobody has been met yet.
        enough = time.monotonic() + min(GRACE, self.settings.deadline / 2)
        while True:
            nodes = {name: node for name, node in self.nodes().items() if name in names}
            if len(nodes) == len(names) or time.monotonic() >= (enough if nodes else deadline):
                return nodes
            pause()

    def _meet(self, node: int, answer: Envelope | Failure) -> None:
        try:
            if isinstance(answer, Failure):
                raise RefusedError(answer.reason)
            name, found = self._read(node, answer)
        except (RefusedError, KeyError, TypeError, ValueError, OverflowError) as error:
            self.heard = f"a node's hello was refused: {printable(first_line(error))}"
            self.say(self.heard)
            self.refused[node] = time.monotonic()
            return
        self.names = {n: other for n, other in self.names.items() if other != name} | {node: name}
        self.facts[name] = found
        self.say(f"site {name} is here: {found.positives} positives, {found.negatives} negatives")

    def _read(self, node: int, answer: Envelope) -> tuple[str, Facts]:
        facts = answer.facts
        name = printable(facts["site"])
        if self.keys is not None and self.keys.get(node) != name:
            raise RefusedError(f"it says it is '{name}', but its key is that of '{self.keys.get(node)}'")
        if name not in self.settings.sites:
            raise RefusedError(f"'{name}' is not among the sites {', '.join(self.settings.sites)}")
        if facts["version"] != __version__:
            raise RefusedError(f"{name} runs fedxl {printable(facts['version'])}, the server {__version__}")
        shape = tuple(whole(n, "length") for n in facts["shape"])
        found = Facts(whole(facts["positives"], "positives"), whole(facts["negatives"], "negatives"), shape)
        if min(found.positives, found.negatives) < 0 or found.positives + found.negatives < 1:
            raise RefusedError(f"{name} says it has {found.positives} positives and {found.negatives} negatives")
        self.require_within_limit(name, found.count("all"))
        if found != self.facts.get(name, found):
            raise RefusedError(f"{name} had other data when this run began: {self.facts[name]}, now {found}")
        return name, found

    def require_within_limit(self, name: str, examples: float) -> None:
        """How much a site counts follows from its examples, so it may not claim more than were approved."""
        limit = self.limits.get(name, examples)
        if examples > limit:
            raise RefusedError(f"{name} says it has {examples:.15g} examples, its approved entry allows {limit}")

    def positive_share(self, weighting: Weighting) -> float:
        """How likely an example is positive where every client, or every example, counts the same."""
        each = [self.facts[name] for name in self.settings.sites]
        if weighting == "samples":
            return sum(one.positives for one in each) / sum(one.count("all") for one in each)
        return sum(one.positives / one.count("all") for one in each) / len(each)


def whole(value: Any, what: str) -> int:
    """A count that another party names. A number between two others would be a mistake or a trick."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RefusedError(f"it says that its {what} is {printable(value)}, which is no whole number")
    return value

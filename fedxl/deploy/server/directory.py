"""Which node of the network is which site, and what each site reports about itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedxl import __version__
from fedxl.data.examples import Holding
from fedxl.data.tables.prepare import Preparation, fit
from fedxl.data.tables.summary import Summary, merge, require_one_label
from fedxl.deploy.protocol.envelope import Carrier, Envelope, Failure, pause, whole
from fedxl.deploy.provision.settings import ServerSettings
from fedxl.errors import RefusedError, first_line, printable, refuse, require
from fedxl.risks.pairing import Side
from fedxl.risks.several import MOST_LABELS
from fedxl.sampling import Indices

GRACE = 60.0  # seconds that a round waits for missing sites once others are connected
RETRY = 30.0  # seconds after a refused hello until the next one


class SiteFacts(NamedTuple):
    """What a site reports about its data."""

    positives: int
    negatives: int
    shape: tuple[int, ...]  # of its examples; empty if they are made of a table
    summary: str = ""  # of its table, as JSON
    labels: str = ""  # of several labels, how many examples of each are positive and negative, as JSON
    both: int = 0  # of several labels, examples that have a positive and a negative one
    relevant: int | None = None  # how many of its queries hold a relevant item; None: its data know no queries
    images: str = ""  # how its files of images become examples, as JSON; "": it has none, or does not tell

    def count(self, side: Side) -> int:
        return Holding(self.positives, self.negatives, self.both).count(side)

    def by_label(self, side: Side) -> npt.NDArray[np.int64]:
        """Of several labels: examples of this side, [L]."""
        return Holding(0, 0, label_counts=read_label_counts(self.labels, self.count("all"))).by_label(side)

    def queries(self, relevant: bool) -> Indices:
        """Numbers that stand for its queries with a relevant item: sites do not tell which they are."""
        # A view of one number: it takes no memory, however many queries a site claims to have.
        return np.broadcast_to(np.int64(0), self.relevant or 0)


@dataclass
class Directory:
    """Which node is which site, and what data each holds. Nodes come and go; a site's data stay the same in a run."""

    carrier: Carrier
    settings: ServerSettings
    say: Callable[[str], None]
    facts: dict[str, SiteFacts] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # by node
    pending: dict[str, int] = field(default_factory=dict)  # by ticket: nodes whose hello has not arrived
    refused: dict[int, float] = field(default_factory=dict)  # by node: when we refused its hello
    last_refusal: str = ""
    keys: Mapping[int, str] | None = None  # by node: the site that owns its key; None: nodes have no keys
    limits: Mapping[str, int] = field(default_factory=dict)  # by site: the most examples it may claim; absent: any

    def nodes(self) -> dict[str, int]:
        """The sites that are connected now. Sends hello to new nodes, without waiting for their replies."""
        connected = set(self.carrier.nodes())
        # A node that was away says hello again: it may have come back with another version, or other data.
        self.names = {node: name for node, name in self.names.items() if node in connected}
        self.refused = {node: since for node, since in self.refused.items() if time.monotonic() < since + RETRY}
        new = connected - self.names.keys() - self.refused.keys() - set(self.pending.values())
        if new:
            hello = Envelope({"version": __version__}, {})
            self.pending |= self.carrier.send(dict.fromkeys(new, hello), "hello", self.settings.join)
        for ticket, reply in self.carrier.replies(list(self.pending)):
            self._register(self.pending.pop(ticket), reply)
        return {name: node for node, name in self.names.items() if node in connected}

    def wait_for_all(self) -> None:
        """Wait until every site of the list has said hello: the weight of each depends on all of them."""
        deadline = time.monotonic() + self.settings.join
        while missing := [name for name in self.settings.sites if name not in self.facts]:
            self.nodes()
            late = time.monotonic() > deadline
            why = f" (last: {self.last_refusal})" if self.last_refusal else ""
            names = ", ".join(missing)
            require(not late, f"no hello from {names} within {self.settings.join:g} s; are they running?{why}")
            pause()

    def gather(self, names: Collection[str]) -> dict[str, int]:
        """Those of these sites that are connected. Waits long for the first one, and briefly for the others."""
        deadline = time.monotonic() + self.settings.deadline
        # After a restart no site has said hello yet.
        enough = time.monotonic() + min(GRACE, self.settings.deadline / 2)
        while True:
            nodes = {name: node for name, node in self.nodes().items() if name in names}
            if len(nodes) == len(names) or time.monotonic() >= (enough if nodes else deadline):
                return nodes
            pause()

    def _register(self, node: int, reply: Envelope | Failure) -> None:
        try:
            if isinstance(reply, Failure):
                raise RefusedError(reply.reason)
            name, found = self._read(node, reply)
        except (RefusedError, KeyError, TypeError, ValueError, OverflowError) as error:
            self.last_refusal = f"refused a node's hello: {printable(first_line(error))}"
            self.say(self.last_refusal)
            self.refused[node] = time.monotonic()
            return
        self.names = {n: other for n, other in self.names.items() if other != name} | {node: name}
        self.facts[name] = found
        self.say(f"site {name} has joined: {found.positives} positives, {found.negatives} negatives")

    def _read(self, node: int, reply: Envelope) -> tuple[str, SiteFacts]:
        facts = reply.facts
        name = printable(facts["site"])
        if self.keys is not None and self.keys.get(node) != name:
            raise RefusedError(f"it claims to be '{name}', but its key belongs to '{self.keys.get(node)}'")
        refuse(name not in self.settings.sites, f"'{name}' is not among the sites {', '.join(self.settings.sites)}")
        if facts["version"] != __version__:
            raise RefusedError(f"{name} runs fedxl {printable(facts['version'])}, the server {__version__}")
        shape = tuple(whole(n, "length") for n in facts["shape"])
        positives, negatives = (whole(facts[side], side) for side in ("positives", "negatives"))
        both = whole(facts.get("both", 0), "both")
        relevant = relevant_queries(facts["queries"], positives) if "queries" in facts else None
        summary, labels, images = (str(facts.get(what, "")) for what in ("summary", "labels", "images"))
        found = SiteFacts(positives, negatives, shape, summary, labels, both, relevant, images)
        examples = found.count("all")
        if not 0 <= both <= min(positives, negatives) or examples < 1:
            raise RefusedError(f"{name} reports {positives} positives and {negatives} negatives")
        self.require_within_limit(name, examples)
        if summary:
            Summary.from_json(summary, examples)
        if images:
            image = Preparation.from_text(images).image
            if image is None:
                raise RefusedError("what it tells of its images is of a table's columns")
            refuse(image.shape != shape, f"{name} says that its images become examples of another shape than {shape}")
        if labels:
            found.by_label("all")
        elif both:
            raise RefusedError(f"{name} reports {both} examples of both classes, and one label")
        before = self.facts.get(name, found)
        if found._replace(images="") != before._replace(images=""):
            told = f"{name} had other data when this run started"
            was, now = (each._replace(summary="", images="") for each in (before, found))
            raise RefusedError(f"{told}: {was}, now {now}")
        return name, found

    def preparation(self) -> Preparation | None:
        """How all sites make examples of their tables, from what each told of its own; None if none has a table."""
        told = {name: self.facts[name] for name in self.settings.sites}
        tables = {name: Summary.from_json(it.summary, it.count("all")) for name, it in told.items() if it.summary}
        if not tables:
            return None
        others = [name for name in told if name not in tables]
        some = f"{next(iter(tables))} has a table, but {''.join(others[:1])} has not; all sites' data must be alike"
        require(not others, some)
        return fit(merge(tables))

    def images(self) -> Preparation | None:
        """How the first site makes examples of files of images, for predictions; None unless all sites tell it."""
        told = {name: self.facts[name].images for name in self.settings.sites}
        if not all(told.values()):
            return None
        found = {name: Preparation.from_text(text) for name, text in told.items()}
        require_one_label({name: each.to_json() for name, each in found.items()})
        return next(iter(found.values()))

    def require_within_limit(self, name: str, examples: float) -> None:
        """A site's weight follows from its number of examples, so it may not claim more than were approved."""
        limit = self.limits.get(name, examples)
        refuse(examples > limit, f"{name} reports {examples:.15g} examples; it is approved for at most {limit}")


def read_label_counts(text: str, examples: int) -> npt.NDArray[np.int64]:
    """Positives and negatives by label, [2, L]. Raises RefusedError if they cannot be true of so many examples."""
    try:
        found: Any = json.loads(text)
        each = [found[side] for side in ("positive", "negative")]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RefusedError("its counts by label cannot be read") from None
    lists = all(isinstance(counts, list) and 1 <= len(counts) <= MOST_LABELS for counts in each)
    if not lists or len(each[0]) != len(each[1]) or len(found) != 2:
        raise RefusedError("its counts by label are not two lists of one length")
    for pair in zip(*each, strict=True):
        if not all(type(count) is int and count >= 0 for count in pair) or sum(pair) > examples:
            raise RefusedError(f"its counts by label are not those of {examples} examples")
    return np.array(each, np.int64)


def relevant_queries(told: Any, positives: int) -> int:
    """How many queries hold a relevant item, as a site says that has so many relevant items."""
    count = whole(told, "number of queries")
    if not min(1, positives) <= count <= positives:
        raise RefusedError(f"it reports {count} queries with a relevant item, and {positives} relevant items")
    return count

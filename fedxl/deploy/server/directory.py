"""Which node of the network is which site, and what each site reports about itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedxl import __version__
from fedxl.data.examples import Holding
from fedxl.data.tables.prepare import Preparation, fit
from fedxl.data.tables.summary import Summary, merge, require_one_label
from fedxl.deploy import Throttle, clock, now
from fedxl.deploy.protocol.envelope import POLL, Carrier, Envelope, Failure, Kind, exchange, grace, whole
from fedxl.deploy.protocol.message import FACTS_ALONE
from fedxl.deploy.provision.settings import ServerSettings
from fedxl.errors import RefusedError, first_line, printable, refuse, require
from fedxl.files import private_folder, write_json
from fedxl.reporting.status import RECENT
from fedxl.risks.pairing import Side
from fedxl.risks.several import MOST_LABELS
from fedxl.risks.timetable import UNREADABLE, Times, read_binned
from fedxl.sampling import Indices

MOST_TIMES = 20_000  # characters of counts of times
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
    times_told: str | None = None  # how many of its examples have which time, as JSON; "": it does not tell

    def count(self, side: Side) -> int:
        return Holding(self.positives, self.negatives, self.both).count(side)

    def by_label(self, side: Side) -> npt.NDArray[np.int64]:
        """Of several labels: examples of this side, [L]."""
        return Holding(0, 0, label_counts=read_label_counts(self.labels, self.count("all"))).by_label(side)

    @property
    def times(self) -> Times | None:
        """Of time to event, if it tells them."""
        return read_times(self.times_told, self.positives, self.count("all")) if self.times_told else None

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
    names: dict[str, str] = field(default_factory=dict)  # by node
    pending: dict[str, str] = field(default_factory=dict)  # by ticket: connected nodes whose hello has not arrived
    refused: dict[str, float] = field(default_factory=dict)  # by site (or keyless node): when we refused its hello
    refusals: list[dict[str, str]] = field(default_factory=list)  # the latest, with their times
    status: Path | None = None  # the file that says who is connected, for the operator's page
    lost: set[str] = field(default_factory=set)  # sites that a round has waited for in vain; until they are back
    waits: dict[str, str] = field(default_factory=dict)  # sites that are waited for before a round, and until when
    here: set[str] = field(default_factory=set)  # sites that were connected when we looked last
    gone: dict[str, tuple[str, str]] = field(default_factory=dict)  # sites that no longer are: when, and grace's end

    def __post_init__(self) -> None:
        self.note = Throttle(self.say)  # for what a site can have us say
        self._shown: Any = None  # what the status file says

    def nodes(self) -> dict[str, str]:
        """The nodes of the sites that are connected now. Sends hello to new ones, and waits for no reply."""
        connected = self.carrier.nodes()
        # A node that was away says hello again: it may have come back with another version, or other data.
        self.names = {node: name for node, name in self.names.items() if node in connected}
        self.refused = {node: since for node, since in self.refused.items() if time.monotonic() < since + RETRY}
        self.carrier.forget([ticket for ticket, node in self.pending.items() if node not in connected])
        self.pending = {ticket: node for ticket, node in self.pending.items() if node in connected}
        known = {*self.names, *self.pending.values()}
        if new := [n for n, owner in connected.items() if n not in known and (owner or n) not in self.refused]:
            hello = Envelope({"version": __version__}, {}, FACTS_ALONE)
            self.pending |= self.carrier.send(dict.fromkeys(new, hello), "hello", self.settings.join)
        for ticket, reply in self.carrier.replies(list(self.pending)):
            node = self.pending.pop(ticket)
            self._register(node, connected[node], reply)
        self._write_status(connected)
        return {name: node for node, name in self.names.items()}

    def exchange(
        self, requests: Mapping[str, Envelope], kind: Kind, seconds: float
    ) -> Iterator[tuple[str, Envelope | Failure]]:
        """`exchange` with nodes. The operator sees which sites are lost meanwhile, and waited for."""

        def look(unanswered: Collection[str]) -> None:
            self._write_status(self.carrier.nodes(), {self.names.get(node, "") for node in unanswered})

        return exchange(self.carrier, requests, kind, seconds, look)

    def _write_status(self, connected: Mapping[str, str], unanswered: Collection[str] = ()) -> None:
        """Say in a file which sites are connected or waited for, whenever that has changed."""
        # A site that comes back while a request is under way is not asked for a hello before the next one.
        back = {site for site in connected.values() if site in self.facts and site not in self.refused}
        here = back | {name for node, name in self.names.items() if node in connected}
        lost = (clock(), clock(grace(self.settings.deadline)))
        self.gone = {name: self.gone.get(name, lost) for name in (self.here | self.gone.keys()) - here}
        self.here = here
        waits = {name: until for name, (_, until) in self.gone.items() if name in unanswered} | self.waits
        sites = {name: self._state(name, waits.get(name, "")) for name in self.settings.sites}
        shown = sites, [*self.refusals]
        if self.status is None or shown == self._shown:
            return
        self._shown = shown
        told = {"time": now(), "sites": sites, "refusals": shown[1]}
        with suppress(OSError):  # the run can do without
            private_folder(self.status.parent)
            write_json(self.status, told)

    def _state(self, name: str, until: str) -> dict[str, str]:
        """What the status file says of a site."""
        if name in self.here:
            return {"state": "connected"}
        if not self.is_approved(name):
            return {"state": "revoked" if name in self.facts else "not approved yet"}
        found = (
            {"state": "lost", "since": self.gone[name][0]} if name in self.gone else {"state": "not connected yet"}
        )
        return found | ({"until": until} if until else {})

    def wait_for_all(self) -> None:
        """Wait until every site of the list has said hello: the weight of each depends on all of them."""
        deadline = time.monotonic() + self.settings.join
        while missing := [name for name in self.settings.sites if name not in self.facts]:
            self.nodes()
            late = time.monotonic() > deadline
            why = f" (last: {self.refusals[-1]['reason']})" if self.refusals else ""
            names = ", ".join(missing)
            require(not late, f"no hello from {names} within {self.settings.join:g} s; are they running?{why}")
            self.carrier.wait(POLL)

    def gather(self, names: Collection[str], least: int = 1) -> dict[str, str]:
        """The nodes of those of these sites that are connected.

        Waits long for the least that there must be, and briefly for others, but once only: a site that did not come
        is left out until it is back. One that is not approved is not waited for.
        """
        began, told, ends = time.monotonic(), set[str](), dict[float, str]()
        while True:
            nodes = {name: node for name, node in self.nodes().items() if name in names}
            self.waits = {}
            self.lost -= nodes.keys()
            away = {name for name in names if name not in nodes and self.is_approved(name)}
            enough, waited = len(nodes) >= least, time.monotonic() - began
            awaited = away - self.lost if enough else away
            most = grace(self.settings.deadline) if enough else self.settings.deadline
            if not awaited or waited >= most:
                self.lost |= away
                return nodes
            until = ends.setdefault(most, clock(most - waited))
            self.waits = dict.fromkeys(awaited, until)
            if awaited - told and waited > POLL:  # after a restart of the server all say hello again
                self.say(f"waiting for {', '.join(sorted(awaited))}, at most {most:g} s")
                told |= awaited
            self.carrier.wait(POLL)

    def note_lost(self, name: str) -> None:
        """A site that was left out of a round: if it is gone, it has been waited for."""
        if name not in self.nodes():
            self.lost.add(name)

    def is_approved(self, name: str) -> bool:
        approved = self.carrier.approved()
        return approved is None or name in approved

    def why_absent(self, name: str) -> str:
        away = "it is not connected, or busy with an earlier request"
        return away if self.is_approved(name) else "it is not approved"

    def limit(self, name: str) -> int | None:
        """The most examples that a site may claim; None: any number."""
        return (self.carrier.approved() or {}).get(name)

    def _register(self, node: str, owner: str, reply: Envelope | Failure) -> None:
        """Take up a node by its hello. owner: the site whose key it has shown, if nodes show keys."""
        try:
            if isinstance(reply, Failure):
                raise RefusedError(reply.reason)
            name, found = self._read(owner, reply)
        except (RefusedError, KeyError, TypeError, ValueError, OverflowError) as error:
            reason = f"refused a node's hello: {printable(first_line(error))}"
            self.note(reason)
            self.refusals = [*self.refusals, {"time": now(), "reason": reason}][-RECENT:]
            self.refused[owner or node] = time.monotonic()
            return
        self.names = {n: other for n, other in self.names.items() if other != name} | {node: name}
        self.facts[name] = found
        self.note(f"site {name} has joined: {found.positives} positives, {found.negatives} negatives")

    def _read(self, owner: str, reply: Envelope) -> tuple[str, SiteFacts]:
        facts = reply.facts
        name = printable(facts["site"])
        refuse(owner and owner != name, f"it claims to be '{name}', but its key belongs to '{owner}'")
        refuse(name not in self.settings.sites, f"'{name}' is not among the sites {', '.join(self.settings.sites)}")
        if facts["version"] != __version__:
            raise RefusedError(f"{name} runs fedxl {printable(facts['version'])}, the server {__version__}")
        shape = tuple(whole(n, "length") for n in facts["shape"])
        positives, negatives = (whole(facts[side], side) for side in ("positives", "negatives"))
        both = whole(facts.get("both", 0), "both")
        relevant = relevant_queries(facts["queries"], positives) if "queries" in facts else None
        summary, labels, images = (str(facts.get(what, "")) for what in ("summary", "labels", "images"))
        times = str(facts["times"]) if "times" in facts else None
        found = SiteFacts(positives, negatives, shape, summary, labels, both, relevant, images, times)
        examples = found.count("all")
        impossible = not 0 <= both <= min(positives, negatives) or examples < 1
        refuse(impossible, f"{name} reports {positives} positives and {negatives} negatives")
        refuse(both and not labels, f"{name} reports {both} examples of both classes, and one label")
        self.require_within_limit(name, examples)
        # Each is read here once, so that what cannot be true is refused.
        if summary:
            Summary.from_json(summary, examples)
        if labels:
            found.by_label("all")
        if times:
            read_times(times, positives, examples)
        if images:
            image = Preparation.from_text(images).image
            refuse(image is None, "what it tells of its images is of a table's columns")
            same = image is not None and image.shape == shape
            refuse(not same, f"{name} says that its images become examples of another shape than {shape}")
        before = self.facts.get(name, found)
        if found._replace(images="") != before._replace(images=""):
            was, now = (each._replace(summary="", images="") for each in (before, found))
            raise RefusedError(f"{name} had other data when this run started: {was}, now {now}")
        return name, found

    @property
    def told(self) -> dict[str, SiteFacts]:
        """What each site of the run has told, in their order."""
        return {name: self.facts[name] for name in self.settings.sites}

    def preparation(self) -> Preparation | None:
        """How all sites make examples of their tables, from what each told of its own; None if none has a table."""
        told = self.told.items()
        tables = {name: Summary.from_json(it.summary, it.count("all")) for name, it in told if it.summary}
        if not tables:
            return None
        others = [name for name, _ in told if name not in tables]
        some = f"{next(iter(tables))} has a table, but {''.join(others[:1])} has not; all sites' data must be alike"
        require(not others, some)
        return fit(merge(tables))

    def images(self) -> Preparation | None:
        """How the first site makes examples of files of images, for predictions; None unless all sites tell it."""
        if not all(it.images for it in self.told.values()):
            return None
        found = {name: Preparation.from_text(it.images) for name, it in self.told.items()}
        require_one_label({name: each.to_json() for name, each in found.items()})
        bits = {each.image.bits: name for name, each in found.items() if each.image and each.image.bits}
        others = ", ".join(f"{count} at {name}" for count, name in bits.items())
        told = f"grey values of 16 bits are made bytes of other bits: {others}; bits must be the same"
        require(len(bits) < 2, told)
        return found[next(iter(bits.values()), self.settings.sites[0])]

    def require_within_limit(self, name: str, examples: float) -> None:
        """A site's weight follows from its number of examples, so it may not claim more than were approved."""
        limit = self.limit(name)
        told = f"{name} reports {examples:.15g} examples; it is approved for at most {limit}"
        refuse(limit is not None and examples > limit, told)


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
    right = all(type(count) is int and count >= 0 for counts in each for count in counts)
    possible = right and all(sum(pair) <= examples for pair in zip(*each, strict=True))
    refuse(not possible, f"its counts by label are not those of {examples} examples")
    return np.array(each, np.int64)


def read_times(text: str, positives: int, examples: int) -> Times:
    """Counts of times between public ones. Raises RefusedError if they cannot be true of so many events."""
    try:
        refuse(len(text) > MOST_TIMES, UNREADABLE)
        return read_binned(json.loads(text), positives, examples)
    except (ValueError, RecursionError):
        raise RefusedError(UNREADABLE) from None


def relevant_queries(told: Any, positives: int) -> int:
    """How many queries hold a relevant item, as a site says that has so many relevant items."""
    count = whole(told, "number of queries")
    if not min(1, positives) <= count <= positives:
        raise RefusedError(f"it reports {count} queries with a relevant item, and {positives} relevant items")
    return count

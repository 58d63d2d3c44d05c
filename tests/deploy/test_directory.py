"""Which node is which site: what becomes of nodes that come and go, over a carrier that only counts."""

from __future__ import annotations

import json

from fedxl.deploy import Throttle
from fedxl.deploy.protocol.envelope import Envelope, Failure
from fedxl.deploy.provision.settings import ServerSettings
from fedxl.deploy.server import directory
from fedxl.deploy.server.directory import RETRY, Directory, SiteFacts
from fedxl.reporting.text import state_in_words
from tests.conftest import Clock


class Counting:
    """One site, at most; each of its connections is a node of its own."""

    def __init__(self) -> None:
        self.node, self.open, self.sent = "", dict[str, str](), 0
        self.found: dict[str, Envelope | Failure] = {}

    def nodes(self):
        return {self.node: "a"} if self.node else {}

    def approved(self):
        return None

    def send(self, requests, kind, seconds, most=0.0):
        self.sent += len(requests)
        tickets = {f"{node}'s {self.sent}": node for node in requests}
        self.open |= tickets
        return tickets

    def replies(self, tickets):
        return [(ticket, self.found.pop(ticket)) for ticket in tickets if ticket in self.found]

    def forget(self, tickets):
        for ticket in tickets:
            del self.open[ticket]

    def wait(self, seconds):
        pass


def followed() -> tuple[Directory, Counting, list[str]]:
    lines: list[str] = []
    carrier = Counting()
    return Directory(carrier, ServerSettings(("a",)), lines.append), carrier, lines


def test_hellos_of_nodes_that_are_gone_are_forgotten():
    known, carrier, _ = followed()
    for number in range(30):
        carrier.node = f"a/{number}"
        known.nodes()
        assert list(known.pending.values()) == list(carrier.open.values()) == [carrier.node]
    carrier.node = ""
    known.nodes()
    assert not known.pending
    assert not carrier.open


def test_a_site_whose_hello_was_refused_waits_before_the_next_even_on_another_connection(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(directory, "time", clock)
    known, carrier, lines = followed()
    for number in range(30):
        carrier.node = f"a/{number}"
        known.nodes()
        carrier.found = {ticket: Failure("it has no data") for ticket in carrier.open}
        known.nodes()
    assert carrier.sent == 1
    assert lines == ["refused a node's hello: it has no data"]
    clock.sleep(RETRY)
    known.nodes()
    assert carrier.sent == 2


def test_the_operator_sees_who_is_lost_while_replies_are_awaited(tmp_path):
    known, carrier, _ = followed()
    known.status = tmp_path / "run" / "status.json"
    carrier.node, known.names, known.facts = "a/1", {"a/1": "a"}, {"a": SiteFacts(1, 1, (2,))}

    def state() -> dict[str, str]:
        return json.loads(known.status.read_text())["sites"]["a"]

    known.nodes()
    assert state() == {"state": "connected"}
    carrier.node = ""
    assert dict(known.exchange({"a/1": Envelope({}, {})}, "train", 0.01))["a/1"] == Failure("no reply within 0.01 s")
    assert state().keys() == {"state", "since", "until"}
    assert state_in_words(state()).startswith("lost at ")
    known.note_lost("a")
    assert "until" not in state()
    assert "since" in state()
    carrier.approved = dict
    known.nodes()
    assert state() == {"state": "revoked"}


def test_lines_that_others_cause_are_said_once_a_minute_and_are_few(monkeypatch):
    clock, lines = Clock(), list[str]()
    monkeypatch.setattr("fedxl.deploy.time", clock)
    say = Throttle(lines.append)
    for number in range(1000):
        say("again")
        say(f"line {number}")
    assert lines == ["again", *(f"line {number}" for number in range(99))]
    clock.sleep(61)
    say("again")
    assert lines[-1] == "again"
    assert len(lines) == 101

"""A site's end of the default transport: what keeps it running, over real TLS connections."""

from __future__ import annotations

import logging
import re
from contextlib import nullcontext

import pytest

pytest.importorskip("cryptography", reason="needs fedxl[deploy]")

from fedxl.deploy import named
from fedxl.deploy.protocol.envelope import Envelope, Failure
from fedxl.deploy.protocol.message import encode
from fedxl.deploy.provision.connection import tls_for_site
from fedxl.deploy.site import requests
from fedxl.deploy.transport.tls import site
from fedxl.deploy.transport.tls.site import Site
from tests.conftest import until
from tests.deploy.hubs import serving


def test_a_typo_in_site_toml_is_a_refusal_and_the_site_works_on(out, monkeypatch):
    """Nobody restarts a site that has ended with a mistake of its user."""
    monkeypatch.setattr(requests, "answer", lambda file, kind, content: encode(Envelope({"ok": True}, {})))
    file, lines = out / "sites" / "a" / "site.toml", list[str]()
    right = file.read_text()
    with serving(out) as server, server.raw(tls_for_site(server.site("a"))) as connection:
        answered = Site(server.site("a"), lines.append).answer_all(connection)
        next(answered)
        assert until(lambda: server.node("a") is not None)
        file.write_text(right.replace("[site]\n", "[site]\nruonds = 3\n"))
        ticket = server.send("a")
        next(answered)
        refused = server.reply(ticket)
        assert isinstance(refused, Failure)
        assert "unknown setting 'site.ruonds'; did you mean 'site.rounds'?" in refused.reason
        assert lines == [f"refused: {refused.reason}"]
        file.write_text(right)
        ticket = server.send("a")
        next(answered)
        assert server.reply(ticket).facts == {"ok": True}


class EnoughError(Exception):
    """The test has seen what it wanted."""


def test_pauses_grow_while_a_reason_stays_and_begin_again_when_it_changes(out, monkeypatch):
    reasons = ["timed out"] * 4 + ["Connection refused"] * 3 + ["timed out"] * 8
    pauses, lines = list[float](), list[str]()

    def connect(*given):
        if len(pauses) == len(reasons):
            raise EnoughError
        raise OSError(reasons[len(pauses)])

    monkeypatch.setattr(site, "connect", connect)
    monkeypatch.setattr(site.time, "sleep", pauses.append)
    with pytest.raises(EnoughError):
        site.work(out / "sites" / "a", lines.append)
    assert pauses == [0.5, 1, 2, 4, 0.5, 1, 2, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert len(lines) == 3, "each change of the reason is said once"


@pytest.mark.parametrize(("kind", "line"), [("", "this site's key is not approved; retrying"), ("model", site.DONE)])
def test_a_connection_that_ends_at_once_is_none_and_after_the_model_the_run_is_done(out, monkeypatch, kind, line):
    pauses, lines = list[float](), list[str]()

    def answer_all(self, connection):
        self.kind = kind
        yield
        if len(pauses) == 3:
            raise EnoughError
        raise EOFError(site.CLOSED)

    monkeypatch.setattr(site, "connect", lambda *given: nullcontext())
    monkeypatch.setattr(Site, "answer_all", answer_all)
    monkeypatch.setattr(site.time, "sleep", pauses.append)
    with pytest.raises(EnoughError):
        site.work(out / "sites" / "a", lines.append)
    assert [each.endswith(line) for each in lines] == [True]
    assert pauses == [0.5, 1, 2]


def test_what_a_party_says_and_what_it_logs_have_time_and_name(capsys, monkeypatch):
    log = logging.getLogger("fedxl")
    monkeypatch.setattr(log, "handlers", [])
    named("server")("begun")
    say = named("site north")
    say("connected")
    log.error("refused: %s", "too large")
    form = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
    server, *site = capsys.readouterr().out.splitlines()
    assert re.fullmatch(f"{form}server: begun", server)
    assert [re.sub(f"^{form}", "", line) for line in site] == [
        "site north: connected",
        "site north: refused: too large",
    ]

"""The operator's page on a deployed run: what it shows, and whom it answers."""

from __future__ import annotations

import fcntl
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from fedxl.reporting.status import REFRESH, Status
from tests.reporting import browser

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[2J"
LOST = "lost at 20:54:13, waited for until 20:55:13"
ROWS = [
    {
        "round": 5, "seconds": 10.0, "validation": {"auroc": 0.7, "positives": 9, "negatives": 9},
        "validation_by_site": {"north": {"auroc": 0.71}, "south": "it discloses no evaluation"},
        "dropped": [{"round": 4, "site": EVIL, "reason": EVIL}],
    },
]  # fmt: skip


@pytest.fixture
def served(tmp_path) -> Iterator[Status]:
    run = tmp_path / "server" / "run"
    run.mkdir(parents=True)
    (tmp_path / "server" / "server.toml").write_text('[server]\nsites = ["north", "south"]\n')
    (run / "run.json").write_text(json.dumps({"settings": {"run.rounds": 40}, "select": "auroc"}))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    lost = {"state": "lost", "since": "20:54:13", "until": "20:55:13"}
    sites = {"north": {"state": "connected"}, "south": lost, EVIL: {"state": "revoked"}}
    told = {"time": "now", "sites": sites}
    (run / "status.json").write_text(json.dumps({**told, "refusals": [{"time": "today", "reason": EVIL}]}))
    with Status(tmp_path) as page, (tmp_path / "server" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the server is running
        thread = Thread(target=page.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield page
        page.shutdown()
        thread.join()


def fetch(page: Status, method: str = "GET", path: str = "", host: str = "") -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", page.server_port)
    connection.request(method, path or page.secret, headers={"Host": host or f"127.0.0.1:{page.server_port}"})
    reply = connection.getresponse()
    found = reply.status, reply.read().decode(), dict(reply.getheaders())
    connection.close()
    return found


def test_it_shows_the_run_and_escapes_what_others_wrote(served):
    code, text, headers = fetch(served)
    assert code == 200
    for shown in (
        "round 5 of 40",
        "0.7000",
        "0.7100",
        "connected",
        LOST,
        "revoked",
        "auroc",
        "it discloses no evaluation",
        "today",
    ):
        assert shown in text
    assert "<script" not in text
    assert "<img" not in text
    assert "\x1b" not in text
    assert text.count("&lt;script&gt;") >= 4, "a site, its note, the round that left it out, the refusal"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert f'content="{REFRESH}"' in text


def test_without_a_server_there_are_no_connections(served):
    (served.folder / ".lock").unlink()
    text = fetch(served)[1]
    assert "The server is not running." in text
    assert "connected" not in text
    assert LOST not in text


def test_before_the_first_round_it_shows_who_is_awaited(served):
    for name in ("run.json", "metrics.jsonl"):
        (served.run / name).unlink()
    assert "waits until every site has joined" in fetch(served)[1]
    (served.run / "status.json").write_text("{")
    assert fetch(served)[0] == 500
    (served.run / "status.json").unlink()
    assert fetch(served)[0] == 200


def test_it_is_read_only_and_for_this_machine_and_for_who_knows_the_address(served):
    before = {path: path.read_bytes() for path in served.run.iterdir()}
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert fetch(served, method)[0] == 501
    assert fetch(served, "HEAD")[:2] == (200, "")
    for host in ("evil.example", f"evil.example:{served.server_port}", "127.0.0.1"):
        assert fetch(served, host=host)[0] == 403
    for path in ("/", "/run/metrics.jsonl", served.secret + "x", "/../etc/passwd"):
        assert fetch(served, path=path)[0] == 404
    assert served.server_address[0] == "127.0.0.1"
    assert {path: path.read_bytes() for path in served.run.iterdir()} == before


@pytest.mark.skipif(browser.binary() is None, reason=f"needs a browser: one of {', '.join(browser.NAMES)}")
def test_a_real_browser_shows_it_and_runs_nothing(served, tmp_path):
    tab = browser.Browser(Path(tmp_path / "profile"))
    try:
        for width in (390, 1200):
            tab.look(width)
            tab.go(served.address)
            assert "round 5 of 40" in tab.value("document.body.innerText")
            assert tab.value("document.querySelectorAll('script, img').length") == 0
            assert tab.value("document.documentElement.scrollWidth") <= width
            styled = tab.value("getComputedStyle(document.querySelector('table')).borderCollapse")
            assert styled == "collapse", "the policy lets its own style sheet in"
            wrong = [event for event in tab.events if event["method"] == "Runtime.exceptionThrown"]
            assert not wrong
        tab.screenshot(tmp_path / "status.png")
    finally:
        tab.close()

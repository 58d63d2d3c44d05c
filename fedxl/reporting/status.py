"""A page in the browser on a deployed run, for the server's operator: read only, and for this machine alone."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedxl import metrics
from fedxl.errors import UserError, first_line, printable, require
from fedxl.reporting import watch
from fedxl.reporting.charts.scale import Svg, element, escape, style_hash
from fedxl.reporting.text import evaluation_in_words, state_in_words
from fedxl.training.run_folder import being_written

RECENT = 20  # evaluations and refusals that are shown
REFRESH = 5  # seconds
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c2733; background: #fff; overflow-wrap: anywhere; color-scheme: light dark; }
table { border-collapse: collapse; width: 100%; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #8886; vertical-align: top; }
.short { white-space: nowrap; } .bad { color: #a33; } @media (prefers-color-scheme: dark) {
  body { color: #dde4ea; background: #14191f; } .bad { color: #f99; } }
"""
NOTHING = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
POLICY = f"default-src 'none'; style-src '{style_hash(STYLE)}'; {NOTHING}"
HEADERS = {
    "Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": POLICY, "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
}  # fmt: skip


def page(server: Path, run: Path, name: str) -> str:
    """The whole page. server: the folder of a server. Names and reasons are other parties' texts."""
    told = watch.connections(run)
    serves = any(being_written(folder) is not False for folder in (server, run))
    view: watch.View | None = None
    try:
        view = watch.look(run)
        title, rows, bad = f"{name}: {watch.state(view)}", view.rows, watch.warning(view)
        said = [each(view) for each in (watch.where, watch.standing, watch.participants, watch.pace, watch.outcome)]
    except UserError:
        title, rows, bad = f"{name}: no round yet", (), ""
        said = ["the server has not begun to train; it waits until every site has joined once"]
    body = [element("h1", title), *(element("p", line) for line in said if line)]
    body += [element("p", bad, class_="bad")] if bad else []
    body += [element("h2", "Sites"), *_sites(view, told, serves)]
    shown = [(row["round"], evaluation_in_words(row, "validation")) for row in [*rows][: -RECENT - 1 : -1]]
    body += [element("h2", "Evaluations"), _table(("round", "validation data"), shown)]
    dropped = [each for row in rows for each in row.get("dropped", []) if isinstance(each, dict)]
    left_out = [(f"round {each.get('round')}", each.get("site"), each.get("reason")) for each in dropped]
    refused = [(each.get("time"), "", each.get("reason")) for each in told.get("refusals", [])]
    refusals = [*left_out[: -RECENT - 1 : -1], *refused[: -RECENT - 1 : -1]]
    body += [element("h2", "Refusals"), _table(("when", "site", "reason"), refusals)]
    head = f'<meta charset="utf-8"><meta http-equiv="refresh" content="{REFRESH}">{element("title", title)}'
    head += f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>'


def _sites(view: watch.View | None, told: Mapping[str, Any], serves: bool) -> list[Svg]:
    measured = {site.name: site for site in view.sites} if view else {}
    known = {printable(name, 40): state_in_words(state) for name, state in told.get("sites", {}).items()}
    rows = list[tuple[Any, ...]]()
    for name in dict.fromkeys([*known, *measured]):
        found = measured.get(name)
        metric = "" if found is None or math.isnan(found.metric) else f"{found.metric:.4f}"
        rows.append((name, known.get(name, "") if serves else "", metric, found.note if found else ""))
    since = f"Connections as of {printable(told.get('time'))}." if serves else "The server is not running."
    metric = metrics.key(view.metric) if view else "metric"
    table = _table(("site", "connection", metric, "note"), rows)
    return [table, *([element("p", since)] if told or not serves else [])]


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> Svg:
    if not rows:
        return element("p", "None.")
    lines = [("th", heads), *(("td", row) for row in rows)]
    return element("table", *(element("tr", *(_cell(tag, each) for each in row)) for tag, row in lines))


def _cell(tag: str, value: Any) -> Svg:
    text = printable("" if value is None else value)
    return element(tag, text, class_="short" if len(text) < 20 else None)


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of the one page to whoever knows its address, and nothing else."""

    server: Status
    server_version, sys_version, timeout = "fedxl", "", 10.0

    def do_GET(self) -> None:
        # A page of the web whose name was made to point here has that name as its host.
        if self.headers.get("Host") not in self.server.hosts:
            return self._reply(403, "this page is for 127.0.0.1 only")
        if not secrets.compare_digest(self.path.encode(), self.server.secret.encode()):
            return self._reply(404, "no such page; use the address that the command has printed")
        try:
            return self._reply(200, page(self.server.folder, self.server.run, self.server.name))
        except UserError as error:
            return self._reply(500, escape(first_line(error)))

    do_HEAD = do_GET

    def _reply(self, code: int, text: str) -> None:
        content = text.encode()
        self.send_response(code)
        for name, value in {**HEADERS, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *told: Any) -> None:
        """Nothing: requests are the operator's own."""


class Status(ThreadingHTTPServer):
    """The page at an address of this machine that nobody can guess."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        found = folder / "server" if (folder / "server").is_dir() else folder
        require((found / "server.toml").is_file(), f"there is no server/ in {folder}, and no server.toml")
        self.name, self.folder, self.run = folder.resolve().name, found, watch.folder_of(found)
        self.secret = f"/{secrets.token_urlsafe(16)}"
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            raise UserError(f"cannot listen on port {port}: {error.strerror}; choose another with --port") from None
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}{self.secret}"

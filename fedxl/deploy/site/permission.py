"""Which requests a site permits: its own site.toml decides.

A server chooses the network, the weights and the risk. With a network of its choice it could recover examples from
scores or weights. So a site lists the networks that it runs, counts requests, and may pin the whole experiment.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedxl import __version__, metrics
from fedxl.algorithms.protocol import Algorithm
from fedxl.config.experiment import Config
from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.provision.settings import SiteFile
from fedxl.deploy.site.locks import locked
from fedxl.errors import UserError, printable, require
from fedxl.files import read_bytes, write_atomically

TABLES = ("model", "risk", "algorithm", "run")
COUNTS = "requests.json"
RUN_ID = re.compile(r"[0-9a-f]{8,64}")
SORTED = "sorted"
COUNTED = {"train": "rounds", "evaluate": "evaluations"}  # kind of request: the setting that limits it


def require_acceptable(request: Envelope) -> None:
    """Refuse a request of another version, or of a run whose id cannot name a folder."""
    theirs = printable(request.facts["version"])
    require(theirs == __version__, f"the server runs fedxl {theirs}, this site {__version__}; they must be the same")
    require(bool(RUN_ID.fullmatch(str(request.facts["run"]))), "the run id is malformed")


def permitted(site: SiteFile, text: str) -> Config:
    """The experiment of a request, if site.toml allows it."""
    tables = _tables(text)
    settings = site.settings
    for kind, allowed in (("model", settings.models), ("risk", settings.risks), ("algorithm", settings.algorithms)):
        name = str(tables[kind].get("name", "mlp" if kind == "model" else ""))
        listed = ", ".join(allowed) or "none"
        require(
            name in allowed,
            f"this site does not allow the {kind} '{printable(name)}'; its site.toml allows: {listed}",
        )
    require_metrics_allowed(site, _metrics(tables["run"]))
    steps = tables["run"].get("local_steps", 32)
    require(isinstance(steps, int) and not isinstance(steps, bool), "local_steps is not an integer")
    require(steps <= settings.steps, f"this site allows {settings.steps} local steps a request, not {steps}")
    if settings.digest:
        same = digest(tables) == settings.digest
        require(same, "this experiment is not the one that the site has pinned by its digest")
    model = {key: value for key, value in tables["model"].items() if key != "weights"}  # the server sends them
    return Config(data={}, model=model, risk=tables["risk"], algorithm=tables["algorithm"], run=tables["run"])


def require_metrics_allowed(site: SiteFile, names: Iterable[str]) -> None:
    """Refuse metrics that are neither fedxl's own nor in site.toml: they would run code that a server names."""
    allowed = site.settings.metrics
    for name in sorted(metrics.own(names)):
        listed = ", ".join(allowed) or "only fedxl's own"
        require(
            name in allowed,
            f"this site does not allow the metric '{printable(name)}'; its site.toml allows: {listed}",
        )


def require_order(site: SiteFile, algorithm: Algorithm) -> None:
    """Refuse a run whose uploads would show the order of the site's draws. Not every algorithm uploads scores."""
    order = algorithm.order
    told = (
        f"this site uploads scores in no order but the sorted one (sorted_scores), and the run has order = '{order}'"
    )
    require(not site.settings.sorted_scores or order == SORTED, f'{told}; set order = "sorted" in [algorithm]')


def _metrics(run: Mapping[str, Any]) -> list[str]:
    """The metrics that a request names in addition to the default ones."""
    more, select = run.get("metrics", []), run.get("select", "")
    names = [select, *more] if isinstance(more, list) else [more]
    require(all(isinstance(name, str) for name in names), "the request's metrics are not names")
    return names


def digest(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """A hash of everything in an experiment that a server sends to sites."""
    kept = {name: dict(tables.get(name, {})) for name in TABLES}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def count(site: SiteFile, kind: str) -> None:
    """Count a request before handling it, so that a crash cannot undo the count. Refuse it above the limit."""
    setting = COUNTED[kind]
    most = int(getattr(site.settings, setting))
    with locked(site.state, ".requests.lock"):
        counts = _counts(site)
        done = counts.get(kind, 0) + 1
        limit = f"this site has answered {most} requests to {kind}, as many as its site.toml allows ({setting})"
        require(done <= most, limit)
        remember(site.state / COUNTS, {**counts, kind: done})


def remember(path: Path, content: Mapping[str, Any]) -> None:
    """Write what this site must not forget."""
    try:
        write_atomically(path, json.dumps(content).encode(), private=True)
    except OSError as error:
        raise UserError(f"cannot write to {path.parent}: {error.strerror}; earlier states are intact") from None


def _counts(site: SiteFile) -> dict[str, int]:
    path = site.state / COUNTS
    try:
        return {str(kind): int(number) for kind, number in json.loads(read_bytes(path)).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"cannot read {path}: {error}; its owner must correct or remove it") from None


def _tables(text: str) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(text)
        tables = {name: dict(found.get(name, {})) for name in TABLES}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise UserError("cannot read the request's experiment") from None
    return tables

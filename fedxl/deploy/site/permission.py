"""Which requests a site permits: its own site.toml decides, and what it has answered before.

A server chooses the network, the weights and the risk. With a network of its choice it could recover examples from
scores or weights. So a site lists the networks that it runs, counts requests, and may pin the whole experiment.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedxl import __version__, metrics
from fedxl.algorithms.protocol import Algorithm
from fedxl.config.experiment import Config
from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.provision.settings import SiteFile
from fedxl.deploy.storage import locked, recall, updating
from fedxl.errors import UserError, printable, require
from fedxl.risks import XRisk
from fedxl.sampling import Floats
from fedxl.training.problem import Problem
from fedxl.tree import add_tensor

TABLES = ("model", "risk", "algorithm", "run")
COUNTS = "requests.json"
RUN_ID = re.compile(r"[0-9a-f]{8,64}")
SORTED = "sorted"
# By kind of request: the setting that limits it.
COUNTED = {"train": "rounds", "evaluate": "evaluations", "frozen": "rounds", "model": "rounds"}
INSTEAD = 'its site.toml may say evaluate = "metrics"'
ANSWERED = "answered.json"  # of a private run: what was asked, by round
FIXED = "fixed.json"  # of a private run: a digest of what its first request has fixed
MOST_ANSWERED = 2**30  # bytes: more rounds than any run has
# What an answer depends on.
ASKED = ("round", "number", "base", "visits", "config", "facts_of_all", "preparation", "frozen")


def require_acceptable(request: Envelope) -> None:
    """Refuse a request of another version, or of a run whose id cannot name a folder."""
    theirs = printable(request.facts["version"])
    require(theirs == __version__, f"the server runs fedxl {theirs}, this site {__version__}; they must be the same")
    require(bool(RUN_ID.fullmatch(str(request.facts["run"]))), "the run id is malformed")


def permitted(site: SiteFile, text: str) -> Config:
    """The experiment of a request, if site.toml allows it."""
    tables = _tables(text)
    for kind, usual in (("model", "mlp"), ("risk", ""), ("algorithm", "")):
        require_listed(site, kind, str(tables[kind].get("name", usual)))
    require_metrics_allowed(site, _metrics(tables["run"]))
    _require_small(site, tables["run"], bool(tables["algorithm"].get("fresh")))
    pinned = site.settings.digest in ("", digest(tables))
    require(pinned, "this experiment is not the one that the site has pinned by its digest")
    model = {key: value for key, value in tables["model"].items() if key != "weights"}  # the server sends them
    return Config(data={}, model=model, risk=tables["risk"], algorithm=tables["algorithm"], run=tables["run"])


def _require_small(site: SiteFile, run: Mapping[str, Any], fresh: bool) -> None:
    """Refuse more steps than the site allows, or larger ones: each takes memory for its examples and their pairs."""
    found = {name: run.get(name, 32) for name in ("local_steps", "batch1", "batch2")}
    for name, value in found.items():
        require(type(value) is int and value > 0, f"{name} is not an integer from 1")
    steps, batch = found["local_steps"], (found["batch1"] + found["batch2"]) * (1 + fresh)
    most, largest = site.settings.steps, site.settings.batch
    require(steps <= most, f"this site allows {most} local steps per request, not {steps}")
    twice = ", which fresh = true doubles" if fresh else ""
    told = f"this site scores at most {largest} examples per step (batch), not {batch}"
    require(batch <= largest, f"{told}: lower batch1 and batch2{twice}")


def require_metrics_allowed(site: SiteFile, names: Iterable[str]) -> None:
    """Refuse metrics that are neither fedxl's own nor in site.toml: they would run code that a server names."""
    for name in sorted(metrics.own(names)):
        require_listed(site, "metric", name)


def require_listed(site: SiteFile, kind: str, name: str) -> None:
    """Refuse a network, a risk, an algorithm or a metric that is not in site.toml."""
    allowed = getattr(site.settings, f"{kind}s")
    listed = ", ".join(allowed) or ("only fedxl's own" if kind == "metric" else "none")
    told = f"this site does not allow the {kind} '{printable(name)}'; its site.toml allows: {listed}"
    require(name in allowed, told)


def require_discreet(site: SiteFile, algorithm: Algorithm, risk: XRisk) -> None:
    """Refuse a run that would show more of the training data than the site allows."""
    settings = site.settings
    sort = f"and the run has order = '{algorithm.order}'; set order = \"sorted\" in [algorithm]"
    allowed = not settings.sorted_scores or algorithm.order == SORTED  # as is one that uploads no scores
    require(allowed, f"this site uploads only sorted scores (sorted_scores), {sort}")
    noise = "this site trains with differential privacy alone (training_epsilon)"
    private = algorithm.private or not settings.training_epsilon
    require(private, f"{noise}; set dp_clip, dp_noise and dp_score_noise in [algorithm]")
    bins = 'pooled scores carry the bin of each time; its site.toml may say times = "bins" in [site]'
    pooled = risk.pairing.timed and not algorithm.local_pairs
    require(not pooled or settings.times == "bins", f"this site does not share event times: {bins}")


def require_useful(site: SiteFile, problem: Problem) -> None:
    """Refuse an evaluation of which what this site discloses would give no metric."""
    kind, pairing = site.settings.evaluate, problem.risk.pairing
    scores = "this site discloses scores, and scores without their queries or times give no metric of these"
    require(kind != "scores" or not (pairing.timed or pairing.ranked), f"{scores}; {INSTEAD}")
    curves = 'curves of time to event need times that all share: time_bins in [risk], and times = "bins" in site.toml'
    known = kind != "curve" or not pairing.timed or shared_times(site, problem) is not None
    require(known, f"{curves}; {INSTEAD}")


def require_enough(site: SiteFile, held: Sequence[Sequence[int]], what: str, timed: bool = False) -> None:
    """Refuse what would rest on few examples of a class: the AUROC of one positive tells its rank.

    held: positives and negatives, of each label.
    """
    least, names = site.settings.fewest, ("events", "examples without one") if timed else ("positives", "negatives")
    for name, numbers in zip(names, zip(*held, strict=True), strict=True):
        few = any(0 < number < least for number in numbers)
        some = " of a label" if len(held) > 1 else ""
        require(not few, f"this site has fewer than {least} {name}{some}, too few for {what} (fewest)")


def shared_times(site: SiteFile, problem: Problem) -> Floats | None:
    """The times between which sums of a run may leave this site; None if none may."""
    return problem.risk.pairing.public_times if site.settings.times == "bins" else None


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
    path, setting = site.state / COUNTS, COUNTED[kind]
    most = int(getattr(site.settings, setting))
    with locked(site.state, ".requests.lock"), updating(path) as counts:
        done = counts.get(kind, 0)
        require(type(done) is int, f"cannot read {path}; its owner must correct or remove it")
        limit = f"this site has answered {most} requests to {kind}, as many as its site.toml allows ({setting})"
        require(done < most, limit)
        counts[kind] = done + 1


def answered(site: SiteFile) -> str:
    """How much this site has answered, for its log."""
    counts = recall(site.state / COUNTS)
    many = {"updates": counts.get("train", 0), "evaluations": counts.get("evaluate", 0)}
    return ", ".join(f"{count} {what}" for what, count in many.items())


def question(facts: Mapping[str, Any], tensors: Mapping[str, Tensor], data: str) -> str:
    """A digest of all that an answer depends on; tensors: those of the request, and of the state it starts from."""
    content = hashlib.sha256(json.dumps([data, *(str(facts.get(name, "")) for name in ASKED)]).encode())
    for name in sorted(tensors):
        add_tensor(content, name, tensors[name])
    return content.hexdigest()


def private_rounds(folder: Path, round: int, *fixed: Any) -> list[int]:
    """The rounds of a private run that have an answer, taken or not, up to this one, which is the last of them.

    How often an example is read follows from how many answers there are, if each one reads on where the last ended.
    So the site answers in ascending order, a round again if need be, and what decides on the reading stays as it is.

    fixed: what must not change during the run, as JSON.
    """
    now = hashlib.sha256(json.dumps(fixed).encode()).hexdigest()
    told = "this private run began with other settings, another number of this site or other data; they must stay"
    with updating(folder / FIXED) as known:
        require(known.setdefault("digest", now) == now, told)
    answered = {int(name) for name in recall(folder / ANSWERED, MOST_ANSWERED)}
    last = max(answered, default=-1)
    told = f"this site has answered round {last} of this private run; of earlier ones it only repeats its answers"
    require(round > last or round in answered, told)
    return sorted(each for each in answered | {round} if each <= round)


def require_same_question(folder: Path, round: int, asked: str) -> None:
    """Note what is asked in a private round, before it is answered; refuse another question in the same round.

    The noise follows from the site's private seed, the round and its number, so that a round that is requested again,
    after a crash, gives the same bits. A server that requested it with other weights would get two answers under one
    noise, and by subtracting them what the noise hides.
    """
    told = f"round {round} has been answered to another request; the noise of one answer must not serve for two"
    with updating(folder / ANSWERED, MOST_ANSWERED) as known:
        require(known.setdefault(str(round), asked) == asked, told)


def _tables(text: str) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(text)
        tables = {name: dict(found.get(name, {})) for name in TABLES}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise UserError("cannot read the request's experiment") from None
    return tables

"""A site's side: it says hello, does its part of a round and evaluates, with its own data and on its own disk.

`answer` takes any request, whatever transport has brought it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedxl import __version__, tree, wire
from fedxl.algorithms.checks import check_update
from fedxl.algorithms.protocol import DataFacts, Phase, Reading
from fedxl.config.experiment import Config, build_problem
from fedxl.data.examples import Examples
from fedxl.data.tables.prepare import Preparation
from fedxl.deploy.protocol.envelope import DIVERGED, NO_EVALUATION, Envelope, ScoreReply, TrainRequest, whole
from fedxl.deploy.protocol.message import Bytes, Piece, decode, encode, encode_failure
from fedxl.deploy.provision.settings import SiteFile, read_site
from fedxl.deploy.site import account, backbone, cache, curve, permission, secure
from fedxl.deploy.storage import SEED_FILE, kept_seed, locked, turn, writing_to
from fedxl.engine.drawing import Secrets
from fedxl.engine.executors import executor
from fedxl.engine.simulator import Simulator
from fedxl.errors import DivergedError, OwnersError, RefusedError, UserError, for_others, printable, refuse, require
from fedxl.evaluation.hazard import hazard_sums
from fedxl.models import weights_of
from fedxl.risks.pairing import Share
from fedxl.risks.timetable import binned, read_timetable
from fedxl.training.privacy import require_given
from fedxl.training.problem import Problem, check_label_names, check_queries, match_types, require_for_sites
from fedxl.training.rounds import passive_like
from fedxl.training.run_writer import load_checkpoint, save_checkpoint
from fedxl.training.settings import pick_device

SPLITS = ("validation", "test")
VISITS = "rounds.0"  # of the simulator's clients, of which this site is the only one
MOST_LIMITS = 6  # false positive rates at which a site discloses its partial AUC

log = logging.getLogger("fedxl")


def answer(file: Path, kind: str, content: Bytes) -> list[Piece]:
    """Answer a request to the site of this site.toml. A refusal or an error becomes a reply that says why."""
    torch.set_num_threads(1)
    try:
        site = read_site(file)  # each time: its owner may have changed what is allowed
        with turn():
            refuse(kind not in HANDLERS, "sites do not handle requests of this kind")
            return encode(HANDLERS[kind](site, decode(content, site.settings.megabytes)))
    except (UserError, RefusedError) as error:
        log.error("refused: %s", printable(error))
        reason = for_others(error)
    except Exception:  # the text stays in the site's own log: it may reveal data
        log.exception("an internal error")
        reason = "an internal error; see the site's log"
    return encode_failure(reason)


def hello(site: SiteFile) -> Envelope:
    """Who this is, and how much it holds. Other data than were prepared are prepared now, and never during a run."""
    cache.refresh(site)
    known = cache.facts(site)
    held, summary = cache.holding(site), known["summary"]
    # What a table's examples look like follows from all sites' tables together.
    shape = () if summary else cache.training_data(site).shape
    allowed = site.settings.summary or not summary
    told = "its table is scaled as all sites' tables are, which needs a summary of its columns"
    require(allowed, f"{told}; its site.toml must say summary = true in [site], or name a preparation in [data]")
    exact = "a summary of its table has no noise, and this site limits what training tells (training_epsilon)"
    require(
        not (summary and site.settings.training_epsilon),
        f"{exact}; name a preparation in [data] (fedxl data prepare)",
    )
    facts: dict[str, Any] = {"site": site.settings.name, "version": __version__, "summary": summary}
    facts |= {"positives": held.positives, "negatives": held.negatives, "shape": list(shape)}
    if site.settings.summary and known["images"]:
        facts["images"] = known["images"]
    if held.label_counts.shape[1] > 1:
        facts["both"] = held.both
        facts["labels"] = json.dumps(dict(zip(("positive", "negative"), held.label_counts.tolist(), strict=True)))
    if held.ranked:
        facts["queries"] = len(held.queries(relevant=True))
    if held.times is not None:
        facts["times"] = json.dumps(binned(held.times)) if site.settings.times == "bins" else ""
    return Envelope(facts, {})


def train(site: SiteFile, request: Envelope) -> Envelope:
    """One round: `local_round` on this site's data, from the state after the round that the server last took."""
    facts = request.facts
    permission.require_acceptable(request)
    experiment, precision = permission.permitted(site, str(facts["config"])), str(facts["wire"])
    hidden = secure.require_allowed(site, request, precision)
    permission.count(site, "train")
    mine = cache.training_data(site, _preparation(request))
    problem = _problem(site, experiment, request, mine)
    permission.require_discreet(site, problem.algorithm, problem.risk)
    require_given(problem.algorithm, bool(cache.facts(site)["fitted"]))
    check_queries(problem, {"train": mine})
    require_for_sites(problem)
    mine = match_types(problem, mine)
    round, number, base, visits = _numbers(request)
    phase = problem.algorithm.phase(round)
    received = tree.to(_received(problem, phase, request), problem.device)
    _require_own_share(received.share, mine, problem.reading)
    data, private = cache.identity(site), problem.algorithm.private
    folder = site.state / str(facts["run"])
    engine = _engine(folder, site.settings.private_draws, problem, mine, number, received.share)
    with locked(folder):
        if private:
            stated = round <= problem.settings.rounds
            require(stated, f"round {round} is beyond the rounds that epsilon was stated for")
            settings = (experiment.algorithm, experiment.risk, problem.schedule, facts["facts_of_all"])
            rounds = permission.private_rounds(folder, round, *settings, number, data)
            visits = len(rounds) - 1  # its own count, not the server's
        note = _recall(folder, engine, received.server, base, visits, data, exact=not private)
        if private:
            asked = permission.question(facts, {**request.tensors, **tree.pack(engine.population, "state")}, data)
            spent = account.spend(site, str(facts["run"]), account.released(problem, mine, rounds))
            permission.require_same_question(folder, round, asked)
        passive = tree.map(lambda leaf: leaf[None], received.passive)
        update: Any = engine.run_round(received.server, round, np.zeros(1, np.int64), passive)
        update = tree.map(lambda leaf: leaf[0], update)
        _require_convergence(phase, received, update, problem)
        _remember(folder, engine, round, base, data)
        if precision == wire.HALF:
            # Rounded to bfloat16 a change loses almost nothing, a weight all changes below 0.4 %. Parameters take
            # small steps. Statistics jump, and are better rounded themselves.
            params = tree.map(torch.sub, update.weights.params, received.server.weights.params)
            update = update._replace(weights=update.weights._replace(params=params))
        drawn = request._replace(facts={**facts, "visits": visits})  # by its own count, if that is another
        sent = (
            secure.disclosed(site, drawn, problem.algorithm, phase, received.server, update)
            if hidden
            else wire.flatten(update, precision)
        )
    if _is_tenth(round, problem.settings.rounds):
        log.warning("round %d of %d done", round, problem.settings.rounds)
        if private and spent:
            log.warning(
                "epsilon %.3g spent here so far, of training_epsilon %g", spent, site.settings.training_epsilon
            )
    return Envelope({"site": site.settings.name, "round": round, "note": note}, sent)


def _is_tenth(round: int, rounds: int) -> bool:
    """Whether another tenth of the rounds ends with this one: then the site's log says so."""
    return round == rounds or (round > 0 and round % max(1, rounds // 10) == 0)


@lru_cache(maxsize=1024)
def _say_once(line: str) -> None:
    log.warning("%s", line)


def take_frozen(site: SiteFile, request: Envelope) -> Envelope:
    """Whether this site has the frozen weights of a run; it keeps those that a request brings."""
    permission.require_acceptable(request)
    experiment = permission.permitted(site, str(request.facts["config"]))
    problem = _built(site, experiment, request, cache.training_data(site, _preparation(request)))
    if request.tensors:
        permission.count(site, "frozen")
        backbone.keep(site, problem.model, request)
    has = backbone.load_kept(site, problem.model, request)
    return Envelope({"site": site.settings.name, "has": has}, {})


def evaluate(site: SiteFile, request: Envelope) -> Envelope:
    """How the server's model does on what this site has held back, as far as the site discloses it."""
    permission.require_acceptable(request)
    kind, split = site.settings.evaluate, str(request.facts["split"])
    header = {"site": site.settings.name, "split": split}
    if kind == "none":
        return Envelope({**header, "kind": "nothing", "why": NO_EVALUATION}, {})
    require(split in SPLITS, f"a site evaluates on {' or '.join(SPLITS)} data, not on '{printable(split)}'")
    experiment = permission.permitted(site, str(request.facts["config"]))
    permission.count(site, "evaluate")
    made = _preparation(request)
    held = cache.examples(site, split, made)
    if held is None:
        return Envelope({**header, "kind": "nothing", "why": f"it has no {split} data"}, {})
    problem = _problem(site, experiment, request, cache.training_data(site, made))
    weights = wire.restore(tree.to(weights_of(problem.model), "cpu"), request.tensors)
    # The risk's own code may have named a metric, too; nothing is imported for it that the site does not allow.
    permission.require_metrics_allowed(site, [problem.select, *map(str, problem.settings.metrics)])
    check_queries(problem, {split: held})
    permission.require_useful(site, problem)
    own = held.holdings()[0]
    if kind == "metrics":
        permission.require_enough(site, own.label_counts.T.tolist(), "metrics", own.times is not None)
    evaluator, device = problem.evaluator, problem.device
    grant = curve.granted(site, request.facts, problem.risk) if kind == "curve" else None
    h = evaluator.outputs(tree.to(weights, device), match_types(problem, held).to(device)).cpu()
    if grant is not None:
        times = permission.shared_times(site, problem)
        facts, counts = curve.disclosed(site, grant, evaluator.scores_of(h, held), times)
        return Envelope({**header, "kind": kind, **facts}, wire.flatten(counts))
    if kind == "scores":
        return Envelope({**header, "kind": kind}, wire.flatten(_in_no_order(h, held.y)))
    # Enough limits are the whole curve, and with it every rank.
    limits = len({metric.limit for metric in evaluator.metrics} - {None})
    require(limits <= MOST_LIMITS, f"metrics at {limits} false positive rates are more than this site discloses")
    values = evaluator.findings(h, held).metrics
    counted: dict[str, Any] = {"queries": len(own.queries(relevant=True))} if own.ranked else {}
    if split == "validation" and (grid := permission.shared_times(site, problem)) is not None:
        scores = evaluator.scores_of(h, held)
        counted["hazard"] = json.dumps(hazard_sums(*scores.flat, scores.time, grid).to_json())
    return Envelope({**header, "kind": kind, "metrics": json.dumps(values), **counted}, {})


def answer_evaluation(site: SiteFile, request: Envelope) -> Envelope:
    """`evaluate`. The log says what leaves for the first time in a run."""
    reply = evaluate(site, request)
    if reply.facts["kind"] != "nothing":
        what = f"{reply.facts['kind']} of {reply.facts['split']} data"
        _say_once(f"sent: {what}, for the first time in run {request.facts['run']}")
    return reply


def _in_no_order(h: Tensor, y: Tensor) -> ScoreReply:
    """Sorted by all there is, so that what leaves is a set: nothing tells which example is which."""
    keys = [*reversed(tree.columns_of(h)), *reversed(tree.columns_of(y))]
    rows = tree.sorting_order(keys)
    return ScoreReply(h[rows], y[rows].to(torch.int8))


def _require_own_share(share: Share, mine: Examples, reading: Reading) -> None:
    """A server that says a site holds a class that it lacks would have others' stand-ins scored and trained on."""
    counts = torch.maximum(share.factors.reshape(2, -1).amax(1), share.mass)
    for name, side, counted in zip(("S1", "S2"), (reading.first, reading.second), counts, strict=True):
        held = len(mine.side(side)[0]) if side != "none" else 0
        right = held > 0 or not bool(counted > 0)
        require(right, f"the request counts examples of {name}, of which this site has none")


def _numbers(request: Envelope) -> tuple[int, int, int, int]:
    """The round, this site's number, the round to start from (-1: none) and how many rounds it has done."""
    names = {"round": 0, "number": 0, "base": -1, "visits": 0}
    found = [whole(request.facts.get(name), name) for name in names]
    if any(not least <= value < 2**31 for value, least in zip(found, names.values(), strict=True)):
        raise RefusedError(f"its {', '.join(names)} are out of range: {found}")
    return found[0], found[1], found[2], found[3]


def _preparation(request: Envelope) -> Preparation | None:
    """How the server wants the columns of tables to be scaled, if sites have tables."""
    text = str(request.facts.get("preparation", ""))
    return Preparation.from_text(text) if text else None


def _problem(site: SiteFile, experiment: Config, request: Envelope, mine: Examples) -> Problem:
    """What this site's share of the run is made of, with the run's frozen weights."""
    problem = _built(site, experiment, request, mine)
    refuse(not backbone.load_kept(site, problem.model, request), "it lacks the frozen weights of this run")
    return problem


def _built(site: SiteFile, experiment: Config, request: Envelope, mine: Examples) -> Problem:
    """The same without frozen weights. Of all sites' data together the server tells what it must."""
    try:
        told = json.loads(request.facts["facts_of_all"])
        pairs = told.pop("pairs", None)
        facts = DataFacts(**{name: float(value) for name, value in told.items()})
        facts = facts._replace(pairs=None if pairs is None else read_timetable(pairs))
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        raise RefusedError("what it says of all sites' data cannot be read") from None
    device = pick_device(site.settings.device)
    problem = build_problem(experiment, mine.shape, facts, device)
    require(not problem.algorithm.centralized, "this algorithm wants all data in one place")
    try:
        check_label_names(problem.label_names, cache.facts(site)["labels"])
    except UserError as error:  # names of labels leave only if the site's settings allow it
        quiet = "this site's labels have other names, or another order; its own log says which"
        raise error if site.settings.summary else OwnersError(str(error), quiet) from None
    return problem


def _received(problem: Problem, phase: Phase, request: Envelope) -> TrainRequest:
    """The tensors of a request, if they are what this phase needs."""
    server = tree.to(problem.algorithm.init(weights_of(problem.model)), "cpu")  # where requests arrive
    one = torch.zeros((), dtype=problem.dtype)
    passive = passive_like(phase, server, problem.reading, problem.settings.local_steps)
    sides = torch.zeros(2, dtype=problem.dtype)
    factors = torch.zeros(2, *([problem.risk.labels] if problem.reading.pairing.labels else []), dtype=problem.dtype)
    like = TrainRequest(phase.downlink(server), Share(one, one, one, sides, factors), passive)
    return wire.restore(like, request.tensors, may_be_nan=problem.algorithm.may_be_nan)


def _engine(folder: Path, draws: bool, problem: Problem, mine: Examples, number: int, share: Share) -> Simulator:
    """The simulator, with this site as its only client: it draws and does what it would among all the others.

    The server does not know the seeds of its draws if the site wants it, and never that of its noise, lest it be
    subtracted.
    """
    private = problem.algorithm.private
    own = {number: kept_seed(folder / SEED_FILE)} if draws or private else {}
    return Simulator(
        algorithm=problem.algorithm,
        score=problem.score,
        data=mine,
        executor=executor("loop"),
        schedule=problem.schedule,
        shares=tree.map(lambda leaf: leaf[None], share),
        placement=problem.placement,
        first_number=number,
        secrets=Secrets(own if draws else {}, noise=own if private else {}),
    )


def _recall(
    folder: Path, engine: Simulator, server: Any, base: int, visits: int, data: str, exact: bool = True
) -> str:
    """Take up the state after round `base`. A site that has lost it begins anew, in the right place of its data.

    exact: whether the state must be after as many visits; in a private run, answers that were not taken count, too.
    """
    algorithm, found = engine.algorithm, load_checkpoint(folder, base) if base >= 0 else None
    state = (algorithm.rejoin if visits else algorithm.init_client)(server, engine.drawing.num_rows(0))
    tensors, note = tree.pack(state, "states.0"), ""
    done = int(found.tensors.get(VISITS, -1)) if found else -1  # in how many rounds it had taken part by then
    if found and found.info.get("data") != data:
        note = f"its data have changed since round {base}; it discards what it knew of them"
    elif found and (done == visits if exact else 0 <= done <= visits):
        tensors = found.tensors
    elif base >= 0:
        note = f"its state after round {base} is lost; it continues without it"
    try:
        engine.restore(server, {**tensors, VISITS: torch.tensor(visits)})
    except wire.RefusedError as error:
        told = f"the state after round {base} in {folder} is intact, but does not belong to this run: {error}"
        raise UserError(f"{told}; remove it to continue without it") from None
    return note


def _remember(folder: Path, engine: Simulator, round: int, base: int, data: str) -> None:
    """Keep the state after this round, and the one before it: the server may ask for the round again."""
    with writing_to(folder):
        info = {"base": base, "data": data}
        save_checkpoint(folder, round, tree.pack(engine.population), info, keep=base, private=True)


def _require_convergence(phase: Phase, received: TrainRequest, update: Any, problem: Problem) -> None:
    """The server would refuse such an update all the same; so it learns that training is to blame, not this site."""
    received, update = tree.to((received, update), "cpu")
    try:
        wire.restore(update, wire.flatten(update), may_be_nan=problem.algorithm.may_be_nan)
        check_update(phase, received.server, update, problem.assignment(received.share))
    except RefusedError as error:
        raise DivergedError(f"{DIVERGED}{error}; a lower learning rate would help") from None


HANDLERS: Mapping[str, Callable[[SiteFile, Envelope], Envelope]] = {
    "hello": lambda site, request: hello(site),
    "train": train,
    "evaluate": answer_evaluation,
    "secure": secure.step,
    "frozen": take_frozen,
    "model": backbone.take_model,
}

"""A site's part of a secure sum: its state on disk, whom it trusts, and what it sends instead of weights and G."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fedxl import tree, wire
from fedxl.algorithms.fixed_point import codes, flat
from fedxl.algorithms.protocol import Algorithm, Phase, ServerState
from fedxl.algorithms.server_rules import fixed_point_bits
from fedxl.deploy.protocol.envelope import DIVERGED, Envelope, whole
from fedxl.deploy.provision.settings import SiteFile
from fedxl.deploy.secure import identity, member
from fedxl.deploy.secure.masks import SIGNED
from fedxl.deploy.secure.member import MemberState
from fedxl.deploy.secure.messages import (
    Advert,
    by_number,
    hexed,
    numbers,
    sealed_shares,
    session_of,
    share_numbers,
    sum_shares,
    sum_weights,
    told,
)
from fedxl.deploy.secure.shamir import BYTES
from fedxl.deploy.site.locks import locked
from fedxl.deploy.site.permission import remember, require_acceptable
from fedxl.errors import DivergedError, RefusedError, require
from fedxl.files import read_json

FILE = "secure.json"
KEPT = 3  # rounds of which a site remembers whose updates it has let be added; a server goes back by one at most
MORE = 10  # sums that may begin for each request to train that the site allows: attempts may fail


def step(site: SiteFile, request: Envelope) -> Envelope:
    """Do the step that the request names, and store the new state before the answer leaves."""
    require_acceptable(request)
    facts = request.facts
    name, session = str(facts.get("secure")), session_of(facts.get("session"))
    if name not in STEPS:
        raise RefusedError("there is no such step of a secure sum")
    with locked(site.state / str(facts["run"])) as folder:
        answer = STEPS[name](site, folder, session, facts)
    return Envelope({"site": site.settings.name, "session": session, **answer}, {})


def _keys(site: SiteFile, folder: Path, session: str, facts: Mapping[str, Any]) -> dict[str, str]:
    round, number = (whole(facts.get(name), name) for name in ("round", "number"))
    _, seen = _load(folder)
    # A session that comes again could bring back old keys of others, some of which the server has learned.
    require(session not in seen, "this site has taken part in that secure sum before; a new one needs a new session")
    most = MORE * site.settings.rounds
    require(len(seen) < most, f"this site has begun {most} secure sums, as many as its site.toml allows (rounds)")
    state, advert = member.begin(session, f"{facts['run']} {round} {session}", number)
    advert = identity.sign(site.folder, state.context, number, advert)
    _store(folder, state, [*seen, session])
    return {"keys": json.dumps(advert.to_plain())}


def _shares(site: SiteFile, folder: Path, session: str, facts: Mapping[str, Any]) -> dict[str, str]:
    state, seen = _begun(folder, "keys", session)
    members = {number: Advert.from_plain(found) for number, found in by_number(facts.get("members")).items()}
    _require_sum_of(site, len(members))
    others = [number for number in members if number != state.number]
    trusted = site.settings.peers
    names = {identity.verify(site.folder, state.context, each, members[each], trusted) for each in others}
    require(len(names | {site.settings.name}) == len(members), "one site takes part twice in a secure sum")
    state, sealed = member.share(state, members)
    _store(folder, state, seen)
    return {"sealed": hexed(sealed)}


def _unmask(site: SiteFile, folder: Path, session: str, facts: Mapping[str, Any]) -> dict[str, str]:
    state, seen = _begun(folder, "mask", session)
    survivors = numbers(facts.get("survivors"))
    _require_sum_of(site, len(survivors))
    if set(survivors) <= {int(number) for number in state.weights}:
        _require_small_part(site, state, survivors)
    answered = _require_same_sum(folder, state, survivors)
    state, shares = member.unmask(state, survivors)
    _store(folder, state, seen, answered, visits=_content(folder).get("visits", 0))
    return {"shares": hexed({number: share.to_bytes(BYTES) for number, share in shares.items()})}


STEPS: Mapping[str, Callable[[SiteFile, Path, str, Mapping[str, Any]], dict[str, str]]] = {
    "keys": _keys,
    "shares": _shares,
    "unmask": _unmask,
}


def require_allowed(site: SiteFile, request: Envelope, precision: str) -> bool:
    """Whether the server wants this update under masks; UserError if the site wants that and the server does not."""
    secure = "secure" in request.facts
    require(
        secure or not site.settings.secure,
        "this site takes part only in secure sums (secure = true in its site.toml); set secure = true in server.toml",
    )
    require(not secure or precision != wire.HALF, "a secure sum cannot be sent in half precision")
    require(
        not secure or site.settings.private_draws,
        "secure sums need private_draws = true in this site's site.toml: otherwise two runs of one experiment give "
        "the same updates, and their sums differ by who was there",
    )
    return secure


def disclosed(
    site: SiteFile,
    folder: Path,
    request: Envelope,
    algorithm: Algorithm,
    phase: Phase,
    server: ServerState,
    update: Any,
) -> dict[str, torch.Tensor]:
    """An update as it leaves: without the parts that are summed, and these as codes under masks.

    A round that changes none of them, and a site that does not count in the average, send nothing of them at all.
    """
    names, bits = algorithm.averaged, fixed_point_bits(algorithm)
    require(bool(names) and bool(bits), "a secure sum needs fixed_point = 32 or 64 in [algorithm]")
    visible = wire.flatten(update._replace(**dict.fromkeys(names, ())))
    session = str(request.facts["session"])
    if not session:
        return visible
    if not phase.averaged:
        raise RefusedError("there is nothing to add in this round")
    state, seen = _begun(folder, "shares", session_of(session))
    try:
        mine = codes(bits, algorithm, server, tree.map(lambda leaf: leaf[None], update))
    except DivergedError as error:
        raise DivergedError(f"{DIVERGED}{error}") from None
    ring = member.as_ring(flat(mine).cpu().numpy(), bits)
    facts = request.facts
    weights = sum_weights(facts.get("weights"))
    if weights.get(state.number) != float(algorithm.counts(update.share)):
        raise RefusedError("the weight of this site in the sum is not its share")
    if sum_shares(facts.get("shares")).get(state.number) != share_numbers(update.share):
        raise RefusedError("the share of this site is another one in what all sites are told")
    visits = whole(facts.get("visits"), "visits")
    _require_new_draws(folder, whole(facts.get("round"), "round"), visits)
    same = told(facts, weights, server)
    state, masked = member.mask(state, sealed_shares(facts.get("secure")), ring, same, weights)
    _require_small_part(site, state, list(weights))
    _store(folder, state, seen, visits=visits)
    return {**visible, "masked": torch.from_numpy(masked.view(SIGNED[bits]))}


def _require_sum_of(site: SiteFile, found: int) -> None:
    least = site.settings.sum_of
    require(found >= least, f"this site takes part in sums of {least} sites or more (sum_of), not of {found}")


def _require_small_part(site: SiteFile, state: MemberState, members: list[int]) -> None:
    """A sum that is almost this site's update alone hides nothing of it."""
    part, most = member.own_part(state, members), site.settings.own_part
    require(
        part <= most, f"this site's update would be {part:.0%} of the sum; its site.toml allows {most:.0%} (own_part)"
    )


def _require_new_draws(folder: Path, round: int, visits: int) -> None:
    """Refuse to make the same update in two rounds: its examples follow from the visits, not from the round.

    Sums over different sites of what are the same updates would differ by single ones.
    """
    before: dict[str, int] = _content(folder).get("added", {})
    if str(round) in before:
        require(visits == before[str(round)], f"this site has added other examples in round {round}")
    else:
        fresh = all(visits > used for used in before.values())
        require(
            fresh, f"this site has added the same examples in another round than {round}; two sums would tell more"
        )


def _require_same_sum(folder: Path, state: MemberState, survivors: list[int]) -> dict[str, list[int]]:
    """Refuse a second sum of the same round over other sites: the difference of both would be no sum any more.

    Returns the sums to remember. A round that is repeated for the same sites gives the same sum, and tells nothing.
    """
    before = _content(folder).get("answered", {})
    round = int(state.context.split()[1])
    oldest = min(map(int, before), default=0)
    require(round >= oldest, f"this site has gone on; it adds nothing to round {round} any more")
    same = before.get(str(round), survivors) == survivors
    require(same, f"this site has let the updates of other sites be added in round {round}; two sums would tell more")
    kept = sorted({*map(int, before), round})[-KEPT:]
    return {str(each): before.get(str(each), survivors) for each in kept}


def _begun(folder: Path, stage: str, session: str) -> tuple[MemberState, list[str]]:
    state, seen = _load(folder)
    if state is None:
        raise RefusedError("this site knows nothing of that secure sum")
    state.require(stage, session)
    return state, seen


def _load(folder: Path) -> tuple[MemberState | None, list[str]]:
    """The state of the last sum of this run, and the sessions of all of them."""
    content = _content(folder)
    try:
        return (MemberState(**content["state"]), [str(each) for each in content["seen"]]) if content else (None, [])
    except (KeyError, TypeError):
        raise RefusedError(f"{FILE} cannot be read; its owner must remove the run's folder") from None


def _content(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / FILE)
    except FileNotFoundError:
        return {}


def _store(
    folder: Path,
    state: MemberState,
    seen: list[str],
    answered: Mapping[str, list[int]] | None = None,
    visits: int = 0,
) -> None:
    """visits: after how many this site draws the examples of this sum."""
    before = _content(folder)
    added = dict(before.get("added", {}))
    if answered is None:
        answered = before.get("answered", {})
    else:
        added[state.context.split()[1]] = visits
        # Of rounds that are forgotten the latest visits are all that counts.
        latest = max(added.values())
        added = {round: used for round, used in added.items() if round in answered or used == latest}
    content = {"state": json.loads(state.to_json()), "seen": seen, "answered": answered}
    remember(folder / FILE, {**content, "visits": visits, "added": added})

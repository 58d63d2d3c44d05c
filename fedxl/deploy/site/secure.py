"""A site's part of a secure sum: its state on disk, whom it trusts, and what it sends instead of weights and G."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fedxl import tree, wire
from fedxl.algorithms.fixed_point import codes, flat
from fedxl.algorithms.protocol import Algorithm, Phase, ServerState
from fedxl.algorithms.server_rules import fixed_point_bits
from fedxl.deploy.protocol.envelope import DIVERGED, Envelope, whole
from fedxl.deploy.provision.settings import SiteFile
from fedxl.deploy.secure import member, messages
from fedxl.deploy.secure.crypto import SHARE, SIGNED
from fedxl.deploy.secure.member import MemberState
from fedxl.deploy.site import permission
from fedxl.deploy.storage import locked, recall, remember
from fedxl.errors import DivergedError, RefusedError, refuse, require

FILE = "secure.json"
KEPT = 3  # rounds of which a site remembers whose updates it has let be added; a server goes back by one at most
MORE = 10  # sums that may begin for each request to train that the site allows: attempts may fail


def step(site: SiteFile, request: Envelope) -> Envelope:
    """Do the step that the request names, and store the new state before the answer leaves."""
    permission.require_acceptable(request)
    facts = request.facts
    name, session = str(facts.get("secure")), messages.session_of(facts.get("session"))
    refuse(name not in STEPS, "there is no such step of a secure sum")
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
    advert = member.sign(site.folder, state.context, number, advert)
    _store(folder, state, seen=[*seen, session])
    return {"keys": json.dumps(advert.to_plain())}


def _shares(site: SiteFile, folder: Path, session: str, facts: Mapping[str, Any]) -> dict[str, str]:
    state = _begun(folder, "keys", session)
    found = messages.by_number(facts.get("members"))
    members = {number: messages.Advert.from_plain(advert) for number, advert in found.items()}
    _require_sum_of(site, len(members))
    others = [number for number in members if number != state.number]
    trusted = site.settings.peers
    names = {member.verify(site.folder, state.context, each, members[each], trusted) for each in others}
    require(len(names | {site.settings.name}) == len(members), "one site takes part twice in a secure sum")
    state, sealed = member.share(state, members)
    _store(folder, state)
    return {"sealed": messages.hexed(sealed)}


def _consent(site: SiteFile, folder: Path, session: str, facts: Mapping[str, Any]) -> dict[str, str]:
    """Sign which updates are to be added. With enough signatures they are, so all is checked and noted before."""
    state, content = _begun(folder, "mask", session), recall(folder / FILE)
    survivors = messages.numbers(facts.get("survivors"))
    _require_sum_of(site, len(survivors))
    state = member.consent(state, survivors)
    _require_small_part(site, state, survivors)
    answered = _require_same_sum(folder, state)
    added = {**content.get("added", {}), str(state.round): content.get("visits", 0)}
    # Of rounds that are forgotten the latest visits are all that counts.
    kept = {round: used for round, used in added.items() if round in answered or used == max(added.values())}
    mine = state.adverts()[state.number]
    signature = member.sign(site.folder, state.context, state.number, mine, member.listed(state)).signature
    _store(folder, state, answered=answered, added=kept)
    return {"signature": signature.hex()}


def _unmask(site: SiteFile, folder: Path, session: str, facts: Mapping[str, Any]) -> dict[str, str]:
    state = _begun(folder, "consent", session)
    found, text, signers = messages.signatures(facts.get("signatures")), member.listed(state), set[int]()
    for number, advert in state.adverts().items():
        advert = advert._replace(signature=found.get(number, b""))
        with suppress(RefusedError):  # an invalid signature does not count, and does not stop the others
            member.verify(site.folder, state.context, number, advert, site.settings.peers, text)
            signers.add(number)
    state, shares = member.unmask(state, signers)
    _store(folder, state)
    return {"shares": messages.hexed({number: share.to_bytes(SHARE) for number, share in shares.items()})}


STEPS: Mapping[str, Callable[[SiteFile, Path, str, Mapping[str, Any]], dict[str, str]]] = {
    "keys": _keys,
    "shares": _shares,
    "consent": _consent,
    "unmask": _unmask,
}


def require_allowed(site: SiteFile, request: Envelope, precision: str) -> bool:
    """Whether the server wants this update under masks; UserError if the site wants that and the server does not."""
    secure = "secure" in request.facts
    only = "this site takes part only in secure sums (secure = true in its site.toml)"
    require(secure or not site.settings.secure, f"{only}; set secure = true in server.toml")
    require(not secure or precision != wire.HALF, "a secure sum cannot be sent in half precision")
    why = "otherwise two runs of one experiment give the same updates, and their sums differ by who was there"
    drawn = not secure or site.settings.private_draws
    require(drawn, f"secure sums need private_draws = true in this site's site.toml: {why}")
    return secure


def disclosed(
    site: SiteFile, request: Envelope, algorithm: Algorithm, phase: Phase, server: ServerState, update: Any
) -> dict[str, torch.Tensor]:
    """An update as it leaves: without the parts that are summed, and these, if they count, as codes under masks."""
    names, bits = algorithm.averaged, fixed_point_bits(algorithm)
    require(bool(names) and bool(bits), "a secure sum needs fixed_point = 32 or 64 in [algorithm]")
    visible = wire.flatten(update._replace(**dict.fromkeys(names, ())))
    facts = request.facts
    session, folder = str(facts["session"]), site.state / str(facts["run"])
    if not session:
        return visible
    refuse(not phase.averaged, "there is nothing to add in this round")
    state = _begun(folder, "shares", messages.session_of(session))
    refuse(state.round != whole(facts.get("round"), "round"), "the secure sum is of another round")
    try:
        mine = codes(bits, algorithm, server, tree.map(lambda leaf: leaf[None], update))
    except DivergedError as error:
        raise DivergedError(f"{DIVERGED}{error}") from None
    ring = member.as_ring(flat(mine).cpu().numpy(), bits)
    weights, shares = messages.sum_weights(facts.get("weights")), messages.sum_shares(facts.get("shares"))
    if shares.get(state.number) != messages.share_numbers(update.share):
        raise RefusedError("the share of this site is another one in what all sites are told")
    each = {number: messages.share_of(numbers, update.share) for number, numbers in shares.items()}
    if weights != {number: float(algorithm.counts(share)) for number, share in each.items()}:
        raise RefusedError("the weights in the sum are not those of the shares")
    gradients = {str(number): weights[number] * float(algorithm.growth(share)) for number, share in each.items()}
    visits = whole(facts.get("visits"), "visits")
    _require_new_draws(folder, state.round, visits)
    same = messages.told(facts, weights, server)
    state, masked = member.mask(state, messages.sealed_shares(facts.get("secure")), ring, same, weights)
    told = {str(number): numbers for number, numbers in shares.items()}
    question = permission.question(facts, request.tensors, "")
    state = replace(state, gradients=gradients, shares=told, question=question)
    _require_small_part(site, state, list(weights))
    _store(folder, state, visits=visits)
    return {**visible, "masked": torch.from_numpy(masked.view(SIGNED[bits]))}


def _require_sum_of(site: SiteFile, found: int) -> None:
    least = site.settings.sum_of
    require(found >= least, f"this site takes part in sums of {least} sites or more (sum_of), not of {found}")


def _require_small_part(site: SiteFile, state: MemberState, members: list[int]) -> None:
    """A sum that is almost this site's update alone hides nothing of it."""
    part, most = member.own_part(state, members), site.settings.own_part
    told = f"this site's update would be {part:.0%} of the sum; its site.toml allows {most:.0%} (own_part)"
    require(part <= most, told)


def _require_new_draws(folder: Path, round: int, visits: int) -> None:
    """Refuse the same update (its examples follow from the visits) in two rounds: sums might differ by one alone."""
    before: dict[str, int] = recall(folder / FILE).get("added", {})
    if str(round) in before:
        require(visits == before[str(round)], f"this site has added other examples in round {round}")
    else:
        told = f"this site has added the same examples in another round than {round}; two sums would tell more"
        require(all(visits > used for used in before.values()), told)


def _require_same_sum(folder: Path, state: MemberState) -> dict[str, str]:
    """Refuse another sum of a round: their difference would be no sum. Returns the digests of all to remember."""
    before = recall(folder / FILE).get("answered", {})
    round = state.round
    oldest = min(map(int, before), default=0)
    require(round >= oldest, f"this site has gone on; it adds nothing to round {round} any more")
    asked = member.asked(state)
    told = f"this site has let the updates of other sites be added in round {round}, or with other weights or models"
    require(before.get(str(round), asked) == asked, f"{told}; two sums would tell more")
    kept = sorted({*map(int, before), round})[-KEPT:]
    return {str(each): before.get(str(each), asked) for each in kept}


def _begun(folder: Path, stage: str, session: str) -> MemberState:
    state, _ = _load(folder)
    if state is None:
        raise RefusedError("this site knows nothing of that secure sum")
    state.require(stage, session)
    return state


def _load(folder: Path) -> tuple[MemberState | None, list[str]]:
    """The state of the last sum of this run, and the sessions of all of them."""
    content = recall(folder / FILE)
    try:
        return (MemberState(**content["state"]), [str(each) for each in content["seen"]]) if content else (None, [])
    except (KeyError, TypeError):
        raise RefusedError(f"{FILE} cannot be read; its owner must remove the run's folder") from None


def _store(folder: Path, state: MemberState, **changed: Any) -> None:
    """Remember the state of the last sum. visits: after how many this site draws the examples of this sum."""
    before = recall(folder / FILE)
    kept = {"seen": before.get("seen", []), "answered": before.get("answered", {}), "visits": 0}
    remember(folder / FILE, {"state": asdict(state), **kept, "added": before.get("added", {}), **changed})

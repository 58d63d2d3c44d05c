"""A site's part of a secure sum: its state on disk, whom it trusts, and what it sends instead of weights and G."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
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
from fedxl.deploy.secure.messages import as_facts, by_number
from fedxl.deploy.site import permission
from fedxl.deploy.storage import locked, updating
from fedxl.errors import DivergedError, RefusedError, refuse, require
from fedxl.risks.pairing import Share

# In the folder of a run: the state of its last sum, the sessions of all of them ("seen"), and by round what sums were
# of ("answered") and after how many rounds the examples in them were drawn ("added").
FILE = "secure.json"
KEPT = 3  # rounds of which a site remembers whose updates it has let be added; a server goes back by one at most
MORE = 10  # sums that may begin for each request to train that the site allows: attempts may fail
Facts = Mapping[str, Any]
Record = dict[str, Any]  # the content of FILE
Step = tuple[MemberState, dict[str, Any]]  # the state after a step, and the facts of the reply


def step(site: SiteFile, request: Envelope) -> Envelope:
    """Do the step that the request names. The new state is on the disk before the answer leaves."""
    permission.require_acceptable(request)
    facts = request.facts
    name, session = str(facts.get("secure")), messages.session_of(facts.get("session"))
    refuse(name not in STEPS, "there is no such step of a secure sum")
    with locked(site.state / str(facts["run"])) as folder, updating(folder / FILE) as record:
        state, answer = STEPS[name](site, record, session, facts)
        record["state"] = asdict(state)
    return Envelope({"site": site.settings.name, "session": session, **answer}, {})


def _keys(site: SiteFile, record: Record, session: str, facts: Facts) -> Step:
    round, number = (whole(facts.get(name), name) for name in ("round", "number"))
    seen = record.setdefault("seen", [])
    # A session that comes again could bring back old keys of others, some of which the server has learned.
    require(session not in seen, "this site has taken part in that secure sum before; a new one needs a new session")
    most = MORE * site.settings.rounds
    require(len(seen) < most, f"this site has begun {most} secure sums, as many as its site.toml allows (rounds)")
    seen.append(session)
    state, advert = member.begin(session, f"{facts['run']} {round} {session}", number)
    return state, {"keys": member.sign(site.folder, state.context, number, advert).to_plain()}


def _shares(site: SiteFile, record: Record, session: str, facts: Facts) -> Step:
    state = _state(record, "keys", session)
    members = by_number(facts.get("members"), messages.Advert.from_plain)
    _require_sum_of(site, len(members))
    trusted = site.settings.peers
    others = [(each, advert) for each, advert in members.items() if each != state.number]
    names = {member.verify(site.folder, state.context, each, advert, trusted) for each, advert in others}
    require(len(names | {site.settings.name}) == len(members), "one site takes part twice in a secure sum")
    state, sealed = member.share(state, members)
    return state, {"sealed": as_facts(sealed)}


def _consent(site: SiteFile, record: Record, session: str, facts: Facts) -> Step:
    """Sign which updates are to be added. With enough signatures they are, so all is checked and noted before."""
    survivors = messages.numbers(facts.get("survivors"))
    _require_sum_of(site, len(survivors))
    state = member.consent(_state(record, "mask", session), survivors)
    _require_small_part(site, state, survivors)
    answered = record["answered"] = _require_same_sum(record, state)
    added = {**record.get("added", {}), str(state.round): state.visits}
    # Of rounds that are forgotten the latest visits are all that counts.
    record["added"] = {n: used for n, used in added.items() if n in answered or used == max(added.values())}
    mine = state.adverts()[state.number]
    signed = member.sign(site.folder, state.context, state.number, mine, member.listed(state))
    return state, {"signature": signed.signature.hex()}


def _unmask(site: SiteFile, record: Record, session: str, facts: Facts) -> Step:
    state = _state(record, "consent", session)
    found, text, signers = by_number(facts.get("signatures"), messages.unhex), member.listed(state), set[int]()
    for number, advert in state.adverts().items():
        advert = advert._replace(signature=found.get(number, b""))
        with suppress(RefusedError):  # an invalid signature does not count, and does not stop the others
            member.verify(site.folder, state.context, number, advert, site.settings.peers, text)
            signers.add(number)
    state, shares = member.unmask(state, signers)
    return state, {"shares": as_facts({number: share.to_bytes(SHARE) for number, share in shares.items()})}


STEPS: Mapping[str, Callable[[SiteFile, Record, str, Facts], Step]] = {
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
    try:
        mine = codes(bits, algorithm, server, tree.map(lambda leaf: leaf[None], update))
    except DivergedError as error:
        raise DivergedError(f"{DIVERGED}{error}") from None
    ring = member.as_ring(flat(mine).cpu().numpy(), bits)
    with updating(folder / FILE) as record:
        state = _state(record, "shares", messages.session_of(session))
        refuse(state.round != whole(facts.get("round"), "round"), "the secure sum is of another round")
        shares = by_number(facts.get("shares"), lambda found: messages.share_of(found, update.share))
        told = {number: messages.share_numbers(share) for number, share in shares.items()}
        own = told.get(state.number) == messages.share_numbers(update.share)
        refuse(not own, "the shares that all sites are told give this site another one")
        parts = _parts(algorithm, shares)
        visits = whole(facts.get("visits"), "visits")
        _require_new_draws(record, state.round, visits)
        inbox = by_number(facts.get("secure"), messages.sealed_shares)
        state, masked = member.mask(state, inbox, ring, messages.told(facts, server), parts)
        question = permission.question(facts, request.tensors, "")
        state = replace(state, shares=told, question=question, visits=visits)
        _require_small_part(site, state, list(parts))
        record["state"] = asdict(state)
    return {**visible, "masked": torch.from_numpy(masked.view(SIGNED[bits]))}


def _parts(algorithm: Algorithm, shares: Mapping[int, Share]) -> dict[int, tuple[float, float]]:
    """How much each site counts in a sum: its weights, and its gradients."""
    found = {}
    for number, share in shares.items():
        weight = float(algorithm.counts(share))
        refuse(not 0 < weight < math.inf, "a site of the secure sum does not count in it")
        found[number] = (weight, weight * float(algorithm.growth(share)))
    return found


def _require_sum_of(site: SiteFile, found: int) -> None:
    least = site.settings.sum_of
    require(found >= least, f"this site takes part in sums of {least} sites or more (sum_of), not of {found}")


def _require_small_part(site: SiteFile, state: MemberState, members: Sequence[int]) -> None:
    """A sum that is almost this site's update alone hides nothing of it."""
    part, most = member.own_part(state, members), site.settings.own_part
    told = f"this site's update would be {part:.0%} of the sum; its site.toml allows {most:.0%} (own_part)"
    require(part <= most, told)


def _require_new_draws(record: Record, round: int, visits: int) -> None:
    """Refuse the same update (its examples follow from the visits) in two rounds: sums might differ by one alone."""
    before: dict[str, int] = record.get("added", {})
    if str(round) in before:
        require(visits == before[str(round)], f"this site has added other examples in round {round}")
    else:
        told = f"this site has added the same examples in another round than {round}; two sums would tell more"
        require(all(visits > used for used in before.values()), told)


def _require_same_sum(record: Record, state: MemberState) -> dict[str, str]:
    """Refuse another sum of a round: their difference would be no sum. Returns the digests of all to remember."""
    before, round = record.get("answered", {}), state.round
    require(
        round >= min(map(int, before), default=0),
        f"this site is at a later round; it adds nothing more to round {round}",
    )
    asked = member.asked(state)
    told = f"this site has agreed to another sum in round {round}: of other sites, weights or models"
    require(before.get(str(round), asked) == asked, f"{told}; two sums would tell more")
    kept = sorted({*map(int, before), round})[-KEPT:]
    return {str(each): before.get(str(each), asked) for each in kept}


def _state(record: Record, stage: str, session: str) -> MemberState:
    """The state of the last sum of this run, if that is the sum and the stage that a request is for."""
    refuse(not record, "this site knows nothing of that secure sum")
    try:
        state = MemberState.from_plain(record["state"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RefusedError(f"{FILE} cannot be read; its owner must remove the run's folder") from None
    state.require(stage, session)
    return state

"""Rounds in which the server sees only the sum of the sites' weights and G (deploy/secure/).

Each round takes five exchanges instead of one: keys, shares, the training itself, each site's signature of whose
updates are to be added, and the shares that take the masks off the sum. A site may be lost at any of them. Scores,
shares and steps are still seen site by site.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedxl import tree, wire
from fedxl.algorithms.fixed_point import FORMS, flat, unflat, with_mean
from fedxl.algorithms.protocol import ClientUpdate, Phase, ServerState
from fedxl.algorithms.server_rules import fixed_point_bits
from fedxl.deploy.protocol.envelope import Envelope, Failure
from fedxl.deploy.protocol.message import FACTS_ALONE
from fedxl.deploy.secure import crypto
from fedxl.deploy.secure.crypto import RINGS, SIGNED, Ring
from fedxl.deploy.secure.member import FEWEST, add_pair_mask, commitment, threshold
from fedxl.deploy.secure.messages import (
    Advert,
    as_facts,
    by_number,
    open_share,
    sealed_shares,
    share_numbers,
    told,
    unhex,
)
from fedxl.deploy.server.engine import Replies, SiteEngine
from fedxl.errors import RefusedError, first_line, printable, refuse, require
from fedxl.files import read_json, write_json

PROMPT = 120.0  # seconds that a site has for a step without training, at most
MASKED = "masked"
TRIED = "tried.json"
# What a site sends in each step but the training.
SENT = {"keys": "keys", "shares": "shares", "consent": "signatures of the sum", "unmask": "the shares of the masks"}
Facts = Mapping[str, Any]


@dataclass
class Collector:
    """One sum, never one site's codes. Sites leave it at any step; while `threshold` of them are left, it goes on."""

    context: str  # run, round and session
    bits: int
    told: str = ""  # a digest of what all sites were told
    adverts: dict[int, Advert] = field(default_factory=dict)  # by number: who has sent keys
    sealed: dict[int, dict[int, bytes]] = field(default_factory=dict)  # by sender, then by receiver
    masked: dict[int, Ring] = field(default_factory=dict)  # who is in the sum, under masks
    signatures: dict[int, bytes] = field(default_factory=dict)  # by who consents to the sum of these
    answers: dict[int, dict[int, int]] = field(default_factory=dict)  # by who answers, then by whose share it is

    @property
    def session(self) -> str:
        return self.context.split()[-1]

    @property
    def needed(self) -> int:
        """Sites that must be left at each step."""
        return threshold(len(self.adverts))

    def take_keys(self, sender: int, facts: Facts) -> None:
        self.adverts[sender] = Advert.from_plain(facts.get("keys"))

    def take_shares(self, sender: int, facts: Facts) -> None:
        sealed = by_number(facts.get("sealed"), sealed_shares)
        refuse(sealed.keys() != self.adverts.keys() - {sender}, "it did not send a share to every other site")
        self.sealed[sender] = sealed

    def inbox(self, receiver: int) -> dict[int, bytes]:
        """The sealed shares for a site, of all others that have sent theirs."""
        return {sender: each[receiver] for sender, each in self.sealed.items() if sender != receiver}

    def take_masked(self, sender: int, vector: NDArray[Any], length: int) -> None:
        if vector.dtype != SIGNED[self.bits] or vector.shape != (length,):
            raise RefusedError(f"its masked update is not a vector of {length} whole numbers of {self.bits} bits")
        self.masked[sender] = vector.view(RINGS[self.bits])

    def take_signature(self, sender: int, facts: Facts) -> None:
        self.signatures[sender] = unhex(facts.get("signature"))

    def take_answer(self, sender: int, facts: Facts) -> None:
        shares = by_number(facts.get("shares"), open_share)
        refuse(shares.keys() != self.sealed.keys(), "it did not send a share of every site's secret")
        self.answers[sender] = shares

    def unmasked(self) -> NDArray[np.int64]:
        """The sum of the codes of all sites in `masked`."""
        total = np.zeros_like(next(iter(self.masked.values())))
        for number, vector in self.masked.items():
            total += vector
            seed = self._secret(number)
            if commitment(seed) != self.adverts[number].commitment:
                raise RefusedError(f"the shares of site {number}'s seed do not fit together")
            crypto.add_mask(total, seed, -1)
        for gone in self.sealed.keys() - self.masked.keys():
            key = self._secret(gone)
            if crypto.public_of(key) != self.adverts[gone].mask:
                raise RefusedError(f"the shares of site {gone}'s mask key do not fit together")
            for number in self.masked:
                # As the lost site would have: what it shares with each other takes that one's mask off.
                add_pair_mask(total, key, self.adverts[number].mask, f"{self.context} {self.told}", gone, number)
        found: NDArray[np.int64] = total.view(SIGNED[self.bits]).astype(np.int64)
        return found

    def _secret(self, whose: int) -> bytes:
        """A seed or a mask key, from as many shares as it takes."""
        some = sorted(self.answers)[: self.needed]
        found = crypto.combine({number + 1: self.answers[number][whose] for number in some})
        refuse(found >= 2 ** (8 * crypto.KEY), f"the shares of site {whose}'s secret do not fit together")
        return found.to_bytes(crypto.KEY)


class SecureEngine(SiteEngine):
    """An engine that holds sites' weights and G under masks only, until they are a sum."""

    sums: ClassVar[bool] = True  # its updates hold the mean that the sum stands for

    def __post_init__(self) -> None:
        super().__post_init__()
        algorithm: Any = self.problem.algorithm
        bits = fixed_point_bits(algorithm)
        named = "secure = true adds weights and G as whole numbers"
        require(bool(bits), f"{named}: set fixed_point = 64 (or 32) in [algorithm]")
        counted = int((algorithm.counts(self.shares) > 0).sum())
        require(counted >= FEWEST, f"secure = true needs two sites whose model counts, and there are {counted}")
        for round in range(algorithm.first_round, self.problem.settings.rounds + 1):
            self._require_secret(algorithm.phase(round), round, self.plan.cohort(round).tolist())
        self.form = FORMS[bits]
        self.nodes: dict[int, str] = {}  # by number, of the sites in the sum
        self.sum = Collector("", bits)  # of this attempt; without sites if there is nothing to add
        self.total = torch.zeros(0, dtype=torch.int64)  # of the codes of all sites in the sum
        self.tried = (-1, frozenset[int]())  # a round, and the sites whose sum was asked for in it
        with suppress(FileNotFoundError):
            found = read_json(self.folder / TRIED)
            self.tried = (int(found["round"]), frozenset(map(int, found["sites"])))

    def _attempt(self, phase: Phase, server: ServerState, round: int, cohort: Sequence[int], least: int) -> Replies:
        self._require_secret(phase, round, cohort)
        self.sum = Collector("", self.form.bits)
        self.total = torch.zeros(len(flat(self.problem.algorithm.parts(server))), dtype=torch.int64)
        replies = super()._attempt(phase, server, round, cohort, least)
        if not self.sum.sealed or len(replies.filled) < least:
            return replies
        self.sum.told = told(
            {**self.head.facts, "round": round, "shares": self._shares_told()}, phase.downlink(server)
        )
        try:
            self.total = self._unmasked(round, {cohort[row] for row in replies.filled})
        except RefusedError as error:
            self.say(f"round {round}: all updates discarded, their sum cannot be used: {printable(error)}")
            replies.filled.clear()
        return replies

    def _prepared(self, phase: Phase, round: int, numbers: Mapping[str, int]) -> Mapping[str, int]:
        """Sites that count exchange keys and shares. Those that fail are not asked to train."""
        if not phase.averaged:
            return numbers
        members = {number: node for node, number in numbers.items() if self._weight(number) > 0}
        others = {node: number for node, number in numbers.items() if number not in members}
        last, before = self.tried
        if last == round and before <= members.keys():
            # Sites let one set of updates be added in a round: the difference of two sums would tell more.
            members = {number: node for number, node in members.items() if number in before}
        if not members:
            return numbers
        self.sum, self.nodes = Collector(f"{self.head.run} {round} {secrets.token_hex(16)}", self.form.bits), members
        try:
            self._step(round, "keys", self.nodes, {}, self.sum.take_keys)
            adverts = as_facts({number: advert.to_plain() for number, advert in sorted(self.sum.adverts.items())})
            self._step(round, "shares", list(self.sum.adverts), {"members": adverts}, self.sum.take_shares)
        except RefusedError as error:
            self.say(f"round {round}: no secure sum: {printable(error)}")
            return {}
        self.nodes = {number: members[number] for number in self.sum.sealed}
        return {node: number for number, node in self.nodes.items()} | others

    def _require_secret(self, phase: Phase, round: int, cohort: Sequence[int]) -> None:
        alone = phase.averaged and sum(self._weight(number) > 0 for number in cohort) == 1
        told = f"only one site of round {round} counts in the average, and a sum of one is no secret"
        require(not alone, f"{told}; a larger cohort would help")

    def _shares_told(self) -> dict[str, list[float]]:
        """Every site sees that all were told the same shares, and finds its own among them."""
        return as_facts({number: share_numbers(self._share(number)) for number in sorted(self.nodes)})

    def _weight(self, number: int) -> float:
        """How much a site counts in the sum; 0: its model is not averaged with the others'."""
        algorithm: Any = self.problem.algorithm
        return float(algorithm.counts(self._share(number)))

    def _unmasked(self, round: int, accepted: Iterable[int]) -> Tensor:
        """The sum of the codes of these sites, or of those among them that count."""
        found = self.sum
        found.masked = {number: found.masked[number] for number in sorted(accepted) if number in found.masked}
        self._require_left(found.masked, "their updates")
        survivors = list(found.masked)
        # Noted before it is asked for: after a crash sites answer for the same ones only.
        self.tried = (round, frozenset(survivors))
        write_json(self.folder / TRIED, {"round": round, "sites": survivors})
        self._step(round, "consent", survivors, {"survivors": survivors}, found.take_signature)
        signed = {"signatures": as_facts(found.signatures)}
        self._step(round, "unmask", list(found.signatures), signed, found.take_answer)
        total = torch.from_numpy(found.unmasked())
        self.form.check_sum(total, len(found.masked))
        return total

    def _step(
        self, round: int, name: str, numbers: Collection[int], facts: Facts, take: Callable[[int, Facts], None]
    ) -> None:
        """One exchange of a sum with these sites. Who fails is left out, with the reason."""
        facts = {**self.head.facts, "secure": name, "session": self.sum.session, "round": round, **facts}
        asked, left = {self.nodes[number]: number for number in numbers}, set[int]()
        envelopes = {node: Envelope({**facts, "number": number}, {}, FACTS_ALONE) for node, number in asked.items()}
        seconds = min(PROMPT, self.settings.deadline)
        for node, reply in self.directory.exchange(envelopes, "secure", seconds):
            number = asked[node]
            try:
                if isinstance(reply, Failure):
                    raise RefusedError(reply.reason)
                refuse(reply.facts.get("session") != self.sum.session, "it replies to another request")
                take(number, reply.facts)
                left.add(number)
            except RefusedError as error:
                reason = f"secure sum, {name}: {printable(first_line(error))}"
                if name in ("consent", "unmask"):  # its update is in the sum all the same
                    self.say(f"round {round}, {self.settings.sites[number]}: {reason}")
                else:
                    self._drop(round, number, reason)
        self._require_left(left, SENT[name])

    def _require_left(self, left: Collection[int], what: str) -> None:
        refuse(len(left) < self.sum.needed, f"{len(left)} sites have sent {what}, and {self.sum.needed} must")

    def _request(self, state: Mapping[str, Tensor], round: int, number: int, most: float) -> Envelope:
        request = super()._request(state, round, number, most)
        facts = {**request.facts, "secure": "", "session": ""}
        if number in self.sum.sealed:
            inbox, shares = as_facts(self.sum.inbox(number)), self._shares_told()
            facts |= {"secure": inbox, "session": self.sum.session, "shares": shares}
        return request._replace(facts=facts)

    def _restored(self, phase: Phase, server: ServerState, number: int, like: Any, reply: Envelope) -> Any:
        """The parts that are seen. In place of the others stands what moves nothing, so that it has no size."""
        algorithm, tensors = self.problem.algorithm, dict(reply.tensors)
        if number in self.sum.sealed:
            refuse(MASKED not in tensors, "it lacks its masked update")
            self.sum.take_masked(number, tensors.pop(MASKED).numpy(), len(self.total))
        seen = like._replace(**dict.fromkeys(algorithm.averaged, ()))
        update = wire.restore(seen, tensors, may_be_nan=algorithm.may_be_nan)
        still = algorithm.parts(server)
        if phase.averaged:
            still = {n: part if n == "weights" else tree.map(torch.zeros_like, part) for n, part in still.items()}
        return update._replace(**still)

    def _merged(self, server: ServerState, updates: ClientUpdate) -> ClientUpdate:
        algorithm = self.problem.algorithm
        return with_mean(self.form.bits, algorithm, server, updates, unflat(algorithm.parts(server), self.total))  # type: ignore[no-any-return]

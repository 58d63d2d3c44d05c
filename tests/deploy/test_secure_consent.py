"""A server that tells sites different things about one secure sum. The sites are real; what they train is a toy."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fedxl import UserError, __version__
from fedxl.algorithms.server_rules import WholeNumbers
from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.provision import keys
from fedxl.deploy.provision.settings import SiteFile, SiteSettings
from fedxl.deploy.secure import crypto, member, messages
from fedxl.deploy.secure.member import MemberState
from fedxl.deploy.server.secure import Collector, SecureEngine
from fedxl.deploy.site import secure
from fedxl.errors import RefusedError
from fedxl.training.settings import Hooks
from tests.deploy.federated import deployed
from tests.deploy.test_secure_sites import Secure, _known_seed, certify, exact  # noqa: F401

NAMES = ("a", "b", "c", "d", "e", "f")
EACH = range(len(NAMES))
WEIGHTS = {0: 16.0, 1: 0.5, 2: 0.5, 3: 5.0, 4: 5.0, 5: 5.0}  # a is 94 % of the sum of a, b and c
KEYS = [keys.new_key() for _ in NAMES]
SESSION = "0" * 32


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch) -> None:
    """A disk that need not survive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class State(NamedTuple):
    """Of the server, or the update of a site."""

    weights: Tensor
    share: Tensor


class Toy:
    """An algorithm, as far as a secure sum needs one."""

    averaged: ClassVar = ("weights",)
    rules: ClassVar = (WholeNumbers(64),)

    def counts(self, share: Tensor) -> Tensor:
        return share

    def growth(self, share: Tensor) -> Tensor:
        return torch.ones_like(share)

    def parts(self, state: State) -> dict[str, Tensor]:
        return {"weights": state.weights}


class Server:
    """It asks sites for whatever it likes, and keeps what they answer."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.sites = [SiteFile(SiteSettings(name=name, **settings), {}, folder / name) for name in NAMES]
        for site, key in zip(self.sites, KEYS, strict=True):
            certify(site.folder, site.settings.name, key)
        draw = torch.Generator().manual_seed(1)
        self.changes = torch.randn(len(NAMES), 7, generator=draw, dtype=torch.float64)
        self.weights, self.more = WEIGHTS, dict[str, Any]()  # more: facts and tensors of a request to train

    def begin(self, session: str = SESSION, round: int = 1, trained: int = 0) -> None:
        """All steps up to the masked updates. All sites are told the same. trained: the round of the updates."""
        self.session, self.round = session, round
        self.sum = Collector(f"{'0' * 8} {round} {session}", 64)
        for number in EACH:
            self.sum.take_keys(number, self.ask(number, "keys", number=number))
        members = messages.as_facts({number: advert.to_plain() for number, advert in self.sum.adverts.items()})
        for number in EACH:
            self.sum.take_shares(number, self.ask(number, "shares", members=members))
        self.round = trained or round
        for number in EACH:
            self.train(number)

    def facts(self) -> dict[str, Any]:
        return {"version": __version__, "run": "0" * 8, "round": self.round, "session": self.session}

    def ask(self, site: int, step: str, **facts: Any) -> Any:
        request = Envelope({**self.facts(), "secure": step, **facts}, {})
        return secure.step(self.sites[site], request).facts

    def train(self, number: int) -> None:
        weights = self.weights
        shares = messages.as_facts({each: [weight] for each, weight in weights.items()})
        facts = {**self.facts(), "shares": shares, "visits": self.round}
        tensors = {"server": torch.ones(2), **self.more}
        facts |= {name: tensors.pop(name) for name in self.more if name in ("config", "base")}
        server = State(torch.zeros(7, dtype=torch.float64), torch.tensor(0.0))
        self.sum.told = messages.told(facts, server)
        request = Envelope({**facts, "secure": messages.as_facts(self.sum.inbox(number))}, tensors)
        update = State(self.changes[number], torch.tensor(weights[number], dtype=torch.float64))
        toy: Any = Toy()
        sent = secure.disclosed(self.sites[number], request, toy, toy, server, update)  # type: ignore[arg-type]
        self.sum.take_masked(number, sent["masked"].numpy(), 7)

    def codes(self, *numbers: int) -> np.ndarray:
        """What these sites have come to: the sum of their codes."""
        each = [torch.round(self.changes[n] * WEIGHTS[n] * 2.0**40).to(torch.int64) for n in numbers]
        return torch.stack(each).sum(0).numpy()

    def consent(self, number: int, survivors: Sequence[int]) -> bytes:
        return bytes.fromhex(self.ask(number, "consent", survivors=list(survivors))["signature"])

    def unmask(self, number: int, signatures: Mapping[int, bytes]) -> dict[int, int]:
        shares = self.ask(number, "unmask", signatures=messages.as_facts(signatures))["shares"]
        return messages.by_number(shares, messages.open_share)

    def signature(self, number: int, folder: Path | None = None, of: MemberState | None = None) -> bytes:
        """What a member signs who has agreed to the list of site 0, or to another one; or what another key signs."""
        state, advert = of or self.state(), self.sum.adverts[number]
        place = folder or self.sites[number].folder
        return member.sign(place, state.context, number, advert, member.listed(state)).signature

    def state(self) -> MemberState:
        """Of site 0."""
        content = json.loads((self.sites[0].state / ("0" * 8) / secure.FILE).read_text())
        return MemberState.from_plain(content["state"])


# Every site is told a list of four that it is on. Together they leave each of d, e and f out four times.
LISTS = {0: [0, 1, 2, 5], 1: [0, 1, 2, 4], 2: [0, 1, 2, 3], 3: [0, 1, 2, 3], 4: [0, 1, 2, 4], 5: [0, 1, 2, 5]}


def sum_of_three(server: Server, shares: Mapping[int, Mapping[int, int]]) -> np.ndarray:
    """What a, b and c have come to together: of each of them the seed is known, of d, e and f the mask keys."""
    server.sum.masked = {number: server.sum.masked[number] for number in (0, 1, 2)}

    def secret(whose: int) -> bytes:
        some = [number for number in EACH if (whose in LISTS[number]) is (whose < 3)][: server.sum.needed]
        return crypto.combine({number + 1: shares[number][whose] for number in some}).to_bytes(crypto.KEY)

    server.sum._secret = secret  # type: ignore[method-assign]
    return server.sum.unmasked()


def test_a_server_that_tells_sites_different_survivors_gets_no_sum(tmp_path, monkeypatch):
    """Each list keeps what its site asks for, sums of four and at most 80 % of its own. The sum keeps neither."""
    server = Server(tmp_path, sum_of=4, own_part=0.8)
    server.begin()
    signed = {number: server.consent(number, LISTS[number]) for number in EACH}
    for number in EACH:
        with pytest.raises(RefusedError, match="2 sites have signed the same list of the sum as this site"):
            server.unmask(number, signed)
    # If any signature would do, the attack would succeed.
    monkeypatch.setattr(member, "verify", lambda *rest: "")
    shares = {number: server.unmask(number, dict.fromkeys(LISTS[number], b"")) for number in EACH}
    assert np.array_equal(sum_of_three(server, shares), server.codes(0, 1, 2))
    assert WEIGHTS[0] / sum(WEIGHTS[number] for number in (0, 1, 2)) > 0.94


def test_only_members_signatures_of_the_same_list_count(tmp_path):
    """Three of the four that it takes are valid. What a server could put in place of the fourth does not count."""
    server = Server(tmp_path, sum_of=2)
    server.begin("1" * 32)
    server.consent(0, EACH[:5])
    former = {"session": server.signature(3)}
    server.begin(SESSION, round=2)
    signed = {number: server.consent(number, EACH[:5]) for number in EACH[:3]}
    state, other = server.state(), tmp_path / "x"
    certify(other, "d", keys.new_key(), keys.new_authority())
    forged = {
        "nothing": {},
        "no signature": {3: b""},
        "another's": {3: signed[2], 4: signed[2]},
        "a key of its own": {3: server.signature(3, other)},
        "another session": {3: former["session"]},
        "another round": {3: server.signature(3, of=replace(state, context=f"{'0' * 8} 1 {SESSION}"))},
        "another list": {3: server.consent(3, [0, 1, 2, 3])},
        "other members": {3: server.signature(3, of=replace(state, members={}))},
        "one who is not in the sum": {5: server.signature(5)},
        "nobody": {9: server.signature(3)},
    }
    for name, more in forged.items():
        with pytest.raises(RefusedError, match="3 sites have signed"):
            print(name, server.unmask(0, {**signed, **more}))
    assert server.unmask(0, {**signed, 4: server.consent(4, EACH[:5]), 3: b"spoilt"}).keys() == set(EACH)


def test_a_key_that_a_site_no_longer_trusts_signs_for_nobody(tmp_path):
    server = Server(tmp_path)
    server.begin()
    signed = {number: server.consent(number, EACH) for number in EACH[:4]}
    trusted = tuple(keys.fingerprint(key.public_key()) for key in KEYS[:3])
    site = server.sites[0]
    server.sites[0] = replace(site, settings=replace(site.settings, peers=trusted))
    with pytest.raises(RefusedError, match="3 sites have signed"):
        server.unmask(0, signed)


def test_a_site_signs_one_list_and_none_that_breaks_its_rules(tmp_path):
    server = Server(tmp_path, sum_of=4, own_part=0.7)
    server.begin()
    for number, survivors, reason in (
        (0, [0, 1, 2], "sums of 4 sites or more"),
        (0, [0, 1, 2, 5], r"would be 73% of the sum; its site.toml allows 70% \(own_part\)"),
        (0, [1, 2, 3, 4], "does not hold this site's update"),
        (0, [0, 1, 3, 4, 9], "holds one that this site knows nothing of"),
        (0, [0, 0, 1, 3, 4], "not in order"),
    ):
        with pytest.raises(ValueError, match=reason):
            server.consent(number, survivors)
    with pytest.raises(RefusedError, match="once: the last one was mask"):
        server.unmask(0, {})
    server.consent(0, EACH[:5])
    for survivors in (EACH, EACH[:5]):
        with pytest.raises(RefusedError, match="once: the last one was consent"):
            server.consent(0, survivors)
    server.begin("1" * 32)
    with pytest.raises(UserError, match="has agreed to another sum in round 1"):
        server.consent(0, EACH)


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": dict.fromkeys(EACH, 2.0)},
        {"config": "another"},
        {"server": torch.ones(2).nextafter(torch.zeros(2))},
        {"passive": torch.ones(1)},
        {"base": 0},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_round_has_one_sum_of_one_question(tmp_path, changed):
    """Two sums over the same sites with other weights solve for one site. The same question again is answered."""
    server = Server(tmp_path)
    for session in ("1" * 32, "2" * 32):
        server.begin(session)
        assert server.consent(0, EACH)
    server.weights, server.more = (
        changed.get("weights", WEIGHTS),
        {n: v for n, v in changed.items() if n != "weights"},
    )
    server.begin("3" * 32)
    with pytest.raises(UserError, match="in round 1: of other sites, weights or models; two sums would tell more"):
        server.consent(0, EACH)


def test_sites_that_were_lost_between_two_attempts_do_not_count(tmp_path):
    """The second attempt is told of fewer sites. Whose updates are added, and how, is the same."""
    server = Server(tmp_path)
    server.begin()
    assert server.consent(0, EACH[:5])
    server.weights = {**WEIGHTS, 5: 7.0}
    server.begin("1" * 32)
    assert server.consent(0, EACH[:5])


@pytest.mark.parametrize("level", ["free", "even"])
def test_a_server_that_tells_all_sites_that_the_others_gradients_are_nothing_is_refused(tmp_path, monkeypatch, level):
    """Weights are true, and all are told the same. The sum would be the update of the first site, to the last bit."""
    begin, lines = SecureEngine.__post_init__, list[str]()

    def silenced(self: SecureEngine) -> None:
        begin(self)
        factors = self.shares.factors.clone()
        factors[1:] *= 1e-30
        self.shares = self.shares._replace(factors=factors)

    monkeypatch.setattr(SecureEngine, "__post_init__", silenced)
    experiment = exact("fedxl2", cohort=0, rounds=1)
    experiment = replace(experiment, algorithm={**experiment.algorithm, "level": level})
    deployed(tmp_path, experiment, Secure(tmp_path, own_part=0.5), Hooks(say=lines.append), secure=True)
    refused = [line for line in lines if "would be 100% of the sum; its site.toml allows 50%" in line]
    assert ["nothing from a: " in line for line in refused] == [True]


@pytest.mark.parametrize("wrong", [[-1.0], [float("nan")], [float("inf")], ["1"], [True], [1.0, 1.0], 1.0])
def test_shares_are_finite_and_not_negative(wrong):
    like: Any = State(torch.zeros(()), torch.zeros(0))
    with pytest.raises(RefusedError, match="shares of a secure sum cannot be read"):
        messages.share_of(wrong, like)


def test_a_site_that_counts_for_nothing_is_in_no_sum(tmp_path, monkeypatch):
    monkeypatch.setattr(Toy, "counts", lambda self, share: 0 * share)
    with pytest.raises(RefusedError, match="a site of the secure sum does not count in it"):
        Server(tmp_path).begin()


def test_a_sum_of_one_round_adds_no_update_of_another(tmp_path):
    """A site would add the examples of round 1 again, and hold the new list against those of round 2."""
    server = Server(tmp_path)
    server.begin()
    server.consent(0, EACH)
    with pytest.raises(RefusedError, match="the secure sum is of another round"):
        server.begin("1" * 32, round=2, trained=1)

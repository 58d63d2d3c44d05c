"""The parts of a secure sum, each against published answers or plain arithmetic; and all steps without sites."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from fedxl.deploy.secure import crypto, member, messages
from fedxl.deploy.secure.crypto import RINGS, SIGNED
from fedxl.deploy.secure.member import MemberState, threshold
from fedxl.deploy.server.secure import Collector
from fedxl.errors import RefusedError


def test_the_field_is_one():
    """Lucas and Lehmer: 2^p - 1 is prime if and only if s(p - 2) = 0, with s(0) = 4 and s(k + 1) = s(k)^2 - 2."""
    s = 4
    for _ in range(521 - 2):
        s = (s * s - 2) % crypto.PRIME
    assert s == 0
    assert (crypto.PRIME - 1).bit_length() <= 8 * crypto.SHARE


def solved(shares: dict[int, int], prime: int) -> int:
    """The constant term of the polynomial through these points, by elimination in Vandermonde's system."""
    rows = [[pow(x, power, prime) for power in range(len(shares))] + [y] for x, y in shares.items()]
    for place in range(len(rows)):
        pivot = next(row for row in rows[place:] if row[place])
        rows.remove(pivot)
        pivot = [value * pow(pivot[place], -1, prime) % prime for value in pivot]
        rows = [[(a - row[place] * b) % prime for a, b in zip(row, pivot, strict=True)] for row in rows]
        rows.insert(place, pivot)
    return rows[0][-1]


def test_any_so_many_shares_give_the_secret():
    secret = 2**256 - 12345
    shares = crypto.split(secret, 3, [1, 2, 5, 9])
    for some in itertools.combinations(shares, 3):
        chosen = {place: shares[place] for place in some}
        assert crypto.combine(chosen) == solved(chosen, crypto.PRIME) == secret
    assert crypto.combine({1: shares[1], 2: shares[2]}) != secret


def test_fewer_shares_tell_nothing(monkeypatch):
    """In a field of 5, by enumeration: whatever the secret, two of three shares are any pair equally often."""
    monkeypatch.setattr(crypto, "PRIME", 5)
    seen = {}
    for secret in range(5):
        counts = Counter[tuple[int, int]]()
        for chosen in itertools.product(range(5), repeat=2):
            drawn = iter(chosen)
            monkeypatch.setattr(crypto.secrets, "randbelow", lambda most, drawn=drawn: next(drawn))
            shares = crypto.split(secret, 3, [1, 2, 3])
            assert crypto.combine(shares) == solved(shares, 5) == secret
            counts[shares[1], shares[3]] += 1
        seen[secret] = counts
    assert all(counts == seen[0] for counts in seen.values())
    assert len(seen[0]) == 25


# RFC 7748, section 6.1: private keys of Alice and Bob, and the secret that they share.
ALICE = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
BOB = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
SHARED = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
# RFC 8439, appendix A.1, test vectors 1 and 2: the stream of the key 0, its first block and half of its second.
STREAM = bytes.fromhex(
    "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
)


def test_two_parties_agree_on_the_published_secret():
    """The rest is RFC 5869, written out for one block."""
    prk = hmac.digest(bytes(32), SHARED, "sha256")
    expected = hmac.digest(prk, b"purpose" + bytes([1]), "sha256")
    assert crypto.agree(ALICE, crypto.public_of(BOB), "purpose") == expected
    assert crypto.agree(BOB, crypto.public_of(ALICE), "purpose") == expected
    assert crypto.agree(BOB, crypto.public_of(ALICE), "another") != expected
    with pytest.raises(RefusedError, match="a public key is not valid"):
        crypto.agree(ALICE, bytes(32), "purpose")  # a point of small order: all would share the secret 0


@pytest.mark.parametrize("bits", [32, 64])
def test_a_mask_is_the_published_stream_and_comes_off_again(bits, monkeypatch):
    size = len(STREAM) * 8 // bits
    vector = np.arange(size).astype(RINGS[bits])
    found = vector.copy()
    crypto.add_mask(found, bytes(32))
    numbers = [int.from_bytes(STREAM[i : i + bits // 8], "little") for i in range(0, len(STREAM), bits // 8)]
    assert found.tolist() == [(place + number) % 2**bits for place, number in enumerate(numbers)]
    monkeypatch.setattr(crypto, "CHUNK", 5)
    crypto.add_mask(found, bytes(32), -1)
    assert np.array_equal(found, vector), "in pieces, too"


def test_what_is_sealed_cannot_be_altered_or_used_elsewhere():
    text = crypto.seal(bytes(32), b"a share", "1 to 2")
    assert crypto.unseal(bytes(32), text, "1 to 2") == b"a share"
    assert len(text) == len(b"a share") + crypto.OVERHEAD
    altered = bytes([text[0] ^ 1]) + text[1:]
    for key, wrong, about in (
        (bytes(32), altered, "1 to 2"),
        (bytes(32), text, "2 to 1"),
        (b"k" * 32, text, "1 to 2"),
    ):
        with pytest.raises(RefusedError, match="altered on its way"):
            crypto.unseal(key, wrong, about)
    with pytest.raises(RefusedError, match="altered on its way"):
        crypto.unseal(bytes(32), b"", "1 to 2")


def opened(shares: dict[int, int]) -> dict[str, str]:
    """As a site sends them."""
    return messages.as_facts({number: share.to_bytes(crypto.SHARE) for number, share in shares.items()})


class Sites:
    """Members of a sum without disks and network: their states go through JSON, as a crash would have it."""

    def __init__(self, count: int, bits: int, length: int = 7) -> None:
        draw = np.random.default_rng(count)
        self.codes = {n: draw.integers(-(2**28), 2**28, length) for n in range(count)}
        self.sum, self.states = Collector("run 3 session", bits), dict[int, MemberState]()
        self.bits, self.length = bits, length

    def keys(self, numbers) -> None:
        for number in numbers:
            self.states[number], self.sum.adverts[number] = member.begin("session", self.sum.context, number)

    def shares(self, numbers) -> None:
        for number in numbers:
            state, found = member.share(self.state(number), self.sum.adverts)
            self.states[number] = state
            self.sum.take_shares(number, {"sealed": messages.as_facts(found)})

    def mask(self, numbers) -> None:
        for number in numbers:
            ring, parts = member.as_ring(self.codes[number], self.bits), dict.fromkeys(self.sum.sealed, (0.5, 0.5))
            inbox, told = self.sum.inbox(number), self.told(number)
            self.states[number], masked = member.mask(self.state(number), inbox, ring, told, parts)
            self.sum.take_masked(number, masked.view(SIGNED[self.bits]), self.length)

    def told(self, number: int) -> str:
        """What the server told a site: the same as all others."""
        return self.sum.told

    def consent(self, numbers) -> None:
        for number in numbers:
            self.states[number] = member.consent(self.state(number), sorted(self.sum.masked))

    def unmask(self, numbers, signers=None) -> None:
        for number in numbers:
            self.states[number], shares = member.unmask(self.state(number), signers or numbers)
            self.sum.take_answer(number, {"shares": opened(shares)})

    def state(self, number: int) -> MemberState:
        return MemberState.from_plain(json.loads(json.dumps(asdict(self.states[number]))))


def subsets(numbers, least: int):
    return (some for size in range(least, len(numbers) + 1) for some in itertools.combinations(numbers, size))


@pytest.mark.parametrize("bits", [32, 64])
def test_the_sum_is_exact_whoever_is_lost_and_whenever(bits):
    """Every way to lose sites after keys, shares, masked updates and signatures, of three and of five."""
    ways = 0
    for count in (3, 5):
        everyone, needed = range(count), threshold(count)
        all_ways = (
            (after_shares, after_masks, after_consents, answering)
            for after_shares in subsets(everyone, needed)
            for after_masks in subsets(after_shares, needed)
            for after_consents in subsets(after_masks, needed)
            for answering in subsets(after_consents, needed)
        )
        for sealing, masking, consenting, answering in all_ways:
            sites = Sites(count, bits)
            sites.keys(everyone)
            sites.shares(sealing)
            sites.mask(masking)
            sites.consent(consenting)
            sites.unmask(answering, consenting)
            assert np.array_equal(sites.sum.unmasked(), sum(sites.codes[number] for number in masking))
            ways += 1
    assert ways > 20


def test_with_fewer_than_two_thirds_there_is_no_sum():
    assert [threshold(count) for count in (2, 3, 4, 5, 6, 16)] == [2, 2, 3, 4, 4, 11]
    assert all(2 * threshold(count) > count for count in range(2, 200)), "one server cannot get both kinds of shares"
    sites = Sites(5, 64)
    sites.keys(range(5))
    sites.shares(range(3))
    with pytest.raises(RefusedError, match="only 3 of 5 sites are left"):
        sites.mask([0])
    sites.shares([3])
    sites.mask(range(4))
    with pytest.raises(RefusedError, match="a sum of 3 of 5 sites has too few of them"):
        member.consent(sites.state(0), [0, 1, 2])
    sites.consent(range(4))
    for signers in ([], [1, 2], [0, 1, 2], [1, 2, 4]):  # site 4 is not in the sum
        with pytest.raises(RefusedError, match=r"\d sites have signed the same list .*; 4 must"):
            member.unmask(sites.state(0), signers)
    sites.unmask(range(3), range(4))
    with pytest.raises(RefusedError, match="do not fit together"):
        sites.sum.unmasked()  # three shares where four are needed


def test_a_site_gives_one_kind_of_share_for_each_other_once():
    sites = Sites(4, 64)
    sites.keys(range(4))
    sites.shares(range(4))
    with pytest.raises(RefusedError, match="once: the last one was shares"):
        sites.state(0).require("keys", "session")
    sites.mask(range(4))
    with pytest.raises(RefusedError, match="once: the last one was mask"):
        sites.state(0).require("shares", "session")
    before = sites.state(0)
    assert (before.seed, before.mask_key, before.seal_key) == ("", "", ""), "its own secrets are forgotten"
    agreed = member.consent(before, [0, 1, 2])
    with pytest.raises(RefusedError, match="once: the last one was consent"):
        agreed.require("mask", "session")
    after, shares = member.unmask(agreed, [0, 1, 2])
    held = {number: (text[: 2 * crypto.SHARE], text[2 * crypto.SHARE :]) for number, text in before.held.items()}
    chosen = {number: int(each[number == 3], 16) for number, each in held.items()}
    assert shares == chosen, "of the seed, or of the mask key of 3"
    with pytest.raises(RefusedError, match="once: the last one was unmask"):
        after.require("mask", "session")
    assert not after.held
    with pytest.raises(RefusedError, match="knows nothing of that secure sum"):
        before.require("mask", "another")
    for wrong in ([1, 2, 3], [0, 1, 2, 7]):
        with pytest.raises(RefusedError, match="does not hold this site's update, or holds one"):
            member.consent(before, wrong)


def test_shares_for_keys_that_are_not_its_own_or_doubled_are_refused():
    sites = Sites(3, 64)
    sites.keys(range(3))
    adverts = dict(sites.sum.adverts)
    with pytest.raises(RefusedError, match="own keys are not among"):
        member.share(sites.state(0), {**adverts, 0: adverts[1]})
    with pytest.raises(RefusedError, match="two sites of a secure sum have the same key"):
        member.share(sites.state(0), {**adverts, 2: adverts[1]})
    with pytest.raises(RefusedError, match="a sum of one"):
        member.share(sites.state(0), {0: adverts[0]})
    sites.shares([0, 1, 2])
    inbox, codes, parts = sites.sum.inbox(0), np.zeros(7, np.uint64), dict.fromkeys(range(3), (0.5, 0.5))
    with pytest.raises(RefusedError, match="altered on its way"):
        member.mask(sites.state(0), {1: inbox[2], 2: inbox[1]}, codes, "", parts)
    with pytest.raises(RefusedError, match="not in this sum"):
        member.mask(sites.state(0), {**inbox, 9: inbox[1]}, codes, "", parts)
    with pytest.raises(RefusedError, match="shares in this sum are not those of its sites"):
        member.mask(sites.state(0), inbox, codes, "", {0: (0.5, 0.5), 1: (0.5, 0.5)})


def test_neither_of_a_sites_secrets_alone_takes_its_masks_off():
    """With its mask key (it counts as lost, and its update arrives late) or with its seed: the codes stay hidden."""
    sites = Sites(3, 64)
    sites.keys(range(3))
    sites.shares(range(3))
    before = sites.state(0)
    sites.mask(range(3))

    def unmasked(with_key: bool, with_seed: bool) -> np.ndarray:
        found = sites.sum.masked[0].copy()
        if with_seed:
            crypto.add_mask(found, bytes.fromhex(before.seed), -1)
        for other in (1, 2) if with_key else ():
            theirs = sites.sum.adverts[other].mask
            seed = member.shared("mask", bytes.fromhex(before.mask_key), theirs, f"{before.context} ", 0, other)
            crypto.add_mask(found, seed, -1)
        return found.view(SIGNED[64])

    assert np.array_equal(unmasked(True, True), sites.codes[0]), "with both it is readable"
    for one in ((True, False), (False, True), (False, False)):
        assert not (unmasked(*one) == sites.codes[0]).any()


def test_masks_do_not_cancel_if_sites_were_told_different_things():
    class Inconsistent(Sites):
        def told(self, number: int) -> str:
            return "one model" if number else "another"

    sites = Inconsistent(3, 64)
    for step in (sites.keys, sites.shares, sites.mask, sites.consent, sites.unmask):
        step(range(3))
    assert (np.abs(sites.sum.unmasked() - sum(sites.codes.values())) > 2**40).any()


def test_what_the_server_takes_has_the_right_form():
    sites = Sites(3, 32)
    sites.keys(range(3))
    with pytest.raises(RefusedError, match="a share to every other site"):
        sites.sum.take_shares(0, {"sealed": {"1": "00" * messages.SEALED}})
    for wrong in (np.zeros(7, np.int64), np.zeros(6, np.int32), np.zeros((7, 1), np.int32)):
        with pytest.raises(RefusedError, match="not a vector of 7 whole numbers of 32 bits"):
            sites.sum.take_masked(0, wrong, 7)
    sites.shares(range(3))
    with pytest.raises(RefusedError, match="a share of every site's secret"):
        sites.sum.take_answer(0, {"shares": opened({0: 1})})


def test_a_wrong_share_is_found():
    """By the seed's commitment, or by the public key that belongs to a mask key."""
    for whose in (1, 3):
        sites = Sites(4, 64)
        sites.keys(range(4))
        sites.shares(range(4))
        sites.mask(range(3))
        sites.consent(range(3))
        sites.unmask(range(3))
        sites.sum.answers[0][whose] = (sites.sum.answers[0][whose] + 1) % crypto.PRIME
        with pytest.raises(RefusedError, match=f"the shares of site {whose}'s .* do not fit together"):
            sites.sum.unmasked()


def test_what_a_site_signs_differs_by_all_that_sites_must_agree_on():
    sites = Sites(4, 64)
    for step in (sites.keys, sites.shares, sites.mask):
        step(range(4))
    state, other = (member.consent(sites.state(number), [0, 1, 2]) for number in (0, 1))
    adverts = {**state.members, 3: state.members[2]}
    assert member.listed(state) == member.listed(other)
    for changed in ({"survivors": [0, 1, 3]}, {"told": "another model"}, {"members": adverts}):
        assert member.listed(replace(state, **changed)) != member.listed(state)


HOSTILE = {
    "text": "{", "a list": [], "nothing": None, "a name": {"a": ""}, "a sign": {"-1": ""}, "zeros": {"01": ""},
    "short": {"1": "00"}, "no text": {"1": 5}, "not hex": {"1": "zz" * 66}, "too large": {"1": "ff" * 66},
}  # fmt: skip
SIZES = ("short", "too large")  # of no matter in a signature: one that is too long is not valid


@pytest.mark.parametrize("kind", list(HOSTILE))
def test_hostile_facts_are_one_line(kind):
    for read in (messages.open_share, messages.sealed_shares, messages.unhex):
        if kind not in SIZES or read is not messages.unhex:
            with pytest.raises(RefusedError):
                messages.by_number(HOSTILE[kind], read)
    if kind != "a list":
        with pytest.raises(RefusedError):
            messages.numbers(HOSTILE[kind])


def test_what_all_must_be_told_alike_is_digested():
    facts = {"config": "{}", "round": 3, "base": 2, "shares": {"0": [0.5], "1": [0.25]}}
    server = {"w": torch.zeros(2), "step": torch.tensor(3)}
    found = messages.told(facts, server)
    assert messages.told({**facts, "base": 1}, server) == found, "where each site stands is its own"
    for other in (
        messages.told({**facts, "config": "{ }"}, server),
        messages.told({**facts, "round": 4}, server),
        messages.told({**facts, "shares": {"0": [0.5], "1": [0.26]}}, server),
        messages.told(facts, {**server, "w": torch.tensor([0.0, 1e-30])}),
    ):
        assert other != found


def test_keys_are_read_as_they_were_sent_and_no_others():
    _, advert = member.begin("session", "context", 0)
    sent = advert._replace(certificate="pem", signature=b"s").to_plain()
    assert messages.Advert.from_plain(sent) == advert._replace(certificate="pem", signature=b"s")
    for wrong in ({}, [], {**sent, "seal": "00"}, {**sent, "more": ""}, {**sent, "certificate": "x" * 20_000}):
        with pytest.raises(RefusedError):
            messages.Advert.from_plain(wrong)
    for wrong in ([2, 1], [1, 1], [-1], [True], [1.0], {}):
        with pytest.raises(RefusedError):
            messages.numbers(wrong)
    with pytest.raises(RefusedError, match="malformed"):
        messages.session_of("../up")
    assert hashlib.sha256(b"fedxl seed" + bytes(32)).digest() == member.commitment(bytes(32))

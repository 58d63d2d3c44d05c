"""A site's part of a secure sum (Bonawitz et al., Practical Secure Aggregation, CCS 2017), as steps between states.

    keys      two fresh key pairs and the seed of a mask of its own; the public parts go to the server
    shares    its mask key and its seed, each split among all members; each member's part is sealed for it
    mask      codes + own mask + the masks shared with each other member, added by the lower number and subtracted
              by the higher; the latter depend on what the server has told, and cancel only if it told all the same
    consent   the members whose updates are in the sum, as the server has told: it signs one such list in each sum
    unmask    once `threshold` of them have signed the same list, itself included: for each member that is in the sum,
              the share of its seed; for each that is not, of its mask key

A server with both the seed and the mask key of one site could read its codes. So a site gives one kind of share for
each member, once: each step is possible once only, in this order, and the state says which was the last one. The
caller stores the state before the answer leaves.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.x509.oid import ExtendedKeyUsageOID
from numpy.typing import NDArray

from fedxl.deploy.provision import keys
from fedxl.deploy.secure import crypto
from fedxl.deploy.secure.crypto import RINGS, Ring
from fedxl.deploy.secure.messages import Advert
from fedxl.errors import RefusedError, UserError, refuse, require

FEWEST = 2  # a sum of one site's codes is no secret
SCHEME = ec.ECDSA(SHA384())


def threshold(members: int) -> int:
    """Members that must be left at the end: two thirds, rounded up."""
    # More than half: a server that tells sites different lists needs a third of them to get shares of both kinds.
    return max(FEWEST, -(-2 * members // 3))


def shared(kind: str, private: bytes, public: bytes, context: str, *pair: int) -> bytes:
    """The secret of a pair of sites: it differs by kind of use, run, round, session and pair."""
    low, high = sorted(pair)
    return crypto.agree(private, public, f"fedxl {kind} {context} {low} {high}")


def add_pair_mask(vector: Ring, private: bytes, public: bytes, context: str, number: int, other: int) -> None:
    """Add the mask that a site shares with another one. The other adds the same with the opposite sign."""
    crypto.add_mask(vector, shared("mask", private, public, context, number, other), 1 if number < other else -1)


def signed_text(context: str, name: str, number: int, content: str) -> bytes:
    """What a site signs: its keys or the list that it consents to, and which sum that is for."""
    return f"fedxl secure sum {context} {name} {number} {content}".encode()


def keys_of(advert: Advert) -> str:
    """The content of a site's first signature."""
    return f"keys {(advert.seal + advert.mask + advert.commitment).hex()}"


def commitment(seed: bytes) -> bytes:
    """It binds a site to its seed, so that a wrong share shows."""
    return hashlib.sha256(b"fedxl seed" + seed).digest()


@dataclass(frozen=True)
class MemberState:
    """What a site remembers of a sum; all of it is secret."""

    session: str
    context: str  # run, round and session
    number: int  # of this site
    stage: str = "keys"  # the last step done
    seal_key: str = ""  # private keys and the seed, in hexadecimal; forgotten as soon as they are not needed
    mask_key: str = ""
    seed: str = ""
    parts: dict[int, tuple[float, float]] = field(default_factory=dict)  # by number: of weights, and of gradients
    shares: dict[int, list[float]] = field(default_factory=dict)  # by number, as told
    question: str = ""  # a digest of what this site's update depends on
    visits: int = 0  # rounds after which this site draws the examples of its update
    members: dict[int, dict[str, str]] = field(default_factory=dict)  # by number: its public keys
    held: dict[int, str] = field(
        default_factory=dict
    )  # by number: shares of its seed and its mask key, in hexadecimal
    told: str = ""  # a digest of what all members must have been told
    survivors: list[int] = field(default_factory=list)  # members whose updates are in the sum, as it has signed

    @classmethod
    def from_plain(cls, found: Mapping[str, Any]) -> MemberState:
        """From JSON, which turns numbers of sites into texts."""
        tables = {name: each for name, each in found.items() if isinstance(each, dict)}
        return cls(**{**found, **{name: {int(n): v for n, v in each.items()} for name, each in tables.items()}})

    @property
    def round(self) -> int:
        return int(self.context.split()[1])

    def require(self, stage: str, session: str) -> None:
        refuse(session != self.session, "this site knows nothing of that secure sum; it may have begun another since")
        refuse(stage != self.stage, f"a site does each step of a secure sum once: the last one was {self.stage}")

    def adverts(self) -> dict[int, Advert]:
        return {number: Advert.from_plain(found) for number, found in self.members.items()}


def begin(session: str, context: str, number: int) -> tuple[MemberState, Advert]:
    """Fresh secrets, and what of them is public; the caller signs it."""
    seal_key, mask_key, seed = (os.urandom(crypto.KEY) for _ in range(3))
    state = MemberState(session, context, number, seal_key=seal_key.hex(), mask_key=mask_key.hex(), seed=seed.hex())
    return state, Advert(crypto.public_of(seal_key), crypto.public_of(mask_key), commitment(seed))


def share(state: MemberState, members: Mapping[int, Advert]) -> tuple[MemberState, dict[int, bytes]]:
    """Its two secrets in shares, sealed for each member. The caller has verified the members' signatures."""
    mine = members.get(state.number)
    seal_key, mask_key = bytes.fromhex(state.seal_key), bytes.fromhex(state.mask_key)
    if mine is None or (mine.seal, mine.mask) != (crypto.public_of(seal_key), crypto.public_of(mask_key)):
        raise RefusedError("this site's own keys are not among those of the secure sum")
    refuse(len(members) < FEWEST, "a sum of one site's update would not be secret")
    if len({key for advert in members.values() for key in (advert.seal, advert.mask)}) < 2 * len(members):
        raise RefusedError("two sites of a secure sum have the same key")
    places, needed = [number + 1 for number in members], threshold(len(members))
    both = [crypto.split(int(secret, 16), needed, places) for secret in (state.seed, state.mask_key)]
    sealed, held = {}, {}
    for number, advert in members.items():
        text = b"".join(shares[number + 1].to_bytes(crypto.SHARE) for shares in both)
        if number == state.number:
            held[number] = text.hex()
        else:
            key = shared("seal", seal_key, advert.seal, state.context, state.number, number)
            sealed[number] = crypto.seal(key, text, f"{state.context} {state.number} to {number}")
    known = {number: advert.to_plain() for number, advert in members.items()}
    return replace(state, stage="shares", members=known, held=held), sealed


def mask(
    state: MemberState, inbox: Mapping[int, bytes], codes: Ring, told: str, parts: Mapping[int, tuple[float, float]]
) -> tuple[MemberState, Ring]:
    """Its codes under all masks.

    inbox: the sealed shares of all other members that go on. told: a digest of what all members must have been told.
    """
    adverts, held = state.adverts(), dict(state.held)
    if state.number in inbox or not inbox.keys() <= adverts.keys():
        raise RefusedError("a sealed share comes from a site that is not in this sum")
    refuse(parts.keys() != inbox.keys() | {state.number}, "the shares in this sum are not those of its sites")
    if len(inbox) + 1 < threshold(len(adverts)):
        raise RefusedError(f"only {len(inbox) + 1} of {len(adverts)} sites are left in the secure sum")
    seal_key, mask_key, masked = bytes.fromhex(state.seal_key), bytes.fromhex(state.mask_key), codes.copy()
    crypto.add_mask(masked, bytes.fromhex(state.seed))
    for number, sealed in inbox.items():
        key = shared("seal", seal_key, adverts[number].seal, state.context, state.number, number)
        held[number] = crypto.unseal(key, sealed, f"{state.context} {number} to {state.number}").hex()
        add_pair_mask(masked, mask_key, adverts[number].mask, f"{state.context} {told}", state.number, number)
    state = replace(state, seal_key="", mask_key="", seed="")  # not needed any more
    return replace(state, stage="mask", held=held, parts=dict(parts), told=told), masked


def consent(state: MemberState, survivors: Sequence[int]) -> MemberState:
    """Settle on the members whose updates are in the sum. The caller signs `listed`."""
    if state.number not in survivors or not state.held.keys() >= set(survivors):
        raise RefusedError("the sum does not hold this site's update, or holds one that this site knows nothing of")
    if len(survivors) < threshold(len(state.members)):
        raise RefusedError(f"a sum of {len(survivors)} of {len(state.members)} sites has too few of them")
    return replace(state, stage="consent", survivors=list(survivors))


def listed(state: MemberState) -> str:
    """The content of a site's second signature: whose updates are in the sum, and what else all must agree on."""
    # The members decide how many signatures it takes: some sites could have been told of fewer.
    agreed = json.dumps([state.members, state.told, state.survivors], sort_keys=True)
    return f"list {hashlib.sha256(agreed.encode()).hexdigest()}"


def unmask(state: MemberState, signers: Collection[int]) -> tuple[MemberState, dict[int, int]]:
    """Of each member whose codes are in the sum the share of its seed, of each other one that of its mask key.

    signers: members whose signatures of the list that this site has signed the caller has verified.
    """
    # Two lists cannot both have so many, as a site signs one: no secret is given away in shares of both kinds.
    needed, found = threshold(len(state.members)), len({state.number, *signers} & set(state.survivors))
    refuse(found < needed, f"{found} sites have signed the same list of the sum as this site; {needed} must")
    both = {number: (text[: 2 * crypto.SHARE], text[2 * crypto.SHARE :]) for number, text in state.held.items()}
    shares = {number: int(each[number not in state.survivors], 16) for number, each in both.items()}
    return replace(state, stage="unmask", members={}, held={}), shares


def own_part(state: MemberState, members: Sequence[int]) -> float:
    """The part of a sum of these members that is this site's own: of weights or of gradients, whichever is more."""
    sums = map(sum, zip(*(state.parts[number] for number in members), strict=True))
    return max(own and own / total for own, total in zip(state.parts[state.number], sums, strict=True))


def asked(state: MemberState) -> str:
    """A digest of what the sum is of: what this site trains on, whose updates are added, and how much each counts."""
    counted = [[number, state.shares.get(number)] for number in state.survivors]
    return hashlib.sha256(json.dumps([state.question, counted]).encode()).hexdigest()


def as_ring(codes: NDArray[np.int64], bits: int) -> Ring:
    """Codes modulo 2^bits."""
    return codes.astype(RINGS[64]).astype(RINGS[bits])


def sign(folder: Path, context: str, number: int, advert: Advert, content: str = "") -> Advert:
    """A site's keys with its certificate and a signature by the key that it connects with: of content, or of them."""
    # Without it a server could put its own keys in place of other sites', and read all shares and masks.
    ready = all((folder / name).exists() for name in ("site.key", "site.crt", "ca.crt"))
    require(ready, f"a secure sum needs site.key, site.crt and ca.crt in {folder}; see fedxl deploy request")
    key, certificate = keys.read_key(folder / "site.key"), keys.read_certificate(folder / "site.crt")
    text = signed_text(context, keys.common_name(certificate.subject), number, content or keys_of(advert))
    pem = keys.certificate_pem(certificate).decode()
    return advert._replace(certificate=pem, signature=key.sign(text, SCHEME))


def verify(
    folder: Path, context: str, number: int, advert: Advert, trusted: Collection[str], content: str = ""
) -> str:
    """The name of the site that has signed. Raises RefusedError if its signature or certificate is not valid.

    trusted: fingerprints of the only keys that count; empty: all that the federation's authority has certified.
    """
    authority = keys.read_certificate(folder / "ca.crt")
    try:
        certificate = keys.parse_certificate(advert.certificate.encode(), "the certificate of another site")
        name = keys.common_name(certificate.subject)
        certificate.verify_directly_issued_by(authority)
        keys.check_dates(certificate, f"site {name}", "it needs a new one")
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        public = keys.public_key(certificate)
        public.verify(advert.signature, signed_text(context, name, number, content or keys_of(advert)), SCHEME)
    except UserError as error:
        raise RefusedError(str(error)) from None
    except (InvalidSignature, x509.ExtensionNotFound, ValueError, TypeError):
        raise RefusedError(f"the keys of site {number} are not signed by a site of this federation") from None
    if ExtendedKeyUsageOID.CLIENT_AUTH not in uses:  # the authority certifies the server, too
        raise RefusedError(f"the keys of site {number} are not signed by a site")
    shown = keys.fingerprint(public)
    if trusted and shown not in trusted:
        raise RefusedError(f"the key of site {name} is not among this site's peers; its fingerprint is {shown}")
    return name

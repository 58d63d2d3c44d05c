"""What the parties of a secure sum tell each other, as JSON in a message's facts. All is checked on arrival."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fedxl import tree
from fedxl.deploy.protocol.envelope import whole
from fedxl.deploy.secure import crypto
from fedxl.errors import RefusedError, refuse
from fedxl.risks.pairing import Share
from fedxl.tree import add_tensor

SESSION = re.compile(r"[0-9a-f]{32}")
MOST_SITES = 10_000
ALIKE = ("run", "version", "config", "facts_of_all", "preparation", "round", "shares")  # facts of a request to train
MOST_TEXT = 10_000  # characters of a certificate or a signature
SEALED = 2 * crypto.SHARE + crypto.OVERHEAD  # bytes of two shares


class Advert(NamedTuple):
    """The public keys of a site for one sum, signed with its long-term key."""

    seal: bytes  # for what other sites send to it
    mask: bytes  # for the masks that it shares with each of them
    commitment: bytes  # SHA-256 of the seed of its own mask
    certificate: str = ""  # of its long-term key, PEM
    signature: bytes = b""

    def to_plain(self) -> dict[str, str]:
        return {name: value.hex() if isinstance(value, bytes) else value for name, value in self._asdict().items()}

    @classmethod
    def from_plain(cls, found: Any) -> Advert:
        refuse(not isinstance(found, dict) or found.keys() != set(cls._fields), "its keys cannot be read")
        seal, mask, commitment = (unhex(found[name], crypto.KEY) for name in ("seal", "mask", "commitment"))
        return cls(seal, mask, commitment, _text(found["certificate"]), unhex(found["signature"]))


def session_of(text: Any) -> str:
    refuse(not SESSION.fullmatch(str(text)), "the session of a secure sum is malformed")
    return str(text)


def by_number(text: Any) -> dict[int, Any]:
    """A table whose keys are sites' numbers."""
    found = parsed(text)
    refuse(not isinstance(found, dict), "a part of the secure sum is not a table")
    if len(found) > MOST_SITES or not all(re.fullmatch(r"0|[1-9][0-9]{0,8}", key) for key in found):
        raise RefusedError("a list of sites cannot be read")
    return {int(key): value for key, value in found.items()}


def numbers(text: Any) -> list[int]:
    """Numbers of sites, ascending."""
    found = parsed(text)
    refuse(not isinstance(found, list) or len(found) > MOST_SITES, "a list of sites cannot be read")
    each = [whole(number, "site") for number in found]
    refuse(each != sorted(set(each)) or (each and each[0] < 0), "a list of sites is not in order")
    return each


def sealed_shares(text: Any) -> dict[int, bytes]:
    return {number: unhex(value, SEALED) for number, value in by_number(text).items()}


def open_shares(text: Any) -> dict[int, int]:
    found = {number: int.from_bytes(unhex(value, crypto.SHARE)) for number, value in by_number(text).items()}
    refuse(any(share >= crypto.PRIME for share in found.values()), "a share is out of range")
    return found


def signatures(text: Any) -> dict[int, bytes]:
    return {number: unhex(value) for number, value in by_number(text).items()}


def sum_weights(text: Any) -> dict[int, float]:
    """How much each site counts in a sum: positive and finite."""
    found = by_number(text)
    if not all(type(weight) is float and 0 < weight < math.inf for weight in found.values()):
        raise RefusedError("the weights of a secure sum are not positive numbers")
    return found


def share_numbers(share: Share) -> list[float]:
    """A share as plain numbers, in the order of its parts."""
    return [float(number) for leaf in tree.leaves(share) for number in leaf.flatten()]


def sum_shares(text: Any) -> dict[int, list[float]]:
    """The shares of all sites of a sum: finite and not negative."""
    found = by_number(text)
    if not all(
        isinstance(each, list) and all(type(n) is float and 0 <= n < math.inf for n in each)
        for each in found.values()
    ):
        raise RefusedError("the shares of a secure sum cannot be read")
    return found


def share_of(numbers: Sequence[float], like: Share) -> Share:
    """The inverse of `share_numbers`, in double; like: a share of the same algorithm."""
    leaves = tree.leaves(like)
    sizes = [leaf.numel() for leaf in leaves]
    refuse(len(numbers) != sum(sizes), "the shares of a secure sum cannot be read")
    pieces = torch.tensor(numbers, dtype=torch.float64).split(sizes)
    return tree.rebuild(like, (piece.reshape(leaf.shape) for piece, leaf in zip(pieces, leaves, strict=True)))


def told(facts: Mapping[str, Any], weights: Mapping[int, float], server: Any) -> str:
    """A digest of all that a server must tell every site of a sum alike: the experiment, shares, the state."""
    # A server that sent all sites but one a model that learns nothing would find that one's update in the sum.
    digest = hashlib.sha256()
    alike = [[str(facts.get(name, "")) for name in ALIKE], sorted(weights.items())]
    digest.update(json.dumps(alike).encode())
    for name, leaf in sorted(tree.pack(server).items()):
        add_tensor(digest, name, leaf.detach().cpu())
    return digest.hexdigest()


def hexed(found: Mapping[int, bytes]) -> str:
    return json.dumps({str(number): value.hex() for number, value in found.items()})


def parsed(text: Any) -> Any:
    try:
        return json.loads(str(text))
    except (ValueError, RecursionError):
        raise RefusedError("a part of the secure sum cannot be read") from None


def _text(found: Any) -> str:
    refuse(not isinstance(found, str) or len(found) > MOST_TEXT, "a text of the secure sum cannot be read")
    return str(found)


def unhex(found: Any, length: int = 0) -> bytes:
    """A key, a share or a signature. length: in bytes; 0: any."""
    try:
        value = bytes.fromhex(_text(found))
    except ValueError:
        raise RefusedError("a key or a share is not in hexadecimal") from None
    refuse(length and len(value) != length, f"a key or a share has {len(value)} bytes instead of {length}")
    return value

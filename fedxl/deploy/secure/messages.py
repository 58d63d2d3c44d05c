"""What the parties of a secure sum tell each other, in a message's facts. All is checked on arrival."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from fedxl import tree
from fedxl.deploy.protocol.envelope import whole
from fedxl.deploy.secure import crypto
from fedxl.errors import RefusedError, refuse
from fedxl.risks.pairing import Share
from fedxl.tree import add_tensor

T = TypeVar("T")
NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")  # of a site, as a key of JSON
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


def session_of(found: Any) -> str:
    refuse(not SESSION.fullmatch(str(found)), "the session of a secure sum is malformed")
    return str(found)


def by_number(found: Any, read: Callable[[Any], T]) -> dict[int, T]:
    """A table whose keys are sites' numbers."""
    refuse(not isinstance(found, dict) or len(found) > MOST_SITES, "a part of the secure sum is not a table of sites")
    refuse(not all(map(NUMBER.fullmatch, found)), "a list of sites cannot be read")
    return {int(key): read(value) for key, value in found.items()}


def as_facts(found: Mapping[int, Any]) -> dict[str, Any]:
    """The inverse of `by_number`: JSON has texts as keys, and no bytes."""
    return {str(number): value.hex() if isinstance(value, bytes) else value for number, value in found.items()}


def numbers(found: Any) -> list[int]:
    """Numbers of sites, ascending."""
    refuse(not isinstance(found, list) or len(found) > MOST_SITES, "a list of sites cannot be read")
    each = [whole(number, "site") for number in found]
    refuse(each != sorted(set(each)) or (each and each[0] < 0), "a list of sites is not in order")
    return each


def sealed_shares(found: Any) -> bytes:
    return unhex(found, SEALED)


def open_share(found: Any) -> int:
    share = int.from_bytes(unhex(found, crypto.SHARE))
    refuse(share >= crypto.PRIME, "a share is out of range")
    return share


def share_numbers(share: Share) -> list[float]:
    """A share as plain numbers, in the order of its parts."""
    return [float(number) for leaf in tree.leaves(share) for number in leaf.flatten()]


def share_of(found: Any, like: Share) -> Share:
    """The inverse of `share_numbers`, in double; like: a share of the same algorithm. Finite and not negative."""
    leaves = tree.leaves(like)
    sizes = [leaf.numel() for leaf in leaves]
    right = isinstance(found, list) and all(type(number) is float and 0 <= number < math.inf for number in found)
    refuse(not right or len(found) != sum(sizes), "the shares of a secure sum cannot be read")
    pieces = torch.tensor(found, dtype=torch.float64).split(sizes)
    return tree.rebuild(like, (piece.reshape(leaf.shape) for piece, leaf in zip(pieces, leaves, strict=True)))


def told(facts: Mapping[str, Any], server: Any) -> str:
    """A digest of all that a server must tell every site of a sum alike: the experiment, shares, the state."""
    # A server that sent all sites but one a model that learns nothing would find that one's update in the sum.
    digest = hashlib.sha256(json.dumps([facts.get(name, "") for name in ALIKE], sort_keys=True).encode())
    for name, leaf in sorted(tree.pack(server).items()):
        add_tensor(digest, name, leaf.detach().cpu())
    return digest.hexdigest()


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

"""The server's part of a secure sum. It holds masked vectors, and in the end their sum; never one site's codes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedxl.deploy.secure import masks, shamir
from fedxl.deploy.secure.masks import RINGS, SIGNED, Ring
from fedxl.deploy.secure.member import commitment, pair_seed, threshold
from fedxl.deploy.secure.messages import Advert
from fedxl.errors import RefusedError


@dataclass
class Collector:
    """One sum. Sites leave it at any step; as long as `threshold` of them are left, it goes on."""

    context: str  # run, round and session
    bits: int
    told: str = ""  # a digest of what all sites were told
    adverts: dict[int, Advert] = field(default_factory=dict)  # by number: who has sent keys
    sealed: dict[int, dict[int, bytes]] = field(default_factory=dict)  # by sender, then by receiver
    masked: dict[int, Ring] = field(default_factory=dict)  # who is in the sum, under masks
    answers: dict[int, dict[int, int]] = field(default_factory=dict)  # by who answers, then by whose share it is

    @property
    def needed(self) -> int:
        """Sites that must be left at each step."""
        return threshold(len(self.adverts))

    def take_shares(self, sender: int, sealed: dict[int, bytes]) -> None:
        if sealed.keys() != self.adverts.keys() - {sender}:
            raise RefusedError("it did not send a share to every other site")
        self.sealed[sender] = sealed

    def inbox(self, receiver: int) -> dict[int, bytes]:
        """The sealed shares for a site, of all others that have sent theirs."""
        return {sender: each[receiver] for sender, each in self.sealed.items() if sender != receiver}

    def take_masked(self, sender: int, vector: NDArray[Any], length: int) -> None:
        if vector.dtype != SIGNED[self.bits] or vector.shape != (length,):
            raise RefusedError(f"its masked update is not a vector of {length} whole numbers of {self.bits} bits")
        self.masked[sender] = vector.view(RINGS[self.bits])

    def take_answer(self, sender: int, shares: dict[int, int]) -> None:
        if shares.keys() != self.sealed.keys():
            raise RefusedError("it did not send a share of every site's secret")
        self.answers[sender] = shares

    def unmasked(self) -> NDArray[np.int64]:
        """The sum of the codes of all sites in `masked`."""
        total = np.zeros_like(next(iter(self.masked.values())))
        for number, vector in self.masked.items():
            total += vector
            seed = self._secret(number)
            if commitment(seed) != self.adverts[number].commitment:
                raise RefusedError(f"the shares of site {number}'s seed do not fit together")
            masks.add_mask(total, seed, -1)
        for gone in self.sealed.keys() - self.masked.keys():
            key = self._secret(gone)
            if masks.public_of(key) != self.adverts[gone].mask:
                raise RefusedError(f"the shares of site {gone}'s mask key do not fit together")
            for number in self.masked:
                seed = pair_seed(key, self.adverts[number], f"{self.context} {self.told}", gone, number)
                masks.add_mask(total, seed, -1 if number < gone else 1)
        found: NDArray[np.int64] = total.view(SIGNED[self.bits]).astype(np.int64)
        return found

    def _secret(self, whose: int) -> bytes:
        """A seed or a mask key, from as many shares as it takes."""
        some = sorted(self.answers)[: self.needed]
        found = shamir.combine({number + 1: self.answers[number][whose] for number in some})
        if found >= 2 ** (8 * masks.KEY):
            raise RefusedError(f"the shares of site {whose}'s secret do not fit together")
        return found.to_bytes(masks.KEY)

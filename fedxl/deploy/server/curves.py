"""Curves of sites at the server: which bins it asks for, and how it reads their counts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedxl import wire
from fedxl.deploy.protocol.envelope import CurveReply, Envelope
from fedxl.errors import RefusedError, UserError, printable, require
from fedxl.evaluation.binned import Binned, rounded
from fedxl.evaluation.grid import Bins, Grid, Spread, bins_from_json, bins_to_json
from fedxl.evaluation.noise import exactly, variance
from fedxl.files import write_json

MOST_COUNTED = 1e9  # examples of a class that a site may say it has, where no approved entry says less
FAR = 1e4  # times the spread of pooled scores before training has begun
ONE = ""  # the name of the only label
IMPOSSIBLE = 64  # noise of so many times 1 / epsilon: its chance is below 1e-27


class GridBook:
    """The bins of a run, by split. Sites hold on to the first that they are sent, and so does the server, on disk.

    They follow from what sites have disclosed before: the last counts of another split, or pooled scores. They reach
    far beyond these, because training changes the size of scores. Where nothing is known, they fit any scores.
    """

    def __init__(self, path: Path, bins: int) -> None:
        self.path, self.bins = path, bins
        self.known = self._load()
        self.latest: Mapping[str, Binned] = {}  # counts of the split that was evaluated last, by label

    def bins_of(self, split: str, names: Sequence[str], pooled: Spread | None = None) -> Bins:
        """The bins of a split. names: of several labels; empty: of one. pooled: where pooled scores lie."""
        if split not in self.known:
            each = tuple(self._new(name, pooled) for name in names or [ONE])
            self.known[split] = each if names else each[0]
            self._save()
        found = self.known[split]
        fits = len(found) == len(names) if isinstance(found, tuple) else not names
        require(fits, f"{self.path} holds bins of other labels; remove the folder to begin anew")
        return found

    def _new(self, name: str, pooled: Spread | None) -> Grid:
        latest = self.latest.get(name)
        if latest is not None and sum(latest.totals()) >= 1:
            return latest.grid_around(self.bins)
        return Grid(self.bins) if pooled is None else Grid.around(self.bins, pooled, FAR)

    def _load(self) -> dict[str, Bins]:
        try:
            content = json.loads(self.path.read_text())
            sizes = {split: len(bins) if isinstance(bins, list) else 0 for split, bins in content.items()}
            return {str(split): bins_from_json(bins, sizes[split]) for split, bins in content.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise UserError(f"cannot read {self.path}: {error}; remove the folder to begin anew") from None

    def _save(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, {split: bins_to_json(bins) for split, bins in self.known.items()})
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}") from None


class Disclosed(NamedTuple):
    """A site's counts, and what differential privacy they have cost it; 0: they have no noise."""

    binned: dict[str, Binned]  # by label, without those that it withholds
    withheld: dict[str, str]  # why, by label
    epsilon: float  # of all labels together, an L-th for each
    spent: float  # by all of its curves so far, over all runs


def read_curve(reply: Envelope, bins: Bins, names: Sequence[str], limit: float | None) -> Disclosed:
    """A site's counts, if it can have them.

    names: of several labels; empty: of one. limit: the most examples that the site is approved for, None: any.
    """
    grids = bins if isinstance(bins, tuple) else (bins,)
    empty = torch.zeros(*([len(grids)] if names else []), grids[0].bins, dtype=torch.int64)
    received = wire.restore(CurveReply(empty, empty), reply.tensors)
    positives, negatives = (counts.reshape(len(grids), -1) for counts in received)
    epsilon, spent = _spent(reply)
    withheld = _withheld(reply.facts.get("withheld"), names) if names else {}
    found = {
        name: _counts(CurveReply(positives[number], negatives[number]), grid, epsilon / len(grids), limit)
        for number, (name, grid) in enumerate(zip(names or [ONE], grids, strict=True))
        if name not in withheld
    }
    if not found:
        raise RefusedError("it discloses the counts of no label")
    return Disclosed(found, withheld, epsilon, spent)


def _withheld(text: Any, names: Sequence[str]) -> dict[str, str]:
    """Why a site withholds labels, which it names by their numbers."""
    numbers = {str(number): name for number, name in enumerate(names)}
    try:
        return {numbers[number]: printable(why) for number, why in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise RefusedError("it does not say which labels it withholds") from None


def _spent(reply: Envelope) -> tuple[float, float]:
    epsilon, spent = (_number(reply.facts.get(name)) for name in ("epsilon", "spent"))
    if spent < epsilon:
        raise RefusedError("it says that it spent less than its curve takes")
    if epsilon:
        exactly(epsilon)
    return epsilon, spent


def _counts(received: CurveReply, grid: Grid, epsilon: float, limit: float | None) -> Binned:
    """Counts that a site can have, with noise of this epsilon in each; 0: without."""
    least = -IMPOSSIBLE * (1 + 1 / epsilon) if epsilon else 0
    for name, counts in received._asdict().items():
        lowest, total = int(counts.min()), sum(counts.tolist())  # whole numbers of any size: nothing overflows
        if lowest < least:
            raise RefusedError(f"it counts {lowest} {name} in a bin")
        if max(total, int(counts.max())) > MOST_COUNTED:
            raise RefusedError(f"it counts {max(total, int(counts.max()))} {name}")
    found = Binned(grid.edges(), received.positives.numpy(), received.negatives.numpy(), variance(epsilon))
    return _bounded(found, limit) if epsilon else found


def _bounded(found: Binned, limit: float | None) -> Binned:
    """Noisy counts of one site as they enter the sum of all: not negative, and no more than the site is approved for.

    With raw counts, a site that claims much noise could take away the counts of others. A total above the limit may
    be noise, and is no reason to leave the site out.
    """
    found = found.without_noise()
    total = sum(found.totals())
    if limit is None or total <= limit:
        return found
    share = limit / total
    return replace(found, positives=rounded(found.positives * share), negatives=rounded(found.negatives * share))


def _number(value: Any) -> float:
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MOST_COUNTED
    if not known or not math.isfinite(value) or value < 0:
        raise RefusedError("it does not say what epsilon its curve has")
    return float(value)

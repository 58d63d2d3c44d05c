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
IMPOSSIBLE = 64  # noise of so many times 1 / epsilon: its chance is below 1e-27


class GridBook:
    """The bins of a run, by split. Sites hold on to the first that they are sent, and so does the server, on disk.

    They follow from what sites have disclosed before: of the test data, from the last counts of validation data; of
    the first split that is evaluated, from pooled scores, where there are any. They reach far beyond these, because
    training changes the size of scores. Where nothing is known, bins fit scores of any size, a little less tightly.
    """

    def __init__(self, path: Path, bins: int) -> None:
        self.path, self.bins = path, bins
        self.known = self._load()
        self.latest: Binned | None = None
        self.latest_labels: Mapping[str, Binned] = {}

    def grid(self, split: str, pooled: Spread | None = None) -> Grid:
        """The bins of a split; `pooled`: where pooled scores lie."""
        if split not in self.known:
            self.known[split] = self._new(pooled)
            self._save()
        found = self.known[split]
        require(isinstance(found, Grid), f"{self.path} holds bins of several labels; remove the folder to begin anew")
        assert isinstance(found, Grid)
        return found

    def of_labels(self, split: str, names: Sequence[str]) -> tuple[Grid, ...]:
        """The bins of a split for each of several labels, whose scores may lie in different places."""
        if split not in self.known:
            known = self.latest_labels
            enough = {name: found for name, found in known.items() if sum(found.totals()) >= 1}
            self.known[split] = tuple(
                enough[name].grid_around(self.bins) if name in enough else Grid(self.bins) for name in names
            )
            self._save()
        found = self.known[split]
        fits = isinstance(found, tuple) and len(found) == len(names)
        require(fits, f"{self.path} holds bins of other labels; remove the folder to begin anew")
        assert isinstance(found, tuple)
        return found

    def _new(self, pooled: Spread | None) -> Grid:
        if self.latest is not None and sum(self.latest.totals()) >= 1:
            return self.latest.grid_around(self.bins)
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

    binned: Binned
    epsilon: float
    spent: float  # by all of its curves so far, over all runs


def read_curve(reply: Envelope, grid: Grid, limit: float | None) -> Disclosed:
    """A site's counts, if it can have them; `limit`: the most examples that it is approved for, None: any."""
    empty = torch.zeros(grid.bins, dtype=torch.int64)
    received = wire.restore(CurveReply(empty, empty), reply.tensors)
    epsilon, spent = _spent(reply)
    return Disclosed(_counts(received, grid, epsilon, limit), epsilon, spent)


class LabelsDisclosed(NamedTuple):
    """A site's counts of several labels, without those that it withholds."""

    binned: dict[str, Binned]
    withheld: dict[str, str]  # why, by label
    epsilon: float  # of all labels together
    spent: float


def read_label_curves(
    reply: Envelope, grids: Sequence[Grid], names: Sequence[str], limit: float | None
) -> LabelsDisclosed:
    """As `read_curve`, of several labels. Their epsilon is that of all together, an L-th for each."""
    empty = torch.zeros(len(grids), grids[0].bins, dtype=torch.int64)
    received = wire.restore(CurveReply(empty, empty), reply.tensors)
    epsilon, spent = _spent(reply)
    withheld = _withheld(reply.facts.get("withheld"), names)
    found = {}
    for number, (name, grid) in enumerate(zip(names, grids, strict=True)):
        if name not in withheld:
            one = CurveReply(received.positives[number], received.negatives[number])
            found[name] = _counts(one, grid, epsilon / len(names), limit)
    if not found:
        raise RefusedError("it discloses the counts of no label")
    return LabelsDisclosed(found, withheld, epsilon, spent)


def _withheld(text: Any, names: Sequence[str]) -> dict[str, str]:
    """Why a site withholds labels, which it names by their numbers."""
    numbers = {str(number): name for number, name in enumerate(names)}
    try:
        return {numbers[number]: printable(why) for number, why in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise RefusedError("it does not say which labels it withholds") from None


def _spent(reply: Envelope) -> tuple[float, float]:
    epsilon, spent = _number(reply.facts.get("epsilon")), _number(reply.facts.get("spent"))
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

    The sum of raw counts would be a little more precise. But then a site that claims much noise could take away the
    counts of others. That a total exceeds the limit may be noise, and is no reason to leave the site out.
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

"""An engine whose clients are sites on a network, under the same loop over rounds as any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedxl import tree, wire
from fedxl.algorithm import Batch, Fresh, RoundOf, Share, local_round
from fedxl.data.federation import shares
from fedxl.engine.trace import outline
from fedxl.errors import UserError
from fedxl.flower.directory import Directory
from fedxl.flower.envelope import WORDS, Envelope, Failure, Letterhead, Order, asked
from fedxl.flower.parts import Parts
from fedxl.sampling import Indices
from fedxl.task import DTYPES
from fedxl.wire import RefusedError


class Rows:
    """Updates stacked, each put into its row as it arrives, so that none is held twice while others are awaited."""

    def __init__(self, count: int) -> None:
        self.count, self.filled, self._all = count, set[int](), None

    def put(self, row: int, update: Any) -> None:
        if self._all is None:
            self._all = tree.map(lambda leaf: leaf.new_zeros((self.count, *leaf.shape)), update)
        tree.map(lambda rows, leaf: rows[row].copy_(leaf), self._all, update)
        self.filled.add(row)

    def stacked(self) -> Any:
        """Those that were put in, in the order of their rows."""
        if len(self.filled) == self.count:
            return self._all
        rows = torch.tensor(sorted(self.filled))
        return tree.map(lambda leaf: leaf[rows], self._all)


class Standing(NamedTuple):
    """What the server knows of its sites besides their facts; part of a checkpoint."""

    base: dict[str, Tensor]  # the last round of each site that was taken, -1: none
    visits: dict[str, Tensor]  # how many of its rounds were taken


@dataclass
class GridEngine:
    """Runs rounds at sites. Whoever answers well and in time is aggregated; private states never come here."""

    directory: Directory
    parts: Parts
    head: Letterhead

    def __post_init__(self) -> None:
        self.settings, self.say = self.directory.settings, self.directory.say
        sites, run = self.settings.sites, self.parts.run
        self.reading = self.parts.algorithm.reading(run.batch1, run.batch2)
        each = [self.directory.facts[name] for name in sites]
        first, second = ([facts.count(side) for facts in each] for side in self.reading[:2])
        dtype = DTYPES[run.dtype]
        self.shares: Share = tree.map(lambda leaf: leaf.to(dtype), shares(first, second, run.weighting))
        self.base, self.visits = dict.fromkeys(sites, -1), dict.fromkeys(sites, 0)
        self.dropped: list[dict[str, Any]] = []
        self._like: dict[bool, Any] = {}

    def run_round(self, algorithm: RoundOf, server: Any, round: int, cohort: Indices) -> Any:
        """The updates of whoever answered, stacked in the order of the sites' numbers."""
        for attempt in range(1, self.settings.patience + 1):
            numbers = sorted(int(number) for number in cohort)
            rows = self._attempt(algorithm, server, round, numbers)
            count = len(rows.filled)
            if count >= min(self.settings.minimum, len(cohort)):
                break
            self.say(f"round {round}: only {count} of at least {self.settings.minimum} updates, try {attempt}")
        else:
            raise UserError(
                f"round {round} had fewer than {self.settings.minimum} updates {self.settings.patience} times; "
                "see that sites are running, then start the server again: it goes on from its last checkpoint"
            )
        for row in rows.filled:
            name = self.settings.sites[numbers[row]]
            self.base[name], self.visits[name] = round, self.visits[name] + 1
        return rows.stacked()

    def _attempt(self, algorithm: RoundOf, server: Any, round: int, cohort: Sequence[int]) -> Rows:
        names = {self.settings.sites[number]: number for number in cohort}
        numbers = {node: names[name] for name, node in self.directory.gather(names).items()}
        for number in set(cohort) - set(numbers.values()):
            self._drop(round, number, "it is not connected")
        state = wire.flatten(Order(server, tree.map(lambda leaf: leaf[0], self.shares)), self.settings.wire)
        letters = {node: self._letter(state, round, number) for node, number in numbers.items()}
        rows = Rows(len(cohort))
        for node, answer in asked(self.directory.carrier, letters, "train", self.settings.deadline):
            number = numbers[node]
            try:
                rows.put(cohort.index(number), self._checked(algorithm, server, round, number, answer))
            except RefusedError as error:
                self._drop(round, number, str(error)[:WORDS])
        return rows

    def _letter(self, state: Mapping[str, Tensor], round: int, number: int) -> Envelope:
        """The same tensors for everyone, held once, but for the share."""
        name = self.settings.sites[number]
        facts = {
            **self.head.facts,
            "wire": self.settings.wire,
            "round": round,
            "number": number,
            "base": self.base[name],
            "visits": self.visits[name],
        }
        share = {f"share.{key}": leaf[number] for key, leaf in self.shares._asdict().items()}
        return Envelope(facts, {**state, **share})

    def _checked(self, algorithm: RoundOf, server: Any, round: int, number: int, answer: Envelope | Failure) -> Any:
        """The update in an answer, if it is one that this site can have come to."""
        if isinstance(answer, Failure):
            raise RefusedError(answer.reason)
        if answer.facts.get("round") != round or answer.facts.get("site") != self.settings.sites[number]:
            raise RefusedError("it answers something else than was asked")
        if note := answer.facts.get("note"):
            self.say(f"round {round}, {self.settings.sites[number]}: {str(note)[:WORDS]}")
        steps = self.parts.run.local_steps
        longest = steps * max(self.reading.size1, self.reading.size2, 1)
        template = self._template(algorithm, server)
        update = wire.restore(template, answer.tensors, longest, unknown=("u",))
        if self.settings.wire == wire.HALF:
            params = wire.plus(server.weights.params, update.weights.params)
            update = update._replace(weights=update.weights._replace(params=params))
        share = tree.map(lambda leaf: leaf[number], self.shares)
        counted = [*zip(tree.leaves(update.share)[1:], tree.leaves(share)[1:], strict=True)]
        more = update.share.model > share.model * (1 + 1e-6) or update.share.model < 0
        if more or any(not torch.equal(found, told) for found, told in counted):
            raise RefusedError("it counts itself differently than it was told")
        if not 0 <= int(update.steps) <= steps:
            raise RefusedError(f"it says it did {int(update.steps)} steps of {steps}")
        # Round 0 pools scores alone; the server finds their first inner estimates itself.
        u_matters = algorithm is self.parts.algorithm and not self.parts.risk.linear
        for side, told, size in (
            ("first", share.first, self.reading.size1),
            ("second", share.second, self.reading.size2),
        ):
            mass = float(share.model * told)
            _require_sane_scores(getattr(update, side, None), side, self._uploaded(size), mass, u_matters)
        return update

    def _uploaded(self, size: int) -> int:
        """How many scores of a side a client uploads, of `size` a step."""
        every = self.parts.run.local_steps * size
        some = int(getattr(self.parts.algorithm, "uploads", 0))
        return some if 0 < some < every else every

    def _template(self, algorithm: RoundOf, server: Any) -> Any:
        """What an update looks like, found by doing a step without numbers."""
        prelude = algorithm is not self.parts.algorithm
        if prelude not in self._like:
            self._like[prelude] = _outline(self.parts, self.reading, algorithm, server, self.directory)
        return self._like[prelude]

    def _drop(self, round: int, number: int, reason: str) -> None:
        name = self.settings.sites[number]
        self.say(f"round {round}: nothing from {name}: {reason}")
        self.dropped.append({"round": round, "site": name, "reason": reason})

    def remarks(self) -> dict[str, Any]:
        """Who was left out since this was last asked, and why."""
        dropped, self.dropped = self.dropped, []
        return {"dropped": dropped} if dropped else {}

    @property
    def population(self) -> Standing:
        return Standing(*({name: torch.tensor(n) for name, n in table.items()} for table in (self.base, self.visits)))

    def restore(self, server: Any, tensors: dict[str, Tensor]) -> None:
        base, visits = tree.unpack(self.population, tensors)
        self.base = {name: int(number) for name, number in base.items()}
        self.visits = {name: int(number) for name, number in visits.items()}


def _require_sane_scores(side: Any, name: str, count: int, mass: float, u_matters: bool) -> None:
    """A site's part of the pool: as many scores as it was asked for, weighing what it weighs, all alike."""
    if side is None:
        return
    if {len(leaf) for leaf in side} != {count}:
        raise RefusedError(f"its scores ({name}) and what belongs to them are not {count}")
    even = bool((side.weight == side.weight[0]).all()) and 0 <= float(side.weight[0]) * count <= mass * (1 + 1e-5)
    if not even or bool((side.age != 0).any()):
        raise RefusedError(f"the weights or ages of its scores ({name}) are none that it was given")
    u = getattr(side, "u", None)
    if u is not None and u_matters:
        bad = ~torch.isfinite(u).flatten(1).all(1) if u.ndim > 1 else ~torch.isfinite(u)
        if bool((bad & (side.weight > 0)).any()):
            raise RefusedError("its inner estimates hold NaN or infinity")


def _outline(parts: Parts, reading: Any, algorithm: RoundOf, server: Any, directory: Directory) -> Any:
    dtype = DTYPES[parts.run.dtype]
    shape = next(iter(directory.facts.values())).shape
    size1, size2 = reading.size1, reading.size2

    def step() -> Any:
        one, rows = torch.ones((), dtype=dtype), torch.zeros(size1, dtype=torch.int64)
        x, y = torch.zeros(size1 + size2, *shape, dtype=dtype), torch.zeros(size1 + size2, dtype=dtype)
        like = tree.map(torch.zeros_like, server)
        lag1, lag2 = rows, torch.zeros(size2, dtype=torch.int64)
        fresh = Fresh(x, y, rows) if reading.fresh else ()
        batch = Batch(x, y, rows, algorithm.passive(like, lag1, lag2), fresh)
        client = parts.algorithm.init_client(like, 1)
        return local_round(algorithm, like, client, Share(one, one, one), [batch])[1]

    return tree.map(lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype), outline(step, ()))

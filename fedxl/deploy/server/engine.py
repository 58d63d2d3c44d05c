"""An engine whose clients are sites on a network, under the same loop over rounds as any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedxl import tree, wire
from fedxl.algorithms.checks import Influence, Sizes, check_server, check_update
from fedxl.algorithms.protocol import ClientUpdate, Phase, ServerState
from fedxl.algorithms.server_rules import next_state
from fedxl.deploy.protocol.envelope import DIVERGED, Envelope, Failure, RunHeader, TrainRequest
from fedxl.deploy.protocol.message import FACTS_ALONE
from fedxl.deploy.server.backbone import Backbone
from fedxl.deploy.server.directory import Directory
from fedxl.deploy.storage import SEED_FILE, kept_seed
from fedxl.engine.drawing import draw_lags, host_weights
from fedxl.errors import DivergedError, RefusedError, UserError, printable
from fedxl.evaluation.bins import Spread
from fedxl.risks.pairing import PoolWeights, Share
from fedxl.risks.scores import outputs_behind
from fedxl.sampling import Indices
from fedxl.training.problem import Problem
from fedxl.training.simulation import participants


class Replies:
    """What came of asking a cohort once, by the place of each site in it.

    Updates are stacked, each put into its row as it arrives, so that none is held twice while others are awaited.
    """

    def __init__(self, count: int) -> None:
        self.count, self.filled = count, set[int]()
        self.sizes = dict[int, Sizes]()  # of the updates that are well-formed
        self.diverged = 0  # how many sites say that they have
        self._all: Any = None

    def put(self, row: int, update: ClientUpdate) -> None:
        if self._all is None:
            self._all = tree.map(lambda leaf: leaf.new_zeros((self.count, *leaf.shape)), update)
        tree.map(lambda rows, leaf: rows[row].copy_(leaf), self._all, update)
        self.filled.add(row)

    def stacked(self) -> ClientUpdate:
        """Those that were put in, in the order of their rows. They move up over the gaps: nothing is held twice."""
        rows = sorted(self.filled)
        for place, row in enumerate(rows):
            if place != row:
                tree.map(lambda leaf, to=place, of=row: leaf[to].copy_(leaf[of]), self._all)
        self.filled = set(range(len(rows)))
        stacked: ClientUpdate = tree.map(lambda leaf: leaf[: len(rows)], self._all)
        return stacked


@dataclass
class SiteEngine:
    """Runs rounds at sites. Valid replies that arrive in time are aggregated; private states stay at the sites."""

    sums: ClassVar[bool] = False
    directory: Directory
    problem: Problem
    head: RunHeader
    folder: Path  # of the run

    def __post_init__(self) -> None:
        self.settings, self.say = self.directory.settings, self.directory.say
        # The seed of what sites read of the pool; 0: the run's, which sites know.
        self.secret = kept_seed(self.folder / SEED_FILE) if self.settings.private_draws else 0
        sites, self.reading = self.settings.sites, self.problem.reading
        counted, self.plan = participants(self.problem, list(self.directory.told.values()), sites)
        self.shares: Share = tree.map(lambda leaf: leaf.to(self.problem.dtype), counted)
        self.base = dict.fromkeys(sites, -1)  # the last round of each site that was taken, -1: none
        self.visits = dict.fromkeys(sites, 0)  # how many of its rounds were taken
        self.influence = Influence(self.settings.influence)
        self.backbone = Backbone(self.directory, self.head, self.problem.model)
        self.dropped: list[dict[str, Any]] = []
        self.participants: list[dict[str, Any]] = []
        self.absent: dict[
            str, tuple[int, set[str]]
        ] = {}  # by site: since which round, and the reasons that were said
        self.pooled: Spread | None = None  # where pooled scores lie; None: there are none

    def run_round(self, server: ServerState, round: int, cohort: Indices) -> ClientUpdate:
        """The updates of the sites that answered, stacked in the order of their numbers."""
        phase = self.problem.algorithm.phase(round)
        numbers, least = sorted(int(number) for number in cohort), min(self.settings.minimum, len(cohort))
        for attempt in range(1, self.settings.patience + 1):
            replies = self._attempt(phase, server, round, numbers, least)
            accepted = sorted(replies.filled)
            if len(accepted) >= least:
                updates = self._merged(server, replies.stacked())
                if self._usable(phase, server, round, updates):
                    break
                accepted = []
            if 2 * replies.diverged > len(numbers):  # it does so again: the round is the same to the last bit
                raise DivergedError(
                    f"training diverged in round {round}: {replies.diverged} of {len(numbers)} sites report numbers "
                    "that are no longer finite or in range; start a new run with a lower learning rate (lr)"
                )
            self.say(f"round {round}: only {len(accepted)} of at least {least} updates, try {attempt}")
        else:
            why = f" (the last reason: {self.dropped[-1]['reason']})" if self.dropped else ""
            raise UserError(
                f"round {round} had fewer than {least} updates {self.settings.patience} times{why}; "
                "check that sites are running, then start the server again: it resumes from its last checkpoint"
            )
        self.influence.remember(replies.sizes[row] for row in accepted)
        names = [self.settings.sites[numbers[row]] for row in accepted]
        self.base |= dict.fromkeys(names, round)
        self.visits |= {name: self.visits[name] + 1 for name in names}
        for name in self.absent.keys() & {*names}:
            missed = round - self.absent.pop(name)[0]
            self.say(f"round {round}: {name} is back after {missed} {'round' if missed == 1 else 'rounds'}")
        self.participants.append({"round": round, "sites": names, "of": len(numbers)})
        return updates

    def _attempt(self, phase: Phase, server: ServerState, round: int, cohort: Sequence[int], least: int) -> Replies:
        names = {self.settings.sites[number]: number for number in cohort}
        numbers: Mapping[str, int] = {node: names[name] for name, node in self.directory.gather(names, least).items()}
        for number in set(cohort) - set(numbers.values()):
            self._drop(round, number, self.directory.why_absent(self.settings.sites[number]))
        numbers = self._prepared(phase, round, numbers)
        state = wire.flatten(TrainRequest(phase.downlink(server), self._share(0), ()), self.settings.wire)
        weights = phase.pool_weights(server)
        pool = None if weights is None else host_weights(weights)
        like = phase.update_like(server, self.problem.assignment(self._share(0)))
        most = FACTS_ALONE + 2 * Envelope({}, tree.pack(like)).size  # whole numbers take up to twice the size
        requests = {
            node: self._request({**state, **self._passive(phase, server, round, number, pool)}, round, number, most)
            for node, number in numbers.items()
        }
        replies = Replies(len(cohort))
        for node, reply in self.backbone.exchange(requests, "train", self.settings.deadline):
            number = numbers[node]
            row = cohort.index(number)
            try:
                update = self._checked(phase, server, round, number, reply)
                replies.sizes[row] = check_update(phase, server, update, self.problem.assignment(self._share(number)))
                replies.put(row, update)
            except RefusedError as error:
                self._drop(round, number, printable(error))
                replies.diverged += isinstance(reply, Failure) and reply.reason.startswith(DIVERGED)
        for row, reason in self.influence.excesses(replies.sizes).items():
            replies.filled.remove(row)
            self._drop(round, cohort[row], reason)
        return replies

    def _usable(self, phase: Phase, server: ServerState, round: int, updates: ClientUpdate) -> bool:
        """Whether sites can go on from what these updates come to: nothing else may be sent to them, or saved."""
        state = next_state(phase, server, updates, self.sums)
        try:
            wire.restore(state, wire.flatten(state, self.settings.wire), may_be_nan=self.problem.algorithm.may_be_nan)
            check_server(phase, state)
        except RefusedError as error:
            self.say(f"round {round}: all updates discarded, sites could not continue from the new state: {error}")
            return False
        self._look_at_pool(state)
        return True

    def _look_at_pool(self, state: ServerState) -> None:
        """For those who count scores in bins. An algorithm may do without a pool."""
        pool, risk = self.problem.algorithm.pooled_scores(state), self.problem.risk
        if pool is None or risk.score_shape:
            return
        outputs = outputs_behind(risk.link, torch.cat([side.entry.score[side.weight > 0] for side in pool]))
        if outputs is not None and len(outputs):
            self.pooled = Spread.of(outputs.numpy())

    def _request(self, state: Mapping[str, Tensor], round: int, number: int, most: float) -> Envelope:
        """The same tensors for everyone, held once, except for its share and its scores."""
        name = self.settings.sites[number]
        facts = {**self.head.facts, "wire": self.settings.wire, "round": round, "number": number}
        facts |= {"base": self.base[name], "visits": self.visits[name]}
        return Envelope(facts, {**state, **tree.pack(self._share(number), "share")}, most)

    def _passive(
        self, phase: Phase, server: ServerState, round: int, number: int, pool: PoolWeights | None
    ) -> Mapping[str, Tensor]:
        """What this site reads of the pool, drawn as the simulator does: no site sees the rest, nor whose it is."""
        if pool is None:
            return {}
        lags = draw_lags(self.problem.schedule, self.reading, number, round, pool, self.secret)
        return tree.pack(phase.passive(server, *map(torch.from_numpy, lags)), "passive")

    def _checked(self, phase: Phase, server: ServerState, round: int, number: int, reply: Envelope | Failure) -> Any:
        """The update in a reply, if it is of the right form and of this site in this round."""
        if isinstance(reply, Failure):
            raise RefusedError(reply.reason)
        if reply.facts.get("round") != round or reply.facts.get("site") != self.settings.sites[number]:
            raise RefusedError("it replies to another request")
        if note := reply.facts.get("note"):
            self.say(f"round {round}, {self.settings.sites[number]}: {printable(note)}")
        like = phase.update_like(server, self.problem.assignment(self._share(number)))
        update = self._restored(phase, server, number, like, reply)
        if self.settings.wire == wire.HALF:
            params = tree.map(torch.add, server.weights.params, update.weights.params)
            update = update._replace(weights=update.weights._replace(params=params))
        return update

    # What a server that sees only sums does in another way.

    def _prepared(self, phase: Phase, round: int, numbers: Mapping[str, int]) -> Mapping[str, int]:
        """The nodes that are asked to train, with their sites' numbers."""
        return numbers

    def _restored(self, phase: Phase, server: ServerState, number: int, like: Any, reply: Envelope) -> Any:
        """The update in a reply's tensors."""
        return wire.restore(like, reply.tensors, may_be_nan=self.problem.algorithm.may_be_nan)

    def _merged(self, server: ServerState, updates: ClientUpdate) -> ClientUpdate:
        """Accepted updates as the algorithm's `aggregate` takes them."""
        return updates

    def _share(self, number: int) -> Share:
        return tree.map(lambda leaf: leaf[number], self.shares)

    def _drop(self, round: int, number: int, reason: str) -> None:
        name = self.settings.sites[number]
        self.directory.note_lost(name)
        said = self.absent.setdefault(name, (round, set()))[1]
        if reason not in said:  # once, however many rounds it stays away
            self.say(f"round {round}: nothing from {name}: {reason}")
            said.add(reason)
        self.dropped.append({"round": round, "site": name, "reason": reason})

    def remarks(self) -> dict[str, Any]:
        """Which sites took part in the rounds since the last call, and which were left out, and why."""
        found = {"participants": self.participants, "dropped": self.dropped}
        self.participants, self.dropped = [], []
        return {name: entries for name, entries in found.items() if entries}

    @property
    def population(self) -> dict[str, dict[str, Tensor]]:
        """What the server knows of its sites besides their facts, and how large updates were in the last rounds."""
        base, visits = ({name: torch.tensor(n) for name, n in table.items()} for table in (self.base, self.visits))
        return {"base": base, "visits": visits, "usual": self.influence.as_tensors()}

    def restore(self, server: ServerState, tensors: dict[str, Tensor]) -> None:
        self._look_at_pool(server)
        found = tree.unpack({**self.population, "usual": {}}, tensors)
        self.base, self.visits = ({n: int(count) for n, count in found[part].items()} for part in ("base", "visits"))
        prefix = "usual."
        usual = {name.removeprefix(prefix): leaf for name, leaf in tensors.items() if name.startswith(prefix)}
        self.influence.restore(usual)

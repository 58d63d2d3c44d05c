"""The server's checks of single updates, and an engine that makes them in a simulation, too."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fedxl import tree
from fedxl.algorithms.checks import Influence, Sizes, check_update
from fedxl.algorithms.protocol import ClientUpdate, ServerState
from fedxl.errors import RefusedError, UserError
from fedxl.risks.pairing import Share
from fedxl.sampling import Indices
from fedxl.training.problem import Problem
from fedxl.training.rounds import Engine

USUAL = "usual."


class Population(NamedTuple):
    clients: Any  # of the engine inside
    usual: dict[str, Tensor]  # how large updates were in the last rounds, by name


class Checked:
    """An engine that leaves out the updates that a server with sites would refuse.

    A simulator by itself trusts its clients. This one is for studies of clients that lie. Other than a site, a client
    whose update is refused keeps the private state that it came to.
    """

    def __init__(self, engine: Engine, problem: Problem, shares: Share, influence: float) -> None:
        self.engine, self.problem, self.shares = engine, problem, shares
        self.influence = Influence(influence)
        self.dropped: list[dict[str, Any]] = []

    @property
    def sums(self) -> bool:
        return self.engine.sums

    def run_round(self, server: ServerState, round: int, cohort: Indices) -> ClientUpdate:
        """The updates that are accepted, stacked in the order of the cohort."""
        updates, phase = self.engine.run_round(server, round, cohort), self.problem.algorithm.phase(round)
        sizes: dict[int, Sizes] = {}
        refused: dict[int, str] = {}
        for row, update in enumerate(tree.unstack(updates, len(cohort))):
            share = tree.map(lambda leaf, client=int(cohort[row]): leaf[client], self.shares)
            try:
                if not tree.finite(update.weights):
                    raise RefusedError("its weights hold NaN or infinity")
                sizes[row] = check_update(phase, server, update, self.problem.assignment(share))
            except RefusedError as error:
                refused[row] = str(error)
        refused |= self.influence.excesses(sizes)
        self.dropped += [{"round": round, "client": int(cohort[row]), "reason": refused[row]} for row in refused]
        accepted = [row for row in range(len(cohort)) if row not in refused]
        if not accepted:
            raise UserError(f"round {round}: all updates were refused; the last reason: {[*refused.values()][-1]}")
        self.influence.remember(sizes[row] for row in accepted)
        return tree.map(lambda leaf: leaf[accepted], updates) if refused else updates

    def remarks(self) -> dict[str, Any]:
        dropped, self.dropped = self.dropped, []
        return self.engine.remarks() | ({"dropped": dropped} if dropped else {})

    @property
    def population(self) -> Population:
        return Population(self.engine.population, self.influence.as_tensors())

    def restore(self, server: ServerState, tensors: dict[str, Tensor]) -> None:
        self.influence.restore({name.removeprefix(USUAL): t for name, t in tensors.items() if name.startswith(USUAL)})
        inside = {name.removeprefix("clients."): t for name, t in tensors.items() if not name.startswith(USUAL)}
        self.engine.restore(server, inside)

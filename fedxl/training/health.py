"""What a run says when its training goes wrong, each at most once or seldom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fedxl import tree
from fedxl.algorithms.pool import Pool
from fedxl.algorithms.protocol import Algorithm, ServerState
from fedxl.risks.saturation import alike, saturated, saturated_outputs
from fedxl.training.run_folder import COLLAPSED

Outputs = tuple[Tensor, Tensor] | None
PATIENCE = 10  # rounds by which the scores of a side may be older than the pool keeps any


class Watch:
    """Looks at a run's health at each evaluation."""

    def __init__(self, algorithm: Algorithm, say: Callable[[str], None]) -> None:
        self.algorithm, self.say = algorithm, say
        self.told = False  # whether the collapse has been said
        self.told_age = dict[str, int]()  # the age of a side's passive scores when it was last said

    def __call__(self, server: ServerState, round: int, outputs: Outputs) -> dict[str, Any]:
        """What to add to the metrics row. outputs: raw ones of held-back data with their labels, if known here."""
        pool = self.algorithm.pooled_scores(server)
        if pool is not None:
            self._tell_ages(pool)
        if not self._collapsed(pool, outputs):
            return {}
        if not self.told:
            self.told = True
            self.say(
                f"the scores have collapsed by round {round}: they are all alike, or so near the ends of their range "
                f"that no gradient passes; start a new run with {self._remedies()}"
            )
        return {COLLAPSED: True}

    def _collapsed(self, pool: Pool | None, outputs: Outputs) -> bool:
        """Whether scores are all alike, or no gradient passes their link. If no outputs are known, the pool says."""
        if outputs is None:
            if pool is None:
                return False
            latest = []
            for side in pool:
                new = (side.weight > 0) & (side.age == side.age.min())
                latest.append(tree.map(lambda leaf, at=new: leaf[at], side.entry))
            return saturated(self.algorithm.risk, *latest)
        guarded = self.algorithm.guards_level
        return alike(outputs[0]) if guarded else saturated_outputs(self.algorithm.risk, *outputs)

    def _remedies(self) -> str:
        remedies = ["a smaller lr", "fewer local_steps"]
        if self.algorithm.risk.score_range.bounded and not self.algorithm.guards_level:
            remedies.append("level = 'bounded'" if self.algorithm.local_pairs else "level = 'even'")
        return f"{', '.join(remedies)}, or a network that norms its scores (score_norm = true)"

    def _tell_ages(self, pool: Pool) -> None:
        """Say which side of the pool was last refreshed long ago, and again when it is twice as long."""
        limit = self.algorithm.pool.pool_rounds - 1 + PATIENCE  # type: ignore[attr-defined]
        ages = [int(side.age.min()) for side in pool]
        for name, side, age in zip(("S1", "S2"), self.algorithm.risk.sides, ages, strict=True):
            if age > limit and age >= 2 * self.told_age.get(name, 0):
                self.told_age[name] = age
                self.say(
                    f"the passive scores of {name} ({side}) are {age} rounds old, because no client of these rounds "
                    "had any; a larger cohort would help"
                )

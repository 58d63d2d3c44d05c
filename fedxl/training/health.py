"""What a run says when its training goes wrong, each at most once or seldom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fedxl import tree
from fedxl.algorithms.pool import Pool
from fedxl.algorithms.protocol import Algorithm, ServerState
from fedxl.risks.saturation import alike, saturated, saturated_outputs
from fedxl.training.run_files import COLLAPSED

PATIENCE = 10  # rounds by which the scores of a side may be older than the pool keeps any


class Watch:
    """Looks at a run's health at each evaluation."""

    def __init__(self, algorithm: Algorithm, say: Callable[[str], None]) -> None:
        self.algorithm, self.say = algorithm, say
        self.told = False  # whether the collapse has been said
        self.told_age = dict[str, int]()  # the age of a side's passive scores when it was last said

    def __call__(self, server: ServerState, round: int, h: Tensor | None, labels: Tensor | None) -> dict[str, Any]:
        """What to add to the metrics row. h: raw scores of data held back, where they are known here."""
        pool = self.algorithm.pooled_scores(server)
        if pool is not None:
            self._tell_ages(self._ages(pool))
        if not self._collapsed(pool, h, labels):
            return {}
        if not self.told:
            self.told = True
            self.say(
                f"the scores have collapsed by round {round}: they are all alike, or so near the ends of their range "
                f"that no gradient passes; start a new run with {self._remedies()}"
            )
        return {COLLAPSED: True}

    def _collapsed(self, pool: Pool | None, h: Tensor | None, labels: Tensor | None) -> bool:
        """Whether scores are all alike, or no gradient passes their link. If no outputs are known, the pool says.

        The scores that are optimised are the linked ones. Guarded ones never saturate, but may all be alike.
        """
        risk, pairs = self.algorithm.risk, getattr(self.algorithm, "level", None)
        if h is None or labels is None:
            return pool is not None and _pool_saturated(self.algorithm, pool)
        return alike(h) if pairs is None or pairs.guards(risk) else saturated_outputs(risk, h, labels)

    def _ages(self, pool: Pool) -> dict[str, int]:
        """How many rounds ago a side of the pool was last refreshed, by name, if that is long."""
        limit = self.algorithm.pool.pool_rounds - 1 + PATIENCE  # type: ignore[attr-defined]
        ages = zip(("S1", "S2"), self.algorithm.risk.sides, (int(side.age.min()) for side in pool), strict=True)
        return {f"{name} ({side})": age for name, side, age in ages if age > limit}

    def _remedies(self) -> str:
        remedies = ["a smaller lr", "fewer local_steps"]
        level = getattr(self.algorithm, "level", None)
        if level is not None and level.level == "free":
            remedies.append("level = 'bounded'" if self.algorithm.local_pairs else "level = 'even'")
        return f"{', '.join(remedies)}, or a network that norms its scores (score_norm = true)"

    def _tell_ages(self, ages: Mapping[str, int]) -> None:
        for side, age in ages.items():
            if age >= 2 * self.told_age.get(side, 0):
                self.told_age[side] = age
                self.say(
                    f"the passive scores of {side} are {age} rounds old, because no client of these rounds had any; "
                    "a larger cohort would help"
                )


def _pool_saturated(algorithm: Algorithm, pool: Pool) -> bool:
    """Whether the latest scores of both sides have collapsed."""
    latest = []
    for side in pool:
        new = (side.weight > 0) & (side.age == side.age.min())
        latest.append(tree.map(lambda leaf, at=new: leaf[at], side.entry))
    return saturated(algorithm.risk, *latest)

"""What a run says when its training goes wrong, each at most once or seldom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fedxl.algorithms import optional
from fedxl.algorithms.protocol import AnyAlgorithm, ServerState
from fedxl.training.run_files import COLLAPSED


class Watch:
    """Looks at a run's health at each evaluation."""

    def __init__(self, algorithm: AnyAlgorithm, say: Callable[[str], None]) -> None:
        self.algorithm, self.say = algorithm, say
        self.told = False  # whether the collapse has been said
        self.told_age = dict[str, int]()  # the age of a side's passive scores when it was last said

    def __call__(self, server: ServerState, round: int, h: Tensor | None, labels: Tensor | None) -> dict[str, Any]:
        """What to add to the metrics row. h: raw scores of data held back, where they are known here."""
        health = optional.health(self.algorithm, server, h, labels)
        self._tell_ages(health.stale)
        if not health.collapsed:
            return {}
        if not self.told:
            self.told = True
            self.say(
                f"the scores have collapsed by round {round}: they are all alike, or so near the ends of their range "
                f"that no gradient passes; start a new run with {self._remedies()}"
            )
        return {COLLAPSED: True}

    def _remedies(self) -> str:
        remedies = ["a smaller lr", "fewer local_steps"]
        if optional.has_free_level(self.algorithm):
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

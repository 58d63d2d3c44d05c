"""What a run says when its training goes wrong, each at most once or seldom."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedxl import tree
from fedxl.algorithms.pool import Pool
from fedxl.algorithms.protocol import Algorithm, Reading, ServerState
from fedxl.models import Weights, scorer, weights_of
from fedxl.risks.saturation import alike, saturated, saturated_outputs
from fedxl.training.run_folder import COLLAPSED

Outputs = tuple[Tensor, Tensor] | None
PATIENCE = 10  # rounds by which the scores of a side may be older than the pool keeps any
SQUASHING = ("Sigmoid", "Hardsigmoid", "Softmax")  # functions, as torch names their gradients
RESHAPING = ("View", "Squeeze", "Select", "Slice", "ReshapeAlias")
# How far weights have moved from where they began, by their length there: with less they are where they were up to
# rounding; with more the rate is too large. In the demo's runs that learned it was between 0.005 and 3.
STILL, FAR = 1e-7, 1e3


def remark_on(model: nn.Module, probe: Tensor, algorithm: Algorithm, reading: Reading) -> str:
    """What is known against a network before it is trained; empty if nothing is."""
    last = _last_function(model, probe)
    paired = reading.second != "none"
    sigmoid = algorithm.risk.score_range.bounded if paired else not algorithm.learns_grades
    if last not in SQUASHING or not sigmoid:
        return ""
    ends = f"the network ends in {last.lower()}, and its outputs go through a sigmoid once more"
    return f"{ends}: together they leave little gradient; end with the layer before"


def _last_function(model: nn.Module, probe: Tensor) -> str:
    """What its outputs come from, be it a layer or a call in `forward`; empty if there is no gradient."""
    weights = weights_of(model)
    params = {name: leaf.requires_grad_() for name, leaf in weights.params.items()}
    node: Any = scorer(model, training=False)(weights._replace(params=params), probe)[0].grad_fn
    while node and node.name().startswith(RESHAPING):
        node = node.next_functions[0][0]
    return str(node.name()).partition("Backward")[0] if node else ""


class Watch:
    """Looks at a run's health at each evaluation."""

    def __init__(self, algorithm: Algorithm, say: Callable[[str], None], start: Weights) -> None:
        self.algorithm, self.say, self.start = algorithm, say, start
        self.told = False  # whether the collapse has been said
        self.told_moves = False  # whether it has been said that weights move too little or too much
        self.told_age = dict[str, int]()  # the age of a side's passive scores when it was last said

    def __call__(self, server: ServerState, round: int, outputs: Outputs) -> dict[str, Any]:
        """What to add to the metrics row. outputs: raw ones of held-back data with their labels, if known here."""
        self._tell_moves(server.weights.params, round)
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
            remedies.append("level = 'even'")
        return f"{', '.join(remedies)}, or a network that norms its scores (score_norm = true)"

    def _tell_moves(self, now: dict[str, Tensor], round: int) -> None:
        began = _length(self.start.params)
        moved = _length(tree.map(torch.sub, now, self.start.params))
        moved = moved / began if began else moved and math.nan  # from 0, only standing still can be told
        if self.told_moves or not (moved < STILL or moved > FAR):
            return
        self.told_moves = True
        less = "have not moved: nobody has trained yet, no gradient reaches them, or lr is far too small"
        more = f"are {moved:.1g} times as far from their first values as those were long: lr is far too large"
        self.say(f"by round {round} the weights {less if moved < STILL else more}")

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


def _length(weights: dict[str, Tensor]) -> float:
    return float(torch.stack([leaf.double().norm() for leaf in tree.leaves(weights)]).norm())

"""How outputs are computed, and how gradients by outputs become a gradient by the weights.

`Exact` is the gradient of the batch. `ByExample` (private.py) clips each example's gradient and adds noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedxl.models import Score, Weights
from fedxl.risks.pairing import Entry
from fedxl.risks.xrisk import ScoreRange

Back = Callable[[Tensor], tuple[dict[str, Tensor]]]
OPTIONS = "fedxl.algorithms.private:gradient"  # the function that builds a gradient from a user's options


@dataclass(frozen=True)
class Exact:
    """The gradient of the batch, and scores as they are."""

    private: ClassVar[bool] = False  # whether it has an epsilon

    def check(self, algorithm: Any) -> None:
        """Raises UserError if the algorithm has settings that this gradient does not allow."""

    def check_weights(self, weights: Weights) -> None:
        """Raises UserError if the network has what this gradient does not allow."""

    def outputs(
        self, score: Score, weights: Weights, x: Tensor, noise: Any
    ) -> tuple[Tensor, Back, dict[str, Tensor]]:
        """The batch's outputs, how gradients by them become one by the weights, and the buffers afterwards."""

        def outputs(params: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            return score(weights._replace(params=params), x)

        found: Any = torch.func.vjp(outputs, weights.params, has_aux=True)
        h, back, buffers = found
        return h, back, buffers

    def scorer(self, score: Score) -> Score:
        """How examples are scored that are not trained on."""
        return score

    def noise_like(self, params: dict[str, Tensor], count: int, trains: bool) -> Any:
        """The noise that a step with so many examples wants, in the right types and shapes.

        trains: whether there is a gradient, and not scores alone.
        """
        return ()

    def disclose(self, a: Entry, b: Entry, noise: Any, within: ScoreRange) -> tuple[Entry, Entry]:
        """A step's scores as they may leave the client."""
        return a, b

    def blank(self, entry: Entry, mass: Tensor, within: ScoreRange) -> Entry:
        """A round's scores of a side; if the client has no mass there, they are of examples that stand in."""
        return entry

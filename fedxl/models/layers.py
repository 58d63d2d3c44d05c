"""What image networks share: norms, initial weights, and checks of their input."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Literal

from torch import Tensor, nn

from fedxl.errors import require

Norm = Callable[[int], nn.Module]  # channels -> layer

NORMS: Mapping[str, Norm] = {
    "batch": nn.BatchNorm2d,
    "group": lambda width: nn.GroupNorm(math.gcd(8, width), width),
    "none": lambda width: nn.Identity(),
}
DEEP = ("batch", "group")  # deep networks do not train without a norm


def norm_layer(name: str, among: Collection[str] = tuple(NORMS)) -> Norm:
    """The norm of this name. Raises UserError if the network cannot use it."""
    require(name in among, f"norm must be one of {', '.join(among)}, not '{name}'")
    return NORMS[name]


def image_channels(shape: tuple[int, ...], network: str) -> int:
    """The number of channels of images [channels, height, width]. Raises UserError for other shapes."""
    needs = f"the {network} needs images [channels, height, width], not examples of shape {list(shape)}"
    require(len(shape) == 3, needs)
    return shape[0]


def kaiming(model: nn.Module, mode: Literal["fan_in", "fan_out"]) -> None:
    """He et al. 2015: convolutions ~ N(0, 2 / fan). Norms already start at one and zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")


class ScoreNorm(nn.BatchNorm1d):
    """Batch norm of the scores themselves, in the precision of the weights.

    A pairwise risk does not change if all scores move together, and with sigmoid scores it falls at first: where the
    sigmoid is flat, no pair is far out of order. At high rates the head moves all scores that way, and nothing is
    learned from then on. Behind this layer they move by its offset alone. Every client needs both classes.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def norms_scores(model: nn.Module) -> bool:
    return any(isinstance(module, ScoreNorm) for module in model.modules())


def check_classes(model: nn.Module, everyone_has_both: bool) -> None:
    """Refuse score norm if a client holds one class: it would norm that class as others norm both."""
    require(
        everyone_has_both or not norms_scores(model),
        "score_norm needs both classes at every client, and one here has only one",
    )

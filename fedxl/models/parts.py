"""Which parts of a network train: all of it, some of it, or low-rank adapters beside layers that stay as they are.

What does not train is frozen. It is in no message, average or checkpoint, and its digest says which numbers it holds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.functional import linear

from fedxl.errors import require
from fedxl.tree import add_tensor

M = TypeVar("M", bound=nn.Module)
MOST_RANK = 1024
FEW = 8  # names in a message


def frozen(model: nn.Module) -> dict[str, nn.Module]:
    """Modules with parameters none of which trains, and all modules below them. They always run as in evaluation."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        params = list(module.parameters())
        if name not in found and params and not any(p.requires_grad for p in params):
            found |= dict(module.named_modules(prefix=name))
    return found


def frozen_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What training never changes: parameters that do not train, and the buffers of frozen modules."""
    inside = {id(buffer) for module in frozen(model).values() for buffer in module._buffers.values()}
    kept = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    return kept | {name: buffer for name, buffer in model.named_buffers() if id(buffer) in inside}


def digest(model: nn.Module) -> str:
    """Of everything that is frozen; "" if nothing is."""
    content, tensors = hashlib.sha256(), frozen_tensors(model)
    for name in sorted(tensors):
        add_tensor(content, name, tensors[name])
    return content.hexdigest() if tensors else ""


def train_only(model: M, names: Sequence[str]) -> M:
    """Freeze every parameter but these, in place. names: of parameters or modules, or patterns such as `*norm*`.

    >>> model = train_only(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)), ["2"])
    >>> [name for name, p in model.named_parameters() if p.requires_grad]
    ['2.weight', '2.bias']
    """
    _require_found("train", names, dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_named(name, names))
    return model


def adapt(model: M, rank: int, targets: Sequence[str] = ()) -> M:
    """Put an adapter of this rank on every frozen `nn.Linear`, in place. targets: names or patterns of some of them.

    LoRA: Hu et al., Low-Rank Adaptation of Large Language Models (ICLR 2022), with scale 1.
    """
    require(1 <= rank <= MOST_RANK, f"adapter_rank must lie between 1 and {MOST_RANK}, got {rank}")
    still = {name: module for name, module in frozen(model).items() if isinstance(module, nn.Linear)}
    told = "adapters need frozen nn.Linear layers, and there are none; name what else trains in train"
    require(bool(still), f'{told}, for example train = ["head"]')
    require("" not in still, "an adapter needs a network around its layer")
    _require_found("adapter_targets", targets, still)
    for name, layer in still.items():
        if not targets or _named(name, targets):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Adapted(layer, rank))
    return model


class Adapted(nn.Module):
    """A frozen linear layer and an adapter: x W' + x A' B', of which A and B train. B is 0 at first."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))  # A
        self.up = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))  # B
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))  # as nn.Linear begins

    def forward(self, x: Tensor) -> Tensor:
        frozen: Tensor = self.layer(x)
        return frozen + linear(linear(x, self.down), self.up)

    # torch's attention and its encoder layers read these of a linear layer instead of calling it.

    @property
    def weight(self) -> Tensor:
        return self.layer.weight + self.up @ self.down

    @property
    def bias(self) -> Tensor | None:
        return self.layer.bias


def with_parts(
    model: nn.Module,
    train: tuple[str, ...] | None = None,  # parameters or modules that train, by name or pattern; left out: all
    adapter_rank: int = 0,  # of low-rank adapters beside frozen linear layers; 0: none
    adapter_targets: tuple[str, ...] = (),  # linear layers that get one, by name or pattern; empty: all frozen ones
) -> nn.Module:
    """Settings of `[model]` for any network: which parts train."""
    if train is not None:
        train_only(model, train)
    require(adapter_rank > 0 or not adapter_targets, "adapter_targets needs adapter_rank")
    return adapt(model, adapter_rank, adapter_targets) if adapter_rank else model


def _named(name: str, patterns: Iterable[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") or fnmatchcase(name, each) for each in patterns)


def _require_found(setting: str, patterns: Sequence[str], names: Iterable[str]) -> None:
    """Raises UserError for the first pattern that matches no name."""
    names = list(names)
    parts = list(dict.fromkeys(name.partition(".")[0] for name in names))
    some = ", ".join(parts[:FEW]) + (", ..." if len(parts) > FEW else "")
    for pattern in patterns:
        told = f"{setting} = '{pattern}' matches nothing in this network; its names begin with {some}"
        require(any(_named(name, [pattern]) for name in names), told)

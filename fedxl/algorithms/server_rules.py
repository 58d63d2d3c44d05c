"""What the server does to updates before it takes their mean: a chain of rules, each with a state of its own.

Clipping by a norm that adapts to the clients': Andrew, Thakkar, McMahan, Ramaswamy. Differentially Private Learning
with Adaptive Clipping. NeurIPS 2021. Trimmed mean: Yin, Chen, Ramchandran, Bartlett. Byzantine-Robust Distributed
Learning. ICML 2018. Multi-Krum: Blanchard, El Mhamdi, Guerraoui, Stainer. Machine Learning with Adversaries. NeurIPS
2017. Momentum (FedAvgM): Hsu, Qi, Brown, 2019. Adam: Reddi et al. Adaptive Federated Optimization. ICLR 2021. With
equal shares they are what is published; with others, a client's values count by its share.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms import fixed_point as whole_numbers
from fedxl.algorithms.descent import Adam, Momentum, Optimiser
from fedxl.algorithms.protocol import Algorithm, Phase, Rule
from fedxl.errors import require
from fedxl.models import Weights

ENOUGH = 3  # clients that a round needs for a median of its own
REMEMBERED = 20  # rounds
ROUNDING = 1e-9  # of a sum of shares, by which two of them are still the same


def begin(algorithm: Algorithm, weights: Weights) -> Any:
    """The server's state before the first round, with those of its rules."""
    server = algorithm.init(weights)
    return server._replace(rules=tuple(rule.init(algorithm, server) for rule in algorithm.rules))


def next_state(phase: Phase, server: Any, updates: Any, summed: bool = False) -> Any:
    """The server's state after a round: what rules make of the updates, their mean, and the algorithm's own part.

    summed: whether updates hold the mean of a secure sum already.
    """
    shares, states = phase.counts(updates.share), list(server.rules)
    for at, rule in enumerate(phase.rules):
        if not (summed and isinstance(rule, WholeNumbers)):
            states[at], updates, shares = rule(states[at], phase, server, updates, shares)
    parts, before = phase.parts(updates), phase.parts(server)
    mean = average({name: parts[name] for name in phase.averaged}, shares, before)
    return phase.aggregate(server, mean, updates)._replace(rules=tuple(states))


def average(stacked: dict[str, Any], shares: Tensor, otherwise: dict[str, Any]) -> dict[str, Any]:
    """The weighted mean over clients, leaf by leaf; `otherwise` if no client counts.

    Integer leaves (BatchNorm's counters) are averaged too, and rounded.
    """
    total = shares.sum()
    some = total > 0
    weights = shares / torch.where(some, total, torch.ones_like(total))

    def mean(leaf: Tensor, fallback: Tensor) -> Tensor:
        averaged = torch.tensordot(weights.to(_exact(leaf).dtype), _exact(leaf), 1)
        return torch.where(some, _as(leaf, averaged), fallback)

    return tree.map(mean, stacked, {name: otherwise[name] for name in stacked})


@dataclass(frozen=True)
class Clip:
    """No client's change counts for more than `limit` usual ones, whatever its size.

    The usual norm is the running median of the clients' norms, which fewer than half of them cannot raise. Its state
    is the usual norm of each part in past rounds, [REMEMBERED, parts], oldest first; 0 if unknown.
    """

    limit: float

    def init(self, phase: Phase, server: Any) -> Tensor:
        count = len(_normed(phase.parts(server)))
        return torch.zeros(REMEMBERED, count, dtype=torch.float64, device=server.step.device)

    def __call__(
        self, state: Tensor, phase: Phase, server: Any, updates: Any, shares: Tensor
    ) -> tuple[Any, Any, Tensor]:
        parts, origin = _normed(phase.parts(updates)), _normed(phase.parts(server))
        growth, counted = phase.growth(updates.share).clamp(min=1), shares > 0
        done, usual_now = {}, []
        for column, (name, part) in enumerate(parts.items()):
            sizes = _distances(part, origin[name], state.new_zeros(len(shares))) / growth  # [C]
            usual = usual_size(sizes[counted], state[:, column])
            scale = torch.where(sizes.isfinite(), (self.limit * usual / sizes).nan_to_num(1.0).clamp(max=1), 0.0)
            scale = torch.where(usual > 0, scale, torch.ones_like(scale))
            done[name] = tree.map(partial(_shorten, scale), part, origin[name]) if bool((scale < 1).any()) else part
            usual_now.append(median((sizes * scale)[counted]))
        latest = torch.stack(usual_now)
        # A part that nobody moved leaves what is known of it.
        latest = torch.where(latest > 0, latest, state[-1])
        return torch.cat((state[1:], latest[None])), _with_parts(updates, done), shares


def _normed(parts: dict[str, Any]) -> dict[str, Any]:
    """Parts that each have a norm of their own: statistics apart from parameters, counters left out."""
    found: dict[str, Any] = {}
    for name, part in parts.items():
        if isinstance(part, Weights):
            buffers = {key: leaf for key, leaf in part.buffers.items() if leaf.is_floating_point()}
            found |= {f"{name}.params": part.params, f"{name}.buffers": buffers}
        else:
            found[name] = part
    return found


def _with_parts(updates: Any, parts: dict[str, Any]) -> Any:
    """Updates with these parts, named as in `_normed`, in place of theirs."""
    for path, part in parts.items():
        name, _, leaf = path.partition(".")
        if leaf:
            weights = getattr(updates, name)
            part = weights._replace(**{leaf: {**getattr(weights, leaf), **part}})
        updates = updates._replace(**{name: part})
    return updates


def usual_size(sizes: Tensor, past: Tensor) -> Tensor:
    """The median of a round's sizes above 0, or that of past rounds if it is larger; 0 if unknown.

    Of two sizes the smaller one counts. With one size, rely on past rounds.
    """
    present = sizes[sizes > 0]
    before = median(past)
    if len(present) >= ENOUGH:
        return torch.maximum(before, median(present))
    return torch.maximum(before, present.min()) if len(present) == 2 else before


def median(sizes: Tensor) -> Tensor:
    """The median of the sizes above 0; 0 if there are none."""
    present = sizes[sizes > 0]
    return present.quantile(0.5) if len(present) else sizes.new_zeros(())


def _distances(updates: Any, origin: Any, squares: Tensor) -> Tensor:
    """How far each client's part is from where it began, over all leaves together, [C]. squares: zeros."""
    for leaf, start in zip(tree.leaves(updates), tree.leaves(origin), strict=True):
        rows = tree.pieces(leaf, len(squares))
        for row, begun in zip(rows, start.reshape(1, -1).split(rows[0].shape[1], 1), strict=True):
            squares = squares + torch.linalg.vector_norm(row - begun, dim=1, dtype=torch.float64).square()
    return squares.sqrt()


def _shorten(scale: Tensor, leaf: Tensor, origin: Tensor) -> Tensor:
    """origin + scale * change; the same bits if nothing is scaled, and the origin if nothing is left."""
    by = scale.view(-1, *[1] * (leaf.ndim - 1)).to(leaf.dtype)
    shorter = torch.where(by > 0, origin + by * (leaf - origin), origin)
    return torch.where(by < 1, shorter, leaf)


class Stateless:
    """A rule that remembers nothing."""

    def init(self, phase: Phase, server: Any) -> Any:
        return ()


@dataclass(frozen=True)
class TrimmedMean(Stateless):
    """The mean of every number without its smallest and its largest values, each of `cut` of the shares."""

    cut: float

    def __call__(
        self, state: Any, phase: Phase, server: Any, updates: Any, shares: Tensor
    ) -> tuple[Any, Any, Tensor]:
        found = tree.map(self._trim(shares), phase.parts(updates), phase.parts(server))
        return state, _everywhere(updates, found, len(shares)), shares

    def _trim(self, shares: Tensor) -> Any:
        rows = torch.nonzero(shares > 0)[:, 0]
        weights = shares[rows].double()

        def trim(leaf: Tensor, otherwise: Tensor) -> Tensor:
            if not len(rows):
                return otherwise.clone()
            values, order = _exact(leaf[rows]).sort(dim=0)
            ends = weights[order].cumsum(0)  # the sum of shares up to each value
            least, most = self.cut * ends[-1:], (1 - self.cut) * ends[-1:]
            begins = torch.cat((torch.zeros_like(ends[:1]), ends[:-1]))
            kept = (ends.minimum(most) - begins.maximum(least)).clamp(min=0)
            # What is cut off may be infinite.
            weighted = torch.where(kept > ROUNDING * ends[-1:], values * kept, 0.0)
            return _as(leaf, weighted.sum(0) / (most - least)[0])

        return trim


@dataclass(frozen=True)
class Krum(Stateless):
    """Multi-Krum: the mean of the clients whose updates lie close together.

    Of n clients that count, f = hostile * n (rounded down) may be hostile. A client's score is the sum of the squared
    distances to its n - f - 2 nearest others, and the n - f clients with the lowest scores are chosen. Its authors
    prove that this withstands f of them if n > 2 f + 2.
    """

    hostile: float

    def __call__(
        self, state: Any, phase: Phase, server: Any, updates: Any, shares: Tensor
    ) -> tuple[Any, Any, Tensor]:
        chosen = close_together(phase.position(server, updates), shares, self.hostile)
        # Clients that are left out may have come to infinity, and 0 times infinity is not 0.
        kept = tree.map(
            lambda leaf, old: torch.where(_column(chosen > 0, leaf), leaf, old),
            phase.parts(updates), phase.parts(server),
        )  # fmt: skip
        return state, updates._replace(**kept), chosen


def close_together(position: Any, shares: Tensor, hostile: float) -> Tensor:
    """Shares, with 0 for the clients that lie far from the others."""
    rows = torch.nonzero(shares > 0)[:, 0]
    n = len(rows)
    f = int(hostile * n + ROUNDING)
    if f == 0:
        return shares
    squares = torch.stack([_squared_distances(leaf[rows]) for leaf in tree.leaves(position)]).sum(0)
    # A client is at distance 0 from itself, so itself is the first. A NaN comes last.
    nearest = squares.sort(dim=1).values[:, 1 : 1 + max(1, n - f - 2)]
    best = rows[nearest.sum(1).argsort(stable=True)[: n - f]]
    return torch.zeros_like(shares).index_copy(0, best, shares[best])


def _squared_distances(leaf: Tensor) -> Tensor:
    """Between the rows of a leaf, [n, n], in double precision and without differences of large squares."""
    flat = leaf.reshape(len(leaf), -1).double()
    return torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").square()


@dataclass(frozen=True)
class WholeNumbers(Stateless):
    """Changes are summed in whole numbers of so many bits: exact, and the same under masks as without them."""

    bits: int

    def init(self, phase: Phase, server: Any) -> Any:
        require(
            isinstance(phase, Algorithm) and phase.summable,
            f"fixed_point is not for {type(phase).__name__}: its server needs more than sums",
        )
        return ()

    def __call__(
        self, state: Any, phase: Phase, server: Any, updates: Any, shares: Tensor
    ) -> tuple[Any, Any, Tensor]:
        codes = whole_numbers.codes(self.bits, phase, server, updates)
        total = tree.map(lambda each: each.sum(0), codes)
        return state, whole_numbers.with_mean(self.bits, phase, server, updates, total), shares


@dataclass(frozen=True)
class ServerStep:
    """The server steps along the merged change, by momentum or Adam. Buffers stay as merged."""

    optimiser: Optimiser
    lr: float

    def init(self, phase: Phase, server: Any) -> Any:
        return self.optimiser.init(server.weights.params, server.step)

    def __call__(
        self, state: Any, phase: Phase, server: Any, updates: Any, shares: Tensor
    ) -> tuple[Any, Any, Tensor]:
        if not bool((shares > 0).any()):
            return state, updates, shares  # nothing moves, not even by momentum
        old = server.weights.params
        merged = average({"params": updates.weights.params}, shares, {"params": old})["params"]
        direction, state = self.optimiser.direction(state, tree.map(torch.sub, old, merged))
        params = tree.map(lambda w, d: torch.add(w, d, alpha=-self.lr), old, direction)
        rows = tree.map(lambda leaf: leaf.expand(len(shares), *leaf.shape), params)
        return state, updates._replace(weights=updates.weights._replace(params=rows)), shares


def server_rules(
    aggregation: Literal[
        "mean", "trimmed", "krum"
    ] = "mean",  # how results are merged: mean, or trimmed, krum, if some lie
    hostile: float = 0.25,  # share of clients that may lie: trimmed cuts it off at either end, krum leaves it out
    clip_change: float = 0.0,  # a client's change is cut to so many times the running median of all; 0: never
    fixed_point: int = 0,  # bits of the whole numbers in which changes are summed, 32 or 64; 0: sums of floats
    server_update: Literal["mean", "momentum", "adam"] = "mean",  # how the server uses the merged change
    server_lr: float = 0.0,  # learning rate of the server's momentum or adam; 0: 1 for momentum, 0.01 for adam
    server_momentum: float = 0.9,  # weight of past changes in the server's momentum and adam
    server_adam_decay: float = 0.99,  # weight of past squares in the server's adam
    server_adam_epsilon: float = 1e-3,  # what the server's adam adds to the root of the mean square
) -> tuple[Rule, ...]:
    """The chain that these options ask for, in the order in which rules apply."""
    require(0 <= hostile < 0.5, f"hostile must lie in [0, 0.5), got {hostile}")
    require(
        clip_change == 0 or clip_change >= 1,
        f"clip_change must be at least 1, or 0 for no clipping, got {clip_change}",
    )
    bits = " or ".join(map(str, whole_numbers.FORMS))
    known = not fixed_point or fixed_point in whole_numbers.FORMS
    require(known, f"fixed_point must be {bits}, or 0 for floats, got {fixed_point}")
    # Whoever knows only the sum of all changes can neither compare nor clip them.
    plain = not fixed_point or (aggregation == "mean" and not clip_change)
    require(plain, 'fixed_point sums changes of all clients: it needs aggregation = "mean" and clip_change = 0')
    for name, value in (("server_momentum", server_momentum), ("server_adam_decay", server_adam_decay)):
        require(0 <= value < 1, f"{name} must lie in [0, 1), got {value}")
    require(server_adam_epsilon > 0, f"server_adam_epsilon must be positive, got {server_adam_epsilon}")
    require(server_lr >= 0, f"server_lr must not be negative, got {server_lr}")
    used = server_update != "mean" or not server_lr
    require(used, "server_lr is for server_update = 'momentum' or 'adam'; the mean is taken as it is")
    adam = Adam(server_momentum, server_adam_decay, server_adam_epsilon)
    chain: dict[str, Rule] = {
        "clip": Clip(clip_change),
        "trimmed": TrimmedMean(hostile),
        "krum": Krum(hostile),
        "whole": WholeNumbers(fixed_point),
        "momentum": ServerStep(Momentum(server_momentum), server_lr or 1.0),
        "adam": ServerStep(adam, server_lr or 0.01),
    }
    wanted = {aggregation, server_update, "clip" if clip_change else "", "whole" if fixed_point else ""}
    return tuple(rule for name, rule in chain.items() if name in wanted)


def settings_of(rules: tuple[Rule, ...]) -> dict[str, Any]:
    """The options that `server_rules` makes these rules of; a rule of the user's own is described by itself."""
    found: dict[str, Any] = {}
    for rule in rules:
        match rule:
            case Clip(limit):
                found["clip_change"] = limit
            case TrimmedMean(cut):
                found |= {"aggregation": "trimmed", "hostile": cut}
            case Krum(hostile):
                found |= {"aggregation": "krum", "hostile": hostile}
            case WholeNumbers(bits):
                found["fixed_point"] = bits
            case ServerStep(Momentum(mu), lr):
                found |= {"server_update": "momentum", "server_lr": lr, "server_momentum": mu}
            case ServerStep(Adam(mu, nu, epsilon), lr):
                found |= {"server_update": "adam", "server_lr": lr, "server_momentum": mu}
                found |= {"server_adam_decay": nu, "server_adam_epsilon": epsilon}
            case _:
                found["server"] = [*found.get("server", []), repr(rule)]
    return found


def fixed_point_bits(algorithm: Algorithm) -> int:
    """Bits of the whole numbers in which changes are summed; 0 if they are sums of floats."""
    return next((rule.bits for rule in algorithm.rules if isinstance(rule, WholeNumbers)), 0)


def _everywhere(updates: Any, parts: dict[str, Any], rows: int) -> Any:
    """Updates with the same parts in every row: any weighted mean of these is that part."""
    return updates._replace(**tree.map(lambda leaf: leaf.expand(rows, *leaf.shape), parts))


def _exact(leaf: Tensor) -> Tensor:
    return leaf if leaf.is_floating_point() else leaf.double()


def _as(leaf: Tensor, found: Tensor) -> Tensor:
    """A result in the type of its leaf."""
    return found.to(leaf.dtype) if leaf.is_floating_point() else found.round().to(leaf.dtype)


def _column(each: Tensor, like: Tensor) -> Tensor:
    """A number for each row, in a shape that fits the rows."""
    return each.view(-1, *[1] * (like.ndim - 1))

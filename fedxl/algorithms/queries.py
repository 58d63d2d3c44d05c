"""Steps and the score pool where pairs lie within queries: a step's examples come in blocks, one a query.

F is a mean over queries (`risks/queries.py`), so a step that reads queries uniformly, and within each block items
uniformly, has the mean over its blocks as its gradient. A query's items may lie at several clients. Then a client's
part of the query's gradient is

    part1 * (active a, passive b)  +  part2 * (passive a, active b)

where part1 and part2 are its parts of the query's relevant items and of all its items, and passive scores are drawn
from the query's entries of the pool, those of each client in proportion to its part.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms.pool import Pool, S1Scores, S2Scores, empty
from fedxl.algorithms.protocol import Items, Share
from fedxl.errors import RefusedError
from fedxl.risks import QueryRisk, XRisk
from fedxl.risks.queries import ItemConstants

S = TypeVar("S", S1Scores, S2Scores)
MOST_WEIGHT = 1 + 1e-5  # of an item, over the number of its query's items: 1, and rounding
Pulled = tuple[Tensor, Tensor, Tensor]


class QueryPassive(NamedTuple):
    """What one step takes from the pool: blocks of the same queries as its own examples."""

    a: Tensor  # [B1]
    u: Tensor  # [B1, *m]
    constants: Tensor  # [B1, 2] weight and size
    some_a: Tensor  # [B1] whether the pool holds relevant items of the query, as 1 or 0
    b: Tensor  # [B2]
    some_b: Tensor  # [B2] whether it holds items of the query


def own_pull(
    risk: XRisk, items: Items | tuple[()], gamma: float, factor: Tensor, a: Tensor, b: Tensor, before: Tensor
) -> Pulled:
    """Both sides of a block active: a query's items at this client are its whole list."""
    assert isinstance(risk, QueryRisk)
    assert isinstance(items, Items)
    a_, b_, before_, weight, size, part = _blocks(risk, a, b, before, *(leaf[: len(a)] for leaf in items[1:4]))
    l, back = risk.pairs(a_, b_, torch.zeros_like(b_))
    u = _known(part, risk.follow(before_, l, size, gamma), before_)
    da, db = back(_masked(risk.item_weights(l, u, ItemConstants(weight, size)), (part * factor).unsqueeze(-1)))
    return da.flatten(), db.flatten(), u.flatten(0, 1)


def pooled_pull(
    risk: XRisk,
    items: Items | tuple[()],
    passive: QueryPassive,
    gamma: float,
    forces: tuple[Tensor, Tensor],
    a: Tensor,
    b: Tensor,
    before: Tensor,
) -> Pulled:
    """Active against passive, both ways, as one block of pairs [2, Q, B1 / Q, B2 / Q]."""
    assert isinstance(risk, QueryRisk)
    assert isinstance(items, Items)
    size1 = len(a)
    mine = _blocks(risk, a, b, before, *(leaf[:size1] for leaf in items[1:4]), items.part2[size1:])
    a_, b_, before_, weight, size, part1, part2 = mine
    theirs = _blocks(
        risk, passive.a, passive.b, passive.u, *passive.constants.unbind(-1), passive.some_a, passive.some_b
    )
    other_a, other_b, other_u, other_weight, other_size, some_a, some_b = theirs
    l, back = risk.pairs(
        torch.stack((a_, other_a)), torch.stack((other_b, b_)), torch.zeros_like(b_).expand(2, *b_.shape)
    )
    part1 = part1 * some_b[:, :1]  # nothing to pair the block with: it is left out, and its u stay as they are
    u = _known(part1, risk.follow(before_, l[0], size, gamma), before_)
    constants = ItemConstants(torch.stack((weight, other_weight)), torch.stack((size, other_size)))
    factors = (forces[0] * part1.unsqueeze(-1), forces[1] * some_a.unsqueeze(-1) * part2.unsqueeze(-2))
    weights = risk.item_weights(l, torch.stack((u, other_u)), constants)
    pairs = l.shape[1:4]
    first, second = back(_masked(weights, torch.stack([factor.expand(pairs) for factor in factors])))
    return first[0].flatten(), second[1].flatten(), u.flatten(0, 1)


def _blocks(risk: XRisk, *leaves: Tensor) -> list[Tensor]:
    """[B, ..] -> [Q, B / Q, ..]."""
    return [leaf.unflatten(0, (risk.queries, -1)) for leaf in leaves]


def _known(part: Tensor, new: Tensor, before: Tensor) -> Tensor:
    """The new u [Q, B1, *m] where a part [Q, B1] of the query is here, and those before elsewhere."""
    return torch.where(part.reshape(*part.shape, *[1] * (new.ndim - part.ndim)) > 0, new, before)


def _masked(weights: Tensor, factor: Tensor) -> Tensor:
    """Weights [.., B1, B2, *m] of pairs times a factor [.., B1, B2]; 0 where it is, even if u is not known there."""
    factor = factor.reshape(*factor.shape, *[1] * (weights.ndim - factor.ndim))
    return torch.where(factor > 0, weights * factor, torch.zeros_like(weights))


def empty_pool(risk: XRisk, like: Tensor) -> Pool:
    pool, none = empty(risk, like, owned=True), torch.zeros(1, dtype=torch.int64, device=like.device)
    return Pool(pool.first._replace(query=none, constants=like.new_zeros(1, 2)), pool.second._replace(query=none))


def take(pool: Pool, lag1: Tensor, lag2: Tensor) -> QueryPassive:
    """Entries at these indices; below 0: there is none of the query."""
    (first, second), at1, at2 = pool, lag1.clamp(min=0), lag2.clamp(min=0)
    assert isinstance(first.constants, Tensor)
    some1, some2 = ((lag >= 0).to(first.a.dtype) for lag in (lag1, lag2))
    return QueryPassive(first.a[at1], first.u[at1], first.constants[at1], some1, second.b[at2], some2)


def uploads(a: Tensor, u: Tensor, b: Tensor, items: Items, share: Share) -> tuple[S1Scores, S2Scores]:
    """A round's scores [K, B] as entries of the pool; the weight of one is its client's part of the query.

    An item that is not relevant, or whose u is not known yet (NaN), has weight 0.
    """
    size1 = a.shape[-1]
    first, second = (
        tree.map(lambda leaf, at=at: leaf[:, at].flatten(), items) for at in (slice(size1), slice(size1, None))
    )
    a, u, b = a.flatten(), u.flatten(0, 1), b.flatten()
    known = ~u.reshape(len(a), -1).isnan().any(-1)
    weight1 = torch.where(known & (first.weight > 0), first.part1, torch.zeros_like(a))
    ages = [torch.zeros(len(scores), dtype=torch.int64, device=scores.device) for scores in (a, b)]
    owners = [share.client.expand(len(scores)) for scores in (a, b)]
    constants = torch.stack((first.weight, first.size), -1)
    return (
        S1Scores(
            a, torch.where(u.isnan(), torch.zeros_like(u), u), weight1, ages[0], owners[0], first.query, constants
        ),
        S2Scores(b, torch.zeros_like(b), second.part2, ages[1], owners[1], second.query),
    )


def check_uploads(name: str, side: S1Scores | S2Scores, count: int, client: Tensor) -> None:
    """RefusedError unless there are `count` new scores of this client, with weights and constants that can be."""
    if {len(leaf) for leaf in tree.leaves(side)} != {count}:
        raise RefusedError(f"its scores ({name}) and what belongs to them are not {count}")
    if not bool(((side.weight >= 0) & (side.weight <= 1)).all()) or bool((side.age != 0).any()):
        raise RefusedError(f"the weights or ages of its scores ({name}) are none that it was given")
    assert isinstance(side.owner, Tensor)
    if not bool((side.owner == client).all()):
        raise RefusedError(f"its scores ({name}) are marked as those of another client")
    if isinstance(side, S1Scores):
        assert isinstance(side.constants, Tensor)
        weight, number = side.constants[side.weight > 0].unbind(-1)
        # No gain is above the ideal of its query, so no weight is above the number of relevant items.
        if not bool(((weight >= 0) & (number >= 1) & (weight <= MOST_WEIGHT * number)).all()):
            raise RefusedError(f"the constants of its items ({name}) are none that an item can have")


def merge_latest(kept: S, sent: S) -> S:
    """Of each client and query the latest scores; `sent` holds one row a client.

    Together, the scores of a client and a query weigh as much as the client's part of the query, however often it
    read the query in the round.
    """
    fresh = tree.map(lambda leaf: leaf.flatten(0, 1), sent)
    fresh = tree.map(lambda leaf: leaf[fresh.weight > 0], fresh)
    older = kept._replace(age=kept.age + 1)
    if not len(fresh.weight):
        return older
    _, which, counts = torch.unique(_keys(fresh), dim=0, return_inverse=True, return_counts=True)
    fresh = fresh._replace(weight=fresh.weight / counts[which].to(fresh.weight.dtype))
    # Which older entries have a successor: both kinds of keys are numbered together.
    keys = torch.cat((_keys(older), _keys(fresh)))
    _, number = torch.unique(keys, dim=0, return_inverse=True)
    replaced = torch.isin(number[: len(older.weight)], number[len(older.weight) :])
    stays = ~replaced & (older.weight > 0)
    return tree.concat([tree.map(lambda leaf: leaf[stays], older), fresh])


def _keys(side: S) -> Tensor:
    assert isinstance(side.owner, Tensor)
    assert isinstance(side.query, Tensor)
    return torch.stack((side.owner.long(), side.query), -1)


def estimated_within(risk: XRisk, pool: Pool) -> Pool:
    """The pool with u that follow from its own scores, query by query; an a without any b is left out."""
    first, second = pool
    assert isinstance(risk, QueryRisk)
    assert isinstance(first.query, Tensor)
    assert isinstance(first.constants, Tensor)
    assert isinstance(second.query, Tensor)
    u, weight = first.u.clone(), first.weight.clone()
    for query in first.query.unique():
        rows, columns = first.query == query, (second.query == query) & (second.weight > 0)
        if not bool(columns.any()):
            weight[rows] = 0
            continue
        l = risk.losses(first.a[rows], second.b[columns], second.y[columns])
        share = second.weight[columns] / second.weight[columns].sum()
        u[rows] = risk.estimated(l, first.constants[rows, 1], share).to(u.dtype)
    return Pool(first._replace(u=u, weight=weight), second)

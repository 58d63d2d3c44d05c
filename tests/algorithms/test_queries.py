"""Pairs within queries that lie at several clients: the clients' parts add up to the gradient of the whole risk."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedxl import UserError, tree
from fedxl.algorithms import build
from fedxl.algorithms.pool import Pooling, Scores, begin, drop_unknown
from fedxl.algorithms.step import own_pull, pull
from fedxl.risks import XRisk, listwise, ndcg
from fedxl.risks.pairing import Entry, Minibatch, Share
from fedxl.risks.ranking import Item, Items, Relevant
from tests.algorithms.rounds import after_rounds, assert_agree
from tests.queries import scattered

RISKS = {
    "ndcg": ndcg(),
    "song": ndcg(surrogate="squared_hinge", top=3),
    "listwise": listwise(),
}
every_risk = pytest.mark.parametrize("name", list(RISKS))


class Ranked:
    """All items of a federation with random scores, and how a step sees some of them."""

    def __init__(self, risk: XRisk, local: bool) -> None:
        self.risk, self.federation, self.local = risk, scattered(), local
        self.y, self.group = self.federation.y[:, 0], self.federation.group
        self.random = torch.Generator().manual_seed(1)
        self.items = risk.pairing.items(self.y, self.group, None, self.federation.parts, local, 0)
        self.h = torch.randn(len(self.federation), generator=self.random, dtype=torch.float64)

    def usable(self, client: int) -> list[Tensor]:
        """All items of each query from which a client can learn."""
        part = torch.from_numpy(self.federation.parts[client])
        queries = self.items.query[part[self.items.part2[part] > 0]].unique()
        return [torch.nonzero(self.items.query == query)[:, 0] for query in queries]

    def filled(self, groups: list[Tensor], size: int) -> Tensor:
        """So many of each group, all of its members as often; in any order, for items meet by their query."""
        assert all(size % len(group) == 0 for group in groups)
        found = torch.cat([group.repeat(size // len(group)) for group in groups])
        return found[torch.randperm(len(found), generator=self.random)]

    def relevant(self, group: Tensor) -> Tensor:
        """If there are none, others stand in."""
        found = group[self.y[group] > 0]
        return found if len(found) else group

    def entries(self, first: Tensor, second: Tensor) -> tuple[Entry, Entry]:
        at = torch.cat((first, second))
        of = Minibatch(at, self.y[at].double(), first, tree.map(lambda leaf: leaf[at], self.items))
        return self.risk.pairing.entries(self.h[at], of)

    def exact_u(self, groups: list[Tensor], first: Tensor) -> Tensor:
        everything = torch.cat(groups)
        return self.risk.inner(*self.entries(first, everything))


@every_risk
def test_parts_of_all_clients_add_up_to_the_gradient_of_the_risk(name):
    """With exact u and passive scores, whole lists on both sides, averaged as the server does it."""
    ranked = Ranked(RISKS[name], local=False)
    risk, parts = ranked.risk, ranked.federation.parts
    leaf = ranked.h.clone().requires_grad_()
    (expected,) = torch.autograd.grad(risk.value(leaf, ranked.y, ranked.group), leaf)
    holders = ranked.federation.holdings()
    _, counts = risk.pairing.counts(holders, risk.sides, local=False)
    assert counts == [2, 2, 1], "the third query has no relevant item"
    plain = Share(*(torch.ones(3),) * 3, torch.ones(3, 2), torch.ones(3, 2, dtype=torch.float64))
    factors = risk.pairing.spread(plain, holders, risk.sides, by_samples=True, local=False).factors
    found, size1, size2 = torch.zeros_like(ranked.h), 12, 36
    for client, part in enumerate(parts):
        groups = ranked.usable(client)
        held = [group[torch.isin(group, torch.from_numpy(part))] for group in groups]
        i, j = ranked.filled([*map(ranked.relevant, held)], size1), ranked.filled(held, size2)
        k, l = ranked.filled([*map(ranked.relevant, groups)], size1), ranked.filled(groups, size2)
        mine, (passive_a, passive_b) = ranked.entries(i, j), ranked.entries(k, l)
        pooled = Scores(passive_a, ranked.exact_u(groups, k), passive_b)
        u, forces = ranked.exact_u(groups, i), risk.pairing.forces(factors[client], mine, passive_a)
        da, db, new = pull(risk, mine, pooled, u, 1.0, forces)
        torch.testing.assert_close(new, u)
        found.index_add_(0, torch.cat((i, j)), torch.cat((da, db)) * counts[client] / sum(counts))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@every_risk
def test_lists_of_their_own_give_each_clients_own_gradient(name):
    ranked = Ranked(RISKS[name], local=True)
    risk, part = ranked.risk, torch.from_numpy(ranked.federation.parts[1])
    leaf = ranked.h[part].clone().requires_grad_()
    (expected,) = torch.autograd.grad(risk.value(leaf, ranked.y[part], ranked.group[part]), leaf)
    counts, _ = risk.pairing.counts(ranked.federation.holdings(), risk.sides, local=True)
    assert counts == [2, 1, 0], "of the first query client 1 holds no relevant item, so it has nothing to learn"
    (group,) = (each[torch.isin(each, part)] for each in ranked.usable(1))
    i, j = ranked.filled([ranked.relevant(group)], 4), ranked.filled([group], 8)
    mine, one = ranked.entries(i, j), torch.ones(2, dtype=torch.float64)
    force = risk.pairing.forces(one, mine, mine[0])[0]
    da, db, _ = own_pull(risk, mine, torch.full((4,), math.nan, dtype=torch.float64), 0.1, force)
    found = torch.zeros_like(ranked.h).index_add_(0, torch.cat((i, j)), torch.cat((da, db)))
    torch.testing.assert_close(found[part], expected, rtol=0, atol=1e-12)


def test_a_query_that_the_pool_does_not_hold_is_left_out():
    """Nothing is pulled, an unknown u stays unknown, and such an item is never drawn from the pool."""
    risk, one = ndcg(queries=2), torch.ones(2, dtype=torch.float64)
    query, other = torch.tensor([5, 6]), torch.tensor([7, 6])
    a, b = Entry(0 * one, Relevant(query, one, one, one)), Entry(0.5 * one, Item(query, one))
    pooled = Scores(Entry(0 * one, Relevant(other, one, one, one)), one, Entry(0.5 * one, Item(other, one)))
    unknown = torch.full_like(one, math.nan)
    forces = risk.pairing.forces(one, (a, b), pooled.a)
    da, db, u = pull(risk, (a, b), pooled, unknown, 0.5, forces)
    assert da[0] == db[0] == 0
    assert da[1] != 0
    assert db[1] != 0
    assert u.isnan().tolist() == [True, False]
    each = tree.map(lambda leaf: leaf[None], Scores(a, u, b))
    share = Share(*(torch.ones(1) for _ in range(3)), torch.ones(1, 2), torch.ones(1, 2))
    pool = drop_unknown(risk, Pooling().merge(risk, begin(risk, one), each, share))
    assert pool.first.weight.tolist() == [0, 0, 1], "the placeholder comes first"
    assert pool.second.weight.tolist() == [0, 1, 1]
    assert bool(pool.first.u.isfinite().all())


def test_what_is_known_of_items():
    """Constants are those of whole queries, parts those of clients; nobody's items have no part."""
    federation = scattered()
    items: Items = ndcg().pairing.items(federation.y[:, 0], federation.group, None, federation.parts[:2], False, 0)
    first, other = federation.group == 10, torch.arange(len(federation)) == federation.parts[2][0]
    held = first & ~other
    assert items.size[held].tolist() == [5] * 5
    ideal = 3 / math.log2(2) + 1 / math.log2(3)  # gains of grades 2 and 1
    assert items.weight[held].tolist() == pytest.approx([2 * 3 / ideal, 0, 2 * 1 / ideal, 0, 0])
    assert items.part1[held].tolist() == [1, 1, 1, 0, 0]
    assert items.part2[held].tolist() == pytest.approx([0.6, 0.6, 0.6, 0.4, 0.4])
    for leaf in (items.weight, items.part1, items.part2):
        assert float(leaf[other]) == 0
    assert items.part2[federation.group == 12].tolist() == [0] * 4, "without a relevant item there is no gradient"


@pytest.mark.parametrize(
    "options", [{}, {"fresh": True, "uploads": 4}, {"pool_u": "server", "order": "sorted"}], ids=str
)
def test_executors_agree(options):
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Linear(3, 1, bias=False).double()
    algorithm, federation = build("fedxl2", ndcg(queries=2), lr=0.3, **options), scattered()
    states = [after_rounds(algorithm, model, federation, name, 3, (2, 4, 6)) for name in ("loop", "vmap")]
    assert_agree(*states)
    moved = states[0]["server.weights.params.weight"] - model.weight.detach()
    assert float(moved.abs().max()) > 1e-3


def test_a_step_reads_as_many_items_of_each_query():
    with pytest.raises(UserError, match="must be multiples of queries = 4"):
        build("fedxl2", ndcg()).reading(6, 8)

"""Sums in whole numbers: each code against Python's own arithmetic, the mean against exact fractions."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fedxl import UserError, auroc, partial_auc, tree
from fedxl.algorithms import LocalSGD, build
from fedxl.algorithms.fixed_point import FORMS, FixedPoint, codes, flat, unflat, with_mean
from fedxl.algorithms.local_sgd import LocalSGDUpdate
from fedxl.algorithms.server_rules import begin, fixed_point_bits, next_state
from fedxl.errors import DivergedError, RefusedError
from fedxl.models import Weights
from fedxl.risks.pairing import Share


class Case(NamedTuple):
    algorithm: LocalSGD
    server: object
    updates: LocalSGDUpdate


def case(bits: int, clients: int = 5, scale: float = 1.0) -> Case:
    """Updates of clients that count differently, the last one not at all; with statistics and a counter."""
    draw = torch.Generator().manual_seed(bits)

    def random(*shape: int) -> Tensor:
        return scale * torch.randn(*shape, generator=draw, dtype=torch.float64)

    algorithm = build("local_sgd", auroc(), fixed_point=bits)
    params = {"w": random(3, 2).float(), "b": random(2)}
    server = begin(algorithm, Weights(params, {"mean": random(4), "count": torch.tensor(7)}))
    count = torch.arange(clients, 0, -1, dtype=torch.float64) - 1
    share, two = count / count.sum(), torch.ones(clients, 2, dtype=torch.float64)
    weights = Weights(
        {"w": random(clients, 3, 2).float(), "b": random(clients, 2)},
        {"mean": random(clients, 4), "count": torch.arange(clients) + 8},
    )
    shares = Share(share, share, torch.arange(clients), two, two)
    return Case(algorithm, server, LocalSGDUpdate(weights, shares, torch.ones(clients, dtype=torch.int64)))


@pytest.mark.parametrize("bits", list(FORMS))
def test_codes_and_their_mean_are_those_of_exact_arithmetic(bits):
    algorithm, server, updates = case(bits)
    form = FORMS[bits]
    found = codes(bits, algorithm, server, updates)
    after = next_state(algorithm, server, updates)
    shares = [Fraction(float(each)) for each in updates.share.model]
    for path, leaf in tree.pack(updates.weights).items():
        base = tree.pack(server.weights)[path].flatten()
        coded = tree.pack(found["weights"])[path].reshape(len(leaf), -1)
        for place in range(base.numel()):
            values = [float(row.flatten()[place]) for row in leaf]
            old = float(base[place])
            mine = [
                round((value - old) * float(share) * 2**form.fraction)
                for value, share in zip(values, shares, strict=True)
            ]
            assert coded[:, place].tolist() == mine
            mean = Fraction(old) + Fraction(sum(mine), 2**form.fraction) / sum(shares)
            got, exact = float(tree.pack(after.weights)[path].flatten()[place]), float(mean)
            if leaf.is_floating_point():
                size = max(abs(old), abs(exact), abs(exact - old))
                assert abs(got - exact) <= 4 * torch.finfo(leaf.dtype).eps * size
            else:
                assert got == round(exact)


def test_the_mean_is_close_to_that_of_floats():
    algorithm, server, updates = case(32)
    exact = next_state(algorithm, server, updates)
    floats = build("local_sgd", auroc())
    plain = next_state(floats, floats.init(server.weights), updates)
    for one, other in zip(tree.leaves(exact.weights), tree.leaves(plain.weights), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=3 * 2.0**-24)


@pytest.mark.parametrize(("bits", "value"), [(32, 100.0), (32, float("nan")), (64, 2.0**23), (64, float("inf"))])
def test_a_change_out_of_range_is_refused_unless_it_does_not_count(bits, value):
    algorithm, server, updates = case(bits)
    updates.weights.params["b"][-1, 0] = value
    next_state(algorithm, server, updates)  # the last client does not count
    updates.weights.params["b"][0, 0] = value
    with pytest.raises(DivergedError, match=f"the range of fixed_point = {bits}"):
        next_state(algorithm, server, updates)


@pytest.mark.parametrize("bits", list(FORMS))
def test_a_secure_sum_comes_to_the_same_bits(bits):
    """Sums arrive from elsewhere: clients' own updates are not known, and the rule is not applied again."""
    algorithm, server, updates = case(bits)
    total = tree.map(lambda each: each.flip(0).sum(0), codes(bits, algorithm, server, updates))
    hidden = updates._replace(weights=tree.map(torch.zeros_like, updates.weights))
    sums = with_mean(bits, algorithm, server, hidden, total)
    one, other = next_state(algorithm, server, updates), next_state(algorithm, server, sums, summed=True)
    assert all(map(torch.equal, tree.leaves(one), tree.leaves(other)))


def test_a_forged_sum_is_refused():
    form = FixedPoint(32, 24)
    most = 2**30 + 3
    form.check_sum(torch.tensor([most, -most]), clients=3)
    for wrong in (most + 1, -most - 1):
        with pytest.raises(RefusedError, match="out of the range of fixed_point = 32"):
            form.check_sum(torch.tensor([0, wrong]), clients=3)


def test_a_tree_becomes_a_vector_and_back():
    found = {"weights": Weights({"w": torch.arange(6).view(2, 3)}, {"n": torch.tensor(9)}), "G": {}}
    assert flat(found).tolist() == [0, 1, 2, 3, 4, 5, 9]
    back = unflat(found, flat(found))
    assert all(map(torch.equal, tree.leaves(back), tree.leaves(found)))


def test_by_default_there_are_no_whole_numbers_and_never_in_the_warm_up():
    assert fixed_point_bits(build("fedxl2", partial_auc())) == 0
    whole = build("fedxl2", partial_auc(), fixed_point=64)
    assert fixed_point_bits(whole) == 64
    assert len(whole.phase(1).rules) == 1
    assert whole.phase(0).rules == (), "the warm-up moves nothing"


def test_what_cannot_be_summed_is_one_line():
    with pytest.raises(UserError, match="fixed_point must be 32 or 64, or 0 for floats, got 16"):
        build("local_sgd", auroc(), fixed_point=16)
    for wrong in ({"aggregation": "krum"}, {"clip_change": 2.0}):
        with pytest.raises(UserError, match='needs aggregation = "mean" and clip_change = 0'):
            build("fedxl2", partial_auc(), fixed_point=64, **wrong)
    with pytest.raises(UserError, match="fixed_point is not for CODASCA"):
        begin(build("codasca", auroc(), fixed_point=64), Weights({"w": torch.zeros(2)}, {}))

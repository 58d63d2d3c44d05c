"""Several labels in training: one label is the plain algorithm, executors agree, and the averaged step is exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedxl import tree
from fedxl.algorithms import Algorithm, build
from fedxl.algorithms.pool import Pool, estimate_u
from fedxl.data.inputs import from_arrays
from fedxl.engine.executors import loop
from fedxl.errors import UserError
from fedxl.models import mlp, weights_of
from fedxl.risks import auroc, average_precision, partial_auc, several
from fedxl.risks.pairing import Share
from fedxl.sampling import Purpose, Stream
from tests.algorithms.rounds import after_rounds, assert_agree
from tests.conftest import EXECUTORS, RAGGED, make_clients
from tests.running import engine_for, play

L = 3


def network(outputs: int = L) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return mlp((5,), outputs=outputs, hidden=[4]).double()


def clients_with_labels() -> list[tuple[Tensor, Tensor]]:
    """Ragged clients; the second lacks label 0, the third knows half of its labels, the last has few positives."""
    rng = torch.Generator().manual_seed(2)
    made = []
    for size in (9, 14, 6, 11):
        x = torch.randn(size, 5, generator=rng, dtype=torch.float64)
        y = (x[:, :L] + 0.5 * torch.randn(size, L, generator=rng) > torch.tensor([0.0, 0.3, 0.8])).double()
        made.append((x, y))
    made[1][1][:, 0] = float("nan")
    made[2][1][::2] = -1
    made[3][1][1:, 2] = 0
    return made


ONE_LABEL: dict[str, dict[str, Any]] = {
    "fedxl2": {},
    "fedxl2, fresh and few": {"fresh": True, "uploads": 5, "pool_rounds": 2},
    "fedxl2, free": {"level": "free"},
    "fedxl2, not held": {"hold": 0.0},
    "local_pair": {},
    "sox": {},
}


BY_SAMPLES = {"weighting": "samples", "cohort": 4}
RISKS = {"auroc": auroc(), "pauc": partial_auc(), "ap": average_precision()}


@pytest.mark.parametrize(
    ("name", "risk", "settings"),
    [*((name, partial_auc(), {}) for name in ONE_LABEL), *(("fedxl2", risk, BY_SAMPLES) for risk in RISKS.values())],
)
def test_one_of_several_labels_is_the_plain_algorithm(name, risk, settings):
    """The same draws, the same guard, the same factors: the same weights, and the same pool."""

    def state(risk: Any, labels: int) -> dict[str, Tensor]:
        algorithm = build(name.partition(",")[0], risk, lr=0.3, **ONE_LABEL[name])
        data = from_arrays(make_clients(RAGGED), labels=labels)
        return after_rounds(algorithm, network(1), data, rounds=4, **settings)

    plain, wrapped, moved = state(risk, 0), state(several(risk, 1), labels=1), False
    for key, value in plain.items():
        own = wrapped[key].reshape(value.shape)
        torch.testing.assert_close(
            own, value, rtol=0, atol=1e-12, equal_nan=True, msg=lambda text, key=key: key + text
        )
        moved |= "params" in key and bool((value - weights_at_start(key, value)).abs().max() > 1e-3)
    assert moved


def weights_at_start(key: str, like: Tensor) -> Tensor:
    start = tree.pack(weights_of(network(1)).params)
    return next((value for name, value in start.items() if key.endswith(name)), torch.zeros_like(like))


def many(name: str = "fedxl2", risk: Any = None, weights: tuple[float, ...] = (), **options: Any) -> Algorithm:
    return build(name, several(risk or partial_auc(), L, weights), lr=0.3, **options)


SEVERAL = {
    "auroc": lambda: many(risk=auroc()),
    "pauc": lambda: many(weights=(1, 2, 3)),
    "pauc, not held": lambda: many(hold=0.0),
    "ap, fresh and few": lambda: many(risk=average_precision(), fresh=True, uploads=5),
    "pauc, server's u": lambda: many(pool_u="server", level="even", one_class="train"),
    "local_pair": lambda: many("local_pair"),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_executors_agree(name):
    executors = EXECUTORS if name == "pauc" else ("loop", "vmap")  # tracing takes seconds
    federation = from_arrays(clients_with_labels(), labels=L)
    states = [after_rounds(SEVERAL[name](), network(), federation, each, 4, cohort=3) for each in executors]
    assert_agree(*states)
    assert all(value.isfinite().all() for key, value in states[0].items() if "params" in key)


def examples(size: int, *positives: list[int]) -> tuple[Tensor, Tensor]:
    """So many examples; positives: which of them each known label has. Labels that are not known are NaN."""
    rng = torch.Generator().manual_seed(size)
    y = torch.full((size, 2), float("nan"))
    for label, mine in enumerate(positives):
        y[:, label] = torch.tensor([float(i in mine) for i in range(size)])
    return torch.randn(size, 5, generator=rng, dtype=torch.float64), y


@pytest.mark.parametrize("base", RISKS.values(), ids=RISKS)
def test_the_averaged_step_is_the_exact_gradient_step(base):
    """Two clients, one of which lacks a label: batches and draws that hold all pairs give the gradient of F.

    A reads its 4 couples twice and B its 2 couples four times. Of the pool one entry of each couple and each example
    is kept, with the weight of all, and draws hold it as often as its weight says.
    """
    clients = [examples(6, [0, 1], [2, 3]), examples(8, [3, 4])]
    risk, model, everyone = several(base, 2), network(2), np.arange(2)
    algorithm = build("fedxl2", risk, lr=1.0, beta=1.0, gamma=1.0, level="free")
    federation = from_arrays(clients, labels=2)
    engine = engine_for(algorithm, model, federation, loop, 1, 8, 168, weighting="samples")
    server = play(algorithm, engine, algorithm.init(weights_of(model)), 0, everyone)
    pool = server.pool
    couples = torch.stack(pool.first.entry, -1)
    first, second = one_of_each(pool.first, couples), one_of_each(pool.second, pool.second.entry.score)
    assert (len(first.weight), len(second.weight)) == (6, 12 if base.sides[1] == "negative" else 14)
    assert sorted((first.weight * 8).tolist()) == pytest.approx([1, 1, 1, 1, 2, 2])
    server = server._replace(pool=estimate_u(risk, pool, Pool(first, second)))
    after = play(algorithm, engine, server, 1, everyone)

    leaves = {name: p.clone().requires_grad_() for name, p in weights_of(model).params.items()}
    x, y = torch.cat([c[0] for c in clients]), federation.y
    exact = torch.autograd.grad(risk.value(torch.func.functional_call(model, leaves, (x,)), y), list(leaves.values()))
    for (name, before), gradient in zip(server.weights.params.items(), exact, strict=True):
        torch.testing.assert_close(before - after.weights.params[name], gradient, rtol=0, atol=1e-12)


def one_of_each(side: Any, scores: Tensor) -> Any:
    """A side of the pool with one entry for each score, which has the weight of all with this score."""
    same = (scores[:, None] - scores).abs().amax(-1) < 1e-9
    kept = [i for i in range(len(scores)) if not same[i, :i].any()]
    whole = same.to(side.weight.dtype) @ side.weight
    return tree.map(lambda leaf: leaf[kept], side._replace(weight=whole))


def test_couples_have_their_turns_and_go_on_where_they_stopped():
    members = {0: np.array([0, 2, 5]), 2: np.array([1]), 3: np.arange(7)}

    def drawn(position: int, count: int) -> np.ndarray:
        purposes = (Purpose.LABELS, Purpose.FIRST)
        return several(auroc(), 4).pairing.couples(Stream(5, 1), purposes, position, count, members)

    whole = drawn(0, 63)
    np.testing.assert_array_equal(whole, np.concatenate([drawn(0, 10), drawn(10, 32), drawn(42, 21)]))
    examples, label = np.divmod(whole, 4)
    for begin in range(0, 63, 3):
        assert sorted(label[begin : begin + 3]) == [0, 2, 3]
    for number, held in members.items():
        mine = examples[label == number]
        assert len(mine) == 21
        assert sorted(mine) == sorted(np.repeat(held, 21 // len(held)))


def test_what_does_not_work_with_several_labels_is_one_line():
    for name in ("local_sgd", "codasca"):
        with pytest.raises(UserError, match="one score per example"):
            many(name)


def test_the_growth_of_each_client_is_its_own():
    """Stacked shares, as the server clips by them, give what each share gives alone."""
    algorithm, one = many(weights=(1, 2, 5)), torch.ones(4, dtype=torch.float64)
    factors = torch.rand(4, 2, L, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 4
    share = Share(one, one, one, torch.ones(4, 2, dtype=torch.float64), factors)
    stacked = algorithm.growth(share)
    alone = [algorithm.growth(tree.map(lambda leaf, at=at: leaf[at], share)) for at in range(4)]
    torch.testing.assert_close(stacked, torch.stack(alone))
    even = (factors[:, 0] * factors[:, 1]).sqrt()
    expected = (torch.tensor([1, 2, 5]).double() / 8 * even).sum(1)
    torch.testing.assert_close(stacked, expected)

"""Several labels in training: one label is the plain algorithm, executors agree, and the averaged step is exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedxl import sampling, tree
from fedxl.algorithms import ALGORITHMS, FeDXL2, labels
from fedxl.algorithms.pool import Pool, check_values
from fedxl.algorithms.protocol import Assignment
from fedxl.data.federation import from_arrays
from fedxl.data.label_columns import Columns
from fedxl.engine.executors import loop
from fedxl.errors import RefusedError, UserError
from fedxl.models import mlp, weights_of
from fedxl.risks import auroc, average_precision, partial_auc, several
from fedxl.sampling import Purpose
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


def final_state(
    algorithm: Any, clients: Any, executor: str, outputs: int = L, one: bool = False, **settings: Any
) -> dict[str, Tensor]:
    federation = from_arrays(clients, None if one else Columns(outputs))
    federation = federation.pooled() if algorithm.centralized else federation
    net = network(outputs)
    engine = engine_for(algorithm, net, federation, EXECUTORS[executor](), 3, 4, 5, seed=1, **settings)
    algorithm = engine.algorithm
    server = algorithm.init(weights_of(net))
    for r in range(algorithm.first_round, 5):
        members = sampling.cohort(1, r, len(federation.parts), settings.get("cohort", 0), engine.chances)
        server = play(algorithm, engine, server, r, members)
    return tree.pack({"server": server, "population": engine.population})


ONE_LABEL = {
    "fedxl2": lambda risk: FeDXL2(risk, lr=0.3),
    "fedxl2, fresh and few": lambda risk: FeDXL2(risk, lr=0.3, fresh=True, uploads=5, pool_rounds=2),
    "fedxl2, free": lambda risk: FeDXL2(risk, lr=0.3, level="free"),
    "local_pair": lambda risk: ALGORITHMS["local_pair"](risk, lr=0.3),
    "sox": lambda risk: ALGORITHMS["sox"](risk, lr=0.3),
}


BY_SAMPLES = {"weighting": "samples", "cohort": 4}
RISKS = {"auroc": auroc(), "pauc": partial_auc(), "ap": average_precision()}


@pytest.mark.parametrize(
    ("name", "risk", "settings"),
    [*((name, partial_auc(), {}) for name in ONE_LABEL), *(("fedxl2", risk, BY_SAMPLES) for risk in RISKS.values())],
)
def test_one_of_several_labels_is_the_plain_algorithm(name, risk, settings):
    """The same draws, the same guard, the same factors: the same weights, and the same pool."""
    plain = final_state(ONE_LABEL[name](risk), make_clients(RAGGED), "loop", 1, one=True, **settings)
    wrapped = final_state(ONE_LABEL[name](several(risk, 1)), make_clients(RAGGED), "loop", 1, **settings)
    moved = False
    for key, value in plain.items():
        own = wrapped[key]
        if key == "server.pool.first.a":
            own = own[:, 0]
        torch.testing.assert_close(
            own.reshape(value.shape), value, rtol=0, atol=1e-12, equal_nan=True, msg=lambda text, key=key: key + text
        )
        moved |= "params" in key and bool((value - weights_at_start(key, value)).abs().max() > 1e-3)
    assert moved


def weights_at_start(key: str, like: Tensor) -> Tensor:
    start = tree.pack(weights_of(network(1)).params)
    return next((value for name, value in start.items() if key.endswith(name)), torch.zeros_like(like))


SEVERAL = {
    "auroc": lambda: FeDXL2(several(auroc(), L), lr=0.3),
    "pauc": lambda: FeDXL2(several(partial_auc(), L, [1, 2, 3]), lr=0.3),
    "ap, fresh and few": lambda: FeDXL2(several(average_precision(), L), lr=0.3, fresh=True, uploads=5),
    "pauc, server's u": lambda: FeDXL2(several(partial_auc(), L), lr=0.3, pool_u="server", level="bounded"),
    "local_pair": lambda: ALGORITHMS["local_pair"](several(partial_auc(), L), lr=0.3),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_executors_agree(name):
    executors = EXECUTORS if name == "pauc" else ("loop", "vmap")  # tracing takes seconds
    first, *others = (
        final_state(SEVERAL[name](), clients_with_labels(), executor, cohort=3) for executor in executors
    )
    for other in others:
        assert first.keys() == other.keys()
        for key, value in first.items():
            torch.testing.assert_close(other[key], value, rtol=0, atol=1e-9, equal_nan=True, msg=key)
    assert all(value.isfinite().all() for key, value in first.items() if "params" in key)


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
    algorithm = FeDXL2(risk, lr=1.0, beta=1.0, gamma=1.0, level="free")
    federation = from_arrays(clients, Columns(2))
    engine = engine_for(algorithm, model, federation, loop, 1, 8, 168, weighting="samples")
    server = play(algorithm, engine, algorithm.init(weights_of(model)), 0, everyone)
    pool = server.pool
    first, second = one_of_each(pool.first, pool.first.a), one_of_each(pool.second, pool.second.b)
    assert (len(first.a), len(second.b)) == (6, 12 if base.sides[1] == "negative" else 14)
    assert sorted((first.weight * 8).tolist()) == pytest.approx([1, 1, 1, 1, 2, 2])
    server = server._replace(pool=algorithm.estimated(Pool(first, second)))
    after = play(algorithm, engine, server, 1, everyone)

    leaves = {name: p.clone().requires_grad_() for name, p in weights_of(model).params.items()}
    x, y = torch.cat([c[0] for c in clients]), federation.source.labels
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
        return sampling.couples(5, (Purpose.LABELS, Purpose.FIRST), 1, position, count, members, 4)

    whole = drawn(0, 63)
    np.testing.assert_array_equal(whole, np.concatenate([drawn(0, 10), drawn(10, 32), drawn(42, 21)]))
    examples, label = np.divmod(whole, 4)
    for begin in range(0, 63, 3):
        assert sorted(label[begin : begin + 3]) == [0, 2, 3]
    for number, held in members.items():
        mine = examples[label == number]
        assert len(mine) == 21
        assert sorted(mine) == sorted(np.repeat(held, 21 // len(held)))


def test_a_server_accepts_honest_couples_and_refuses_others():
    algorithm = FeDXL2(several(partial_auc(), L), lr=0.1)
    federation = from_arrays(clients_with_labels(), Columns(L))
    engine = engine_for(algorithm, network(), federation, loop, 3, 4, 5)
    server = algorithm.init(weights_of(network()))
    for r in range(3):
        updates = engine.run_round(server, r, np.arange(4))
        phase = algorithm.phase(r)
        for client in range(4):
            update = tree.map(lambda leaf, client=client: leaf[client], updates)
            phase.check_update(server, update, Assignment(update.share, 3, algorithm.reading(4, 5)))
        server = phase.aggregate(server, updates)
    honest = Pool(update.first, update.second)
    risk, share = algorithm.risk, update.share
    labels.check_couples(risk, share, honest)
    first, second = honest
    lies = [
        (first._replace(a=first.a + torch.tensor([0.0, 0.5])), second),
        (first._replace(a=first.a + torch.tensor([0.0, 3.0])), second),
        (first._replace(weight=2 * first.weight), second),
        (first, second._replace(y=second.y + 2)),
    ]
    for lie in lies:
        with pytest.raises(RefusedError):
            labels.check_couples(risk, share, Pool(*lie))
    with pytest.raises(RefusedError, match="scores \\(first\\)"):
        check_values(risk, Pool(first._replace(a=first.a + torch.tensor([5.0, 0.0])), second), True)


def test_what_does_not_work_with_several_labels_is_one_line():
    risk = several(partial_auc(), L)
    for options in ({"mix": 0.1}, {"one_class": "centre"}, {"level": "balanced"}):
        with pytest.raises(UserError, match="one label"):
            FeDXL2(risk, **options)
    for name in ("local_sgd", "codasca"):
        with pytest.raises(UserError, match="one score an example"):
            ALGORITHMS[name](risk)


def test_the_largest_factor_of_each_client_is_its_own():
    """Stacked shares, as the server clips by them, give what each share gives alone."""
    algorithm = FeDXL2(several(auroc(), L))
    factors = torch.rand(4, 2, L, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 4
    stacked = labels.largest_factor(algorithm.risk, factors, "even")
    alone = [labels.largest_factor(algorithm.risk, each, "even") for each in factors]
    torch.testing.assert_close(stacked, torch.stack(alone))

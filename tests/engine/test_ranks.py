"""Several processes as one engine: the same state as one process, whatever the number of ranks."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fedxl import algorithms, sampling, tree
from fedxl.algorithms.server_rules import begin
from fedxl.data.inputs import from_arrays
from fedxl.engine.executors import loop, vectorised
from fedxl.engine.ranks.ranked import Ranked, costs, longest_first
from fedxl.engine.ranks.team import NAMES, Team, Watch, place_of, seat
from fedxl.engine.simulator import Simulator
from fedxl.errors import UserError
from fedxl.models import operations, weights_of
from fedxl.risks import auroc, partial_auc
from tests.conftest import PATIENCE, RAGGED, make_clients
from tests.ranks import on_ranks
from tests.running import engine_for, play

ROUNDS = 4


class Case(NamedTuple):
    algorithm: str = "fedxl2"
    options: Mapping[str, Any] = MappingProxyType({})
    settings: Mapping[str, Any] = MappingProxyType({})
    executor: Any = vectorised
    dtype: str = "float64"

    @property
    def kind(self) -> torch.dtype:
        return torch.float64 if self.dtype == "float64" else torch.float32


# Six clients, two of them with one class; cohorts of three leave one of four ranks without any.
CASES = {
    "all clients": Case(),
    "loop": Case(executor=loop),
    "a cohort of 3": Case(settings={"cohort": 3}, options={"pool_rounds": 2}),
    "by samples, in groups": Case(settings={"weighting": "samples", "cohort": 4, "clients_at_once": 2}),
    "local buffers": Case(options={"buffers": "local"}, settings={"cohort": 4}),
    "Local SGD": Case("local_sgd", settings={"cohort": 3}),
    "states as large as the model": Case("codasca", settings={"cohort": 4}),
    "one client": Case("sgd"),
    "trimmed, clipped": Case(options={"aggregation": "trimmed", "clip_change": 1.5}),
    "krum": Case("codasca", options={"aggregation": "krum"}),
    "single precision": Case(dtype="float32", settings={"cohort": 4}),
    "single precision, loop": Case(dtype="float32", executor=loop),
}
TOLERANCE = {"float64": 1e-12, "float32": 1e-6}


def network(case: Case) -> nn.Module:
    """With BatchNorm where there are digits to spare: a batch of equal examples multiplies rounding errors by 300."""
    norm = nn.BatchNorm1d(6) if case.dtype == "float64" else nn.Identity()
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 6), norm, nn.Tanh(), nn.Linear(6, 1)).to(case.kind)


def build(case: Case) -> Simulator:
    federation = from_arrays([(x.to(case.kind), y) for x, y in make_clients(RAGGED)])
    risk = auroc() if case.algorithm == "sgd" else partial_auc()
    algorithm = algorithms.build(case.algorithm, risk, lr=0.1, **case.options)
    federation = federation.pooled() if algorithm.centralized else federation
    return engine_for(
        algorithm, network(case), federation, case.executor, 3, 4, 5, seed=1, dtype=case.dtype, **case.settings
    )


def played(simulator: Simulator, case: Case, engine: Any) -> dict[str, torch.Tensor]:
    """The state after some rounds, and every index that was drawn here on the way."""
    drawn: dict[str, torch.Tensor] = {}
    draw = simulator.drawing.draw

    def recorded(client: int, round: int, visits: int, pool: Any) -> Any:
        draws = draw(client, round, visits, pool)
        drawn.update({f"drawn.{client}.{round}.{i}": torch.tensor(each) for i, each in enumerate(draws)})
        return draws

    simulator.drawing.draw = recorded  # type: ignore[method-assign]
    algorithm, clients = simulator.algorithm, len(simulator.data.parts)
    server = begin(algorithm, weights_of(network(case)))
    for r in range(algorithm.first_round, ROUNDS):
        members = sampling.cohort(1, r, clients, case.settings.get("cohort", 0), simulator.chances)
        server = play(algorithm, engine, server, r, members)
    return tree.pack({"server": server, "population": engine.population}) | drawn


def cost_of(simulator: Simulator) -> Any:
    return costs(100, 9, 3, [len(held.first) for held in simulator.drawing.held])


def on_this_rank(folder: Path, team: Team) -> None:
    for name, case in CASES.items():
        simulator = build(case)
        found = played(simulator, case, Ranked(simulator, team, cost_of(simulator)))
        kept = {key: leaf.contiguous().clone() for key, leaf in found.items()}
        save_file(kept, folder / f"{name} {team.rank}.safetensors")


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory) -> tuple[int, Path]:
    """What 2 and 4 ranks have come to, in a file for each case and rank; they are started once for all cases."""
    folder = tmp_path_factory.mktemp("ranks")
    assert on_ranks(request.param, partial(on_this_rank, folder)) == [0] * request.param
    return request.param, folder


@pytest.mark.parametrize("name", list(CASES))
def test_the_result_does_not_depend_on_the_number_of_ranks(name, ranks):
    size, folder = ranks
    simulator = build(CASES[name])
    expected = played(simulator, CASES[name], simulator)
    found = [load_file(folder / f"{name} {rank}.safetensors") for rank in range(size)]
    for key, leaf in expected.items():
        if key.startswith("drawn."):
            (holder,) = (each for each in found if key in each)  # one rank alone has run this client
            assert torch.equal(holder[key], leaf), key
            continue
        for rank, each in enumerate(found[:1] if key.startswith("population") else found):
            torch.testing.assert_close(
                each[key], leaf, rtol=0, atol=TOLERANCE[CASES[name].dtype], equal_nan=True, msg=f"{key} at {rank}"
            )
    assert set().union(*found) == expected.keys()
    # All ranks go on from the very same bits.
    for each in found[1:]:
        assert all(torch.equal(each[key], found[0][key]) for key in expected if key.startswith("server.weights"))


def statistics_of_communication(folder: Path, team: Team) -> None:
    case = Case(settings={"cohort": 4}, dtype="float32")
    simulator = build(case)
    engine = Ranked(simulator, team, cost_of(simulator))
    algorithm = simulator.algorithm
    server = play(algorithm, engine, begin(algorithm, weights_of(network(case))), 0, np.arange(4))
    updates = engine.run_round(server, 1, np.arange(4))
    before = team.spent.bytes
    weights = updates.weights.params
    assert tuple(weights["0.weight"].shape) == (4, 6, 5), "it looks like the rows of all clients"
    torch.tensordot(torch.full((4,), 0.25), weights["0.weight"], 1)
    reduced = team.spent.bytes - before
    numbers = sum(leaf.numel() // 4 for leaf in weights.values())
    # Half of the vector in doubles, twice: once to be added up, once added up.
    assert reduced == 2 * 8 * -(-numbers // 2)
    torch.tensordot(torch.full((4,), 0.25), weights["3.bias"], 1)
    assert team.spent.bytes - before == reduced, "the whole network was added up at once"
    middle = weights["0.weight"].median(0).values
    assert team.spent.bytes - before == reduced + 2 * 30 * 4, "two rows of one leaf in single precision"
    (folder / f"{team.rank}").write_text(str(float(middle.sum())))


def test_networks_are_added_up_and_gathered_only_where_they_must_be(tmp_path):
    assert on_ranks(2, partial(statistics_of_communication, tmp_path)) == [0, 0]
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()


def optimum(cost: list[float], ranks: int) -> float:
    """The least possible largest load, by trying all placements."""
    placements = itertools.product(range(ranks), repeat=len(cost))
    return min(largest(cost, places, ranks) for places in placements)


def largest(cost: Any, places: Any, ranks: int) -> float:
    return max(sum(c for c, place in zip(cost, places, strict=True) if place == rank) for rank in range(ranks))


def test_placement_by_cost_is_near_the_best_that_there_is():
    rng = np.random.default_rng(0)
    better = 0
    for _ in range(20):
        cost = list(rng.pareto(1.0, 7) + 0.1)
        found = largest(cost, longest_first(cost, 3), 3)
        assert found <= (4 / 3 - 1 / 9) * optimum(cost, 3) + 1e-9, "Graham's bound"
        better += found < largest(cost, [i % 3 for i in range(7)], 3)
    assert better >= 15


def test_equal_clients_are_dealt_out_evenly_and_stay_where_they_are():
    places = longest_first([1.0] * 7, 3)
    assert sorted(places.count(rank) for rank in range(3)) == [2, 2, 3]
    homes = {i: (i + 1) % 3 for i in range(6)}
    assert longest_first([1.0] * 6, 3, homes) == [homes[i] for i in range(6)]


def test_a_long_u_counts_for_a_small_network_and_not_for_a_large_one():
    small = costs(operations(nn.Linear(10, 1), torch.zeros(1, 10)), 64, 32, [100, 10**7])
    assert operations(nn.Linear(10, 1), torch.zeros(4, 10)) == 20
    assert small[1] > 10 * small[0]
    large = costs(1e9, 64, 32, [100, 10**7])
    assert large[1] < 1.1 * large[0]
    assert len(set(costs(20, 64, 32, [100, 10**7], padded=True))) == 1


def test_a_seat_is_what_torchrun_says():
    given = dict(zip(NAMES, ("0", "1", "0", "1", "localhost", "1"), strict=True))
    assert seat(given) is None, "one process is a run as ever"
    with pytest.raises(UserError, match="whole numbers"):
        seat(given | {"RANK": "first"})
    with pytest.raises(UserError, match="RANK 8 of 8"):
        seat(given | {"RANK": "8", "WORLD_SIZE": "8"})


def test_a_rank_has_a_card_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    own = seat(dict(zip(NAMES, ("5", "8", "1", "2", "localhost", "1"), strict=True)))
    assert own is not None
    assert [place_of(name, own) for name in ("auto", "cuda")] == [("cuda:1", True)] * 2
    assert [place_of(name, own) for name in ("cpu", "cuda:1")] == [("cpu", False), ("cuda:1", False)], "shared"
    with pytest.raises(UserError, match="3 processes need as many cards, and this machine has 2"):
        place_of("auto", own._replace(beside=3))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert place_of("auto", own) == ("cpu", False)


def dies_or_ends(folder: Path, dies: bool, team: Team) -> None:
    given_up = threading.Event()
    watch = Watch(team.rank, team.size, PATIENCE, given_up.set)
    if dies and team.rank == 1:
        os._exit(9)
    if dies:
        assert given_up.wait(PATIENCE)
    else:
        watch.end()
    (folder / f"{team.rank}").write_text(str(watch.lost.is_set()))
    if dies:
        os._exit(0)  # there is nobody to leave together with


@pytest.mark.parametrize("dies", [True, False])
def test_a_watch_notices_a_rank_that_dies_and_none_that_ends(dies, tmp_path):
    """Ranks 1 and 2 are not connected with each other: rank 2 hears of it when rank 0 goes."""
    assert on_ranks(3, partial(dies_or_ends, tmp_path, dies)) == [0, 9 if dies else 0, 0]
    assert [(tmp_path / f"{rank}").read_text() for rank in ((0, 2) if dies else range(3))] == [str(dies)] * (3 - dies)


def dies_before_it_is_watched(team: Team) -> None:
    if team.rank == 1:
        os._exit(9)
    with pytest.raises((RuntimeError, ValueError)):
        Watch(team.rank, team.size, 2.0, lambda: None)
    os._exit(0)


def test_nobody_waits_longer_than_the_limit_for_a_rank_that_never_comes():
    assert on_ranks(2, dies_before_it_is_watched) == [0, 9]

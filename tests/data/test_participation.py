"""Plans of participation: who takes part when, and by enumeration that everyone weighs its part on average."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest
import torch

from fedxl import UserError, sampling, tree
from fedxl.algorithms import FeDXL2, LocalSGD
from fedxl.data.inputs import from_arrays
from fedxl.data.participation import Plan, Trace, read_trace, shares
from fedxl.engine.executors import vectorised
from fedxl.risks import partial_auc
from fedxl.training.settings import Hooks
from tests.conftest import RAGGED, make_clients
from tests.data.test_cohorts import probabilities
from tests.running import engine_for, fit_named

# Six clients, who are available unevenly; in its third round fewer than a cohort, and client 5 is there once.
ROWS = [[0, 1, 2, 3], [0, 2, 3, 4], [3], [1, 2, 3, 4, 5]]
ALL_BUT_LAST = [[0, 1, 2, 3], [0, 2, 4], [3], [1, 4]]
SMALL = {"local_steps": 2, "batch1": 3, "batch2": 4}


def trace_file(folder, rows) -> str:
    path = folder / "trace.json"
    path.write_text(json.dumps({"rounds": rows}))
    return str(path)


@pytest.mark.parametrize("parts", [None, np.array([0.4, 0.1, 0.1, 0.1, 0.2, 0.1])], ids=["alike", "by size"])
def test_a_trace_in_which_all_are_available_draws_uniform_cohorts(parts):
    plan = Trace(num_clients=6, size=2, seed=3, available=np.ones((3, 6), bool), parts=parts)
    chances = None if parts is None else sampling.inclusion(parts, 2)
    uniform = Plan(num_clients=6, size=2, seed=3, chances=chances)
    for r in range(20):
        assert plan.cohort(r).tolist() == uniform.cohort(r).tolist() == sampling.cohort(3, r, 6, 2, chances).tolist()
    np.testing.assert_allclose(plan.frequency, uniform.frequency, rtol=0, atol=1e-15)


def test_only_who_is_available_takes_part():
    available = np.zeros((4, 6), bool)
    for row, present in enumerate(ROWS):
        available[row, present] = True
    for parts in (None, np.array([0.4, 0.1, 0.1, 0.1, 0.2, 0.1])):
        plan = Trace(num_clients=6, size=2, seed=3, available=available, parts=parts)
        drawn = [plan.cohort(r) for r in range(4000)]
        assert all(set(members.tolist()) <= set(ROWS[r % 4]) for r, members in enumerate(drawn))
        assert {len(members) for members in drawn} == {1, 2}
        often = np.bincount(np.concatenate(drawn), minlength=6) / 4000
        assert np.abs(often - plan.frequency).max() < 0.03


def cohorts_of(plan) -> dict[tuple[int, ...], float]:
    """Every cohort of a trace, with its exact probability."""
    found: dict[tuple[int, ...], float] = {}
    for row in range(len(plan.available)):
        present = np.flatnonzero(plan.available[row]).tolist()
        if not 0 < plan.size < len(present):
            each = {tuple(present): 1.0}
        elif plan.parts is None:
            subsets = list(itertools.combinations(present, plan.size))
            each = dict.fromkeys(subsets, 1 / len(subsets))
        else:
            each = probabilities(plan.chances_of(row))
        for members, probability in each.items():
            found[members] = found.get(members, 0.0) + probability / len(plan.available)
    return found


@pytest.mark.parametrize("weighting", ["clients", "samples"])
@pytest.mark.parametrize("cohort", [0, 2])
def test_every_client_weighs_its_part_on_average(cohort, weighting, network, tmp_path):
    """Over all cohorts of a trace by their probabilities, before weights are divided by their sum in a cohort."""
    options = {"participation": "trace", "trace": trace_file(tmp_path, ROWS), "cohort": cohort}
    federation = from_arrays(make_clients(RAGGED))
    engine = engine_for(LocalSGD(), network(), federation, vectorised, 2, 3, 4, weighting=weighting, **options)
    expected, found = np.zeros(6), cohorts_of(engine.plan)
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    for members, probability in found.items():
        expected[list(members)] += probability * engine.shares.model.numpy()[list(members)]
    np.testing.assert_allclose(expected / expected.sum(), engine.shares.part.numpy(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("weighting", ["clients", "samples"])
def test_who_is_never_available_counts_for_nothing_and_the_others_make_up_for_it(weighting, network, tmp_path):
    options = {"participation": "trace", "trace": trace_file(tmp_path, ALL_BUT_LAST), "weighting": weighting}
    engine = engine_for(LocalSGD(), network(), from_arrays(make_clients(RAGGED)), vectorised, 2, 3, 4, **options)
    of_five = engine_for(
        FeDXL2(partial_auc()), network(), from_arrays(make_clients(RAGGED)), vectorised, 2, 3, 4, **options
    )
    assert [leaf[5].tolist() for leaf in engine.shares] == [0, 0, 5, [0, 0], [0, 0]]
    first, second = ([size[side] for size in RAGGED[:5]] for side in (0, 1))
    expected = shares(first, second, weighting)
    for name in ("part", "factors"):
        torch.testing.assert_close(getattr(of_five.shares, name)[:5], getattr(expected, name))
    lines: list[str] = []
    fit_named(
        network(), make_clients(RAGGED), partial_auc(), rounds=1, batch1=3, batch2=4, local_steps=1, dtype="float64",
        hooks=Hooks(say=lines.append), device="cpu", **options,
    )  # fmt: skip
    told = "trace: 1 of 6 clients are never available (client 5); the run optimises the risk of the others"
    assert told in lines


BAD = {
    "[]": "must hold a JSON object",
    "{": "is not a JSON file",
    "{}": re.escape('must read {"rounds": [[...], ...]}'),
    '{"rounds": []}': re.escape('must read {"rounds": [[...], ...]}'),
    '{"rounds": [["a"]], "round": 1}': "unknown key 'round'; did you mean 'rounds'?",
    '{"rounds": ["a"]}': "round 0 of .* must be a list of clients, not a str",
    '{"rounds": [["a"], []]}': "round 1 of .* names nobody; leave such rounds out",
    '{"rounds": [["a", "c"]]}': "round 0 of .* names 'c', which is not a client; clients are a, b, ... or numbers",
    '{"rounds": [["a", 0]]}': "round 0 of .* names a client twice",
    '{"rounds": [[2]]}': "names client 2, but they are 0 to 1",
    '{"rounds": [[-1]]}': "names client -1, but they are 0 to 1",
    '{"rounds": [[true]]}': "names True, which is not a client",
    '{"rounds": [[0.0]]}': "names 0.0, which is not a client",
    '{"rounds": [[["a"]]]}': "which is not a client",
}


@pytest.mark.parametrize("text", list(BAD))
def test_a_trace_that_says_nothing_clear_is_one_line(text, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(UserError, match=BAD[text]) as caught:
        read_trace(path, ["a", "b"])
    assert "\n" not in str(caught.value)


def test_a_trace_is_read_by_name_and_by_number_and_has_limits(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    path.write_text('{"rounds": [["b"], [0, "b"]]}')
    assert read_trace(path, ["a", "b"]).tolist() == [[False, True], [True, True]]
    monkeypatch.setattr("fedxl.data.participation.MOST_ROUNDS", 1)
    with pytest.raises(UserError, match="has 2 rounds of 2 clients; at most 1 rounds"):
        read_trace(path, ["a", "b"])
    with pytest.raises(UserError, match=r"there is no file .*none.json, which run.trace names"):
        read_trace(tmp_path / "none.json", ["a", "b"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"participation": "trace"}, "participation = 'trace' needs trace"),
        ({"trace": "x.json"}, "trace is for participation = 'trace', not for 'uniform'"),
        ({"participation": "cycle"}, "must be one of 'uniform', 'trace', not 'cycle'"),
        ({"participation": "trace", "trace": "no.json"}, "there is no file no.json"),
    ],
)
def test_settings_that_do_not_fit_together_are_one_line(settings, message, network):
    with pytest.raises(UserError, match=message):
        fit_named(network(), make_clients(RAGGED), partial_auc(), rounds=1, dtype="float64", **settings)


def test_a_trace_without_anyone_who_trains_is_one_line(network, tmp_path):
    options = {"participation": "trace", "rounds": 1, "dtype": "float64", "device": "cpu"}
    with pytest.raises(UserError, match="no client that holds examples of S2 is ever available"):
        fit_named(network(), make_clients(RAGGED), partial_auc(), trace=trace_file(tmp_path, [[1]]), **options)
    lending = {"one_class": "lend", "trace": trace_file(tmp_path, [[1, 2]])}
    with pytest.raises(UserError, match="no client that trains is ever available"):
        fit_named(network(), make_clients(RAGGED), partial_auc(), **lending, **options)


def test_a_run_goes_on_with_the_cohorts_that_it_would_have_had(network, tmp_path):
    options = {
        "participation": "trace", "trace": trace_file(tmp_path, ROWS), "cohort": 3, "eval_every": 2,
        "checkpoint_every": 1, "executor": "loop",
        "dtype": "float64", "device": "cpu", "weighting": "samples", "pool_rounds": 2, **SMALL,
    }  # fmt: skip
    through, out = (network(), make_clients(RAGGED), partial_auc()), tmp_path / "run"
    whole = fit_named(*through, rounds=5, **options)
    fit_named(*through, rounds=2, out=out, **options)
    rest = fit_named(*through, rounds=5, out=out, resume=True, **options)
    for name, leaf in tree.pack(whole.server).items():
        assert torch.equal(tree.pack(rest.server)[name], leaf) or leaf.isnan().any(), name
    with pytest.raises(UserError, match=r"run.participation was '\w+' and is now 'uniform'"):
        fit_named(*through, rounds=5, out=out, resume=True, **{**options, "participation": "uniform", "trace": ""})
    trace_file(tmp_path, ROWS[::-1])
    with pytest.raises(UserError, match=r"task\.trace was"):
        fit_named(*through, rounds=5, out=out, resume=True, **options)


def test_where_all_data_are_in_one_place_a_line_says_that_a_trace_does_not_apply(network, tmp_path):
    lines: list[str] = []
    trace = {"participation": "trace", "trace": trace_file(tmp_path, ROWS)}
    settings = {"rounds": 1, **SMALL, **trace, "hooks": Hooks(say=lines.append)}
    fit_named(network(), make_clients(RAGGED), partial_auc(), "sox", dtype="float64", **settings)
    assert "participation = 'trace' does not apply: all data are in one place" in lines

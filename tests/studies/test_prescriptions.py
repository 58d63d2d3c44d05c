"""What the theorems prescribe: exponents, the theorems as printed, and the terms of the proofs' bounds."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fedxl.errors import UserError
from studies.theory.plan import Federated, prescribe
from tests.studies.running import command

HERE = Federated(clients=16, examples=256)

# What is doubled, and the exponents of 2 by which the prescription then changes.
DOUBLED = {
    "T for FeDXL1": (
        "fedxl1", HERE, HERE, 2, {"epsilon": -1 / 4, "local_steps": 1 / 4, "rounds": 3 / 4, "lr": -1 / 2},
    ),
    "N for FeDXL1": (
        "fedxl1", HERE, replace(HERE, clients=32), 1,
        {"epsilon": -1 / 4, "local_steps": -3 / 4, "rounds": 3 / 4, "lr": 1 / 2},
    ),
    "M for FeDXL1": ("fedxl1", HERE, replace(HERE, examples=512), 1, {"epsilon": 0, "local_steps": 0, "lr": 0}),
    "T for FeDXL2": (
        "fedxl2", HERE, HERE, 2,
        {"epsilon": -1 / 4, "local_steps": 1 / 4, "rounds": 3 / 4, "lr": -1 / 2, "beta": -1 / 2, "gamma": -1 / 2},
    ),
    "N for FeDXL2": ("fedxl2", HERE, replace(HERE, clients=32), 1, {"epsilon": 0, "local_steps": 0, "rounds": 0}),
    "M for FeDXL2": (
        "fedxl2", HERE, replace(HERE, examples=512), 1,
        {"epsilon": 1 / 4, "local_steps": 1 / 4, "rounds": -1 / 4, "lr": -1 / 2, "beta": 0, "gamma": 1 / 2},
    ),
    "the cohort": (
        "fedxl2", replace(HERE, cohort=4), replace(HERE, cohort=8), 1,
        {"epsilon": -1 / 4, "local_steps": -3 / 4, "rounds": 3 / 4, "lr": 1 / 2, "steps_of_a_client": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", list(DOUBLED))
def test_doubling_changes_the_prescription_by_the_theorems_exponents(what):
    algorithm, before, after, factor, exponents = DOUBLED[what]
    steps = 1e6
    old, new = prescribe(algorithm, before, steps=steps), prescribe(algorithm, after, steps=factor * steps)
    assert new.rounds * new.local_steps == pytest.approx(factor * steps)
    for name, exponent in exponents.items():
        assert getattr(new, name) / getattr(old, name) == pytest.approx(2**exponent), name


@pytest.mark.parametrize("epsilon", [0.05, 0.01])
def test_theorem_1_as_printed(epsilon):
    """eta = N / R^(2/3), K = R^(1/3) / N."""
    plan, N = prescribe("fedxl1", HERE, epsilon=epsilon), 16
    assert plan.lr == pytest.approx(N / plan.rounds ** (2 / 3))
    assert plan.local_steps == pytest.approx(plan.rounds ** (1 / 3) / N)


@pytest.mark.parametrize("cohort", [0, 4])
@pytest.mark.parametrize("epsilon", [0.3, 0.01])
def test_theorems_2_and_3_as_printed(epsilon, cohort):
    """gamma = M^(1/3) R^(-2/3), beta = M^(-1/6) R^(-2/3), eta = |P| (M R)^(-2/3) / N, K = N (M R)^(1/3) / |P|."""
    plan, M, present = prescribe("fedxl2", replace(HERE, cohort=cohort), epsilon=epsilon), 256, (cohort or 16) / 16
    R = plan.rounds
    assert plan.gamma == pytest.approx(M ** (1 / 3) / R ** (2 / 3))
    assert plan.beta == pytest.approx(1 / (M ** (1 / 6) * R ** (2 / 3)))
    assert plan.lr == pytest.approx(present / (M ** (2 / 3) * R ** (2 / 3)))
    assert plan.local_steps == pytest.approx(M ** (1 / 3) * R ** (1 / 3) / present)


def test_no_term_of_the_bounds_exceeds_the_promise():
    """The bounds at the end of the proofs; a cohort's (beta K)^2 alone does, as the plan says."""
    one, two = (prescribe(name, HERE, epsilon=0.05) for name in ("fedxl1", "fedxl2"))
    round1, round2 = one.lr * one.local_steps, two.lr * two.local_steps
    most = 0.05**2 * (1 + 1e-9)
    assert max(1 / (round1 * one.rounds), round1**2, one.lr / 16) <= most
    M, T = 256, two.steps
    assert max(M / (two.gamma * T), two.gamma, (two.beta * two.local_steps) ** 2, 1 / (round2 * two.rounds)) <= most
    assert M / two.gamma * round2**2 * (1 / (two.beta * T) + two.beta / 16) <= most
    some = prescribe("fedxl2", replace(HERE, cohort=4), epsilon=0.05)
    assert (some.beta * some.local_steps) ** 2 == pytest.approx(16 * 0.05**2)
    assert any("(N / |P|)^2 = 16 times" in limit for limit in some.limits)


def test_more_clients_than_the_speed_up_has_room_for():
    """Beyond N = T^(1/3) K stays 1 and clients save nothing; at the edge both prescriptions agree."""
    edge, beyond = (prescribe("fedxl1", Federated(clients=n), steps=1000) for n in (10, 1000))
    assert (edge.local_steps, beyond.local_steps) == (pytest.approx(1), 1)
    for name in ("epsilon", "rounds", "lr", "steps"):
        assert getattr(edge, name) == pytest.approx(getattr(beyond, name)), name
    assert "no longer save steps" in beyond.limits[0]


MISTAKES = {
    "too few steps": (["--steps", "100"], "steps must be more than N M / |P| = 1,000, got 100"),
    "no steps": (["fedxl1", "--steps", "0"], "steps must be more than 1, got 0"),
    "epsilon too large": (["--epsilon", "1.5"], "epsilon must lie between 0 and 1, got 1.5"),
    "both": (["--epsilon", "0.1", "--steps", "9"], "either the steps T or epsilon"),
    "cohort": (["--cohort", "17"], "cohort must lie between 1 and the 16 clients (0: all), got 17"),
    "clients": (["--clients", "0"], "clients must be at least 1, got 0"),
    "examples": (["--examples", "0"], "examples must be at least 1, got 0"),
    "algorithm": (["sox"], "unknown algorithm 'sox'; known: fedxl1, fedxl2"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_mistakes_are_one_line(mistake, monkeypatch, capsys):
    arguments, line = MISTAKES[mistake]
    code, _, error = command(monkeypatch, capsys, "theory", *arguments)
    assert code == 2
    assert line in error
    assert len(error.strip().splitlines()) == 1


def test_the_command_shows_both_theorems(monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, "theory", "--epsilon", "0.1", "--clients", "4", "--examples", "100")
    assert code == 0
    assert "FeDXL1, Theorem 1" in out
    assert "FeDXL2, Theorem 2" in out
    assert "K may grow no faster" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    code, out, _ = command(monkeypatch, capsys, "theory", "fedxl2", "--epsilon", "0.1", "--cohort", "4", "--json")
    (plan,) = json.loads(out)["plans"]
    assert (code, plan["theorem"]) == (0, "Theorem 3")
    assert plan["rounds"] == pytest.approx(1000**0.5 * 1e3)


def test_one_of_steps_and_epsilon_is_needed():
    with pytest.raises(UserError, match="either the steps T or epsilon"):
        prescribe("fedxl1", HERE)

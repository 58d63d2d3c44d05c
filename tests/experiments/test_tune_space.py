"""What is searched: distributions against their own formulas, settings that fit, mistakes in one line, rungs."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedxl import UserError
from fedxl.config.experiment import Config, dump
from fedxl.experiments.tune.plan import (
    Choice,
    Range,
    Rung,
    TuneSettings,
    defaults,
    draw,
    ladder,
    parse,
    plan,
    read,
    spaces,
)

CONFIG = Config(data={"name": "digits"}, risk={"name": "pauc"}, algorithm={"name": "fedxl2", "level": "free"})


def drawn(space, count: int = 2000) -> list:
    return [draw({"algorithm.x": space}, 0, number)["algorithm.x"] for number in range(count)]


def test_draws_follow_their_distributions():
    log = stats.kstest(drawn(Range(0.01, 10.0, "log")), stats.loguniform(0.01, 10.0).cdf)
    flat = stats.kstest(drawn(Range(2.0, 5.0)), stats.uniform(2.0, 3.0).cdf)
    assert log.pvalue > 0.01
    assert flat.pvalue > 0.01
    for values, kinds in ((drawn(Range(1, 4, "whole")), 4), (drawn(Choice((0.0, [1, 2], "c"))), 3)):
        _, counts = np.unique([str(value) for value in values], return_counts=True)
        assert len(counts) == kinds
        assert stats.chisquare(counts).pvalue > 0.01


def test_settings_of_one_trial_are_independent_and_those_of_trials_differ():
    space = {"algorithm.lr": Range(0.0, 1.0), "algorithm.beta": Range(0.0, 1.0)}
    pairs = np.array([list(draw(space, 0, number).values()) for number in range(1000)])
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 0.1
    assert len({tuple(pair) for pair in pairs}) == 1000
    assert draw(space, 0, 3) == draw(dict(reversed(space.items())), 0, 3)
    assert draw(space, 0, 3) != draw(space, 1, 3)


def test_algorithms_that_search_the_same_setting_try_the_same_values_of_it():
    lr = {"algorithm.lr": Range(0.0, 1.0)}
    more = {"algorithm.beta": Range(0.0, 1.0), **lr, "risk.lam": Range(0.1, 1.0)}
    for number in range(5):
        assert draw(lr, 0, number)["algorithm.lr"] == draw(more, 0, number)["algorithm.lr"]


@pytest.mark.parametrize(
    ("algorithm", "risk", "expected"),
    [
        (
            "fedxl2",
            "pauc",
            {"algorithm.lr", "algorithm.weight_decay", "algorithm.gamma", "algorithm.beta", "risk.lam"},
        ),
        ("fedxl2", "ap", {"algorithm.lr", "algorithm.weight_decay", "algorithm.gamma", "algorithm.beta"}),
        ("fedxl1", "auroc", {"algorithm.lr", "algorithm.weight_decay"}),
        ("local_sgd", "pauc", {"algorithm.lr", "algorithm.weight_decay"}),
        ("codasca", "pauc", {"algorithm.lr", "algorithm.weight_decay"}),
    ],
)
def test_defaults_search_what_the_algorithm_has(algorithm, risk, expected):
    config = Config(data={"name": "digits"}, risk={"name": risk}, algorithm={"name": algorithm})
    assert set(defaults(algorithm, config)) == expected


def test_a_space_is_shared_where_it_fits_and_an_algorithm_has_its_own():
    table = {
        "algorithm": {"lr": [0.1, 0.2], "gamma": {"uniform": [0.1, 1]}},
        "local_sgd": {"algorithm": {"lr": {"log": [0.1, 1.0]}}},
    }
    found = spaces(CONFIG, ["fedxl2", "local_sgd"], table)
    assert found["fedxl2"] == {"algorithm.lr": Choice((0.1, 0.2)), "algorithm.gamma": Range(0.1, 1)}
    assert found["local_sgd"] == {"algorithm.lr": Range(0.1, 1.0, "log")}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"algorithm": {"lrr": [1]}}, "did you mean 'tune.space.algorithm.lr'"),
        ({"algoritm": {"lr": [1]}}, "did you mean 'tune.space.algorithm'"),
        ({"fedxl2": {"algorithm": {"lrr": [1]}}}, "did you mean 'tune.space.fedxl2.algorithm.lr'"),
        ({"algorithm": {"lr": 0.1}}, "must be a list of values, or"),
        ({"algorithm": {"lr": {"log": [0, 1]}}}, "must lie above 0"),
        ({"algorithm": {"lr": {"log": [2, 1]}}}, "smaller end first"),
        ({"algorithm": {"lr": {"log": [1, 2, 3]}}}, "must be a list of values, or"),
        ({"algorithm": {"lr": {"lag": [1, 2]}}}, "must be a list of values, or"),
        ({"algorithm": {"lr": []}}, "between 1 and 1000 values"),
        ({"run": {"local_steps": {"whole": [1.5, 3]}}}, "whole ends"),
        ({"run": {"rounds": [10, 20]}}, "must be the same in all trials"),
        ({"data": {"seed": [1, 2]}}, "would tune on other data"),
        ({"algorithm": {"name": ["fedxl1"]}}, "unknown setting"),
        ({"local_sgd": {"algorithm": {"lr": [1]}}}, "unknown table"),
        ({"algorithm": 3}, "must be a table of settings"),
        ({"risk": {"lamb": [1]}}, "did you mean 'tune.space.risk.lam'"),
    ],
)
def test_mistakes_are_one_line(table, message):
    with pytest.raises(UserError, match=message):
        spaces(CONFIG, ["fedxl2"], table)


def test_distributions_come_back_from_their_record():
    for each in (Range(0.1, 1.0, "log"), Range(0.1, 1.0), Range(1, 9, "whole"), Choice((1, [2, 3]))):
        assert parse(each.as_json(), "x") == each


def test_the_guide_shows_a_section_that_is_accepted(tmp_path):
    guide = Path(__file__).parents[2] / "docs" / "guides" / "tuning.md"
    (section,) = re.findall(r"```toml\n(.*?)```", guide.read_text(), re.DOTALL)
    (tmp_path / "a.toml").write_text(dump(CONFIG) + section)
    found = plan(CONFIG, *read(tmp_path / "a.toml", {}))
    assert found.spaces["local_sgd"]["algorithm.lr"] == Range(0.1, 3.0, "log")
    assert found.spaces["fedxl2"]["run.local_steps"] == Range(8, 64, "whole")
    assert "algorithm.gamma" not in found.spaces["local_sgd"]
    assert (found.settings.trials, found.settings.seeds) == (16, 2)


def test_the_risk_itself_is_no_metric_where_it_is_searched():
    by_risk = Config(**{**CONFIG.tables(), "run": {"select": "-risk"}})
    with pytest.raises(UserError, match=r"risk.lam changes; set run\.select"):
        plan(by_risk, TuneSettings(), {})
    assert plan(by_risk, TuneSettings(), {"algorithm": {"lr": [0.1]}}).metric == "-risk"


@pytest.mark.parametrize("eta", [2, 3, 4])
@pytest.mark.parametrize("trials", [1, 2, 9, 16, 81])
@pytest.mark.parametrize(("rounds", "every"), [(1, 1), (40, 5), (100, 10), (81, 1), (7, 3)])
def test_rungs_halve_trials_and_end_at_evaluations(trials, eta, rounds, every):
    rungs = ladder(trials, rounds, eta, every)
    assert rungs[0].trials == trials
    assert rungs[-1].rounds == rounds
    for lower, upper in pairwise(rungs):
        assert lower.rounds < upper.rounds
        assert lower.rounds % every == 0
        assert upper.trials == max(1, lower.trials // eta) or upper.trials == trials // eta ** rungs.index(upper)


def test_the_rungs_of_the_paper():
    """Table 1 of Hyperband (Li et al. 2018), bracket s = 4: R = 81, eta = 3."""
    assert ladder(81, 81, 3, 1) == [Rung(81, 1), Rung(27, 3), Rung(9, 9), Rung(3, 27), Rung(1, 81)]


@pytest.mark.parametrize(
    "given",
    [{"trials": 0}, {"trials": 10**6}, {"seeds": 0}, {"eta": 1}, {"sampler": "grid"}, {"algorithms": ["sgd", "sgd"]}],
)
def test_settings_out_of_bounds_are_refused(given):
    from fedxl.options import call

    with pytest.raises(UserError):
        call(TuneSettings, given, "tune")

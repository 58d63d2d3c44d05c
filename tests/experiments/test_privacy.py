"""The study of differential privacy: its attack finds members where there are any to find, its noise is right."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fedxl.experiments.privacy import attack, record, study
from fedxl.experiments.privacy.attack import Shadow
from fedxl.experiments.privacy.study import EPSILONS, FEDERATIONS, METRIC, Case

from fedxl import UserError


def shadows(effect: float, models: int = 16, count: int = 150) -> tuple[list[Shadow], np.ndarray]:
    """Models that score an example by what it is, by chance, and higher (a negative: lower) if they have seen it."""
    rng = np.random.default_rng(0)
    labels = (np.arange(count) % 3 == 0).astype(float)
    usual, signs = 2 * rng.normal(size=count), np.where(labels > 0, 1.0, -1.0)
    seen = attack.halves(count, models)
    outputs = [usual + rng.normal(size=count) + effect * signs * mask for mask in seen]
    return [Shadow(out, mask, 0.9, None) for out, mask in zip(outputs, seen, strict=True)], labels


def test_members_are_found_by_what_models_remember_and_not_otherwise():
    found, nothing = attack.attack(*shadows(effect=1.0)), attack.attack(*shadows(effect=0.0))
    mean, half = attack.interval(found.likelihood)
    assert 0.68 < mean - half < mean < 0.79, "two Gaussians a standard deviation apart have .76, if they are known"
    assert attack.interval(found.threshold)[0] < mean, "which examples are easy is not known to a threshold"
    for each in nothing:
        mean, half = attack.interval(each)
        assert abs(mean - 0.5) < 2 * half < 0.06


def test_each_candidate_is_seen_by_half_of_the_models():
    assert (attack.halves(50, 8).sum(0) == 4).all()


def test_a_cases_noise_spends_its_epsilon():
    case = Case("4 larger sites", 8.0, 10)
    config = study.config_of(case, study.noise_of(case))
    holdings = study.load_data(config).train.holdings()
    ledger = study.account(config, study.members(study.numbered(4), holdings))
    spent = ledger.after(config.run["rounds"]).epsilon
    assert 7.95 < spent <= 8
    assert "dp_clip" not in study.config_of(Case("4 larger sites", math.inf, 10)).algorithm


def test_the_record_holds_every_figure(tmp_path):
    runs = [
        {"federation": name, "epsilon": None if math.isinf(e) else e, "seed": seed, "auroc": 0.8, METRIC: 0.7}
        | {"dp_noise": 3.0, "dp_score_noise": 2.0, "spent": {"epsilon_replaced": 2 * e}}
        for name in FEDERATIONS
        for e in EPSILONS
        for seed in (1, 2)
    ]
    plain = {"likelihood": [0.64, 0.02], "threshold": [0.57, 0.03], "auroc": 0.88, "models": 16}
    attacks = [{**plain, "epsilon": None, "bound": None}, {**plain, "epsilon": 9.5, "bound": 0.9}]
    record.write(runs, attacks, tmp_path, "a machine")
    text = (tmp_path / "privacy.md").read_text()
    assert "| 8 | 16.0 | 3.00 | 2.00 | 0.8000 ± 0.0000 | 0.7000 ± 0.0000 |" in text
    assert "| 9.5 | 0.640 ± 0.020 | 0.570 ± 0.030 | 0.900 | 0.880 | 16 |" in text
    assert (tmp_path / "privacy.png").stat().st_size > 10_000


def test_results_of_something_else_are_not_overwritten(tmp_path):
    (tmp_path / "privacy.json").write_text('{"runs": []}')
    with pytest.raises(UserError, match="holds no results of this study"):
        study.study(tmp_path / "privacy.json")

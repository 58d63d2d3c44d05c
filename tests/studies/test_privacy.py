"""The study of differential privacy: its attack finds members where there are any to find, its noise is right."""

from __future__ import annotations

import numpy as np
import pytest

from studies.harness import Planned
from studies.privacy import attack, study
from studies.privacy.attack import Shadow
from studies.privacy.study import EPSILONS, FEDERATIONS, METRICS
from tests.studies.running import made


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


def test_the_noise_of_a_run_spends_its_epsilon():
    pytest.importorskip("dp_accounting", reason="needs fedxl[dp]")
    found, _ = study.run_case(Planned({"federation": "4 larger sites", "epsilon": 8.0, "seed": 10}))
    config = study.config_of("4 larger sites", found["dp_noise"], 10)
    account = study.ledger(study.simulate(config, lambda line: None))
    assert 7.95 < account.after(config.run["rounds"]).epsilon <= 8
    assert set(found["test"]) == set(METRICS)
    assert study.find_noise("4 larger sites", None, 10) == 0
    assert "dp_clip" not in study.config_of("4 larger sites", 0, 10).algorithm


def test_the_tables_are_of_rows(tmp_path):
    rows = [
        made(
            case, test=dict(zip(METRICS, (0.8, 0.7), strict=True)), dp_noise=4.0, replaced=2 * (case["epsilon"] or 0)
        )
        for case in study.cases((1, 2))
        if "attack" not in case
    ]
    assert len(rows) == 2 * len(FEDERATIONS) * len(EPSILONS)
    plain = {"likelihood": [0.64, 0.02], "threshold": [0.57, 0.03], "auroc": 0.88}
    rows += [
        made({"attack": "plain", "models": 16}, **plain, epsilon=None, bound=None),
        made({"attack": "private", "models": 16}, **plain, epsilon=9.5, bound=0.9),
    ]
    text = study.markdown(rows)
    assert "| 8 | 16.0 | 4.00 | 3.00 | 0.8000 ± 0.0000 | 0.7000 ± 0.0000 |" in text
    assert "| 9.5 | 0.640 ± 0.020 | 0.570 ± 0.030 | 0.900 | 0.880 | 16 |" in text
    study.draw(tmp_path / "privacy.png", rows)
    assert (tmp_path / "privacy.png").stat().st_size > 10_000

"""Runs that older versions began: they go on with the same numbers, or one line says why not."""

from __future__ import annotations

import pytest
import torch

from fedxl import UserError, auroc, partial_auc, two_way_partial_auc
from fedxl.training.checkpoint import load_latest, save_checkpoint
from fedxl.training.resuming import SINCE
from tests.conftest import make_clients
from tests.running import fit_named
from tests.training.test_resume import model, rewritten, run


def test_a_run_with_a_gradient_average_that_nobody_used_goes_on(tmp_path):
    """Version 0.2 kept G for FeDXL1, too."""
    parts = (model(), make_clients([(6, 14), (3, 9)]), auroc(), "fedxl1")
    options = {"local_steps": 2, "batch1": 2, "batch2": 3, "dtype": "float64", "executor": "loop", "out": tmp_path}
    fit_named(*parts, rounds=2, **options)
    checkpoint = load_latest(tmp_path / "checkpoints")[0]
    params = {name: leaf for name, leaf in checkpoint.tensors.items() if name.startswith("server.weights.params.")}
    assert not any(".G." in name for name in checkpoint.tensors)
    G = {name.replace("weights.params", "G"): leaf for name, leaf in params.items()}
    save_checkpoint(tmp_path / "checkpoints", 2, {**checkpoint.tensors, **G}, checkpoint.info)
    resumed = fit_named(*parts, rounds=4, resume=True, **options)
    straight = fit_named(*parts, rounds=4, **{**options, "out": None})
    for name, expected in straight.server.weights.params.items():
        assert torch.equal(resumed.server.weights.params[name], expected)


def test_a_run_that_kept_estimates_of_raw_scores_in_single_precision_goes_on(tmp_path):
    """As version 0.3 did."""
    parts = (model().float(), make_clients([(6, 14), (3, 9)]), partial_auc(scores="raw"))
    options = {"local_steps": 2, "batch1": 2, "batch2": 3, "lr": 0.01, "executor": "loop", "out": tmp_path}
    fit_named(*parts, rounds=2, **options)

    def single(tensors: dict, info: dict) -> None:
        kept = [name for name in tensors if name.endswith(".u")]
        assert {tensors[name].dtype for name in kept} == {torch.float64}
        assert len(kept) == 3, "the pool's and two clients'"
        tensors.update({name: tensors[name].float() for name in kept})

    rewritten(tmp_path, single)
    resumed = fit_named(*parts, rounds=4, resume=True, **options)
    straight = fit_named(*parts, rounds=4, **{**options, "out": None})
    for name, expected in straight.server.weights.params.items():
        torch.testing.assert_close(resumed.server.weights.params[name], expected, rtol=0, atol=1e-4)


def test_a_run_with_the_plain_two_way_risk_is_not_resumed_with_the_normalised_one(tmp_path):
    """Up to version 0.3 the plain one had the name that the normalised one has now."""
    parts = (model(), make_clients([(6, 14), (3, 9)]), two_way_partial_auc())
    options = {"local_steps": 2, "batch1": 2, "batch2": 3, "dtype": "float64", "executor": "loop", "out": tmp_path}
    fit_named(*parts, rounds=2, **options)

    def plain(tensors: dict, info: dict) -> None:
        info["settings"] |= {"task.risk": info["settings"]["task.risk"].replace(", lam_outer 1.0", "")}

    rewritten(tmp_path, plain)
    with pytest.raises(UserError, match=r"task\.risk was .* lam_outer 1\.0"):
        fit_named(*parts, rounds=4, resume=True, **options)


def test_a_run_whose_cohorts_were_not_yet_drawn_by_size_is_refused(tmp_path):
    run(tmp_path, rounds=3, weighting="samples")
    straight = run(None, rounds=6, weighting="samples")
    resumed = run(tmp_path, resume=True, rounds=6, weighting="samples")
    assert all(torch.equal(resumed.weights.params[n], w) for n, w in straight.weights.params.items())
    with pytest.raises(UserError, match=r"run.weighting was 'samples' and is now 'clients'"):
        run(tmp_path, resume=True, rounds=9)
    rewritten(tmp_path, lambda tensors, info: info["settings"].pop("run.cohorts_by_size"))
    with pytest.raises(UserError, match=r"began with fedxl 0\.3 or older, which drew cohorts uniformly"):
        run(tmp_path, resume=True, rounds=9, weighting="samples")


def test_a_run_that_was_begun_before_data_were_digested_goes_on(tmp_path):
    expected = run(None, rounds=9)
    run(tmp_path, rounds=3)

    def forget(tensors: dict, info: dict) -> None:
        info["settings"] = {k: v for k, v in info["settings"].items() if k not in SINCE}

    rewritten(tmp_path, forget)
    resumed = run(tmp_path, resume=True, rounds=9)
    assert all(torch.equal(resumed.weights.params[n], w) for n, w in expected.weights.params.items())
    assert load_latest(tmp_path / "checkpoints")[0].info["settings"].keys() > SINCE, "from now on it is noticed"

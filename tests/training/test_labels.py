"""Several labels from `fit` to the run's folder: classes, missing labels, metrics by label, resumption."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedxl import FeDXL2, auroc, fit, partial_auc, several
from fedxl.config.experiment import Config, build_algorithm, build_model
from fedxl.errors import UserError
from fedxl.evaluation import scores
from fedxl.models import TwoViews
from fedxl.reporting.document import build
from fedxl.training.run_folder import SCORES, read_run
from tests.conftest import Clients

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "labels.md"


def net(outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))


def classes(number: int = 3) -> Clients:
    """Examples of three classes, which are where their coordinate is largest."""
    rng = torch.Generator().manual_seed(0)
    xs = [torch.randn(60, 4, generator=rng) for _ in range(number)]
    return [(x, x[:, :3].argmax(1)) for x in xs]


RUN = {"rounds": 12, "local_steps": 4, "batch_size": 9, "eval_every": 6, "executor": "loop"}


def test_classes_each_against_the_rest(tmp_path):
    """From a class's number alone; the run's folder has the scores, and its rows each label's metrics."""
    data = classes(5)
    risk = several(auroc(scores="sigmoid"), ["x", "y", "z"])
    run = {**RUN, "validation": data[3], "test": data[4], "out": tmp_path / "run"}
    result = fit(net(), data[:3], FeDXL2(risk, lr=3.0), **run)
    assert result.metrics["test"]["auroc"] > 0.85
    row = result.history[-1]
    each = [row["validation_by_label"][name]["auroc"] for name in "xyz"]
    assert row["validation"]["auroc"] == pytest.approx(sum(each) / 3)
    kept = scores.load(tmp_path / "run" / SCORES)["test"]
    assert kept.labels == ("x", "y", "z")
    assert kept.scores.shape == (60, 3)
    assert [line.name for line in result.label_table()] == ["x", "y", "z", "mean"]
    np.testing.assert_allclose(result.predict(data[4][0]).scores, kept.scores, atol=1e-6)
    (section,) = [one for one in build([read_run(tmp_path / "run")]).sections if one.id == "labels"]
    told = [[cell.text for cell in line.cells] for line in section.tables[0].rows]
    assert [cells[0] for cells in told] == ["mean of the labels", "x", "y", "z"]
    assert told[0][4] == f"{result.metrics['test']['auroc']:.3f}"


def test_resumed_runs_come_to_the_same_bits(tmp_path):
    data, algorithm = classes(), FeDXL2(several(partial_auc(), 3), lr=0.5)
    data[0][1][::3] = -1  # of no class that is known
    whole = fit(net(), data, algorithm, **RUN)
    fit(net(), data, algorithm, **{**RUN, "rounds": 5}, out=tmp_path / "run")
    rest = fit(net(), data, algorithm, **RUN, out=tmp_path / "run", resume=True)
    for name, value in whole.weights.params.items():
        assert torch.equal(rest.weights.params[name], value)


def columns(y: Tensor) -> Tensor:
    return nn.functional.one_hot(y, 3)


def test_mistakes_are_one_line():
    x, y = classes(1)[0]
    algorithm = FeDXL2(several(auroc(), 3), lr=0.1)
    without = columns(y)
    without[:, 1] = 0
    cases = [
        ((net(), [(x, columns(y))], FeDXL2(auroc())), {}, "one number per example"),
        ((net(), [(x, columns(y)[:, :2])], algorithm), {}, r"must be \[n, 3\]"),
        ((net(2), [(x, y)], algorithm), {}, r"needs \[2, 3\]"),
        ((net(), [(x, without)], algorithm), {}, "S1 for the label '1'"),
        ((net(), [(x, y)], algorithm), {"positive": 1}, "positive is for one label"),
        ((net(), [(x, y)], algorithm), {"validation": (x, torch.zeros_like(y) - 1)}, "both classes"),
    ]
    for given, more, told in cases:
        with pytest.raises(UserError, match=told):
            fit(*given, **{**RUN, "rounds": 1}, **more)


@pytest.mark.skipif(not GUIDE.exists(), reason="the guides are not in the source archive")
def test_the_guide_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    exec(block, {})
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()] == ["mass", "nodule", "effusion", "mean"]


def test_labels_in_a_config():
    config = Config(
        data={}, risk={"name": "pauc", "lam": 0.5, "labels": ["a", "b"], "label_weights": [3, 1]},
        algorithm={"name": "fedxl2"},
    )  # fmt: skip
    risk = build_algorithm(config).risk
    assert repr(risk) == "several(partial_auc(lam=0.5), labels=['a', 'b'], weights=[3, 1])"
    model = build_model(config, (4,), risk)
    assert not isinstance(model, TwoViews)
    assert model(torch.zeros(5, 4)).shape == (5, 2)
    for wrong, told in (
        ({"labels": 2.5}, "labels"),
        ({"label_weights": [1, 2]}, "labels"),
        ({"labels": 0}, "between 1"),
    ):
        with pytest.raises(UserError, match=told):
            build_algorithm(Config(data={}, risk={"name": "pauc", **wrong}, algorithm={"name": "fedxl2"}))

"""Several labels at sites: the same bits as in the simulator, and counts by label that cannot be true are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedxl.config.experiment import Config
from fedxl.deploy.provision.settings import SiteFile, SiteSettings
from fedxl.deploy.server.directory import SiteFacts, read_label_counts
from fedxl.errors import RefusedError, UserError
from tests.deploy.federated import SITES, InProcess, assert_same, deployed, simulated

pytestmark = pytest.mark.usefixtures("impatient")


def write(path: Path) -> dict[str, str]:
    """Four clients with three labels; the second lacks one of them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, 4)).astype(np.float32)
    y = (x[:, :3] + 0.3 * rng.normal(size=(160, 3)) > [0.0, 0.5, 1.0]).astype(np.float64)
    client = np.arange(160) % 4
    y[client == 1, 2] = np.nan
    held = {f"{kind}_{split}": each[:60] for split in ("validation", "test") for kind, each in (("x", x), ("y", y))}
    np.savez(path, x=x, y=y, client=client, **held)
    return {"name": "npz", "path": str(path)}


def experiment(data: dict[str, str]) -> Config:
    return Config(
        data=data,
        model={"name": "mlp", "hidden": [8]},
        risk={"name": "pauc", "labels": ["a", "b", "c"]},
        algorithm={"name": "fedxl2", "lr": 0.2, "pool_rounds": 2},
        run={
            "rounds": 4, "local_steps": 3, "batch1": 4, "batch2": 5, "cohort": 3, "eval_every": 2, "dtype": "float64",
            "checkpoint_every": 1, "executor": "loop", "device": "cpu", "seed": 5,
        },
    )  # fmt: skip


def carrier(folder: Path, data: dict[str, str], evaluate: str = "metrics", fewest: int = 10) -> InProcess:
    sites = InProcess(folder)
    allowed = {"models": ("mlp",), "risks": ("pauc",), "algorithms": ("fedxl2",)}
    for number, name in enumerate(SITES):
        settings = SiteSettings(name=name, part=number, device="cpu", evaluate=evaluate, fewest=fewest, **allowed)
        sites.sites[str(100 + number)] = SiteFile(settings, data, folder / name)
    return sites


def test_sites_and_simulator_come_to_the_same_bits(tmp_path):
    data = write(tmp_path / "data.npz")
    found = deployed(tmp_path, experiment(data), carrier(tmp_path, data))
    expected = simulated(experiment(data))
    assert_same(found, expected)
    assert found.metrics["test"] == expected.metrics["test"]
    assert [row.name for row in found.label_table()] == ["a", "b", "c", "mean"]
    assert found.form == expected.form._replace(scale=""), "a server does not see the sites' types"


@pytest.mark.parametrize("disclosed", ["metrics", "scores"])
def test_sites_evaluate_by_label(tmp_path, disclosed):
    data = write(tmp_path / "data.npz")
    limits = dict.fromkeys(SITES, 40)
    found = deployed(
        tmp_path, experiment(data), carrier(tmp_path, data, disclosed, 1), limits=limits, evaluate="sites"
    )
    assert found.metrics["test"]["auroc"] > 0.5
    if disclosed == "scores":
        rows = found.label_table()
        mean = np.mean([row.auroc.value for row in rows[:-1]])
        assert found.metrics["test"]["auroc"] == pytest.approx(mean) == pytest.approx(rows[-1].auroc.value)
        assert set(found.history[-1]["validation_by_label"]) == {"a", "b", "c"}


def test_labels_must_be_those_of_the_risk(tmp_path):
    data = write(tmp_path / "data.npz")
    for risk in ({"name": "pauc"}, {"name": "pauc", "labels": 2}):
        wrong = replace(experiment(data), risk=risk)
        with pytest.raises(UserError, match=r"3 label\(s\), and the risk is for"):
            deployed(tmp_path / str(len(risk)), wrong, carrier(tmp_path, data))
        with pytest.raises(UserError, match=r"3 label\(s\), and the risk is for"):
            simulated(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"positive": [1], "negative": [1, 2]}', '{"positive": [1], "negative": [10]}',
        '{"positive": [-1], "negative": [1]}', '{"positive": [1.5], "negative": [1]}',
        '{"positive": [], "negative": []}',
        '{"positive": [true], "negative": [1]}', '{"positive": [1], "negative": [1], "more": 1}',
    ],
)  # fmt: skip
def test_counts_that_cannot_be_true_are_refused(text):
    with pytest.raises(RefusedError):
        read_label_counts(text, 10)


def test_counts_travel():
    facts = SiteFacts(6, 10, (4,), labels='{"positive": [3, 1], "negative": [4, 9]}', both=6)
    assert facts.by_label("positive").tolist() == [3, 1]
    assert facts.by_label("all").tolist() == [7, 10]

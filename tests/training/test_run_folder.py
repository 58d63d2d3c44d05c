"""What a run's folder says to those who read it later: which rows were trained on, and that it is too old."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import fedxl
from fedxl.errors import UserError
from fedxl.training import run_writer
from fedxl.training.run_folder import CURVES, SCORES, TRAINED_ON, read_run
from tests.conftest import make_clients

SIZES = {"rounds": 1, "local_steps": 1, "batch_size": 2, "device": "cpu", "executor": "loop"}


def floats(count: int, seed: int) -> Tensor:
    return torch.randn(count, 2, 2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pixels(count: int, seed: int) -> Tensor:
    return torch.randint(256, (count, 2, 2, 2), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


@pytest.mark.parametrize("make", [floats, pixels])
def test_predictions_on_rows_that_were_trained_on_are_counted(tmp_path, make):
    """Whatever type the rows are given in: the network's own decides. Augmentation changes none of them."""

    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(8, 1))

    old, new, y = make(20, 0), make(7, 1), torch.arange(20) % 2
    clients = [(old[:12], y[:12]), (old[12:], y[12:])]
    augment = fedxl.Augment(flip=True, noise=0.1)
    held = (make(9, 2), torch.arange(9) % 2)
    fedxl.fit(
        network(), clients, fedxl.FeDXL2(fedxl.auroc()), validation=held, augment=augment, out=tmp_path, **SIZES
    )
    assert (tmp_path / TRAINED_ON).exists()
    found = fedxl.load(tmp_path, model=network())
    assert found.predict(old).trained_on == len(old)
    assert found.predict(new).trained_on == found.predict(held[0]).trained_on == 0
    assert found.predict(torch.cat([new, old[:5]])).trained_on == 5
    (tmp_path / TRAINED_ON).unlink()
    assert fedxl.load(tmp_path, model=network()).predict(old).trained_on == 0, "then nobody knows"


def test_damaged_digests_are_one_line(tmp_path):
    (x, y), *_ = make_clients([(6, 6)])
    fedxl.fit(nn.Linear(5, 1), [(x, y)], fedxl.FeDXL2(fedxl.auroc()), out=tmp_path, **SIZES)
    whole = (tmp_path / TRAINED_ON).read_bytes()
    for content in (b"", b"rubbish", whole.replace(b"}", b"y", 1)):
        (tmp_path / TRAINED_ON).write_bytes(content)
        with pytest.raises(UserError, match=r"cannot read .*trained_on.npy: .*; remove it to do without it") as error:
            fedxl.load(tmp_path, model=nn.Linear(5, 1))
        assert len(str(error.value).splitlines()) == 1
    np.save(tmp_path / TRAINED_ON, np.arange(3))
    with pytest.raises(UserError, match="does not hold digests"):
        fedxl.load(tmp_path, model=nn.Linear(5, 1))


def test_scores_and_counts_of_the_last_version_are_refused_in_one_line(tmp_path):
    (x, y), *_ = make_clients([(6, 6)])
    data = {"validation": (x, y), "test": (x, y)}
    fedxl.fit(nn.Linear(5, 1), [(x, y)], fedxl.FeDXL2(fedxl.auroc()), **data, out=tmp_path, **SIZES)
    run = read_run(tmp_path)
    assert run.scores.keys() == {"validation", "test"}
    np.savez(tmp_path / SCORES, test_scores=np.zeros(3), test_labels=np.array([0, 1, 1]))
    older = r"cannot read .*: it was written by an older version of fedxl; remove it to do without its"
    for read in (lambda: read_run(tmp_path).scores, lambda: fedxl.load(tmp_path, model=nn.Linear(5, 1))):
        with pytest.raises(UserError, match=rf"{older} scores") as error:
            read()
        assert len(str(error.value).splitlines()) == 1
    (tmp_path / SCORES).unlink()
    counts = {"positives": np.zeros((1, 3)), "negatives": np.zeros((1, 3)), "noise": np.zeros(1)}
    old = {"edges": np.arange(2.0), "sites": np.array(["a"]), **counts}
    np.savez(tmp_path / CURVES, **{f"test_{name}": array for name, array in old.items()})
    with pytest.raises(UserError, match=rf"{older} counts") as error:
        _ = read_run(tmp_path).histograms
    assert len(str(error.value).splitlines()) == 1


def test_a_run_that_goes_on_writes_what_is_missing_beside_its_run_json(tmp_path):
    """As a run has it that ended between the two in an older version, or whose file was removed."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.normal(60, 9, 80), "site": ["a", "b"] * 40, "sick": [0, 0, 1, 1] * 20})
    data, algorithm = fedxl.from_frame(frame, label="sick", site="site"), fedxl.FeDXL2(fedxl.auroc())
    fedxl.fit(nn.Linear(1, 1), data, algorithm, out=tmp_path, **SIZES)
    kept = {name: (tmp_path / name).read_bytes() for name in ("preparation.json", "trained_on.npy", "run.json")}
    for name in ("preparation.json", "trained_on.npy"):
        (tmp_path / name).unlink()
    fedxl.fit(nn.Linear(1, 1), data, algorithm, out=tmp_path, resume=True, **SIZES)
    assert kept == {name: (tmp_path / name).read_bytes() for name in kept}
    (tmp_path / "preparation.json").unlink()
    (tmp_path / "run.json").write_bytes(
        kept["run.json"].replace(b'"preparation_digest": "', b'"preparation_digest": "0')
    )
    fedxl.fit(nn.Linear(1, 1), data, algorithm, out=tmp_path, resume=True, **SIZES)
    assert not (tmp_path / "preparation.json").exists(), "what the data give now is not what the run began with"


@pytest.mark.parametrize("last", ["preparation.json", "trained_on.npy", "run.json"])
def test_a_run_that_ended_while_it_was_described_has_its_preparation_when_it_goes_on(tmp_path, monkeypatch, last):
    """Killed, or the disk was full, at any of the files that are written before the first round."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.normal(60, 9, 80), "site": ["a", "b"] * 40, "sick": [0, 0, 1, 1] * 20})
    data, algorithm = fedxl.from_frame(frame, label="sick", site="site"), fedxl.FeDXL2(fedxl.auroc())
    whole = run_writer.write_atomically

    def full(path, content, **options):
        if path.name == last:
            raise OSError(28, "No space left on device")
        whole(path, content, **options)

    monkeypatch.setattr(run_writer, "write_atomically", full)
    with pytest.raises(UserError, match="No space left"):
        fedxl.fit(nn.Linear(1, 1), data, algorithm, out=tmp_path, **SIZES)
    assert not (tmp_path / "run.json").exists()
    monkeypatch.setattr(run_writer, "write_atomically", whole)
    fedxl.fit(nn.Linear(1, 1), data, algorithm, out=tmp_path, resume=True, **SIZES)
    found = fedxl.load(tmp_path, model=nn.Linear(1, 1))
    assert len(found.predict(frame[["age"]]).scores) == 80

"""Bad input: one clear line, exit code 2, no traceback, nothing written over."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedxl import SOX, FeDXL1, FeDXL2, LocalPair, UserError, XRisk, auroc, fit, gap, identity, partial_auc
from fedxl.cli import main as cli
from fedxl.data import digits
from tests.conftest import make_clients

CONFIG = """
[data]
name = "digits"
[model]
name = "mlp"
hidden = [4]
[risk]
name = "pauc"
[algorithm]
name = "fedxl2"
[run]
rounds = 2
local_steps = 2
"""


def command(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["fedxl", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


# What a user may get wrong in a config or on the command line, and what the line must say.
MISTAKES = {
    "unknown key": ("algorithm.leraning_rate=1", "unknown setting 'algorithm.leraning_rate'"),
    "nearly known key": ("algorithm.milestone=[3]", "did you mean 'algorithm.milestones'?"),
    "a run setting among the algorithm's": ("algorithm.rounds=3", "unknown setting 'algorithm.rounds'"),
    "another name of a key": ("algorithm.learning_rate=3", "did you mean 'algorithm.lr'?"),
    "unknown run key": ("run.round=3", "did you mean 'run.rounds'?"),
    "unknown section": ("algo.lr=1", "unknown section 'algo'; did you mean 'algorithm'?"),
    "unknown algorithm": ("algorithm.name=fedxl", "unknown algorithm 'fedxl'; did you mean 'fedxl"),
    "unknown risk": ("risk.name=auc", "unknown risk 'auc'; did you mean"),
    "unknown model": ("model.name=resnet", "unknown model 'resnet'"),
    "unknown data set": ("data.name=digit", "unknown data set 'digit'; did you mean 'digits'?"),
    "unknown surrogate": ("risk.surrogate=hinge", "unknown surrogate 'hinge'"),
    "wrong type": ("algorithm.lr=fast", "'algorithm.lr' must be a number, not 'fast'"),
    "a number that is not whole": ("run.rounds=2.5", "'run.rounds' must be a whole number, not 2.5"),
    "true is not a number": ("run.rounds=true", "'run.rounds' must be a whole number, not True"),
    "not a list": ("algorithm.milestones=3", "'algorithm.milestones' must be a list, each item a whole number"),
    "negative rate": ("algorithm.lr=-0.1", "lr must be positive, got -0.1"),
    "zero rate": ("algorithm.lr=0", "lr must be positive"),
    "beta out of range": ("algorithm.beta=1.5", "beta must lie in (0, 1], got 1.5"),
    "K = 0": ("run.local_steps=0", "local_steps must be at least 1, got 0"),
    "no rounds": ("run.rounds=0", "rounds must be at least 1"),
    "negative lam": ("risk.lam=-1", "lam must be positive"),
    "a cohort too large": ("run.cohort=17", "cohort is 17, but there are only 16 clients"),
    "unknown metric": ("run.select=auc", "unknown metric to select by 'auc'; did you mean 'auroc'?"),
    "unknown executor": ("run.executor=gpu", "unknown executor 'gpu'"),
    "unknown device": ("run.device=tpu9", "cannot use device 'tpu9'"),
    "an option not its own": ("algorithm.name=local_sgd algorithm.beta=0.1", "unknown setting 'algorithm.beta'"),
    "linear f only": ("algorithm.name=fedxl1", "fedxl1 is for risks with a linear outer function"),
    "no such file": ("data.name=npz data.path=nowhere.npz", "there is no file nowhere.npz"),
    "a missing setting": ("data.name=npz", "the setting 'data.path' is missing"),
    "embeddings from images": ("risk.name=contrastive", "the model"),
    "a model that is not there": ("model.name=nowhere:Net", "cannot import the model 'nowhere:Net'"),
    "not an override": ("lr=3", "must read section.key=value"),
    "a shape among the model's": ("model.shape=9", "unknown setting 'model.shape'; known: "),
    "outputs among the model's": ("model.outputs=3", "unknown setting 'model.outputs'; known: "),
    "a risk among the algorithm's": ("algorithm.risk=ap", "unknown setting 'algorithm.risk'"),
    "no number": ("risk.lam=inf", "'risk.lam' cannot be inf"),
    "a date": ("run.seed=2026-01-01", "'run.seed' cannot be 2026-01-01"),
    "a list for a name": ("risk.name=['auroc']", "'risk.name' must be a text"),
    "sizes below 0": ("model.hidden=[-1]", "hidden sizes must be positive"),
    "half an import": ("model.name=:", "cannot import the model ':'"),
    "vectors for a method of scalars": (
        "risk.name=contrastive risk.dim=4 data.views=true algorithm.name=local_sgd",
        "this algorithm needs one score per example",
    ),
    "a device without numbers": ("run.device=meta", "the device 'meta' holds no numbers"),
    "a negative seed": ("data.seed=-1", "seed must not be negative"),
    "no CIFAR here": (
        "data.name=cifar10 data.root=nowhere",
        "there is no cifar-10-batches-bin in nowhere; fetch https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
        " and put it into nowhere, or run: fedxl data fetch cifar10 --root nowhere",
    ),
    "no MedMNIST here": (
        "data.name=medmnist data.set=breastmnist",
        "there is no file data/breastmnist.npz; fetch https://zenodo.org/records/10519652/files/breastmnist.npz",
    ),
    "no CheXpert here": (
        "data.name=chexpert",
        "there is no CheXpert-v1.0-small with a train.csv in data; ask for it at https://stanfordmlgroup.github.io/",
    ),
    "nearly a setting of the sites": ("data.name=cifar10 data.partion=equal", "did you mean 'data.partition'?"),
    "unknown partition": ("data.name=cifar100 data.partition=dirchlet", "did you mean 'dirichlet'?"),
    "no clients": ("data.name=medmnist data.clients=0", "clients must be at least 1, got 0"),
    "alpha of 0": ("data.name=cifar10 data.alpha=0", "alpha must lie between 0.000001 and 1,000,000, got 0.0"),
    "more than all labels": ("data.name=cifar10 data.flipped=1.5", "flipped must lie in [0, 1], got 1.5"),
    "a negative deviation": ("data.name=cifar10 data.site_noise=-0.04", "site_noise must lie between 0 and 1000"),
    "a negative crop": ("data.name=cifar10 data.crop=-1", "crop must lie between 0 and 65536 pixels"),
    "an eleventh class": ("data.name=cifar10 data.positive=[10]", "positive must name classes 0 to 9, got [10]"),
    "no class": ("data.name=cifar100 data.positive=[]", "positive must name classes 0 to 99, got []"),
    "a negative ratio": ("data.name=cifar10 data.ratio=-1", "ratio must not be negative"),
    "unknown set": ("data.name=medmnist data.set=chestminst", "unknown MedMNIST set 'chestminst'; did you mean"),
    "labels for a label": ("data.name=medmnist data.label=[4]", "'data.label' must be a whole number or a text"),
    "unknown policy": ("data.name=chexpert data.uncertain=maybe", "must be one of 'zeros', 'ones', 'ignore'"),
    "clients beyond counting": (f"data.clients={2**63 - 1}", "clients for only"),
    "more clients than images": ("data.clients=100000", "there are 100000 clients for only"),
    "copies beyond counting": (f"data.copies={2**63 - 1}", "copies must lie between 1 and 1000"),
    "images that overflow": ("data.shift=1e308", "shift must lie in [-10, 10]"),
    "noise that overflows": ("data.noise=1e308", "noise must lie between 0 and 1000"),
    "a skew that overflows": ("data.skew=1e308", "skew must lie in (0, 1,000,000]"),
    "a crop beyond counting": ("data.name=cifar10 data.crop=10000000", "crop must lie between 0 and 65536 pixels"),
    "alpha that overflows": ("data.name=cifar10 data.alpha=1e308", "alpha must lie between"),
    "too many pixels": ("data.name=chexpert data.size=100000", "size must lie between 8 and 4096 pixels"),
    "a batch beyond 64 bits": (f"run.batch1={2**64}", "'run.batch1' must lie between -2^63 and 2^63 - 1"),
    "a batch beyond memory": (f"run.batch1={2**63 - 1}", "batch1 must be at most 1,000,000"),
    "rounds beyond counting": (f"run.rounds={2**63 - 1}", "rounds must be at most 1,000,000,000"),
    "a round beyond memory": ("run.batch1=1000000 run.local_steps=1000000", "must be at most 100,000,000 per round"),
    "a number of 4401 digits": (f"run.seed={'9' * 4401}", "'run.seed' must be a whole number"),
    "a long number that Python cannot write": (f"run.seed=0x{'f' * 5000}", "'run.seed' must lie between"),
    "a layer beyond memory": (f"model.hidden=[{2**40}]", "weights; at most 1,000,000,000"),
    "an embedding beyond memory": (f"risk.name=contrastive risk.dim={2**40}", "dim must lie between 1 and 65536"),
    "a list in a list in a list": (f"run.fpr={'[' * 20}{']' * 20}", "'run.fpr' is nested too deeply"),
    "a list that Python cannot read": (f"run.fpr={'[' * 5000}", "'run.fpr' must be a list"),
    "a name of two lines": ("run.a\nb=1", "unknown setting 'run.a b'"),
    "a name too long": (f"data.name=cifar10 data.root={'x' * 5000}", "cannot read the data"),
    "no pixels": ("data.name=chexpert data.size=0", "size must lie between 8 and 4096 pixels, got 0"),
}


def test_noise_of_less_than_nothing_is_nothing():
    assert torch.equal(digits(noise=-0.0).train.x, digits(noise=0.0).train.x)


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_in_the_config_is_one_line(mistake, tmp_path, monkeypatch, capsys):
    overrides, expected = MISTAKES[mistake]
    (tmp_path / "c.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    arguments = [item for override in overrides.split(" ") for item in ("--set", override)]
    code, _, err = command(monkeypatch, capsys, "train", "c.toml", "--out", "run", *arguments)
    assert code == 2
    assert expected in err
    assert len(err.strip().splitlines()) == 1, err
    assert not Path("run").exists(), "nothing is begun before everything is checked"


def test_files_that_are_not_configs(tmp_path, monkeypatch, capsys):
    (tmp_path / "bad.toml").write_text("[data\n")
    (tmp_path / "half.toml").write_text("[data]\nname = 'digits'\n")
    for name, expected in (
        ("bad.toml", "cannot read"),
        ("half.toml", "needs a section [risk]"),
        ("no.toml", "there is no file"),
    ):
        code, _, err = command(monkeypatch, capsys, "train", str(tmp_path / name))
        assert (code, expected in err, len(err.strip().splitlines())) == (2, True, 1), err
    for verb in ("resume", "report"):
        code, _, err = command(monkeypatch, capsys, verb, str(tmp_path))
        assert code == 2
        assert "holds no run" in err


def test_a_run_is_never_written_over(tmp_path, monkeypatch, capsys):
    config = tmp_path / "c.toml"
    config.write_text(CONFIG)
    out = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["fedxl", "train", str(config), "--out", str(out)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    code, _, err = command(monkeypatch, capsys, "train", str(config), "--out", str(out))
    assert code == 2
    assert f"fedxl resume {out}" in err
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def save(path: Path, **arrays) -> Path:
    np.savez(path, **arrays)
    return path


def arrays() -> dict:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(12, 5)), "y": np.arange(12) % 2, "client": np.arange(12) // 4}


DATA = {
    "NaN in data": (lambda a: a["x"].__setitem__((3, 2), np.nan), "1 of 12 examples hold NaN or infinity"),
    "clients that are no numbers": (lambda a: a.update(client=a["client"] * 1.5), "client must hold one integer"),
    "texts": (lambda a: a.update(x=np.full((12, 5), "a")), "x must hold numbers"),
    "a single feature": (lambda a: a.update(x=a["x"][:, 0]), "examples must be rows of features"),
    "other features": (
        lambda a: a.update(x_test=a["x"][:, :4], y_test=a["y"]),
        "test holds examples of shape [4], the clients of [5]",
    ),
    "no positive anywhere": (lambda a: a.update(y=np.zeros(12, int)), "needs positive examples (S1)"),
    "no negative anywhere": (lambda a: a.update(y=np.ones(12, int)), "needs negative examples (S2)"),
    "strange labels": (lambda a: a.update(y=np.arange(12)), "labels must be 0 or 1 (or -1 and 1), found 2"),
    "too few labels": (lambda a: a.update(y=np.zeros(7, int)), "12 examples but 7 labels"),
    "no client column": (lambda a: a.pop("client"), "lacks the array(s) client"),
    "a misnamed split": (lambda a: a.update(x_val=a["x"]), "unknown array in"),
    "half a split": (lambda a: a.update(x_test=a["x"]), "holds x_test but no y_test"),
    "one class to validate on": (
        lambda a: a.update(x_validation=a["x"], y_validation=np.ones(12, int)),
        "validation must hold both classes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(DATA))
def test_bad_data_is_one_line(case, tmp_path, monkeypatch, capsys):
    change, expected = DATA[case]
    content = arrays()
    change(content)
    path = save(tmp_path / "d.npz", **content)
    (tmp_path / "c.toml").write_text(CONFIG.replace('"digits"', f'"npz"\npath = "{path}"'))
    code, _, err = command(monkeypatch, capsys, "train", str(tmp_path / "c.toml"), "--out", str(tmp_path / "run"))
    assert code == 2
    assert expected in err
    assert len(err.strip().splitlines()) == 1, err
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_no_npz(tmp_path, monkeypatch, capsys):
    path = tmp_path / "d.npz"
    path.write_bytes(b"rubbish")
    (tmp_path / "c.toml").write_text(CONFIG.replace('"digits"', f'"npz"\npath = "{path}"'))
    code, _, err = command(monkeypatch, capsys, "train", str(tmp_path / "c.toml"))
    assert (code, len(err.strip().splitlines())) == (2, 1), err


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (TwoOutputs(), r"returned scores of shape \[2, 2\] for 2 examples; this risk needs \[2\]"),
        (nn.Linear(7, 1), r"cannot score examples of shape \[5\]"),
        (nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), None),
    ],
    ids=["two outputs", "other inputs", "a flat vector is fine"],
)
def test_a_model_of_the_wrong_shape(model, expected):
    def train():
        return fit(model, make_clients([(4, 4)]), FeDXL2(partial_auc()), rounds=1, local_steps=1)

    if expected is None:
        train()
    else:
        with pytest.raises(UserError, match=expected):
            train()


@pytest.mark.parametrize(
    ("pair", "outer", "expected"),
    [
        (lambda a, b, y: a[:, None] - b[None, :], identity, "the risk's pair"),
        (lambda a, b, y: gap(a, b).mean(), identity, "the risk's pair must return"),
        (lambda a, b: gap(a, b), identity, "the risk's pair cannot take"),
        (lambda a, b, y: gap(a, b), lambda g: (g**2).mean(), "entry by entry"),
    ],
    ids=["no leading dimensions", "a mean", "no labels", "an outer that sums up"],
)
def test_a_risk_of_the_wrong_shape(pair, outer, expected):
    with pytest.raises(UserError, match=expected):
        fit(nn.Linear(5, 1), make_clients([(4, 4)]), FeDXL2(XRisk(pair=pair, outer=outer)))


def test_mistakes_in_the_library_call():
    clients = make_clients([(4, 4)])
    for given, told in (
        ({"rouns": 3}, "unknown argument of fit 'rouns'; did you mean 'rounds'?"),
        ({"batch": 8}, "unknown argument of fit 'batch'; did you mean 'batch_size'?"),
        ({"epochs": 3}, "unknown argument of fit 'epochs'; did you mean 'rounds'?"),
        ({"learning_rate": 1.0}, "'learning_rate'; lr is a setting of the algorithm: fedxl.FeDXL2(..., lr=...)"),
    ):
        with pytest.raises(UserError, match=re.escape(told)):
            fit(nn.Linear(5, 1), clients, FeDXL2(auroc()), **given)
    with pytest.raises(TypeError, match=r"auroc\(\) got an unexpected keyword argument 'lam'"):
        auroc(lam=1.0)
    with pytest.raises(UserError, match="at least one client"):
        fit(nn.Linear(5, 1), [], FeDXL2(auroc()))
    with pytest.raises(UserError, match="client 1 has no examples"):
        fit(nn.Linear(5, 1), [*clients, (torch.empty(0, 5), torch.empty(0))], FeDXL2(auroc()))
    with pytest.raises(UserError, match="different shapes"):
        fit(nn.Linear(5, 1), [*clients, (torch.zeros(3, 4), torch.zeros(3))], FeDXL2(auroc()))
    with pytest.raises(UserError, match="different types"):
        fit(nn.Linear(5, 1), [*clients, (torch.zeros(3, 5, dtype=torch.uint8), torch.zeros(3))], FeDXL2(auroc()))
    with pytest.raises(UserError, match="must be a pair"):
        fit(nn.Linear(5, 1), [torch.zeros(3, 5)], FeDXL2(auroc()))
    with pytest.raises(UserError, match="validation must be a pair"):
        fit(nn.Linear(5, 1), clients, FeDXL2(auroc()), validation=clients[0][0])
    for wrong in ("fedxl2", auroc(), FeDXL2):
        with pytest.raises(UserError, match=r"algorithm must be an object such as fedxl.FeDXL2\(fedxl.auroc\(\)\)"):
            fit(nn.Linear(5, 1), clients, wrong)
    with pytest.raises(UserError, match="batch_size must be one number or two"):
        fit(nn.Linear(5, 1), clients, FeDXL2(auroc()), batch_size=(1, 2, 3))
    with pytest.raises(UserError, match="no parameter to train"):
        fit(nn.Flatten(0), clients, FeDXL2(auroc()))
    with pytest.raises(UserError, match="nothing to train on"):
        fit(nn.Linear(5, 1), make_clients([(4, 0), (0, 4)]), LocalPair(auroc()))


def test_scores_that_overflow_are_told():
    x, y = make_clients([(9, 9)])[0]
    with pytest.raises(UserError, match="no longer finite"):
        fit(
            nn.Linear(5, 1), [(x, y)], FeDXL1(auroc(surrogate="square"), lr=1e30), rounds=1, local_steps=1,
            validation=(1e20 * x, y),
        )  # fmt: skip


def test_a_centralised_method_takes_no_cohort():
    fit(nn.Linear(5, 1), make_clients([(4, 4)] * 3), SOX(partial_auc()), cohort=2, rounds=1, local_steps=1)


def test_the_risks_own_limit_is_always_there():
    x, y = make_clients([(9, 9)])[0]
    result = fit(
        nn.Linear(5, 1), [(x, y)], FeDXL2(partial_auc()), rounds=1, local_steps=1, fpr=(0.2,), validation=(x, y)
    )
    assert {"pauc@0.2", "pauc@0.3"} <= result.metrics["validation"].keys()


def test_divergence_is_told_and_not_saved(tmp_path):
    with pytest.raises(UserError, match="no longer finite by round"):
        fit(
            nn.Linear(5, 1), make_clients([(9, 9), (5, 5)]), FeDXL1(auroc(surrogate="square"), lr=1e6),
            rounds=40, local_steps=8, out=tmp_path,
        )  # fmt: skip
    saved = [path.name for path in tmp_path.glob("checkpoints/*")]
    assert saved == ["round-00000000.safetensors"], "only what was still finite: round 0"


@pytest.mark.parametrize("name", ["paper", "theory"])
def test_a_command_that_has_moved_says_where(name, monkeypatch, capsys):
    code, _, err = command(monkeypatch, capsys, name, "--anything")
    assert (code, err) == (2, f"fedxl: fedxl {name} is `python -m studies {name}` in a checkout since version 0.4\n")

"""Names of fedxl's tables and of a user's own modules: what is found, and what is said if nothing is."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from fedxl import UserError, XRisk, registry
from fedxl.config.experiment import Config, build_model, build_risk, execute, load_data
from fedxl.risks import RISKS
from tests.deploy.federated import QUIET

MODULES = {
    "goods": """
        import functools, math, sys
        import torch
        from torch import nn
        from fedxl import XRisk, gap
        from fedxl.data.examples import Splits
        from fedxl.data.inputs import from_arrays

        PATH = list(sys.path)
        seven = 7
        ready = XRisk(pair=lambda a, b, y: torch.exp(-gap(a, b)), outer=lambda g: g**2)

        def risk(power: float = 2.0):
            return XRisk(pair=lambda a, b, y: torch.exp(-gap(a, b)), outer=lambda g: g**power)

        cubed = functools.partial(risk, 3.0)

        def net(width: int = 3):
            return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))

        def nothing():
            return None

        def load(clients: int = 2, seed: int = 0):
            generator = torch.Generator().manual_seed(seed)
            y = torch.arange(8) % 2
            pairs = [(torch.randn(8, 4, generator=generator) + y[:, None], y) for _ in range(clients + 1)]
            return Splits(from_arrays(pairs[1:]), from_arrays(pairs[:1]), None)

        def missing():
            raise FileNotFoundError("scans.csv")

        def wrong():
            return math.sqrt(-1)
        """,
    "package_with/__init__": "",
    "package_with/inner": "def thing(): return 1",
    "needs_another": "import json\nimport no_such_dependency",
    "needs_a_name": "from json import no_such_name",
    "broken": "def (:",
    "raising": "1 / 0",
    "rude": "import sys\nsys.path.clear()\nthing = len",
}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A folder with modules of one's own, the current one; nothing of it stays."""
    for name, text in MODULES.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in {module.partition("/")[0] for module in MODULES}:
            del sys.modules[name]


def test_a_name_of_the_table_or_of_ones_own_module(modules):
    assert registry.find("risk", "auroc", RISKS) is RISKS["auroc"]
    assert registry.find("thing", "package_with.inner:thing", {})() == 1
    found = registry.find("risk", "goods:risk", RISKS)
    assert found is sys.modules["goods"].risk
    assert sys.modules["goods"].PATH[0] == str(modules), "its neighbours could be imported"
    assert str(modules) not in sys.path, "and only then"
    assert registry.find("thing", "rude:thing", {}) is len, "a module may change the path"


def test_a_file_written_a_moment_ago_is_found(modules):
    with pytest.raises(UserError, match="there is no module 'fresh'"):
        registry.find("thing", "fresh:thing", {})
    Path("fresh.py").write_text("def thing(): return 5")
    try:
        assert registry.find("thing", "fresh:thing", {})() == 5
    finally:
        del sys.modules["fresh"]


WRONG = {
    "nearly": ("aurock", "unknown risk 'aurock'; did you mean 'auroc'?"),
    "no module": ("nowhere:thing", "cannot import the risk 'nowhere:thing': there is no module 'nowhere'"),
    "no package": ("goods.inner:thing", "there is no module 'goods.inner'"),
    "no module within": ("package_with.other:thing", "there is no module 'package_with.other'"),
    "no attribute": ("goods:rsik", "cannot import the risk 'goods:rsik': the module 'goods' has no 'rsik'"),
    "the wrong kind": ("goods:seven", "'goods:seven' is of type int; a risk must be a function or a class"),
    "no signature": ("builtins:dict", "'builtins:dict' is of type type; a risk must be"),
    "nothing": (":", "reads package.module:attribute"),
    "no attribute at all": ("goods:", "reads package.module:attribute"),
    "relative": (".goods:risk", "reads package.module:attribute"),
    "a path": ("../goods:risk", "reads package.module:attribute"),
    "an odd letter": ("goods\0:risk", "reads package.module:attribute"),
    "two colons": ("goods:risk:more", "reads package.module:attribute"),
    "a missing dependency": ("needs_another:x", r"needs_another.py, line 2: No module named 'no_such_dependency'"),
    "a missing name": ("needs_a_name:x", r"needs_a_name.py, line 1: cannot import name 'no_such_name' from 'json'"),
    "broken": ("broken:x", r"invalid syntax (broken.py, line 1)"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_a_wrong_name_is_one_line(modules, case):
    name, expected = WRONG[case]
    with pytest.raises(UserError) as error:
        registry.find("risk", name, RISKS)
    assert expected in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_an_error_inside_ones_own_module_keeps_its_traceback(modules):
    with pytest.raises(ZeroDivisionError) as error:
        registry.find("risk", "raising:x", RISKS)
    assert error.traceback[-1].path.name == "raising.py"
    with pytest.raises(ValueError, match=r"math domain|nonnegative") as error:
        build_risk(config(risk={"name": "goods:wrong"}))
    assert not isinstance(error.value, UserError)


def config(**sections) -> Config:
    usual = {
        "data": {"name": "goods:load"},
        "model": {"name": "goods:net"},
        "risk": {"name": "goods:risk"},
        "algorithm": {"name": "fedxl2", "lr": 0.1},
        "run": {"rounds": 1, "local_steps": 2, "batch1": 2, "batch2": 2, "device": "cpu"},
    }
    return Config(**{**usual, **sections})


def test_data_risk_and_model_of_ones_own_in_one_run(modules):
    found = execute(config(), hooks=QUIET)
    assert 0 <= found.metrics["validation"]["auroc"] <= 1
    assert isinstance(found.model, nn.Sequential)


def test_options_reach_what_they_are_for(modules):
    h, y = torch.tensor([0.0, 1.0]), torch.tensor([1, 0])
    for risk, power in (
        ({"name": "goods:risk", "power": 4}, 4),
        ({"name": "goods:ready"}, 2),
        ({"name": "goods:cubed"}, 3),
    ):
        assert build_risk(config(risk=risk)).value(h, y).item() == pytest.approx(torch.e**power, rel=1e-6)
    splits = load_data(config(data={"name": "goods:load", "clients": 3}))
    assert len(splits.train.parts) == 3
    seeded = load_data(config(run={"seed": 9}))
    assert not torch.equal(seeded.train.x, load_data(config()).train.x), "the run's seed is handed on"
    net = build_model(config(model={"name": "goods:net", "width": 5}), (4,), build_risk(config()))
    assert net[0].out_features == 5


OPTIONS = {
    "an option of a ready risk": ({"risk": {"name": "goods:ready", "power": 1}}, "takes no options, not power"),
    "an unknown option": ({"risk": {"name": "goods:risk", "powr": 1}}, "did you mean 'risk.power'?"),
    "a wrong type": ({"risk": {"name": "goods:risk", "power": "a"}}, "'risk.power' must be"),
    "no risk": (
        {"risk": {"name": "goods:nothing"}},
        "'goods:nothing' gave a NoneType, not a fedxl.risks.xrisk.XRisk",
    ),
    "a number for a risk": ({"risk": {"name": "goods:seven"}}, "a risk must be an XRisk, or a function"),
    "no splits": ({"data": {"name": "goods:nothing"}}, "gave a NoneType, not a fedxl.data.examples.Splits"),
    "no file": ({"data": {"name": "goods:missing"}}, "[data] cannot read the data: scans.csv"),
    "no data set": ({"data": {"name": "goods:lod"}}, "cannot import the data set 'goods:lod'"),
    "no model": ({"model": {"name": "goods:nothing"}}, "gave a NoneType, not a torch.nn.modules.module.Module"),
}


@pytest.mark.parametrize("case", list(OPTIONS))
def test_what_is_not_of_the_right_kind_is_one_line(modules, case):
    sections, expected = OPTIONS[case]
    with pytest.raises(UserError) as error:
        execute(config(**sections), hooks=QUIET)
    assert expected in str(error.value)


def test_a_risk_is_no_function():
    assert not callable(XRisk(pair=lambda a, b, y: a, outer=lambda g: g)), "build_risk tells them apart by this"

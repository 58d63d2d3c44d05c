"""`fit` as users meet it: every setting in its signature, with the same defaults as in a config."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import nn

import fedxl
from fedxl.algorithms import ALGORITHMS, Algorithm
from fedxl.algorithms.protocol import DataFacts
from fedxl.config.experiment import Config, build_algorithm, build_problem
from fedxl.data.examples import Examples
from fedxl.errors import UserError
from fedxl.evaluation import scores
from fedxl.training.settings import Settings
from tests.conftest import RAGGED, make_clients

SIZES = {"rounds": 2, "local_steps": 2, "dtype": "float64", "device": "cpu"}


def test_every_setting_is_in_the_signature_with_its_default():
    parameters = inspect.signature(fedxl.fit).parameters
    for item in fields(Settings):
        if item.name in ("batch1", "batch2"):
            continue
        assert parameters[item.name].default == item.default, item.name
    assert parameters["batch_size"].default == (Settings().batch1, Settings().batch2)
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values())


def test_one_batch_size_serves_both_sides(network):
    clients = make_clients(RAGGED)
    algorithm = fedxl.FeDXL2(fedxl.partial_auc(), lr=0.1)
    one, two = (fedxl.fit(network(), clients, algorithm, batch_size=size, **SIZES) for size in (3, (3, 3)))
    assert all(torch.equal(two.weights.params[name], value) for name, value in one.weights.params.items())


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_an_algorithm_is_built_without_a_network_and_says_what_it_is(name):
    algorithm = ALGORITHMS[name](fedxl.auroc(surrogate="square"), lr=0.25)
    assert "risk=auroc(surrogate='square'), lr=0.25" in repr(algorithm)
    with pytest.raises(AttributeError):
        algorithm.lr = 1.0
    assert replace(algorithm, lr=0.5).risk is algorithm.risk
    assert isinstance(algorithm, Algorithm)


def test_baselines_need_no_risk(network):
    for algorithm in (fedxl.LocalSGD(lr=0.1), fedxl.CODASCA(lr=0.1)):
        x, y = make_clients([(20, 30)], seed=9)[0]
        result = fedxl.fit(network(), make_clients(RAGGED), algorithm, validation=(x, y), **SIZES)
        assert set(result.metrics) == {"validation", "test"}
        assert result.metrics["validation"]["auroc"] > 0


@pytest.mark.parametrize("seed", [-1, "x", [1], None])
def test_settings_are_checked_before_a_network_is_built(seed):
    config = Config(data={}, risk={"name": "auroc"}, algorithm={"name": "fedxl1"}, run={"seed": seed})
    with pytest.raises(fedxl.UserError, match="seed"):
        build_problem(config, (5,), DataFacts())


def wrong(risk: object) -> int:
    return 3


def without_a_risk(lr: float = 0.1) -> None: ...


@pytest.mark.parametrize(("name", "expected"), [("wrong", "gave a int"), ("without_a_risk", "must take its risk")])
def test_what_is_no_algorithm_is_one_line(name, expected):
    config = Config(data={}, risk={"name": "auroc"}, algorithm={"name": f"{__name__}:{name}"})
    with pytest.raises(fedxl.UserError, match=expected):
        build_algorithm(config)


def test_one_object_serves_many_runs(network):
    """Nothing of a run stays in the algorithm."""
    algorithm = fedxl.CODASCA(lr=0.1)
    first = fedxl.fit(network(), make_clients(RAGGED), algorithm, **SIZES)
    other = nn.Linear(3, 1).double()
    fedxl.fit(other, make_clients([(5, 5), (6, 2)], dim=3), algorithm, **SIZES)
    again = fedxl.fit(network(), make_clients(RAGGED), algorithm, **SIZES)
    assert all(torch.equal(again.weights.params[name], value) for name, value in first.weights.params.items())


def test_names_of_clients_reach_the_run_folder(tmp_path):
    (x, y), other = make_clients([(6, 6), (5, 5)], seed=3)
    clients = {"north": (x.numpy(), y.numpy()), "south": other}
    result = fedxl.fit(
        nn.Linear(5, 1), clients, fedxl.FeDXL2(fedxl.partial_auc()), validation=clients, test={"south": other},
        out=tmp_path, **SIZES,
    )  # fmt: skip
    told = json.loads((tmp_path / "run.json").read_text())["members"]
    assert told == [
        {"name": "north", "positives": 6, "negatives": 6},
        {"name": "south", "positives": 5, "negatives": 5},
    ]
    kept = scores.load(tmp_path / "scores.npz")
    assert {name: len(part) for name, part in kept["validation"].by_site().items()} == {"north": 12, "south": 10}
    assert kept["test"].by_site().keys() == result.scores["test"].by_site().keys() == {"south"}


def test_texts_for_labels_train_as_their_numbers_do():
    (x, y), *_ = make_clients([(6, 9)])
    texts = ["malignant" if label else "benign" for label in y]

    def weights(labels, **options):
        torch.manual_seed(0)
        result = fedxl.fit(nn.Linear(5, 1), [(x, labels)], fedxl.FeDXL2(fedxl.auroc()), **SIZES, **options)
        return result.weights.params["weight"]

    assert torch.equal(weights(y), weights(texts, positive="malignant"))


def tokens() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 1))


@pytest.mark.parametrize("make", [lambda: nn.Linear(5, 1), tokens], ids=["a network of floats", "one of tokens"])
def test_integers_suit_the_network(make):
    """Floats for a linear layer, as if the user had converted them; integers for an embedding."""
    x = torch.randint(0, 9, (20, 5), generator=torch.Generator().manual_seed(0))
    y, network = torch.arange(20) % 2, make()
    given = [x, x.float()] if isinstance(network, nn.Linear) else [x, x.int()]
    results = [
        fedxl.fit(network, [(one, y)], fedxl.FeDXL2(fedxl.auroc()), validation=(one, y), **SIZES) for one in given
    ]
    one, other = (result.weights.params for result in results)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert results[0].metrics == results[1].metrics
    with pytest.raises(UserError, match="cannot score"):
        fedxl.fit(network, [(x[:, :3], y)], fedxl.FeDXL2(fedxl.auroc()), **SIZES)


class Two(nn.Module):
    """A network that returns something else than scores."""

    def __init__(self, give):
        super().__init__()
        self.layer, self.give = nn.Linear(5, 1), give

    def forward(self, x):
        return self.give(self.layer(x))


def broken() -> nn.Module:
    network = nn.Linear(5, 1)
    nn.init.constant_(network.weight, float("nan"))
    return network


def hooked(name: str) -> nn.Module:
    network = nn.Linear(5, 1)
    getattr(network if hasattr(network, name) else network.weight, name)(lambda *seen: None)
    return network


HOOKS, PURE = "the model has backward hooks", "the model cannot be trained: "
MISTAKES = {
    "a backward hook": ({"model": hooked("register_full_backward_hook")}, HOOKS),
    "a hook before": ({"model": hooked("register_full_backward_pre_hook")}, HOOKS),
    "a hook of a weight": ({"model": hooked("register_hook")}, HOOKS),
    "a hook after": ({"model": hooked("register_post_accumulate_grad_hook")}, HOOKS),
    "numbers of numpy": ({"model": Two(lambda h: torch.tensor(h.detach().numpy()[:, 0]))}, PURE),
    "an impossible folder": ({"out": "a\0b"}, "out must be a folder, such as 'runs/first', not 'a\\x00b'"),
    "no folder": ({"out": ""}, "out must be a folder, such as 'runs/first', not ''"),
    "a class": ({"model": nn.Linear}, "model is the class Linear; give a network, such as Linear(...)"),
    "a function": ({"model": lambda x: x}, "model must be a torch.nn.Module, not a function"),
    "a name": ({"model": "mlp"}, "model must be a torch.nn.Module, not a str"),
    "a lazy network": ({"model": nn.LazyLinear(1)}, "the model has lazy layers without shapes; call it once"),
    "a network nowhere": ({"model": nn.Linear(5, 1, device="meta")}, "the model is on the device 'meta'"),
    "complex weights": ({"model": nn.Linear(5, 1, dtype=torch.complex64)}, "the model has complex weights"),
    "weights of NaN": ({"model": broken()}, "the model's weight 'weight' holds NaN or infinity before training"),
    "a tuple": ({"model": Two(lambda h: (h, h))}, "the model must return a tensor of scores, not a tuple"),
    "two classes": (
        {"model": nn.Linear(5, 2)},
        "scores of shape [2, 2] for 2 examples; this risk needs [2]; end the model with one output",
    ),
    "other features": ({"model": nn.Linear(7, 1)}, "its first layer takes 7 features, these examples have 5"),
    "a function to augment": (
        {"augment": lambda x: x},
        "augment must be fedxl.Augment(crop=..., flip=..., noise=...)",
    ),
    "the class to augment": ({"augment": fedxl.Augment}, "not the class Augment"),
    "no batch": ({"batch_size": None}, "'run.batch1' must be a whole number, not None"),
    "a batch beyond memory": ({"batch_size": 2**64}, "batch1 must be at most 1,000,000"),
    "one rate": ({"fpr": 0.3}, "fpr must be a list, such as [0.3], not a float"),
    "one metric": ({"metrics": "auroc"}, "metrics must be a list, such as ['auroc'], not a str"),
    "a number for a folder": ({"out": 5}, "out must be a folder, such as 'runs/first', not an int"),
    "a function for hooks": ({"hooks": print}, "hooks must be fedxl.Hooks(...)"),
    "a number for a hook": ({"hooks": fedxl.Hooks(say=3)}, "hooks: say must be a function, not an int"),
    "data for an algorithm": ({"algorithm": [(torch.zeros(3, 5), 0)]}, "algorithm must be an object such as"),
    "another type": ({"dtype": torch.float16}, "unknown dtype 'float16'"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_in_the_call_is_one_line(mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where out = "" would be, were it taken for a folder
    options, told = MISTAKES[mistake]
    call = {"model": nn.Linear(5, 1), "clients": make_clients([(6, 6)]), "algorithm": fedxl.FeDXL2(fedxl.auroc())}
    with pytest.raises(UserError) as error:
        fedxl.fit(**{**call, **SIZES, **options})
    assert told in str(error.value)
    assert len(str(error.value)) < 250
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: fedxl.FeDXL2(fedxl.auroc(), lr="0.1"), "'FeDXL2.lr' must be a number, not '0.1'"),
        (lambda: fedxl.Descent(milestones=3), "'Descent.milestones' must be a list, each item a whole number, not 3"),
        (lambda: fedxl.Pooling(pool_rounds=1.5), "'Pooling.pool_rounds' must be a whole number, not 1.5"),
        (
            lambda: fedxl.FeDXL2(fedxl.auroc(), level="free"),
            "'FeDXL2.level' must be a Level, such as Level(...), not 'free'; fedxl.build takes settings by their",
        ),
        (
            lambda: fedxl.build("fedxl2", fedxl.auroc(), pool_rounds=1.5),
            "'algorithm.pool_rounds' must be a whole number, not 1.5",
        ),
        (
            lambda: fedxl.FeDXL2("pauc"),
            "'FeDXL2.risk' must be an XRisk, such as fedxl.partial_auc(), not 'pauc'; fedxl.build takes",
        ),
        (lambda: fedxl.FeDXL2(fedxl.partial_auc), "such as fedxl.partial_auc(), not a function; fedxl.build takes"),
        (lambda: fedxl.partial_auc(lam="1"), "'partial_auc.lam' must be a number, not '1'"),
        (lambda: fedxl.auroc(surrogate=3), "'auroc.surrogate' must be a text, not 3"),
        (lambda: fedxl.Augment(crop="4"), "'Augment.crop' must be a whole number, not '4'"),
        (lambda: fedxl.Augment(site_means=3), "'Augment.site_means' must be a list, each item a number, not 3"),
        (
            lambda: fedxl.advise(make_clients([(3, 3)]), fedxl.auroc),
            "risk must be an object such as fedxl.partial_auc()",
        ),
        (
            lambda: fedxl.advise(make_clients([(3, 3)]), batch_size=(1, 2, 3)),
            "batch_size must be one whole number or two",
        ),
    ],
)
def test_a_mistake_in_what_is_handed_to_fit_is_one_line(build, told):
    with pytest.raises(UserError) as error:
        build()
    assert told in str(error.value)


def test_sites_of_held_back_data_are_clients():
    (x, y), *_ = make_clients([(6, 6)])
    held = Examples(x, y[:, None], site=np.arange(12))
    with pytest.raises(UserError, match="validation: sites must number the client of each example, from 0 to 0"):
        fedxl.fit(nn.Linear(5, 1), [(x, y)], fedxl.FeDXL2(fedxl.auroc()), validation=held, **SIZES)


def test_devices_and_types_of_torch_are_names():
    clients, algorithm = make_clients([(6, 6)]), fedxl.FeDXL2(fedxl.auroc())
    sizes = {**SIZES, "dtype": torch.float64, "device": torch.device("cpu")}
    result = fedxl.fit(nn.Linear(5, 1).double(), clients, algorithm, **sizes)
    assert result.weights.params["weight"].dtype == torch.float64


def test_tokens_are_not_validated_on_floats():
    x, y = torch.randint(0, 9, (8, 5)), torch.arange(8) % 2
    with pytest.raises(
        UserError, match=r"validation holds torch.float32, the clients torch.int64; give the same type"
    ):
        fedxl.fit(tokens(), [(x, y)], fedxl.FeDXL2(fedxl.auroc()), validation=(x.float(), y), device="cpu")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_network_trains_as_the_network_itself(network):
    """Its weights keep their own names, so that the network without compilation can load them."""
    plain = network()
    found, expected = (
        fedxl.fit(model, make_clients(RAGGED), fedxl.FeDXL2(fedxl.auroc()), **SIZES)
        for model in (torch.compile(plain), plain)
    )
    assert list(found.weights.params) == list(dict(plain.named_parameters()))
    assert all(torch.equal(found.weights.params[name], value) for name, value in expected.weights.params.items())

"""Networks of which parts train: what is frozen stays, adapters train, and nothing else is sent."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from fedxl import UserError, fit, partial_auc, tree
from fedxl.algorithms import build
from fedxl.config.experiment import Config, build_network, execute
from fedxl.models import Score, adapt, digest, frozen_tensors, linear, mlp, scorer, train_only, weights_of
from fedxl.models.parts import Adapted, frozen
from fedxl.prediction.run import network_of, read_finished
from tests.conftest import EXECUTORS, make_clients
from tests.engine.cuda.test_graph import Run
from tests.running import fit_named


def network(*train: str) -> nn.Module:
    """A backbone with BatchNorm and dropout below `body`, and a head with both."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU())
    head = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = nn.Sequential()
    model.add_module("body", body)
    model.add_module("head", head)
    body[1].running_mean += torch.randn(6)
    return train_only(model.double(), train or ["head"])


def inside(score: Score) -> nn.Module:
    """The network that a scorer calls."""
    return next(cell.cell_contents for cell in score.__closure__ if isinstance(cell.cell_contents, nn.Module))


@pytest.mark.parametrize("name", list(EXECUTORS))
def test_frozen_parts_stay_to_the_bit_in_every_executor(name):
    run, before = Run(EXECUTORS[name](), network()), network().state_dict()
    run.state(0, 4, 3)
    weights = run.server.weights
    assert not any(key.startswith("body") for key in (*weights.params, *weights.buffers))
    assert int(weights.buffers["head.1.num_batches_tracked"]) > 0, "that of the head moves"
    for key, tensor in frozen_tensors(inside(run.engine.score)).items():
        assert torch.equal(tensor, before[key]), key


@pytest.mark.parametrize("name", list(EXECUTORS))
def test_training_draws_no_dropout_below_frozen_modules(name):
    """The same as a network that has none, to the bit; where the head stands, dropout is on."""
    plain = network()
    plain.body[2] = nn.Identity()
    found, expected = (Run(EXECUTORS[name](), model).state(0, 4, 4) for model in (network(), plain))
    for key, tensor in expected.items():
        assert torch.equal(found[key].nan_to_num(), tensor.nan_to_num()), key
    x = torch.randn(8, 5).double()
    for model, same in ((network(), True), (network("head", "body.0.bias"), False)):
        score, weights = scorer(model, True), weights_of(model)
        assert torch.equal(score(weights, x)[0], score(weights, x)[0]) == same


def test_what_is_frozen_is_what_nothing_trains_in():
    model = network("head.2", "body.1.bias")
    assert sorted(frozen(model)) == ["body.0", "head.0", "head.1"], "layers without parameters are as their parent"
    assert sorted(frozen(network())) == ["body", "body.0", "body.1", "body.2", "body.3"]
    kept = frozen_tensors(model)
    assert {"body.1.weight", "head.1.running_var"} <= kept.keys()
    assert "body.1.running_var" not in kept, "its norm trains"
    weights = weights_of(model)
    assert {*weights.params, *weights.buffers, *kept} == {*model.state_dict()}


def test_scorers_share_what_is_frozen_and_copy_the_rest():
    model = network()
    inner = inside(scorer(model, True))
    assert inner.body[0].weight is model.body[0].weight
    assert inner.body[1].running_mean is model.body[1].running_mean
    assert inner.head[0].weight is not model.head[0].weight
    assert model.training
    assert not inner.body[1].training
    assert inner.head[1].training


def test_traffic_counts_what_trains_alone():
    clients = make_clients([(6, 8), (7, 9)])
    whole, head = (
        fit_named(model, clients, partial_auc(), rounds=1, local_steps=2, lr=0.1, batch1=2, batch2=2).traffic
        for model in (network("body", "head"), network())
    )
    frozen = frozen_tensors(network())
    params = tree.nbytes({k: v.float() for k, v in frozen.items() if "running" not in k and "num" not in k})
    buffers = tree.nbytes(
        {k: v if "num" in k else v.float() for k, v in frozen.items() if "running" in k or "num" in k}
    )
    for one, other in zip(whole, head, strict=True):
        assert one - other == 2 * params + buffers, "weights and G, and the statistics"


def test_a_run_is_resumed_with_its_own_backbone_only(tmp_path):
    clients, settings = make_clients([(6, 8), (7, 9)]), {"local_steps": 2, "lr": 0.1, "out": tmp_path}
    fit_named(network(), clients, partial_auc(), rounds=1, **settings)
    other = network()
    with torch.no_grad():
        other.body[1].running_mean[0] += 1e-6
    with pytest.raises(UserError, match=r"other settings: task\.frozen was"):
        fit_named(other, clients, partial_auc(), rounds=2, resume=True, **settings)
    resumed = fit_named(network(), clients, partial_auc(), rounds=2, resume=True, **settings)
    assert resumed.history[-1]["round"] == 2


def test_the_digest_is_of_all_that_is_frozen():
    model, found = network(), digest(network())
    assert found == digest(model)
    assert not digest(linear((3,)))
    with torch.no_grad():
        model.head[0].weight += 1
    assert digest(model) == found
    model.body[1].running_var[2] += 1
    assert digest(model) != found


PATTERNS = {
    ("head",): ["head.0", "head.1", "head.2"],
    ("head.2", "body.1"): ["body.1", "head.2"],
    ("*.1.*",): ["body.1", "head.1"],
    ("head.[02].*",): ["head.0", "head.2"],
    (): [],
}


@pytest.mark.parametrize("patterns", list(PATTERNS))
def test_parts_are_named_by_name_prefix_or_pattern(patterns):
    model = network("*")
    train_only(model, patterns)
    assert (
        sorted({k.rpartition(".")[0] for k, p in model.named_parameters() if p.requires_grad}) == PATTERNS[patterns]
    )


@pytest.mark.parametrize("pattern", ["hea", "head.7", "*norm*", ""])
def test_a_pattern_that_names_nothing_is_one_line(pattern):
    with pytest.raises(UserError, match=r"train = '.*' matches nothing .* begin with body, head$"):
        train_only(network(), ["head", pattern])


def test_settings_of_a_config_say_what_trains():
    table = {"name": "mlp", "hidden": [4, 3], "train": ["5"], "adapter_rank": 2, "adapter_targets": ["3"]}
    model = build_network(table, (5,), ())
    assert sorted(weights_of(model).params) == ["3.down", "3.up", "5.bias", "5.weight"]
    views = build_network({"name": "mlp", "train": ["3"]}, (2, 5), (8,))
    assert sorted(weights_of(views).params) == ["encoder.3.bias", "encoder.3.weight"]


WRONG = {
    "matches nothing": {"train": ["fc"]},
    "adapter_rank must lie between 1 and 1024, got -1": {"train": ["3"], "adapter_rank": -1},
    "there are none; name what else trains": {"adapter_rank": 2},
    "adapter_targets = '3'": {"train": ["3"], "adapter_rank": 2, "adapter_targets": ["3"]},
    "adapter_targets needs adapter_rank": {"adapter_targets": ["1"]},
    "'model.train' must be": {"train": "3"},
}


@pytest.mark.parametrize("told", list(WRONG))
def test_settings_that_do_not_fit_are_one_line(told):
    with pytest.raises(UserError) as error:
        build_network({"name": "mlp", **WRONG[told]}, (5,), ())
    assert told in str(error.value)


def test_a_run_with_adapters_is_read_back(tmp_path):
    model = {"name": "mlp", "hidden": [4], "train": ["3"], "adapter_rank": 2}
    sizes = {"rounds": 1, "local_steps": 2, "batch1": 2, "batch2": 2, "device": "cpu"}
    data, method = {"name": "digits", "clients": 3}, {"name": "fedxl2", "lr": 0.1}
    config = Config(data=data, model=model, risk={"name": "pauc"}, algorithm=method, run=sizes)
    result = execute(config, tmp_path / "run")
    found, x = network_of(read_finished(tmp_path / "run")), torch.rand(3, 1, 8, 8)
    assert torch.equal(found(x), result.model(x))
    assert sorted(weights_of(found).params) == ["1.down", "1.up", "3.bias", "3.weight"]


def shaped(shape: tuple[int, ...], outputs: int, width: int = 3) -> nn.Module:
    return mlp(shape, outputs, (width,))


def greedy(train: int, outputs: int) -> nn.Module:
    return nn.Linear(train, outputs)


def test_a_factory_of_ones_own_gets_shape_and_outputs():
    own = "tests.models.test_parts:{}"
    model = build_network({"name": own.format("shaped"), "width": 2, "train": ["3"]}, (2, 4), (3,), labels=True)
    assert [tuple(p.shape) for p in model.parameters()] == [(2, 8), (2,), (3, 2), (3,)]
    assert build_network({"name": own.format("shaped"), "shape": [4], "outputs": 2}, (2, 4), ())(
        torch.ones(1, 4)
    ).shape == (1, 2)
    assert build_network({"name": own.format("greedy"), "train": 5}, (5,), ()).in_features == 5, "its own setting"
    assert build_network({"name": "torch.nn:Linear", "in_features": 5, "out_features": 1}, (5,), ()).bias is not None


def adapted() -> nn.Module:
    torch.manual_seed(0)
    return adapt(train_only(mlp((5,), 1, (4,)), ["3"]).double(), 2)


def test_an_adapted_network_begins_as_the_network():
    torch.manual_seed(0)
    base, model, x = mlp((5,), 1, (4,)).double(), adapted(), torch.randn(7, 5).double()
    assert torch.equal(model(x), base(x))
    assert sorted(weights_of(model).params) == ["1.down", "1.up", "3.bias", "3.weight"]
    assert model[1].down.shape == (2, 5)
    assert model[1].up.shape == (4, 2)
    assert torch.equal(frozen_tensors(model)["1.layer.weight"], base[1].weight)


def test_a_step_of_an_adapter_by_hand():
    """h = x (W + B A)', loss = sum(h c): dB = c' x A', dA = B' c' x. From B = 0 only B moves at first."""
    torch.manual_seed(1)
    model = adapt(nn.Sequential(nn.Linear(3, 2, bias=False).requires_grad_(False)).double(), 1)
    x, c, layer = torch.randn(4, 3).double(), torch.randn(4, 2).double(), model[0]
    w, a, b = layer.layer.weight.clone(), layer.down.detach().clone(), layer.up.detach().clone()
    for _ in range(2):
        model.zero_grad()
        (model(x) * c).sum().backward()
        with torch.no_grad():
            layer.down -= 0.1 * layer.down.grad
            layer.up -= 0.1 * layer.up.grad
        a, b = a - 0.1 * b.T @ c.T @ x, b - 0.1 * c.T @ x @ a.T
        torch.testing.assert_close(layer.down.detach(), a)
        torch.testing.assert_close(layer.up.detach(), b)
    assert b.abs().min() > 0
    assert torch.equal(layer.layer.weight, w)
    torch.testing.assert_close(model(x), x @ (w + b @ a).T)


def test_torchs_attention_reads_adapted_weights():
    """It never calls its output layer, and its encoder layers have a kernel that reads the weights of theirs."""
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True).double().requires_grad_(False)
    model, x = adapt(nn.Sequential(layer), 2), torch.randn(3, 4, 8).double()
    assert isinstance(layer.self_attn.out_proj, Adapted)
    before = model(x)
    for name, parameter in model.named_parameters():
        if name.endswith("up"):
            nn.init.normal_(parameter)
    trained = model.train()(x)
    assert not torch.allclose(before, trained)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), trained)


class TextEncoder(nn.Module):
    """Token ids, 0 is padding; the mean over the positions of a small encoder."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.embedding, self.encoder = nn.Embedding(12, 8), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        h = self.encoder(self.embedding(x), src_key_padding_mask=x == 0)
        return self.head(h.mean(1))


class VisionTransformer(nn.Module):
    """Patches of 4 x 4 pixels, a class token, and a small encoder."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
        self.patches, self.token = nn.Conv2d(1, 8, 4, 4), nn.Parameter(torch.zeros(1, 1, 8))
        self.place = nn.Parameter(torch.randn(1, 5, 8))
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 1)

    def forward(self, x):
        h = self.patches(x).flatten(2).mT
        h = torch.cat([self.token.expand(len(h), -1, -1), h], 1) + self.place
        return self.head(self.encoder(h)[:, 0])


def examples(kind: type) -> list:
    torch.manual_seed(3)
    y = [(torch.arange(12) % 3 == 0).long() for _ in range(3)]
    if kind is TextEncoder:
        return [(torch.randint(1, 12, (12, 6)) * (torch.arange(6) < 4 + each[:, None]), each) for each in y]
    return [(torch.randn(12, 1, 8, 8), each) for each in y]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no rule for the attention of a CPU
@pytest.mark.parametrize("part", ["whole", "head", "adapters"])
@pytest.mark.parametrize("kind", [TextEncoder, VisionTransformer])
def test_transformers_train_with_loop_and_vmap(kind, part):
    results = []
    for executor in ("loop", "vmap"):
        torch.manual_seed(4)
        model = kind()
        if part != "whole":
            train_only(model, ["head"])
        if part == "adapters":
            adapt(model, 2)
        for module in model.modules():  # which draws alike in no two executors
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
        before = weights_of(model.double())
        result = fit(
            model, examples(kind), build("fedxl2", partial_auc(), lr=0.1), rounds=2, local_steps=2, batch_size=(3, 4),
            executor=executor, dtype="float64", device="cpu",
        )  # fmt: skip
        moved = [name for name, p in result.weights.params.items() if not torch.equal(p, before.params[name])]
        assert len(moved) >= len(before.params) - 2, "all but the bias of keys, which attention does not feel"
        results.append(result.weights.params)
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=1e-8, atol=1e-10, msg=name)


def test_padding_is_evaluated_as_it_was_trained():
    """torch's fused encoder would give 0 at padded places, and the mean over all places would be another."""
    torch.manual_seed(4)
    model, x = TextEncoder(), torch.tensor([[3, 4, 0, 0, 0, 0], [5, 6, 7, 8, 0, 0]])
    for layer in model.encoder.layers:
        layer.dropout.p = layer.dropout1.p = layer.dropout2.p = layer.self_attn.dropout = 0.0
    weights = weights_of(model)
    with torch.no_grad():
        trained, evaluated = (scorer(model, training)(weights, x)[0] for training in (True, False))
    torch.testing.assert_close(evaluated, trained)

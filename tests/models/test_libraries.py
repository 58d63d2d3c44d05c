"""Networks of other packages by name, where they are installed; nothing of them is downloaded."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from fedxl import UserError, fit, partial_auc
from fedxl.algorithms import build
from fedxl.config.experiment import Config, build_network, execute
from fedxl.data.examples import Splits
from fedxl.data.inputs import from_arrays
from fedxl.models import LIBRARIES, weights_of
from fedxl.prediction.run import network_of, read_finished

IMAGES, TOKENS = (3, 32, 32), (6,)
WIDTHS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
SIZES = {"distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}}
FETCHED = {
    "hf-hub:owner/net": {},
    "owner/net": {},
    "net": {"pretrained": True},
    "other": {"checkpoint_path": "a.bin"},
}


def needs(library: str) -> ModuleType:
    return pytest.importorskip(library, exc_type=Exception)


def trained(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parameters after two rounds; all that train have moved, and all others stayed."""
    before, frozen = weights_of(model), {n: p for n, p in model.named_parameters() if not p.requires_grad}
    clients = [(x[each::2], (torch.arange(len(x)) % 4 < 2)[each::2].long()) for each in range(2)]
    sizes = {"rounds": 2, "local_steps": 2, "batch_size": (2, 2)}
    result = fit(model, clients, build("fedxl2", partial_auc(), lr=0.1), device="cpu", dtype="float64", **sizes)
    after = dict(result.model.named_parameters())
    assert all(torch.equal(after[name], p.double()) for name, p in frozen.items())
    still = [name for name, p in before.params.items() if torch.equal(after[name], p.double())]
    assert not [name for name in still if "key" not in name], "but the bias of keys, which attention does not feel"
    return result.weights.params


@pytest.mark.parametrize("library", list(LIBRARIES))
@pytest.mark.parametrize("name", list(FETCHED))
def test_nothing_comes_from_a_hub(library, name):
    with pytest.raises(UserError, match="nothing is downloaded"):
        build_network({"name": f"{library}:{name}", **FETCHED[name]}, IMAGES, ())


@pytest.mark.parametrize("library", list(LIBRARIES))
def test_a_missing_package_is_one_line(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=f"'{library}:net' needs the package {library}, which cannot be imported"):
        build_network({"name": f"{library}:net"}, IMAGES, ())


class Package(ModuleType):
    """Stands for torchvision: one network, whose last layer has another name."""

    class models:
        @staticmethod
        def get_model(name: str, weights: None, num_classes: int, width: int = 4) -> nn.Module:
            if name != "net":
                raise ValueError(f"Unknown model {name}")
            assert weights is None
            model = nn.Sequential(nn.Conv2d(3, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            model.add_module("classifier", nn.Sequential(nn.Linear(width, width), nn.Linear(width, num_classes)))
            return model


@pytest.fixture
def package(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", Package("torchvision"))


def test_the_head_of_a_file_with_other_outputs_is_left(package, tmp_path, caplog):
    published = Package.models.get_model("net", None, 10, width=3).state_dict()
    torch.save(published, tmp_path / "net.pth")
    table = {"name": "torchvision:net", "weights": str(tmp_path / "net.pth"), "width": 3, "train": ["classifier.1"]}
    model = build_network(table, IMAGES, ())
    for name, tensor in model.state_dict().items():
        assert name.startswith("classifier.1.") or torch.equal(tensor, published[name]), name
    assert model(torch.zeros(2, *IMAGES)).shape == (2, 1)
    (line,) = caplog.messages
    assert "'classifier.1', belongs to another task; this network's starts untrained" in line
    assert sorted(weights_of(model).params) == ["classifier.1.bias", "classifier.1.weight"]


WRONG = {
    "Unknown model nte": ({"name": "torchvision:nte"}, IMAGES),
    "take images": ({"name": "torchvision:net"}, (1, 32, 32)),
    "unexpected keyword argument 'hidden'": ({"name": "torchvision:net", "hidden": 3}, IMAGES),
    "there is no file nowhere.pth": ({"name": "torchvision:net", "weights": "nowhere.pth"}, IMAGES),
}


@pytest.mark.parametrize("told", list(WRONG))
def test_a_library_that_refuses_is_one_line(package, told):
    table, shape = WRONG[told]
    with pytest.raises(UserError) as error:
        build_network(table, shape, ())
    assert told in str(error.value)


def test_a_network_of_torchvision():
    needs("torchvision")
    model = build_network({"name": "torchvision:resnet18", "train": ["fc"]}, IMAGES, ())
    weights = weights_of(model)
    assert sorted(weights.params) == ["fc.bias", "fc.weight"]
    assert not weights.buffers
    trained(model, torch.randn(16, *IMAGES))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "test_vit", "resnet10t"])
def test_a_network_of_timm(name, tmp_path):
    """A ViT is built for the size of the images."""
    timm = needs("timm")
    size = {"img_size": 32} if "vit" in name else {}
    published = timm.create_model(name, num_classes=7, **size).state_dict()
    torch.save(published, tmp_path / "w.pt")
    table = {"name": f"timm:{name}", "train": ["head" if size else "fc"], "weights": str(tmp_path / "w.pt")}
    model = build_network(table, IMAGES, ())
    for key, tensor in model.state_dict().items():
        assert key.startswith(("head.", "fc.")) or torch.equal(tensor, published[key]), key
    trained(model, torch.randn(16, *IMAGES))


def test_adapters_in_a_vision_transformer_of_timm():
    needs("timm")
    table = {"name": "timm:test_vit", "train": ["head"], "adapter_rank": 2, "adapter_targets": ["*.qkv"]}
    torch.manual_seed(0)
    params = trained(build_network(table, (1, 32, 32), ()), torch.randn(16, 1, 32, 32))
    assert {name.rpartition(".")[2] for name in params if "qkv" in name} == {"down", "up"}


def plain(name: str) -> str:
    """Without what an adapter adds."""
    return name.replace(".layer.weight", ".weight").replace(".layer.bias", ".bias")


@pytest.mark.parametrize("name", ["bert", "distilbert", "roberta"])
def test_a_network_of_hugging_face(name, tmp_path, caplog, capfd):
    package = needs("transformers")
    sizes = {**SIZES.get(name, WIDTHS), "vocab_size": 30}
    table = {"name": f"transformers:{name}", **sizes, "train": ["*classifier*"], "adapter_rank": 2}
    config = package.AutoConfig.for_model(name, **sizes)
    published = package.AutoModel.from_config(config).state_dict()  # encoders have no classifier
    torch.save(published, tmp_path / "encoder.pt")
    torch.manual_seed(0)
    model = build_network({**table, "weights": str(tmp_path / "encoder.pt")}, TOKENS, ())
    (line,) = caplog.messages
    assert "start untrained: classifier" in line.replace("pre_classifier", "classifier")
    assert "REPORT" not in capfd.readouterr().err, "transformers itself does not say it, too"
    own = {plain(key): tensor for key, tensor in model.state_dict().items()}
    read = [
        key
        for key, tensor in published.items()
        if any(name.endswith(plain(key)) and torch.equal(mine, tensor) for name, mine in own.items())
    ]
    assert len(read) >= len([key for key in published if "pooler" not in key]), "the whole encoder is read"
    x = torch.randint(2, 30, (16, 6))
    x[::2, 4:] = config.pad_token_id
    model.eval()
    torch.testing.assert_close(model(x[:1]), model(x[:1, :4]), rtol=1e-4, atol=1e-5)  # padding is not attended to
    trained(model, x)


@pytest.mark.parametrize(
    "wrong", ["hidden_sise", "auto_map", "attn_implementation", "_name_or_path", "quantization_config"]
)
def test_settings_of_hugging_face_are_those_of_the_type(wrong):
    needs("transformers")
    with pytest.raises(UserError, match="unknown setting"):
        build_network({"name": "transformers:bert", wrong: "x"}, TOKENS, ())
    with pytest.raises(UserError, match="cannot build 'brt'"):
        build_network({"name": "transformers:brt"}, TOKENS, ())


def test_a_file_of_another_network_is_one_line(tmp_path):
    needs("transformers")
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "other.pt")
    table = {"name": "transformers:bert", **WIDTHS, "vocab_size": 30, "weights": str(tmp_path / "other.pt")}
    with pytest.raises(UserError, match=r"other\.pt is not of this network: it lacks 'bert"):
        build_network(table, TOKENS, ())


def test_adapters_of_peft_train_as_they_are():
    peft = needs("peft")
    torch.manual_seed(0)
    base = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 1))
    config = peft.LoraConfig(r=2, target_modules=["1"], modules_to_save=["3"])
    params = trained(peft.get_peft_model(base, config), torch.randn(16, 12))
    assert len(params) == 4


def test_a_run_with_a_network_of_a_library_is_read_back(package, tmp_path):
    """It is code outside of fedxl, which a reader must allow; the file of its first weights is not needed."""
    torch.save(Package.models.get_model("net", None, 1).state_dict(), tmp_path / "net.pth")
    model = {"name": "torchvision:net", "weights": str(tmp_path / "net.pth"), "train": ["classifier"]}
    sizes = {"rounds": 1, "local_steps": 1, "batch1": 2, "batch2": 2, "device": "cpu"}
    data = {"name": "tests.models.test_libraries:colours"}
    method = {"name": "fedxl2", "lr": 0.1}
    config = Config(data=data, model=model, risk={"name": "pauc"}, algorithm=method, run=sizes)
    result = execute(config, tmp_path / "run")
    (tmp_path / "net.pth").unlink()
    run = read_finished(tmp_path / "run")
    with pytest.raises(UserError, match="code outside of fedxl"):
        network_of(run)
    x = torch.rand(3, *IMAGES)
    assert torch.equal(network_of(run, allow_code=True)(x), result.model(x))


def colours() -> Splits:
    y = torch.arange(8) % 2
    return Splits(from_arrays([(torch.rand(8, *IMAGES), y) for _ in range(2)]), None, None)

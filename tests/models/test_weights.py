"""Weights to begin with, from files of all kinds, and what is said of those that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fedxl import UserError, auroc
from fedxl.config.experiment import Config, build_model, execute
from fedxl.models import MODELS, densenet121, resnet18, resnet20
from tests.models.test_zoo import COLOUR, DEEP, GREY, State, images, seeded, stirred

assert seeded  # a fixture for every test here, too


def saved(path: Path, state: object, **options: bool) -> str:
    torch.save(state, path, **options)
    return str(path)


def older(name: str) -> str:
    """As the published files of torchvision's DenseNets have it."""
    for layer in ("norm1", "norm2", "conv1", "conv2"):
        name = name.replace(f".{layer}.", f".{layer[:-1]}.{layer[-1]}.") if "denselayer" in name else name
    return name


def test_the_published_densenet_is_read(tmp_path):
    """Older names, older format, no num_batches_tracked."""
    model = stirred(densenet121(COLOUR, 5))
    state = {older(name): t for name, t in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    assert "features.denseblock4.denselayer16.norm.2.running_var" in state
    path = saved(tmp_path / "published.pth", state, _use_new_zipfile_serialization=False)
    read = densenet121(COLOUR, 5, weights=path).double().eval()
    torch.testing.assert_close(read(images()), model(images()), rtol=1e-4, atol=1e-4)  # it is kept in float32


@pytest.mark.parametrize("name", DEEP)
def test_weights_are_read_from_files_of_all_kinds(name, tmp_path):
    model = stirred(MODELS[name](COLOUR, 5)).float()
    state, x = model.state_dict(), images().float()
    save_file(state, tmp_path / "plain.safetensors")
    saved(tmp_path / "plain.pth", state)
    saved(tmp_path / "wrapped.pth", {"epoch": 3, "state_dict": state})
    for file in ("plain.safetensors", "plain.pth", "wrapped.pth"):
        assert torch.equal(MODELS[name](COLOUR, 5, weights=str(tmp_path / file)).eval()(x), model(x)), file


def test_weights_of_group_norm_are_read_by_group_norm(tmp_path):
    model = stirred(resnet20(COLOUR, norm="group")).float()
    read = resnet20(COLOUR, norm="group", weights=saved(tmp_path / "group.pth", model.state_dict()))
    assert torch.equal(read(images().float()), model(images().float()))


@pytest.mark.parametrize("kept", [True, False], ids=["another head", "no head"])
def test_a_head_that_does_not_fit_begins_afresh(kept, tmp_path):
    file = {name: t for name, t in resnet20(COLOUR, 10).state_dict().items() if kept or not name.startswith("fc.")}
    torch.manual_seed(5)
    read = resnet20(COLOUR, 1, weights=saved(tmp_path / "ten.pth", file)).state_dict()
    torch.manual_seed(5)
    fresh = resnet20(COLOUR, 1).state_dict()
    for name, tensor in read.items():
        assert torch.equal(tensor, (fresh if name.startswith("fc.") else file)[name]), name


@pytest.mark.parametrize("name", DEEP)
def test_grey_images_are_scored_as_colours_all_alike(name, tmp_path):
    model = stirred(MODELS[name](COLOUR, 5))
    read = MODELS[name](GREY, 5, weights=saved(tmp_path / "colour.pth", model.state_dict())).double().eval()
    x = images(channels=1)
    torch.testing.assert_close(read(x), model(x.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-4)


class Code:
    """A pickle that would make a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return Path.mkdir, (self.folder,)


def changed(**changes: Tensor | None) -> State:
    """The weights of a resnet20, with some put in or (None) taken out; `__` stands for a dot."""
    state = {**resnet20(COLOUR).state_dict(), **{name.replace("__", "."): t for name, t in changes.items()}}
    return {name: t for name, t in state.items() if t is not None}


NO_WEIGHTS = "is not a file of weights; it must hold tensors by name"
# What may be in a file instead, and what the line must say.
FILES = {
    "a model": (lambda folder: resnet20(COLOUR), {}, NO_WEIGHTS),
    "code": (lambda folder: Code(folder / "made"), {}, f"{NO_WEIGHTS}.* and no code"),
    "code among weights": (
        lambda folder: changed(fc__weight=Code(folder / "made")),
        {},
        f"{NO_WEIGHTS}.* and no code",
    ),
    "a tensor": (lambda folder: torch.ones(3), {}, NO_WEIGHTS),
    "nothing": (lambda folder: {}, {}, NO_WEIGHTS),
    "other things by name": (lambda folder: {"epoch": 3}, {}, NO_WEIGHTS),
    "a tensor missing": (lambda folder: changed(layer2__0__bn1__bias=None), {}, r"lacks 'layer2.0.bn1.bias' \[32\]"),
    "a tensor too many": (
        lambda folder: changed(layer2__0__bias=torch.ones(3)),
        {},
        "holds 'layer2.0.bias', which this network does not have; its names run from 'conv1.weight' to 'fc.bias'",
    ),
    "another shape": (
        lambda folder: changed(layer1__0__bn1__bias=torch.ones(3)),
        {},
        r"'layer1.0.bn1.bias' must be \[16\] for this network, not \[3\]",
    ),
    "another stem": (
        lambda folder: changed(conv1__weight=torch.ones(16, 3, 7, 7)),
        {},
        r"'conv1.weight' must be \[16, 3, 3, 3\] for this network, not \[16, 3, 7, 7\]; its stem or its channels",
    ),
    "colours for other channels": (
        lambda folder: changed(),
        {"shape": (2, 32, 32)},
        r"'conv1.weight' must be \[16, 2",
    ),
    "grey for colours": (
        lambda folder: changed(conv1__weight=torch.ones(16, 1, 3, 3)),
        {},
        r"'conv1.weight' must be \[16, 3, 3, 3\] for this network, not \[16, 1, 3, 3\]",
    ),
    "batch norm for group norm": (lambda folder: changed(), {"norm": "group"}, 'batch norm.*; set norm = "batch"'),
    "group norm for batch norm": (
        lambda folder: resnet20(COLOUR, norm="group").state_dict(),
        {},
        r"lacks 'bn1.running_mean' \[16\]",
    ),
    "another network": (lambda folder: resnet18(COLOUR).state_dict(), {}, "holds 'layer2.0.downsample.0.weight'"),
}


@pytest.mark.parametrize("mistake", list(FILES))
def test_files_that_do_not_fit(mistake, tmp_path):
    write, options, message = FILES[mistake]
    path = saved(tmp_path / "file.pth", write(tmp_path))
    with pytest.raises(UserError, match=message) as error:
        resnet20(**{"shape": COLOUR, "weights": path, **options})
    assert "\n" not in str(error.value)
    assert path in str(error.value)
    assert not (tmp_path / "made").exists(), "no code of a file is run"


STRANGE = {
    "sparse": lambda t: t.to_sparse(),
    "a shape alone": lambda t: t.to("meta"),
    "complex": lambda t: t.to(torch.complex64),
    "quantised": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "nested": lambda t: torch.nested.nested_tensor([t[0], t[1]]),
}


@pytest.mark.parametrize("kind", list(STRANGE))
@pytest.mark.filterwarnings("ignore")  # torch's own, of kinds that it is still at work on
def test_tensors_that_are_no_plain_numbers(kind, tmp_path):
    path = saved(tmp_path / "file.pth", changed(conv1__weight=STRANGE[kind](changed()["conv1.weight"])))
    with pytest.raises(
        UserError, match=r"'conv1.weight' must be a plain dense tensor|is not a file of weights"
    ) as error:
        resnet20(COLOUR, weights=path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_files_that_cannot_be_read(suffix, tmp_path):
    path = tmp_path / f"file.{suffix}"
    for content, message in ((None, "there is no file"), (b"", "no code"), (b"epoch,loss\n1,0.5\n", "no code")):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError, match=message) as error:
            resnet20(COLOUR, weights=str(path))
        assert "\n" not in str(error.value)
    whole = tmp_path / f"whole.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(changed(), whole)
    path.write_bytes(whole.read_bytes()[:-1000])
    with pytest.raises(UserError, match=NO_WEIGHTS):
        resnet20(COLOUR, weights=str(path))
    with pytest.raises(UserError, match=r"cannot read|not a file of weights"):
        resnet20(COLOUR, weights=str(tmp_path))


def config(**model: object) -> Config:
    run = {"rounds": 1, "local_steps": 1, "batch1": 2, "batch2": 2, "cohort": 2, "executor": "loop", "device": "cpu"}
    return Config({"name": "digits"}, {"name": "auroc"}, {"name": "fedxl1", "lr": 1e-9}, model, run)


def test_a_config_names_its_weights(tmp_path, monkeypatch):
    """From the current folder, as data.path; two options of a run that differ in nothing but the file."""
    monkeypatch.chdir(tmp_path)
    file = stirred(resnet20(COLOUR, 10)).state_dict()
    saved(Path("ten.pth"), file)
    named = config(name="resnet20", weights="ten.pth")
    begun, scratch = (build_model(c, (1, 8, 8), auroc()) for c in (named, config(name="resnet20")))
    assert torch.equal(begun.fc.weight, scratch.fc.weight), "the head is drawn from the run's seed, file or no file"
    torch.testing.assert_close(begun.layer3[2].conv2.weight.double(), file["layer3.2.conv2.weight"])
    trained = execute(named, tmp_path / "run").model
    torch.testing.assert_close(trained.state_dict()["layer3.2.conv2.weight"], begun.layer3[2].conv2.weight)
    with pytest.raises(UserError, match=r"\[model\] there is no file nowhere.pth; model.weights must name"):
        build_model(config(name="resnet20", weights="nowhere.pth"), (1, 8, 8), auroc())
    with pytest.raises(UserError, match=r"'model.weights' must be a text, not 3"):
        build_model(config(name="resnet20", weights=3), (1, 8, 8), auroc())

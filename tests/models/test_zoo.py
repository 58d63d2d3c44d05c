"""The networks of the literature: their names and sizes, their scores by formula, and weights from files."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from fedxl import UserError, auroc, tree
from fedxl.models import MODELS, Weights, densenet121, resnet18, resnet20, scorer, simple_cnn, weights_of
from fedxl.models.layers import ScoreNorm
from fedxl.models.networks import DenseLayer, Halve
from tests.conftest import make_clients
from tests.running import fit_named

COLOUR, GREY = (3, 32, 32), (1, 32, 32)
IMAGE_NETWORKS = ["cnn", "simple_cnn", "resnet18", "resnet20", "densenet121"]
DEEP = ["resnet18", "resnet20", "densenet121"]
State = dict[str, Tensor]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def stirred(model: nn.Module, seed: int = 1) -> nn.Module:
    """The model in float64 with all it holds moved from where it begins, norms and their statistics, too."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.double().state_dict().values():
        if tensor.is_floating_point():
            scale = 0.1 if tensor.ndim == 1 else 0.01
            tensor.add_(scale * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype))
    return model.eval()


def images(channels: int = 3, size: int = 32, count: int = 2) -> Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


# The sizes that the literature gives: torchvision's documentation for 1,000 classes; the ResNet-18 for CIFAR-10 in
# common use; 0.27 M in Table 6 of He et al.; TensorFlow Federated's network for EMNIST; the last one counted by hand.
COUNTS = {
    "resnet18": (lambda: resnet18((3, 224, 224), 1000, stem="7x7"), 11_689_512),
    "resnet18 for CIFAR-10": (lambda: resnet18(COLOUR, 10), 11_173_962),
    "resnet20": (lambda: resnet20(COLOUR, 10), 269_722),
    "densenet121": (lambda: densenet121((3, 224, 224), 1000), 7_978_856),
    "simple_cnn for EMNIST": (lambda: simple_cnn((1, 28, 28), 62), 1_206_590),
    "simple_cnn": (
        lambda: simple_cnn(COLOUR, 10),
        (27 * 32 + 32) + (9 * 32 * 64 + 64) + (14 * 14 * 64 * 128 + 128) + (128 * 10 + 10),
    ),
}


@pytest.mark.parametrize("name", list(COUNTS))
def test_number_of_parameters(name):
    build, expected = COUNTS[name]
    assert sum(p.numel() for p in build().parameters()) == expected


def norm_shapes(name: str, width: int) -> dict[str, tuple[int, ...]]:
    vectors = ("weight", "bias", "running_mean", "running_var")
    return {**{f"{name}.{vector}": (width,) for vector in vectors}, f"{name}.num_batches_tracked": ()}


def torchvision_resnet18() -> dict[str, tuple[int, ...]]:
    expected = {"conv1.weight": (64, 3, 7, 7), **norm_shapes("bn1", 64)}
    expected |= {"fc.weight": (1000, 512), "fc.bias": (1000,)}
    for stage in (1, 2, 3, 4):
        width = 32 * 2**stage
        for block in (0, 1):
            name, before = f"layer{stage}.{block}", width // 2 if block == 0 and stage > 1 else width
            expected |= {f"{name}.conv1.weight": (width, before, 3, 3), f"{name}.conv2.weight": (width, width, 3, 3)}
            expected |= norm_shapes(f"{name}.bn1", width) | norm_shapes(f"{name}.bn2", width)
            if before != width:
                expected[f"{name}.downsample.0.weight"] = (width, before, 1, 1)
                expected |= norm_shapes(f"{name}.downsample.1", width)
    return expected


def torchvision_densenet121() -> dict[str, tuple[int, ...]]:
    expected = {"features.conv0.weight": (64, 3, 7, 7), **norm_shapes("features.norm0", 64)}
    expected |= norm_shapes("features.norm5", 1024)
    expected |= {"classifier.weight": (1000, 1024), "classifier.bias": (1000,)}
    for block, layers, begins, ends in ((1, 6, 64, 256), (2, 12, 128, 512), (3, 24, 256, 1024), (4, 16, 512, 1024)):
        for layer in range(1, layers + 1):
            name, width = f"features.denseblock{block}.denselayer{layer}", begins + 32 * (layer - 1)
            expected |= norm_shapes(f"{name}.norm1", width) | norm_shapes(f"{name}.norm2", 128)
            expected |= {f"{name}.conv1.weight": (128, width, 1, 1), f"{name}.conv2.weight": (32, 128, 3, 3)}
        if block < 4:
            expected |= norm_shapes(f"features.transition{block}.norm", ends)
            expected[f"features.transition{block}.conv.weight"] = (ends // 2, ends, 1, 1)
    return expected


def test_names_and_shapes_are_those_of_torchvision():
    assert shapes(resnet18((3, 224, 224), 1000, stem="7x7")) == torchvision_resnet18()
    assert shapes(densenet121((3, 224, 224), 1000)) == torchvision_densenet121()


def normed(state: State, name: str, x: Tensor) -> Tensor:
    mean, var, weight, bias = (
        state[f"{name}.{kind}"][:, None, None] for kind in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / (var + 1e-5).sqrt() * weight + bias


def resnet_by_formula(state: State, x: Tensor, large: bool, blocks: int) -> Tensor:
    """He et al. 2016, written down from the paper: what a file of weights says the scores are."""
    conv = functional.conv2d
    x = normed(state, "bn1", conv(x, state["conv1.weight"], stride=2 if large else 1, padding=3 if large else 1))
    x = functional.max_pool2d(x.clamp(min=0), 3, 2, 1) if large else x.clamp(min=0)
    for stage in range(1, 5):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            if f"{name}.conv1.weight" not in state:
                continue
            stride = 2 if stage > 1 and block == 0 else 1
            h = normed(state, f"{name}.bn1", conv(x, state[f"{name}.conv1.weight"], stride=stride, padding=1))
            h = normed(state, f"{name}.bn2", conv(h.clamp(min=0), state[f"{name}.conv2.weight"], padding=1))
            if f"{name}.downsample.0.weight" in state:
                x = conv(x, state[f"{name}.downsample.0.weight"], stride=stride)
                x = normed(state, f"{name}.downsample.1", x)
            elif stride == 2:
                x = torch.cat([x[:, :, ::2, ::2], torch.zeros_like(x[:, :, ::2, ::2])], 1)
            x = (h + x).clamp(min=0)
    return x.mean((2, 3)) @ state["fc.weight"].T + state["fc.bias"]


def densenet_by_formula(state: State, x: Tensor) -> Tensor:
    """Huang et al. 2017, written down from the paper; each layer reads all that came before it in its block."""
    conv = functional.conv2d
    x = normed(state, "features.norm0", conv(x, state["features.conv0.weight"], stride=2, padding=3))
    x = functional.max_pool2d(x.clamp(min=0), 3, 2, 1)
    for block, layers in enumerate((6, 12, 24, 16), 1):
        seen = [x]
        for layer in range(1, layers + 1):
            name = f"features.denseblock{block}.denselayer{layer}"
            h = conv(normed(state, f"{name}.norm1", torch.cat(seen, 1)).clamp(min=0), state[f"{name}.conv1.weight"])
            h = conv(normed(state, f"{name}.norm2", h).clamp(min=0), state[f"{name}.conv2.weight"], padding=1)
            seen.append(h)
        x, name = torch.cat(seen, 1), f"features.transition{block}"
        if block < 4:
            x = conv(normed(state, f"{name}.norm", x).clamp(min=0), state[f"{name}.conv.weight"])
            x = functional.avg_pool2d(x, 2)
    x = normed(state, "features.norm5", x).clamp(min=0).mean((2, 3))
    return x @ state["classifier.weight"].T + state["classifier.bias"]


def test_scores_are_those_of_the_papers():
    x = images(size=33)
    for model, large, blocks in (
        (resnet18(COLOUR, 3), False, 2),
        (resnet18(COLOUR, 3, stem="7x7"), True, 2),
        (resnet20(COLOUR, 3), False, 3),
    ):
        state = stirred(model).state_dict()
        torch.testing.assert_close(model(x), resnet_by_formula(state, x, large, blocks))
    dense = stirred(densenet121(COLOUR, 3))
    for size in (33, 64, 75):
        x = images(size=size)
        torch.testing.assert_close(dense(x), densenet_by_formula(dense.state_dict(), x))


def test_halving_leaves_one_pixel_alone():
    for size, halved in ((7, 3), (3, 1), (1, 1), (2, 1)):
        assert Halve()(images(size=size)).shape[2:] == (halved, halved)
    assert torch.equal(Halve()(images(size=1)), images(size=1))


def test_first_weights_are_those_of_torchvision():
    residual, dense = resnet18(COLOUR, stem="7x7"), densenet121(COLOUR)
    for conv, fan in (
        (residual.conv1, 64 * 7 * 7),  # fan out
        (residual.layer4[1].conv2, 512 * 3 * 3),
        (dense.features.conv0, 3 * 7 * 7),  # fan in
        (dense.features.transition3.conv, 1024),
    ):
        assert conv.weight.std().item() == pytest.approx(math.sqrt(2 / fan), rel=0.03)
    assert not dense.classifier.bias.any()
    for module in (*residual.modules(), *dense.modules()):
        if isinstance(module, nn.BatchNorm2d):
            assert module.weight.eq(1).all()
            assert module.bias.eq(0).all()


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", DEEP)
def test_every_parameter_has_a_gradient_and_group_norm_no_buffers(name, norm):
    model = MODELS[name](COLOUR, norm=norm)
    model(torch.randn(4, *COLOUR)).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
    assert bool(list(model.buffers())) == (norm == "batch")


@pytest.mark.parametrize("score_norm", [False, True])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", DEEP)
def test_clients_at_once_and_one_by_one_agree(name, norm, score_norm):
    """Gradients of a pure function, under vmap; the buffers of each client move as if it were alone."""
    models = [stirred(MODELS[name]((1, 16, 16), norm=norm, score_norm=score_norm), seed) for seed in (1, 2)]
    score, x = scorer(models[0], training=True), torch.stack([images(1, 16, 3), images(1, 16, 3) + 1])

    def gradient(weights: Weights, x: Tensor) -> tuple[State, State]:
        def total(params: State) -> tuple[Tensor, State]:
            h, buffers = score(Weights(params, weights.buffers), x)
            return h.square().sum(), buffers

        return torch.func.grad(total, has_aux=True)(weights.params)

    weights = [weights_of(model) for model in models]
    together = torch.func.vmap(gradient)(tree.stack(weights), x)
    apart = tree.stack([gradient(w, part) for w, part in zip(weights, x, strict=True)])
    torch.testing.assert_close(together, apart)


@pytest.mark.parametrize("name", DEEP)
def test_normed_scores_do_not_move_together(name, tmp_path):
    save_file(MODELS[name](COLOUR).state_dict(), tmp_path / "begin.safetensors")
    plain, normed = (
        MODELS[name](COLOUR, weights=str(tmp_path / "begin.safetensors"), score_norm=norm) for norm in (False, True)
    )
    x = torch.randn(8, *COLOUR)
    h = normed(x)[:, 0].detach()
    assert float(h.mean()) == pytest.approx(0, abs=1e-5)
    torch.testing.assert_close(h, functional.batch_norm(plain(x), None, None, training=True)[:, 0].detach())
    last = [module for module in normed.modules() if isinstance(module, nn.Linear)][-1]
    with torch.no_grad():
        last.bias += 5
    torch.testing.assert_close(normed(x)[:, 0].detach(), h, rtol=1e-4, atol=1e-4)
    save_file(normed.state_dict(), tmp_path / "own.safetensors")
    again = MODELS[name](COLOUR, weights=str(tmp_path / "own.safetensors"), score_norm=True)
    torch.testing.assert_close(again.eval()(x), normed.eval()(x))
    grouped = MODELS[name](COLOUR, norm="group", score_norm=True)
    save_file(grouped.state_dict(), tmp_path / "group.safetensors")
    MODELS[name](COLOUR, norm="group", score_norm=True, weights=str(tmp_path / "group.safetensors"))
    assert normed.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_normed_scores_need_both_classes_at_every_client():
    clients = make_clients([(4, 4), (3, 0)])
    network = nn.Sequential(nn.Linear(5, 1), ScoreNorm(1))
    with pytest.raises(UserError, match="needs both classes at every client"):
        fit_named(network, clients, auroc(), rounds=1, device="cpu", dtype="float64")
    fit_named(network, clients[:1] * 2, auroc(), rounds=1, local_steps=1, device="cpu", dtype="float64")


def test_normed_scores_in_half_precision():
    x = torch.randn(8, *COLOUR)
    with torch.autocast("cpu", torch.bfloat16):
        assert resnet20(COLOUR, score_norm=True)(x).dtype == torch.float32, "in the precision of the weights"


def test_networks_compile_as_one_graph():
    dense = nn.Sequential(DenseLayer(16, nn.BatchNorm2d), Halve(), DenseLayer(48, nn.BatchNorm2d), Halve())
    for model, x in ((resnet20(COLOUR), images(size=8).float()), (dense, torch.randn(2, 16, 3, 3))):
        compiled = torch.compile(model.eval(), backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), model(x))


def test_simple_cnn_drops_in_training_only():
    def rates(model: nn.Module) -> list[float]:
        return [module.p for module in model if isinstance(module, nn.Dropout)]

    model, x = simple_cnn(COLOUR), torch.randn(4, *COLOUR)
    assert rates(model) == [0.25, 0.5]
    assert rates(simple_cnn(COLOUR, dropout=(0.1, 0.0))) == [0.1, 0.0]
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


# What a user may get wrong in [model], and what the line must say.
OPTIONS = {
    "stem": (resnet18, {"stem": "5x5"}, "stem must be one of 3x3, 7x7, not '5x5'"),
    "no norm": (resnet18, {"norm": "none"}, "norm must be one of batch, group, not 'none'"),
    "norm of resnet20": (resnet20, {"norm": "layer"}, "norm must be one of batch, group, not 'layer'"),
    "norm of densenet121": (densenet121, {"norm": "none"}, "norm must be one of batch, group, not 'none'"),
    "one rate": (simple_cnn, {"dropout": (0.5,)}, r"dropout must be two rates in \[0, 1\), got \[0.5\]"),
    "all dropped": (simple_cnn, {"dropout": (0.5, 1.0)}, r"dropout must be two rates in \[0, 1\)"),
    "too small": (simple_cnn, {"shape": (3, 8, 5)}, "needs images of 6 x 6 pixels or more, not 8 x 5"),
}


@pytest.mark.parametrize("mistake", list(OPTIONS))
def test_wrong_options(mistake):
    build, options, message = OPTIONS[mistake]
    with pytest.raises(UserError, match=message):
        build(**{"shape": COLOUR, **options})


@pytest.mark.parametrize("shape", [(64,), (32, 32), (2, 3, 32, 32)], ids=str)
@pytest.mark.parametrize("name", IMAGE_NETWORKS)
def test_networks_for_images_refuse_the_rest(name, shape):
    with pytest.raises(UserError, match=rf"the {name} needs images \[channels, height, width\]"):
        MODELS[name](shape)

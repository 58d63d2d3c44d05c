"""CIFAR, MedMNIST and CheXpert, from small files in the published formats that the tests write themselves."""

from __future__ import annotations

import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedxl import UserError
from fedxl.config.experiment import Config, load_data
from fedxl.data import chexpert, cifar10, cifar100, medmnist
from fedxl.data.examples import Splits
from fedxl.data.splits import Sites
from tests.cli.test_errors import CONFIG, command

PLAIN = Sites(clients=4)


def images(count: int, seed: int = 0) -> np.ndarray:
    """Rows of 3072 random bytes: no two alike, so that an image can be told by its pixels."""
    return np.random.default_rng(seed).integers(256, size=(count, 3072), dtype=np.uint8)


def write_cifar10(root: Path, each: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Five batches and a test batch; (all training images, their classes)."""
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    x, y = images(6 * each), np.arange(6 * each) * 7 % 10
    for number, name in enumerate([*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]):
        rows = slice(number * each, (number + 1) * each)
        (folder / name).write_bytes(records(x[rows], y[rows]))
    (folder / "batches.meta.txt").write_text("airplane\n")
    return x[: 5 * each], y[: 5 * each]


def write_cifar100(root: Path) -> None:
    folder = root / "cifar-100-binary"
    folder.mkdir(parents=True)
    for name, count in (("train.bin", 400), ("test.bin", 100)):
        fine = np.arange(count) * 7 % 100
        (folder / name).write_bytes(records(images(count, count), np.zeros(count), fine))


def records(x: np.ndarray, *labels: np.ndarray) -> bytes:
    """As published: each image follows its labels, a byte each."""
    return np.column_stack([*labels, x]).astype(np.uint8).tobytes()


def keys(x: torch.Tensor) -> list[bytes]:
    return [image.numpy().tobytes() for image in x]


def places(x: torch.Tensor, among: np.ndarray) -> list[int]:
    """Where these images are in a file: a site's lie together, in an order of its own."""
    known = {image.tobytes(): at for at, image in enumerate(among)}
    return [known[key] for key in keys(x)]


def same(first: Splits, second: Splits) -> bool:
    return (
        torch.equal(first.train.x, second.train.x)
        and torch.equal(first.train.y, second.train.y)
        and all(map(np.array_equal, first.train.parts, second.train.parts))
        and torch.equal(first.validation.x, second.validation.x)
        and torch.equal(first.test.x, second.test.x)
    )


@pytest.fixture
def cifar(tmp_path) -> Path:
    write_cifar10(tmp_path / "data")
    return tmp_path / "data"


def test_cifar10_has_the_counts_the_balance_and_no_overlap(tmp_path):
    x, classes = write_cifar10(tmp_path)
    splits = cifar10(str(tmp_path), validation=40, sites=PLAIN)
    train = splits.train
    assert (train.x.shape, train.x.dtype) == ((96, 3, 32, 32), torch.uint8)
    assert (int(train.y.sum()), len(splits.validation.y), len(splits.test.y)) == (16, 40, 40)
    assert int(splits.validation.y.sum()) == 20
    assert sorted(np.concatenate(splits.train.parts)) == list(range(96))
    seen = [keys(part) for part in (train.x, splits.validation.x, splits.test.x)]
    assert len({key for part in seen for key in part}) == 96 + 40 + 40
    truth = {row.tobytes(): int(label >= 5) for row, label in zip(x, classes, strict=True)}
    for part, labels in ((seen[0], train.y), (seen[1], splits.validation.y)):
        assert [truth[key] for key in part] == labels[:, 0].tolist(), "every image kept its own label"
    assert keys(splits.test.x) == keys(torch.from_numpy(images(240)[200:]).view(-1, 3, 32, 32))


def test_cifar10_by_its_seed(cifar):
    first, again = (cifar10(str(cifar), validation=40, sites=Sites(clients=4, seed=3)) for _ in range(2))
    other = cifar10(str(cifar), validation=40, sites=Sites(clients=4, seed=4))
    assert same(first, again)
    assert not torch.equal(first.train.x, other.train.x)
    assert not torch.equal(first.validation.x, other.validation.x)
    assert torch.equal(first.test.x, other.test.x), "the same test images whatever the seed"


def test_cifar10_with_other_settings(cifar):
    options = {"validation": 0, "positive": (3,), "ratio": 0}
    splits = cifar10(str(cifar), sites=Sites(clients=4, flipped=0.2), **options)
    assert splits.validation is None
    assert len(splits.train) == 200
    assert int(splits.train.y[:, 0].sum()) == 20 - 4 + 36
    assert int(splits.test.y.sum()) == 4, "labels to test on are never flipped"
    noisy = cifar10(str(cifar), validation=40).train
    assert noisy.augment.noise == pytest.approx(0.02), "the paper's, by default"
    assert len(noisy.parts) == 16


def test_cifar10_is_found_wherever_it_may_lie(cifar, tmp_path):
    above = cifar10(str(cifar), validation=40, sites=PLAIN)
    assert same(above, cifar10(str(cifar / "cifar-10-batches-bin"), validation=40, sites=PLAIN))
    packed = tmp_path / "packed"
    packed.mkdir()
    with tarfile.open(packed / "cifar-10-binary.tar.gz", "w:gz") as tar:
        tar.add(cifar / "cifar-10-batches-bin", "cifar-10-batches-bin")
    assert same(above, cifar10(str(packed), validation=40, sites=PLAIN))
    assert [path.name for path in packed.iterdir()] == ["cifar-10-binary.tar.gz"], "nothing is unpacked"


def test_cifar100_takes_the_fine_labels(tmp_path):
    write_cifar100(tmp_path)
    for root in (tmp_path, tmp_path / "cifar-100-binary"):
        splits = cifar100(str(root), validation=80, sites=PLAIN)
        assert (len(splits.train), int(splits.train.y[:, 0].sum())) == (192, 32)
        assert (int(splits.validation.y.sum()), int(splits.test.y.sum())) == (40, 50)
    few = cifar100(str(tmp_path), positive=(0, 99), ratio=0, validation=0, sites=PLAIN)
    assert int(few.train.y[:, 0].sum()) == 8


def test_cifar_that_is_damaged(cifar, tmp_path):
    folder = cifar / "cifar-10-batches-bin"
    batch = folder / "data_batch_3.bin"
    good = batch.read_bytes()
    wrong = {
        "data_batch_3.bin is not a file of cifar10: its length is no multiple of 3073 bytes": good[:-1],
        "a label is not among 10 classes": records(images(1), np.array([10])),
    }
    for expected, content in wrong.items():
        batch.write_bytes(content)
        with pytest.raises(UserError, match=expected):
            cifar10(str(cifar))
    batch.write_bytes(b"")
    with pytest.raises(UserError, match=r"data_batch_3.bin is not a file of cifar10"):
        cifar10(str(cifar))
    batch.write_bytes(good)
    with pytest.raises(UserError, match=r"validation must lie in \[0, 200\), got 200"):
        cifar10(str(cifar), validation=200)
    batch.unlink()
    with pytest.raises(
        UserError, match=r"cifar-10-batches-bin lacks data_batch_3.bin; fetch https://www.cs.toronto.edu"
    ):
        cifar10(str(cifar))
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="remove it and fetch it again"):
        cifar10(str(tmp_path))
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as tar:
        tar.add(folder, "cifar-10-batches-bin")
    with pytest.raises(UserError, match="does not hold all of cifar-10-batches-bin"):
        cifar10(str(tmp_path))
    cut = (tmp_path / "cifar-10-binary.tar.gz").read_bytes()[:20_000]
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(cut)
    with pytest.raises(UserError, match="remove it and fetch it again"):
        cifar10(str(tmp_path))


def test_cifar_of_any_other_size_is_not_read(cifar, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[cifar10.__module__], "LARGEST", 1000)
    with pytest.raises(UserError, match="is too large to be"):
        cifar10(str(cifar))
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as tar:
        tar.add(cifar / "cifar-10-batches-bin", "cifar-10-batches-bin")
    with pytest.raises(UserError, match="is too large to be what was published"):
        cifar10(str(tmp_path))


def write_medmnist(path: Path, shape: tuple[int, ...], labels: int, classes: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    content = {}
    for part, count in (("train", 60), ("val", 20), ("test", 30)):
        content[f"{part}_images"] = rng.integers(256, size=(count, *shape), dtype=np.uint8)
        content[f"{part}_labels"] = rng.integers(classes, size=(count, labels), dtype=np.uint8)
    np.savez_compressed(path, **content)
    return content


@pytest.mark.parametrize(("label", "column"), [(None, 4), ("mass", 4), ("Infiltration", 3), (13, 13)])
def test_chestmnist_by_label(tmp_path, label, column):
    content = write_medmnist(tmp_path / "chestmnist.npz", (28, 28), 14)
    splits = medmnist(label=label, root=str(tmp_path), sites=PLAIN)
    assert splits.train.x.shape == (60, 1, 28, 28)
    rows = places(splits.train.x, content["train_images"])
    assert splits.train.y[:, 0].tolist() == content["train_labels"][rows, column].tolist()
    assert sorted(rows) == list(range(60))
    assert splits.validation.y[:, 0].tolist() == content["val_labels"][:, column].tolist()
    assert splits.test.y[:, 0].tolist() == content["test_labels"][:, column].tolist()
    assert torch.equal(splits.test.x[:, 0], torch.from_numpy(content["test_images"]))
    assert sorted(np.concatenate(splits.train.parts)) == list(range(60))


def test_other_medmnist_sets(tmp_path):
    content = write_medmnist(tmp_path / "pathmnist.npz", (28, 28, 3), 1, classes=9)
    splits = medmnist("pathmnist", 8, str(tmp_path), PLAIN)
    assert splits.test.y[:, 0].tolist() == (content["test_labels"][:, 0] == 8).tolist()
    assert splits.test.x.shape == (30, 3, 28, 28)
    assert torch.equal(splits.test.x[5, 1], torch.from_numpy(content["test_images"][5, :, :, 1]))
    content = write_medmnist(tmp_path / "pneumoniamnist.npz", (28, 28), 1)
    splits = medmnist("pneumoniamnist", root=str(tmp_path / "pneumoniamnist.npz"), sites=PLAIN)
    assert splits.test.y[:, 0].tolist() == content["test_labels"][:, 0].tolist()
    write_medmnist(tmp_path / "chestmnist_subset_64.npz", (64, 64), 14)
    assert medmnist("chestmnist_subset_64", root=str(tmp_path), sites=PLAIN).train.x.shape == (60, 1, 64, 64)


def test_medmnist_mistakes(tmp_path):
    root = str(tmp_path)
    write_medmnist(tmp_path / "chestmnist.npz", (28, 28), 14)
    write_medmnist(tmp_path / "pathmnist.npz", (28, 28, 3), 1, classes=9)
    write_medmnist(tmp_path / "organamnist.npz", (28, 28, 28), 1)
    np.savez(tmp_path / "breastmnist.npz", x=np.zeros(3))
    (tmp_path / "octmnist.npz").write_bytes(b"rubbish")
    mistakes = {
        ("chestmnist", "mas"): "unknown label 'mas'; did you mean 'mass'?",
        ("chestmnist", 14): r"label must lie in \[0, 14\), got 14",
        ("pathmnist", None): "label must name which of the 9 classes",
        ("pathmnist", "mucus"): "numbers its classes 0 to 8; there is no 'mucus'",
        ("organamnist", 0): r"must be \[n, H, W\] or \[n, H, W, 3\], not \[60, 28, 28, 28\]",
        ("breastmnist", None): "is not a MedMNIST file: it lacks train_images, train_labels",
        ("octmnist", 1): "cannot read .*octmnist.npz as an .npz file",
        (
            "bloodmnist",
            1,
        ): "there is no file .*bloodmnist.npz; fetch https://zenodo.org/.* fedxl data fetch bloodmnist",
    }
    for (name, label), expected in mistakes.items():
        with pytest.raises(UserError, match=expected):
            medmnist(name, label, root)


HEADER = "Path,Sex,Age,Frontal/Lateral,AP/PA,No Finding,Consolidation,Edema"
FINDINGS = ["1.0", "0.0", "-1.0", "", "1.0", "0.0", "-1.0", "1.0", "0.0", "1.0", "", "1.0"]  # of the training images


def write_chexpert(root: Path) -> Path:
    """Twelve training images, every fourth lateral, and four to test on; the brightness of each is its number."""
    folder = root / "CheXpert-v1.0-small"
    for part, findings in (("train", FINDINGS), ("valid", ["1.0", "0.0", "1.0", "0.0"])):
        lines = [HEADER]
        for number, finding in enumerate(findings):
            view = "lateral" if number % 4 == 3 else "frontal"
            path = f"{part}/patient{number:05}/study1/view1_{view}.jpg"
            lines.append(f"CheXpert-v1.0-small/{path},Female,68,{view.title()},AP,,{finding},0.0")
            (folder / path).parent.mkdir(parents=True)
            Image.new("L", (39, 32), 10 * number + 5).save(folder / path, quality=95)
        (folder / f"{part}.csv").write_text("\n".join(lines) + "\n")
    return folder


def brightness(x: torch.Tensor) -> list[int]:
    return [round((float(value) - 5) / 10) for value in x.float().mean((1, 2, 3))]


@pytest.mark.parametrize(
    ("uncertain", "numbers", "labels"),
    [
        ("zeros", [0, 1, 2, 4, 5, 6, 8], [1, 0, 0, 1, 0, 0, 0]),
        ("ones", [0, 1, 2, 4, 5, 6, 8], [1, 0, 1, 1, 0, 1, 0]),
        ("ignore", [0, 1, 4, 5, 8], [1, 0, 1, 0, 0]),
    ],
)
def test_chexpert_and_what_is_uncertain(tmp_path, uncertain, numbers, labels):
    write_chexpert(tmp_path)
    options = {"uncertain": uncertain, "size": 16, "validation": 2, "sites": Sites(clients=2)}
    splits = chexpert(root=str(tmp_path), **options)
    found = dict(zip(brightness(splits.train.x), splits.train.y[:, 0].tolist(), strict=True))
    assert found == dict(zip(numbers, labels, strict=True))
    assert (brightness(splits.validation.x), splits.validation.y[:, 0].tolist()) == ([9, 10], [1, 0]), "the last ones"
    assert (brightness(splits.test.x), splits.test.y[:, 0].tolist()) == ([0, 1, 2], [1, 0, 1]), (
        "the published validation"
    )
    assert splits.test.x.shape == (3, 1, 16, 16)
    assert sorted(np.concatenate(splits.train.parts)) == list(range(len(labels)))


def load_chexpert(folder: Path, **options) -> Splits:
    return chexpert(**{"root": str(folder), "size": 16, "validation": 2, "sites": Sites(clients=2), **options})


def test_chexpert_with_lateral_views_and_another_finding(tmp_path):
    folder = write_chexpert(tmp_path)
    both = load_chexpert(folder, frontal=False)
    assert (len(both.train), len(both.test.y)) == (10, 4)
    with pytest.raises(
        UserError, match=r"unknown label in .*train.csv 'Consolidatoin'; did you mean 'Consolidation'"
    ):
        load_chexpert(folder, label="Consolidatoin")
    assert int(load_chexpert(folder, label="Edema").train.y[:, 0].sum()) == 0


def test_chexpert_is_resized_once(tmp_path, capsys):
    folder = write_chexpert(tmp_path)
    first = load_chexpert(folder)
    kept = sorted(path.name for path in folder.glob("*.npy*"))
    assert [name.rpartition("-")[0] for name in kept] == ["chexpert-train-16", "chexpert-valid-16"], (
        "nothing half done"
    )
    shutil.rmtree(folder / "train")
    shutil.rmtree(folder / "valid")
    again = load_chexpert(folder)
    assert same(first, again)
    assert load_chexpert(folder, uncertain="ones", label="Edema")
    again.train.x.zero_()
    numbers = sorted(brightness(load_chexpert(folder).train.x))
    assert numbers == [0, 1, 2, 4, 5, 6, 8], "what is done to the images in memory does not reach the file"
    for change in ({"size": 24}, {"frontal": False}, {"cache": str(tmp_path / "elsewhere")}):
        with pytest.raises(UserError, match=r"there is no image .*train/patient00000/study1/view1_frontal.jpg"):
            load_chexpert(folder, **change)
    assert sorted(path.name for path in folder.glob("*.npy*")) == kept
    assert not list((tmp_path / "elsewhere").iterdir())
    assert capsys.readouterr() == ("", ""), "no progress bar without a terminal"


def test_another_list_of_images_is_another_cache(tmp_path):
    folder = write_chexpert(tmp_path)
    load_chexpert(folder)
    header, *rows = (folder / "train.csv").read_text().splitlines()
    (folder / "train.csv").write_text("\n".join([header, *rows[::-1]]) + "\n")
    assert sorted(brightness(load_chexpert(folder).train.x)) == [2, 4, 5, 6, 8, 9, 10]


def test_a_damaged_cache_is_made_again(tmp_path):
    folder = write_chexpert(tmp_path)
    first = load_chexpert(folder, cache=str(tmp_path / "cache"))
    assert not list(folder.glob("*.npy"))
    for damage in (b"rubbish", b""):
        for path in list((tmp_path / "cache").iterdir()):
            content = damage or path.read_bytes()[:-40]
            path.unlink()  # what was loaded is still mapped to the file as it was
            path.write_bytes(content)
        assert same(first, load_chexpert(folder, cache=str(tmp_path / "cache")))


def test_chexpert_mistakes(tmp_path, monkeypatch):
    folder = write_chexpert(tmp_path)
    with pytest.raises(UserError, match=r"validation must lie in \[0, 9\), got 9"):
        load_chexpert(folder, validation=9)
    with pytest.raises(UserError, match="only 7 training images have a certain Consolidation"):
        load_chexpert(folder, validation=8, uncertain="ignore")
    (folder / "train/patient00004/study1/view1_frontal.jpg").write_bytes(b"rubbish")
    with pytest.raises(UserError, match=r"cannot read the image .*patient00004"):
        load_chexpert(folder, size=20)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"needs Pillow; pip install 'fedxl\[images\]'"):
        load_chexpert(folder, size=20)
    text = (folder / "valid.csv").read_text()
    for wrong, expected in (
        ("2.0", "a label must be 1, 0, -1 or empty, not '2.0'"),
        ("-1.0", "cannot be uncertain"),
    ):
        (folder / "valid.csv").write_text(text.replace("AP,,1.0", f"AP,,{wrong}"))
        with pytest.raises(UserError, match=expected):
            load_chexpert(folder)
    (folder / "valid.csv").unlink()
    with pytest.raises(UserError, match=r"lacks valid.csv; ask for it at https://stanford"):
        load_chexpert(folder)


def test_a_config_takes_the_settings_of_the_sites(cifar):
    table = {
        "name": "cifar10",
        "root": str(cifar),
        "validation": 40,
        "clients": 3,
        "partition": "dirichlet",
        "flip": True,
    }
    splits = load_data(Config(data=table, risk={}, algorithm={}, run={"seed": 5}))
    assert len(splits.train.parts) == 3
    assert splits.train.augment.flip
    assert splits.train.augment.noise == pytest.approx(0.02), "what is not said stays this set's own"
    assert same(splits, load_data(Config({**table, "seed": 5}, {}, {}))), "the run's seed is the data's"


def test_training_on_cifar10_from_a_config(cifar, monkeypatch, capsys):
    config = CONFIG.replace(
        '"digits"', f'"cifar10"\nroot = "{cifar}"\nvalidation = 40\nclients = 2\ncrop = 4\nflip = true'
    )
    (cifar / "c.toml").write_text(config.replace('"mlp"\nhidden = [4]', '"cnn"\nchannels = 4'))
    code, out, err = command(monkeypatch, capsys, "train", str(cifar / "c.toml"), "--out", str(cifar / "run"))
    assert code == 0, err
    assert "test: auroc" in out

"""Images of one's own: listed by a table, or in folders of classes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedxl import UserError
from fedxl.data.check import inspect_folder
from fedxl.data.examples import UNKNOWN
from fedxl.data.images import Image as Square
from fedxl.data.images import decoded, unreadable
from fedxl.data.sets.own import FolderOptions, folder
from fedxl.data.tables.prepare import Preparation
from fedxl.data.tables.roles import TableOptions
from fedxl.data.tables.table import read_new, table

Image = pytest.importorskip("PIL.Image", reason="needs fedxl[images]")


def save(path: Path, level: int, colour: bool = False) -> None:
    """An image of one grey, or of one red."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((9, 12, 3) if colour else (9, 12), 0, np.uint8)
    pixels[..., 0 if colour else slice(None)] = level
    Image.fromarray(pixels).save(path)


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """Forty images, of which the odd ones are positive; the grey of each is its number."""
    for number in range(40):
        save(tmp_path / "pictures" / f"{number}.png", number, colour=True)
    rows = {
        "file": [f"pictures/{n}.png" for n in range(40)],
        "odd": [n % 2 for n in range(40)],
        "site": ["a", "b"] * 20,
    }
    pd.DataFrame(rows).to_csv(tmp_path / "list.csv", index=False)
    return tmp_path / "list.csv"


def test_a_table_of_images_in_colour(listed):
    options = TableOptions(label="odd", image="file", size=8, channels=3, site="site", id="file")
    splits = table(str(listed), options)
    assert splits.train.shape == (3, 8, 8)
    for split in (splits.validation, splits.test):
        numbers = [int(Path(row).stem) for row in split.row]
        assert split.x[:, 0].amax((1, 2)).tolist() == numbers, "red"
        assert not split.x[:, 1:].any(), "neither green nor blue"
        assert split.y[:, 0].tolist() == [number % 2 for number in numbers]
    made = Preparation.from_text(splits.preparation.to_text())
    rows = read_new(made, listed)
    assert rows.row[7] == "pictures/7.png"
    assert torch.equal(rows.x[[int(Path(row).stem) for row in splits.test.row]], splits.test.x)


def test_the_cache_is_used_and_notices_other_images(listed):
    options = TableOptions(label="odd", image="file", size=8, split="", validation=0.0, test=0.0)
    first = table(str(listed), options).train
    assert len(list(listed.parent.glob("images-8-*.npy"))) == 1
    save(listed.parent / "pictures" / "3.png", 200)
    second = table(str(listed), options).train
    assert second.x[3].amax() == 200 != first.x[3].amax()


@pytest.mark.parametrize(
    "path",
    [
        "../secret.png", "/etc/passwd", "pictures/../../secret.png", "C:\\secret.png", "..\\s.png",
        "//srv/x.png", "\\\\srv\\x.png", "/\\srv/x.png", "///etc/passwd",
    ],
)  # fmt: skip
def test_a_table_does_not_reach_out_of_its_folder(listed, path):
    save(listed.parent.parent / "secret.png", 1)
    lines = listed.read_text().replace("pictures/5.png", path)
    listed.write_text(lines)
    with pytest.raises(UserError, match="outside of the table's folder"):
        table(str(listed), TableOptions(label="odd", image="file", size=8))


@pytest.mark.parametrize("folder", [False, True])
def test_a_link_does_not_lead_out_of_the_tables_folder(listed, tmp_path_factory, folder):
    """Neither an image nor its folder; a link within the table's folder is followed."""
    away = tmp_path_factory.mktemp("away")
    save(away / "5.png", 1)
    link = listed.parent / ("elsewhere" if folder else "pictures/link.png")
    link.symlink_to(away if folder else away / "5.png", target_is_directory=folder)
    (listed.parent / "pictures" / "near.png").symlink_to(listed.parent / "pictures" / "6.png")
    text = listed.read_text().replace("pictures/6.png", "pictures/near.png")
    listed.write_text(text)
    options = TableOptions(label="odd", image="file", size=8, split="", validation=0.0, test=0.0)
    assert len(table(str(listed), options).train)
    listed.write_text(text.replace("pictures/5.png", "elsewhere/5.png" if folder else "pictures/link.png"))
    with pytest.raises(UserError, match="is a link that leads out of"):
        table(str(listed), options)


def test_all_unreadable_images_are_told(listed):
    for number in range(10, 18):
        (listed.parent / "pictures" / f"{number}.png").write_bytes(b"not an image")
    (listed.parent / "pictures" / "20.png").unlink()
    with pytest.raises(UserError, match=r"cannot read the image .*\(and 4 more\)") as told:
        table(str(listed), TableOptions(label="odd", image="file", size=8))
    assert str(told.value).count("image /") == 5
    found = unreadable(listed.parent, [f"pictures/{number}.png" for number in range(40)])
    assert len(found) == 9
    assert "there is no image" in found[-1]


def test_grey_values_of_16_bits_keep_their_order(tmp_path):
    """Pillow's own conversion makes nearly all of them white."""
    wide = np.arange(0, 2**16, 2**10, dtype=np.uint16).reshape(8, 8)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    Image.fromarray((wide >> 8).astype(np.uint8)).save(tmp_path / "narrow.png")
    for channels in (1, 3):
        one, other = decoded(tmp_path, ["wide.png", "narrow.png"], Square(8, channels))
        assert np.array_equal(one, other)
        assert len(np.unique(one)) == 64


def scans(root: Path, largest: int) -> None:
    """Ten images of both classes, with 64 grey values of 16 bits up to `largest`."""
    for number in range(10):
        for kind in ("ill", "well"):
            (root / kind).mkdir(parents=True, exist_ok=True)
            values = np.linspace(0, largest - number, 64).astype(np.uint16).reshape(8, 8)
            Image.fromarray(values).save(root / kind / f"{number}.png")


def test_grey_values_of_12_bits_in_16_keep_their_levels(tmp_path):
    """A run keeps how many bits there were: new images are scaled alike, however bright they are."""
    scans(tmp_path / "scans", 4095)
    options = FolderOptions(positive="ill", size=8)
    for _ in range(2):  # the second time from the cache
        splits = folder(str(tmp_path / "scans"), options)
        assert splits.preparation.image.bits == 12
        assert all(len(image.unique()) == 64 for image in splits.train.x)
        assert splits.train.x.max() == 255
    made = Preparation.from_text(splits.preparation.to_text())
    Image.fromarray(np.array([[0, 400, 800, 4095, 65535]], np.uint16).repeat(5, 0)).save(tmp_path / "new.png")
    new = decoded(tmp_path, ["new.png"], replace(made.image, size=8))
    assert new[0, 0, 0, 0] == 0
    assert new.max() == 255
    dark = tmp_path / "dark" / "unsorted"
    dark.mkdir(parents=True)
    Image.fromarray(np.full((8, 8), 160, np.uint16)).save(dark / "1.png")
    assert (read_new(made, tmp_path / "dark").x == 10).all()
    declared = folder(str(tmp_path / "scans"), replace(options, bits=16))
    assert declared.preparation.image.bits == 16
    assert declared.train.x.max() == 15
    for file in (tmp_path / "scans").rglob("*.png"):
        Image.fromarray(np.asarray(Image.open(file)).astype(np.uint8)).save(file)
    assert folder(str(tmp_path / "scans"), options).preparation.image.bits == 0, "there are none"


def test_a_preparation_of_an_older_version_has_images_of_16_bits():
    made = Preparation(image=Square(8), label="class", positive="ill", negative="well", source="folder")
    content = made.to_json()
    del content["image"]["bits"]
    assert Preparation.from_json(content).image.bits == 16
    with pytest.raises(UserError, match="bits must lie between 8 and 16"):
        FolderOptions(bits=17)


def test_images_are_upright(tmp_path):
    """A camera that was held upright notes it in the file, and stores the image lying."""
    lying = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8))
    notes = Image.Exif()
    notes[0x0112] = 6
    lying.save(tmp_path / "turned.png", exif=notes)
    lying.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "upright.png")
    one, other = decoded(tmp_path, ["turned.png", "upright.png"], Square(8))
    assert np.array_equal(one, other)


@pytest.mark.parametrize("part", [b"}", b"\n"], ids=["its shape", "an image"])
def test_a_damaged_cache_is_made_anew(listed, part):
    options = TableOptions(label="odd", image="file", size=8, split="", validation=0.0, test=0.0)
    first = table(str(listed), options).train.x.clone()
    (cache,) = listed.parent.glob("images-8-*.npy")
    content = bytearray(cache.read_bytes())
    content[content.index(part) + (part == b"\n")] ^= 4
    cache.write_bytes(content)
    assert torch.equal(table(str(listed), options).train.x, first)
    assert cache.read_bytes() != content


def test_pillow_warns_of_nothing_in_its_own_words(tmp_path, monkeypatch, recwarn):
    Image.fromarray(np.zeros((30, 30), np.uint8)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 800)
    assert decoded(tmp_path, ["large.png"], Square(8)).shape == (1, 1, 8, 8)
    assert unreadable(tmp_path, ["large.png"]) == []
    assert not recwarn.list


def test_a_link_does_not_lead_out_of_a_folder_of_images(tmp_path):
    """As for tables; a link within the folder is followed."""
    root = tmp_path / "scans"
    fill(root, "{kind}")
    (root / "ill" / "near.png").symlink_to(root / "ill" / "p0_0.png")
    splits = folder(str(root), FolderOptions(positive="ill", size=8))
    save(tmp_path / "away.png", 1)
    link = root / "ill" / "far.png"
    for target in (tmp_path / "away.png", tmp_path):
        link.symlink_to(target)
        for read in (
            lambda: folder(str(root), FolderOptions(positive="ill", size=8)),
            lambda: read_new(splits.preparation, root),
            lambda: inspect_folder(str(root)),
        ):
            with pytest.raises(UserError, match="is a link that leads out of"):
                read()
        link.unlink()


def test_pixels_without_a_white_and_pipes_are_unreadable(tmp_path):
    Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(tmp_path / "real.tif")
    os.mkfifo(tmp_path / "pipe.png")
    real, pipe = unreadable(tmp_path, ["real.tif", "pipe.png"])
    assert "save 8 or 16 bits" in real
    assert "it is not a file" in pipe


def fill(root: Path, pattern: str, **levels: Any) -> None:
    """Ten images in every folder of a pattern."""
    for number in range(10):
        for kind in ("ill", "well"):
            save(root / pattern.format(kind=kind, **levels) / f"p{number // 2}_{number}.png", number)


@pytest.mark.parametrize("pattern", ["{site}/{split}/{kind}", "{split}/{site}/{kind}"])
def test_folders_of_sites_and_splits_in_either_order(tmp_path, pattern):
    for site in ("south", "north"):
        for split in ("train", "Val", "test"):
            fill(tmp_path, pattern, site=site, split=split)
    splits = folder(str(tmp_path), FolderOptions(positive="ill", size=8))
    assert splits.names == ("north", "south")
    assert [len(part) for part in splits.train.parts] == [20, 20]
    assert len(splits.validation.y) == len(splits.test.y) == 40
    assert [Path(row).parent.name == "ill" for row in splits.test.row] == splits.test.y[:, 0].bool().tolist()
    assert splits.test.x[:, 0, 0, 0].tolist() == [int(Path(row).stem[3:]) for row in splits.test.row]


def test_a_plain_folder_is_one_site_and_splits_are_drawn_by_group(tmp_path):
    fill(tmp_path, "{kind}")
    splits = folder(str(tmp_path), FolderOptions(positive="ill", size=8, group="_", called="north"))
    assert splits.names == ("north",)
    of = [{Path(row).name[:2] for row in split.row} for split in (splits.validation, splits.test)]
    assert of[0]
    assert not of[0] & of[1]
    assert splits.train.y[:, 0].sum() == len(splits.train.y[:, 0]) / 2
    made = Preparation.from_text(splits.preparation.to_text())
    fill(tmp_path / "new", "unsorted")
    assert (read_new(made, tmp_path / "new").y == UNKNOWN).all()
    rows = read_new(made, tmp_path / "ill")
    assert len(rows.row) == 10
    known = {row: x for row, x in zip(splits.test.row, splits.test.x, strict=True) if row.startswith("ill/")}
    for row, x in zip(rows.row, rows.x, strict=True):
        assert torch.equal(known.get(f"ill/{row}", x), x)


@pytest.mark.parametrize(
    ("make", "options", "line"),
    [
        (lambda root: None, {}, "holds no images"),
        (lambda root: fill(root, "{kind}"), {"positive": "sick"}, "positive is 'sick'"),
        (lambda root: fill(root, "{kind}"), {"positive": None}, "say which one"),
        (lambda root: fill(root, "a/b/c/{kind}"), {}, "not where an image should be"),
        (lambda root: save(root / "loose.png", 1), {}, "not where an image should be"),
        (lambda root: (fill(root, "train/{kind}"), fill(root, "{kind}")), {}, "in no folder called train"),
        (lambda root: fill(root, "{kind}"), {"group": "#"}, "has no '#' in its name"),
        (lambda root: (fill(root, "{kind}"), save(root / "else" / "1.png", 1)), {}, "a label has two values"),
        (lambda root: (fill(root, "{kind}"), (root / "ill" / "x.png").write_text("no")), {}, "cannot read the image"),
    ],
)
def test_folders_that_cannot_be_read_are_told_in_one_line(tmp_path, make, options, line):
    make(tmp_path)
    with pytest.raises(UserError, match=line):
        folder(str(tmp_path), FolderOptions(**{"positive": "ill", "size": 8, **options}))
    with pytest.raises(UserError, match="there is no folder"):
        folder(str(tmp_path / "none"))

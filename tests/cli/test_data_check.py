"""`fedxl data check` as it is used: for data sets of each kind, for a site, as JSON, and for thousands of sites."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedxl.data.tables.table import load_preparation
from tests.cli.test_errors import CONFIG, arrays, command, save

REST = '[risk]\nname = "auroc"\n[algorithm]\nname = "fedxl1"\n'


def checked(monkeypatch, capsys, path: Path, *options: str) -> tuple[int, str, str]:
    monkeypatch.setenv("COLUMNS", "200")
    return command(monkeypatch, capsys, "data", "check", str(path), *options)


def config(tmp_path: Path, data: str) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(f"[data]\n{data}\n{REST}")
    return path


def test_good_data(tmp_path, monkeypatch, capsys):
    (tmp_path / "c.toml").write_text(CONFIG)
    code, out, _ = checked(monkeypatch, capsys, tmp_path / "c.toml")
    assert code == 0
    assert next(line.split() for line in out.splitlines() if "client 15" in line)[:4] == ["client", "15", "194", "0"]
    assert 'algorithm.name = "fedxl2": 6 of 16 sites hold one class' in out
    assert "No problems found" in out
    code, out, _ = checked(monkeypatch, capsys, tmp_path / "c.toml", "--json", "--set", "data.clients=4")
    told = json.loads(out)
    assert (code, told["problems"], len(told["sites"]), len(told["advice"]["lines"])) == (0, [], 4, 3)


def test_copies_end_in_exit_code_2(tmp_path, monkeypatch, capsys):
    held = arrays()
    file = save(tmp_path / "d.npz", **held, x_test=held["x"][:3], y_test=held["y"][:3])
    code, out, _ = checked(monkeypatch, capsys, config(tmp_path, f'name = "npz"\npath = "{file}"'))
    assert code == 2
    assert "problem: 3 of 3 test examples are in train, too: #0 = 0 #0" in out
    assert "Fix the problems above before training" in out


def test_data_that_cannot_be_read_are_one_line(tmp_path, monkeypatch, capsys):
    held = arrays()
    held["x"][3] = np.nan
    file = save(tmp_path / "d.npz", **held)
    code, out, err = checked(monkeypatch, capsys, config(tmp_path, f'name = "npz"\npath = "{file}"'))
    assert (code, out) == (2, "")
    assert "1 of 12 examples hold NaN or infinity" in err


def test_thousands_of_sites_are_a_short_table(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    file = save(tmp_path / "d.npz", x=rng.normal(size=(6000, 2)), y=np.arange(6000) % 2, client=np.arange(6000) // 2)
    code, out, _ = checked(monkeypatch, capsys, config(tmp_path, f'name = "npz"\npath = "{file}"'))
    assert code == 0
    assert "... and 2,980 more" in out
    assert len(out.splitlines()) < 40


@pytest.fixture
def table(tmp_path) -> Path:
    pytest.importorskip("pyarrow")
    lines = ["patient,age,sex,split,site,sick"]
    for row in range(60):
        split = ("train", "train", "test", "validation")[row % 4]
        age = "" if row % 10 == 0 else str(40 + row)
        lines.append(f"p{row},{age},{'mf'[row // 2 % 2]},{split},{'ab'[row // 4 % 2]},{('no', 'yes')[row // 8 % 2]}")
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


OPTIONS = 'label = "sick"\npositive = "yes"\nsite = "site"\nsplit = "split"\ngroup = "patient"\nrare = 1'


def test_a_table_says_what_is_missing_and_which_groups_are_torn(table, tmp_path, monkeypatch, capsys):
    path = config(tmp_path, f'name = "table"\npath = "{table}"\n{OPTIONS}')
    code, out, _ = checked(monkeypatch, capsys, path)
    assert code == 0, out
    assert "values are missing: age 10.0%; the preparation fills them in" in out
    table.write_text(table.read_text().replace("p2,", "p0,"))  # rows 1 and 3, in train and test
    code, out, _ = checked(monkeypatch, capsys, path)
    assert code == 2
    assert "problem: 1 groups of column 'patient' are in two splits, for example rows 1 and 3" in out
    told = json.loads(checked(monkeypatch, capsys, path, "--json")[1])
    assert told["missing_values"] == {"age": 6}
    table.write_text(table.read_text().replace("p7,", "p3,"))  # both in validation, at two sites
    assert "1 groups of column 'patient' are at two sites" in checked(monkeypatch, capsys, path)[1]


def test_a_preparation_of_public_rows_is_written_for_private_training(table, tmp_path, monkeypatch, capsys):
    path, out = config(tmp_path, f'name = "table"\npath = "{table}"\n{OPTIONS}'), tmp_path / "made.json"
    private = {"dp_clip": 1.0, "dp_noise": 2.0, "dp_score_noise": 2.0, "level": "free", "pool_u": "server"}
    sets = [
        "model.name=mlp",
        "risk.scores=sigmoid",
        "run.rounds=1",
        *(f"algorithm.{name}={value}" for name, value in private.items()),
    ]
    train = ["train", str(path), "--out", str(tmp_path / "run"), *(f"--set={each}" for each in sets)]
    code, _, err = command(monkeypatch, capsys, *train)
    assert code == 2
    assert "takes a preparation.json of public rows: `fedxl data prepare` makes one" in " ".join(err.split()), err
    made = ["data", "prepare", str(path), "--out", str(out)]
    code, shown, err = command(monkeypatch, capsys, *made)
    assert (code, f"in {out}; name it in [data]" in shown) == (0, True), err
    assert [column.name for column in load_preparation(out).columns] == ["age", "sex"]
    code, _, err = command(monkeypatch, capsys, *train, "--set", f"data.preparation={out}")
    assert code == 0, err
    assert "exists already" in command(monkeypatch, capsys, *made)[2]
    other = config(tmp_path, 'name = "digits"')
    code, _, err = command(monkeypatch, capsys, "data", "prepare", str(other), "--out", str(tmp_path / "new.json"))
    assert (code, "must be a table of numbers and categories" in " ".join(err.split())) == (2, True)


def test_images_that_cannot_be_read_are_listed(tmp_path, monkeypatch, capsys):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("pyarrow")
    rng = np.random.default_rng(0)
    lines = ["file,site,sick"]
    for row in range(40):
        image.fromarray(rng.integers(0, 255, (8, 8), dtype=np.uint8)).save(tmp_path / f"{row}.png")
        lines.append(f"{row}.png,{'ab'[row % 2]},{row // 2 % 2}")
    (tmp_path / "3.png").write_bytes(b"rubbish")
    (tmp_path / "5.png").unlink()
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    data = (
        f'name = "table"\npath = "{tmp_path / "rows.csv"}"\nlabel = "sick"\nsite = "site"\nimage = "file"\nsize = 8'
    )
    code, out, _ = checked(monkeypatch, capsys, config(tmp_path, data))
    assert code == 2
    assert "3.png" in out
    assert "5.png" in out
    assert out.count("problem: ") == 2


def test_a_folder_of_images_is_looked_through(tmp_path, monkeypatch, capsys):
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for row in range(40):
        file = tmp_path / "images" / "ab"[row % 2] / ("no", "yes")[row // 2 % 2] / f"{row}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(rng.integers(0, 255, (8, 8), dtype=np.uint8)).save(file)
    path = config(tmp_path, f'name = "folder"\npath = "{tmp_path / "images"}"\npositive = "yes"\nsize = 8')
    code, out, _ = checked(monkeypatch, capsys, path, "--json")
    told = json.loads(out)
    assert (code, told["problems"], told["unreadable_images"]) == (0, [], 0)
    assert [site["name"] for site in told["sites"]] == ["a", "b"]
    file.write_bytes(b"rubbish")
    code, out, _ = checked(monkeypatch, capsys, path)
    assert code == 2
    assert "39.png" in out


def test_a_site_checks_its_own_data(tmp_path, monkeypatch, capsys):
    held = arrays()
    held["y"] = np.r_[np.ones(4, int), held["y"][4:]]
    file = save(tmp_path / "d.npz", **held)
    path = tmp_path / "site.toml"
    path.write_text(f'[site]\nname = "north"\npart = 0\n[data]\nname = "npz"\npath = "{file}"\n')
    code, out, _ = checked(monkeypatch, capsys, path)
    assert code == 0
    assert [line.split() for line in out.splitlines() if line.startswith("north")] == [["north", "4", "4"]]
    assert "remark: no training example is negative" in out
    code, _, err = checked(monkeypatch, capsys, path, "--set", "site.part=1")
    assert (code, "--set is for experiments" in err) == (2, True)
    path.write_text(path.read_text().replace("part = 0", "part = 7"))
    assert "part is 7, but the data have 3 client(s)" in checked(monkeypatch, capsys, path)[2]


def test_events_are_not_called_positive(tmp_path, monkeypatch, capsys):
    (tmp_path / "t.csv").write_text("age,days,died\n" + "".join(f"{50 + n % 7},{n + 1},{n % 2}\n" for n in range(60)))
    told = f'name = "table"\npath = "{tmp_path / "t.csv"}"\ntime = "days"\nevent = "died"'
    (tmp_path / "c.toml").write_text(f'[data]\n{told}\n[risk]\nname = "cox"\n[algorithm]\nname = "fedxl2"\n')
    code, out, err = checked(monkeypatch, capsys, tmp_path / "c.toml")
    assert code == 0, err
    assert out.splitlines()[0].split() == ["site", "train", "events", "validation", "events", "test", "events"]
    assert "positive" not in out

"""Tables at sites: summaries leave, one preparation comes back, and all is as if the tables lay in one place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedxl import UserError
from fedxl.config.experiment import Config, load_data
from fedxl.data.tables.prepare import Number, Preparation
from fedxl.data.tables.summary import Summary
from fedxl.data.tables.table import read_new
from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.provision.settings import ServerSettings, SiteFile
from fedxl.deploy.server.directory import Directory
from fedxl.deploy.site import cache, requests
from fedxl.errors import RefusedError
from tests.data.tables import frame, write_sites
from tests.deploy.federated import SITES, InProcess, assert_same, config, deployed, simulated, site_file

pytestmark = pytest.mark.usefixtures("impatient")
TABLE = {"name": "table", "label": "sick", "positive": "yes", "group": "patient", "rare": 2}


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    return write_sites(tmp_path / "data", frame())


def carrier(folder: Path, paths: list[str], **changes: Any) -> InProcess:
    """Four sites, each with its own file."""
    found = InProcess(folder)
    for number, path in enumerate(paths):
        settings = {"summary": True, "part": 0, "evaluate": "scores", **changes}
        own = site_file(folder, number)
        found.sites[str(100 + number)] = SiteFile(
            replace(own.settings, **settings), {**TABLE, "path": path}, own.folder
        )
    return found


def experiment(paths: list[str]) -> Config:
    return replace(config("fedxl1"), data={**TABLE, "path": paths, "seed": 0})


def test_sites_with_tables_come_to_the_simulators_bits(tmp_path, paths):
    wanted = simulated(experiment(paths))
    found = deployed(tmp_path, replace(experiment(paths), data={}), carrier(tmp_path, paths), evaluate="sites")
    assert_same(found, wanted)
    assert found.metrics["test"]["auroc"] == pytest.approx(wanted.metrics["test"]["auroc"], abs=1e-12)
    made = Preparation.from_json(json.loads((tmp_path / "server" / "run" / "preparation.json").read_text()))
    pooled = load_data(experiment(paths)).preparation
    assert pooled is not None
    assert made == replace(pooled, id=made.id)


def test_rows_with_weights_are_drawn_alike_at_sites_and_in_the_simulator(tmp_path):
    data = frame()
    data["often"] = np.random.default_rng(1).uniform(0.5, 4, len(data))
    paths = write_sites(tmp_path / "data", data)
    table = {**TABLE, "weight": "often"}
    told = replace(experiment(paths), data={**table, "path": paths, "seed": 0})
    sites = carrier(tmp_path, paths)
    for node, own in sites.sites.items():
        sites.sites[node] = SiteFile(own.settings, {**own.data, "weight": "often"}, own.folder)
    found = deployed(tmp_path, replace(told, data={}), sites, evaluate="sites")
    assert_same(found, simulated(told))
    alike = simulated(replace(told, data={**TABLE, "drop": ["often"], "path": paths, "seed": 0}))
    assert not tree_equal(found.server.weights.params, alike.server.weights.params)


def test_several_label_columns_are_trained_on_alike_at_sites_and_in_the_simulator(tmp_path):
    data = frame().rename(columns={"sick": "mass"})
    data["nodule"] = np.where(data.smoker, "yes", "no")
    data.loc[data.site == "b", "nodule"] = np.nan
    data.loc[:9, ["mass", "nodule"]] = np.nan  # rows without any label
    paths = write_sites(tmp_path / "data", data)
    table = {**TABLE, "label": ["mass", "nodule"]}
    told = replace(experiment(paths), data={**table, "path": paths, "seed": 0})
    told = replace(told, risk={**told.risk, "labels": ["mass", "nodule"]})
    sites = carrier(tmp_path, paths)
    for node, own in sites.sites.items():
        sites.sites[node] = SiteFile(own.settings, {**own.data, **table}, own.folder)
    found, wanted = deployed(tmp_path, replace(told, data={}), sites, evaluate="sites"), simulated(told)
    assert_same(found, wanted)
    assert found.metrics["test"]["auroc"] == pytest.approx(wanted.metrics["test"]["auroc"], abs=1e-12)
    assert found.preparation.labels == ("mass", "nodule")
    other = SiteFile(
        sites.sites["100"].settings, {**sites.sites["100"].data, "label": ["nodule", "mass"]}, tmp_path / "o"
    )
    cache.prepare(other)
    with pytest.raises(UserError, match="the server's preparation is for the label"):
        cache.training_data(other, found.preparation)
    kept = tmp_path / "server" / "run" / "preparation.json"
    own = SiteFile(other.settings, {**sites.sites["100"].data, "preparation": str(kept)}, tmp_path / "p")
    assert cache.facts(own)["labels"] == ["mass", "nodule"]
    usual = cache.training_data(sites.sites["100"], found.preparation)
    assert torch.equal(cache.training_data(own).x, usual.x), "made by its own copy of the preparation"
    turned = replace(told, data={}, risk={**told.risk, "labels": ["nodule", "mass"]})
    with pytest.raises(UserError, match="name the labels as the table does"):
        deployed(tmp_path / "again", turned, sites, evaluate="sites")


def test_a_site_that_tells_no_summary_compares_no_names_for_the_server(tmp_path):
    """A server that sends a preparation all the same would learn from errors what columns and labels there are."""
    paths = write_sites(tmp_path / "data", frame())
    own = carrier(tmp_path, paths).sites["100"]
    quiet = SiteFile(replace(own.settings, summary=False), own.data, own.folder)
    guess = Preparation(columns=(Number("a guess", 0.0, 1.0),), label="another", positive="1", negative="0")
    with pytest.raises(UserError, match="tells nothing of its table") as told:
        cache.training_data(quiet, guess)
    names = {*frame().columns, "yes"} - {"site"}
    assert not any(name in str(told.value) for name in names)


def tree_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(map(torch.equal, one.values(), other.values()))


def test_a_resumed_server_asks_with_the_same_preparation(tmp_path, paths):
    sites = carrier(tmp_path, paths)
    first = replace(experiment(paths), data={}, run={**config("fedxl1").run, "rounds": 2})
    deployed(tmp_path, first, sites, evaluate="sites")
    found = deployed(tmp_path, replace(experiment(paths), data={}), sites, evaluate="sites")
    assert_same(found, simulated(experiment(paths)))
    assert len({facts["preparation"] for _, facts in sites.sent if "preparation" in facts}) == 1


def test_a_servers_own_table_is_scaled_as_the_sites_are(tmp_path, paths):
    held = frame(80, seed=7).drop(columns="site").assign(split="test")
    held.loc[:39, "split"] = "validation"
    held.to_csv(tmp_path / "held.csv", index=False)
    own = {**TABLE, "group": "", "path": str(tmp_path / "held.csv"), "split": "split", "drop": ["patient"]}
    found = deployed(tmp_path, replace(experiment(paths), data=own), carrier(tmp_path, paths))
    made = Preparation.from_json(json.loads((tmp_path / "server" / "run" / "preparation.json").read_text()))
    rows = read_new(made, tmp_path / "held.csv")
    scores = found.model(rows.x[40:].double()).flatten()
    assert np.allclose(found.scores["test"].flat[0], scores.detach().numpy(), atol=1e-9)


def test_a_site_that_allows_no_summary_sends_none(tmp_path, paths):
    sites = carrier(tmp_path, paths, summary=False)
    with pytest.raises(UserError, match="must say summary = true"):
        requests.hello(sites.sites["100"])
    with pytest.raises(UserError, match="summary = true"):
        deployed(tmp_path, replace(experiment(paths), data={}), sites, join=0.1)


def test_what_leaves_is_counts_means_and_squares(tmp_path, paths):
    site = carrier(tmp_path, paths).sites["103"]
    told = json.loads(str(requests.hello(site).facts["summary"]))
    assert told.keys() == {"rows", "columns", "about"}
    assert [len(column) for column in told["columns"].values()] == [5, 5, 5, 2]
    assert all(count >= TABLE["rare"] for count in told["columns"]["ward"][1].values())


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda t: t.rename(columns={"age": "years"}),
            "a has a column 'age', which b lacks, and b has a column 'years', which a lacks; rename a column",
        ),
        (lambda t: t.assign(ward=1), "column 'ward' holds categories at a and numbers at b"),
        (lambda t: t.assign(sick=t.sick.map({"yes": "yes", "no": "never"})), "a predicts 'sick'"),
    ],
)
def test_sites_that_differ_are_told_by_column_and_name(tmp_path, change, line):
    paths = write_sites(tmp_path / "data", frame())
    table = frame()
    change(table[table.site == "b"]).drop(columns="site").to_csv(paths[1], index=False)
    with pytest.raises(UserError, match=line):
        deployed(tmp_path, replace(experiment(paths), data={}), carrier(tmp_path, paths), join=5.0)


def _asked(site: SiteFile, text: str) -> Envelope:
    facts = {"version": requests.__version__, "run": "0" * 16, "config": json.dumps(config("fedxl1").tables())}
    return Envelope({**facts, "facts_of_all": "{}", "preparation": text, "split": "test"}, {})


HOSTILE = [
    (lambda c: c["columns"][0].update(scale=0.0), "scale"),
    (lambda c: c["columns"][0].update(scale=1e300), "scale"),
    (lambda c: c["columns"][0].update(mean=float("nan")), "mean"),
    (lambda c: c["columns"][0].update(mean="1"), "must be a number"),
    (lambda c: c["columns"].pop(), "of the columns"),
    (lambda c: c["columns"][3].update(values=[str(n) for n in range(5000)]), "too many categories"),
    (lambda c: c["columns"][3].update(values=["x", "x"]), "twice"),
    (lambda c: c["columns"].append(c["columns"][0]), "twice"),
    (lambda c: c["columns"].__setitem__(0, {"kind": "category", "name": "age", "values": ["1"]}), "has numbers"),
    (lambda c: c.update(label="other"), "for the label"),
    (lambda c: c.update(label="age"), "which has another meaning"),
    (lambda c: c.update(columns=[], image={"size": 8}), "not of images"),
    (lambda c: c.update(form=99), "form"),
    (lambda c: c.update(more=1), "unknown setting"),
    (lambda c: c.clear(), "malformed"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "line"), HOSTILE, ids=[line for _, line in HOSTILE])
def test_a_hostile_preparation_is_refused_by_the_site(tmp_path, paths, change, line):
    site = carrier(tmp_path, paths).sites["100"]
    made = load_data(experiment(paths)).preparation
    assert made is not None
    content = made.to_json()
    change(content)
    with pytest.raises(UserError, match=line):
        requests.evaluate(site, _asked(site, json.dumps(content)))
    assert not list(site.cache.glob("*x-*")), "and nothing was made of it"


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "3", " " * 5_000_000])
def test_a_preparation_that_is_none_is_refused(tmp_path, paths, text):
    site = carrier(tmp_path, paths).sites["100"]
    with pytest.raises(UserError, match="preparation"):
        requests.evaluate(site, _asked(site, text))


def test_a_site_keeps_the_examples_of_one_preparation(tmp_path, paths):
    site = carrier(tmp_path, paths).sites["100"]
    made = load_data(experiment(paths)).preparation
    assert made is not None
    other = replace(made, columns=(replace(made.columns[0], mean=0.0), *made.columns[1:]))
    first = cache.training_data(site, made)
    second = cache.training_data(site, other)
    assert len(list(site.cache.glob("train_x-*"))) == 1
    changed = (first.fetch(torch.arange(3)) != second.fetch(torch.arange(3))).any(0)
    assert changed.tolist() == [True, *[False] * (made.width - 1)]
    with pytest.raises(UserError, match="sent no preparation"):
        cache.training_data(site)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(rows=c["rows"] + 1),
        lambda c: c["columns"]["age"].__setitem__(1, 10**9),
        lambda c: c["columns"]["age"].__setitem__(3, float("inf")),
        lambda c: c["columns"]["age"].__setitem__(3, 1e40),
        lambda c: c["columns"]["age"].__setitem__(4, -1.0),
        lambda c: c["columns"]["age"].__setitem__(3, 10**400),
        lambda c: c["columns"]["age"].__setitem__(4, 10**400),
        lambda c: c["columns"]["age"].__setitem__(4, 1e70),  # the scale would be beyond any number
        lambda c: c["columns"]["age"].append(1),
        lambda c: c["columns"]["ward"].__setitem__(1, {"icu": -3}),
        lambda c: c["columns"]["ward"].__setitem__(1, {str(n): 0 for n in range(1000)}),
        lambda c: c["columns"]["ward"].__setitem__(1, {"x" * 1000: 1}),
        lambda c: c["columns"].__setitem__("age", ["numbers"]),
        lambda c: c["columns"].__setitem__("age", ["what", 1]),
        lambda c: c.update(columns={}),
        lambda c: c.update(about={"label": "x" * 1000}),
        lambda c: c.update(about={"columns": "x"}),
        lambda c: c["about"].update(id="age"),
        lambda c: c["about"].update(time="age"),
        lambda c: c["about"].update(time=3),
        lambda c: c.clear(),
    ],
)
def test_a_hostile_summary_is_refused_by_the_server(tmp_path, paths, change):
    hello = requests.hello(carrier(tmp_path, paths).sites["100"]).facts
    examples = hello["positives"] + hello["negatives"]
    content = json.loads(str(hello["summary"]))
    assert Summary.from_json(json.dumps(content), examples)
    change(content)
    with pytest.raises(RefusedError):
        Summary.from_json(json.dumps(content), examples)


def test_changed_folders_are_noticed_at_any_depth(tmp_path):
    images = tmp_path / "images" / "here" / "train" / "ill"
    images.mkdir(parents=True)
    (tmp_path / "images" / "broken").symlink_to(tmp_path / "nowhere")
    site = SiteFile(site_file(tmp_path, 0).settings, {"name": "folder", "path": str(tmp_path / "images")}, tmp_path)
    before = cache._stamps(site)
    assert before == cache._stamps(site)
    (images / "1.png").write_bytes(b"")
    assert cache._stamps(site) != before


def test_a_site_that_its_table_does_not_name_gets_nobodys_rows(tmp_path, paths):
    sites = carrier(tmp_path, paths)
    own = sites.sites["100"]
    lost = SiteFile(replace(own.settings, name="Hospital C"), {**TABLE, "path": paths[:2]}, own.folder)
    with pytest.raises(
        UserError, match=r"called 'Hospital C', and its table holds the sites .*; name it like one of"
    ):
        cache.prepare(lost)
    alone = SiteFile(replace(own.settings, name="Hospital C"), {**TABLE, "path": paths[0]}, own.folder)
    assert cache.holding(alone).count("all") == cache.holding(own).count("all")


def write_images(folder: Path, seed: int = 0) -> list[str]:
    """Four sites, each with a table of its own and small pictures beside it; the sick ones are brighter."""
    from PIL import Image

    rng, paths = np.random.default_rng(seed), []
    for site in ("a", "b", "c", "d"):
        place = folder / site
        place.mkdir(parents=True)
        rows = ["file,sick"]
        for number in range(40):
            sick = number % 4 == 0
            pixels = rng.integers(0, 156, (8, 8)) + 100 * sick
            Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")
            rows.append(f"{number}.png,{'yes' if sick else 'no'}")
        (place / f"{site}.csv").write_text("\n".join(rows) + "\n")
        paths.append(str(place / f"{site}.csv"))
    return paths


IMAGES = {"name": "table", "label": "sick", "positive": "yes", "image": "file", "size": 8}


def with_images(folder: Path) -> tuple[Config, InProcess]:
    """An experiment, and four sites each of which names its own table."""
    pytest.importorskip("PIL", reason="needs fedxl[images]")
    paths = write_images(folder / "data")
    sites = InProcess(folder)
    for number, path in enumerate(paths):
        own = site_file(folder, number)
        settings = replace(own.settings, part=0, evaluate="scores", summary=True)
        sites.sites[str(100 + number)] = SiteFile(settings, {**IMAGES, "path": path}, own.folder)
    return replace(config("fedxl2"), model={"name": "cnn"}, data={**IMAGES, "path": paths, "seed": 0}), sites


def test_sites_with_images_come_to_the_simulators_bits(tmp_path):
    """Each site has a table of paths and its own pictures; nobody needs a common preparation."""
    told, sites = with_images(tmp_path)
    wanted = simulated(told)
    found = deployed(tmp_path, replace(told, data={}), sites, evaluate="sites")
    assert_same(found, wanted)
    assert found.metrics["test"]["auroc"] == pytest.approx(wanted.metrics["test"]["auroc"], abs=1e-12)
    kept = Preparation.from_text((tmp_path / "server" / "run" / "preparation.json").read_text())
    assert kept == found.preparation == wanted.preparation, "new files are read as the simulator reads them"


def test_a_site_that_allows_no_summary_tells_nothing_of_its_images(tmp_path):
    told, sites = with_images(tmp_path)
    quiet = sites.sites["103"]
    sites.sites["103"] = SiteFile(replace(quiet.settings, summary=False), quiet.data, quiet.folder)
    assert "images" in requests.hello(sites.sites["100"]).facts
    assert "images" not in requests.hello(sites.sites["103"]).facts
    short = replace(told, data={}, run={**told.run, "rounds": 1})
    assert deployed(tmp_path, short, sites, evaluate="sites").preparation is None


def test_sites_whose_images_show_something_else_are_told(tmp_path):
    told, sites = with_images(tmp_path)
    other = sites.sites["101"]
    sites.sites["101"] = SiteFile(other.settings, {**other.data, "positive": "no"}, other.folder)
    with pytest.raises(UserError, match=r"a predicts 'sick' \('yes' or 'no'\), but b 'sick' \('no' or 'yes'\)"):
        deployed(tmp_path, replace(told, data={}), sites)


def test_grey_values_of_16_bits_become_bytes_alike_at_all_sites(tmp_path):
    """A scanner with 12 bits and one with 16, each of whose sites would find another number by itself."""
    from PIL import Image

    told, sites = with_images(tmp_path)
    for file in sorted((tmp_path / "data").glob("[ab]/*.png")):
        values = np.asarray(Image.open(file)).astype(np.uint16) << (4 if file.parent.name == "a" else 8)
        Image.fromarray(values).save(file)

    def declare(node: str, bits: int) -> None:
        site = sites.sites[node]
        sites.sites[node] = SiteFile(site.settings, {**site.data, "bits": bits}, site.folder)

    for node, found in (("100", 12), ("101", 16)):
        with pytest.raises(UserError, match=rf"must be the same at all sites.*\(here bits = {found}\)"):
            requests.hello(sites.sites[node])
    declare("100", 12)
    declare("101", 16)
    short = replace(told, data={}, run={**told.run, "rounds": 1})
    with pytest.raises(UserError, match="12 at a, 16 at b; bits must be the same"):
        deployed(tmp_path / "1", short, sites)
    declare("100", 16)
    assert deployed(tmp_path / "2", short, sites).preparation.image.bits == 16


FINDINGS = ("sick", "dark")


def with_two_findings(folder: Path) -> tuple[Config, InProcess]:
    """The same pictures with a second label, which is not known of every tenth; a network with two outputs."""
    told, sites = with_images(folder)
    for file in (folder / "data").glob("*/*.csv"):
        names, *rows = file.read_text().splitlines()
        second = ["" if number % 10 == 9 else ("yes" if number % 3 else "no") for number in range(len(rows))]
        file.write_text("\n".join([f"{names},dark", *map(",".join, zip(rows, second, strict=True))]) + "\n")
    several = {"label": list(FINDINGS)}
    for node, site in sites.sites.items():
        sites.sites[node] = SiteFile(site.settings, {**site.data, **several}, site.folder)
    return replace(told, data={**told.data, **several}, risk={**told.risk, "labels": list(FINDINGS)}), sites


def test_images_with_several_labels_come_to_the_simulators_bits(tmp_path):
    told, sites = with_two_findings(tmp_path)
    wanted = simulated(told)
    found = deployed(tmp_path, replace(told, data={}), sites, evaluate="sites")
    assert_same(found, wanted)
    assert found.metrics["test"]["auroc"] == pytest.approx(wanted.metrics["test"]["auroc"], abs=1e-12)
    assert [row.name for row in found.label_table()] == [*FINDINGS, "mean"]
    assert found.preparation == wanted.preparation


@pytest.mark.parametrize("summary", [True, False])
def test_a_site_whose_images_have_their_labels_in_another_order_is_told(tmp_path, summary):
    """Whether it says so in its hello, or says nothing and refuses to train."""
    told, sites = with_two_findings(tmp_path)
    for node, site in sites.sites.items():
        labels = {"label": list(reversed(FINDINGS))} if node == "101" else {}
        settings = replace(site.settings, summary=summary)
        sites.sites[node] = SiteFile(settings, {**site.data, **labels}, site.folder)
    if summary:
        with pytest.raises(UserError, match=r"a predicts 'sick, dark'.*, but b 'dark, sick'"):
            deployed(tmp_path, replace(told, data={}), sites)
        return
    found = deployed(tmp_path, replace(told, data={}), sites, minimum=1)
    reasons = {(entry["site"], entry["reason"]) for row in found.history for entry in row.get("dropped", [])}
    assert {site for site, _ in reasons} == {"b"}
    assert {reason for _, reason in reasons} == {
        "this site's labels have other names, or another order; its own log says which"
    }


COLUMN = {"kind": "number", "name": "age", "mean": 0.0, "scale": 1.0}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda c: c["image"].update(size=16), "another shape"),
        (lambda c: c["image"].update(column="x" * 1000), "more than"),
        (lambda c: c.update(image=None, columns=[COLUMN]), "columns"),
        (lambda c: c.update(label="x" * 1000), "more than"),
        (lambda c: c.update(delimiter=";" * 100), "delimiter must be one character"),
        (lambda c: c.clear(), "malformed"),
    ],
)  # fmt: skip
def test_what_a_site_tells_of_its_images_is_checked_by_the_server(tmp_path, change, line):
    _, sites = with_images(tmp_path)
    content = json.loads(requests.hello(sites.sites["103"]).facts["images"])
    change(content)
    directory = Directory(sites, ServerSettings(sites=SITES), lambda said: None)
    hello = requests.hello(sites.sites["103"]).facts
    with pytest.raises((RefusedError, UserError), match=line):
        directory._read("", Envelope({**hello, "images": json.dumps(content)}, {}))
    assert directory._read("", Envelope(hello, {}))[0] == SITES[3]

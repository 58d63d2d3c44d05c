"""What a site's own file allows, whoever asks: networks, risks, algorithms, how much, and how often."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="needs fedxl[deploy]")

from fedxl import UserError
from fedxl.deploy.provision import folders
from fedxl.deploy.provision.settings import SiteFile, read_site
from fedxl.deploy.site.permission import COUNTS, count, digest, permitted
from fedxl.training.settings import Hooks
from tests.deploy.federated import InProcess, config, deployed, site_file

EXPERIMENT = config("fedxl2").tables()


def careful(folder: Path, **changes: Any) -> SiteFile:
    """A site that allows little."""
    return site_file(folder, 0, **{"models": ("mlp",), "risks": ("auroc", "pauc"), **changes})


def tables(**changes: object) -> str:
    tables = {name: dict(table) for name, table in EXPERIMENT.items() if name != "data"}
    for path, value in changes.items():
        section, key = path.split("__")
        tables[section][key] = value
    return json.dumps(tables)


def test_an_experiment_within_the_sites_file_is_allowed(tmp_path):
    found = permitted(careful(tmp_path), tables(model__weights="/etc/passwd"))
    assert (found.risk, found.run) == (EXPERIMENT["risk"], EXPERIMENT["run"])
    assert found.model == {"name": "mlp", "hidden": [8]}, "weights are no file of the site's"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model__name": "linear"}, "does not allow the model 'linear'; its site.toml allows: mlp"),
        ({"model__name": "os:system"}, "does not allow the model 'os:system'"),
        ({"model__name": "\x1b[2Jmlp"}, r"does not allow the model '\\x1b\[2Jmlp'"),
        ({"risk__name": "contrastive"}, "does not allow the risk 'contrastive'; its site.toml allows: auroc, pauc"),
        ({"algorithm__name": "sgd"}, "does not allow the algorithm 'sgd'"),
        (
            {"run__metrics": ["os:system"]},
            "does not allow the metric 'os:system'; its site.toml allows: only fedxl's own",
        ),
        ({"run__select": "-os:\x1b[2J@0.3"}, r"does not allow the metric 'os:\\x1b\[2J'"),
        ({"run__metrics": "os:system"}, "does not allow the metric 'os:system'"),
        ({"run__metrics": [7]}, "the request's metrics are not names"),
        ({"run__local_steps": 1001}, "allows 1000 local steps per request, not 1001"),
        ({"run__local_steps": "many"}, "local_steps is not an integer"),
        ({"run__local_steps": True}, "local_steps is not an integer"),
        (
            {"run__batch1": 60_000},
            r"scores at most 4096 examples per step \(batch\), not 60005: lower batch1 and batch2",
        ),
        ({"run__batch2": 4093}, r"at most 4096 examples per step \(batch\), not 4097"),
        ({"run__batch2": 2045, "algorithm__fresh": True}, r"\(batch\), not 4098: .*, which fresh = true doubles"),
        ({"run__batch1": -(10**9), "run__batch2": 10**9}, "batch1 is not an integer from 1"),
    ],
)
def test_everything_else_is_refused(tmp_path, changes, why):
    with pytest.raises(UserError, match=why):
        permitted(careful(tmp_path), tables(**changes))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model": 7}', "[" * 100_000, "null", '{"run": [1]}'])
def test_an_experiment_that_is_none(tmp_path, text):
    with pytest.raises(UserError):
        permitted(site_file(tmp_path, 0), text)


def test_a_site_without_a_word_on_it_allows_nothing(tmp_path):
    with pytest.raises(UserError, match=r"does not allow the model 'mlp'; its site\.toml allows: none"):
        permitted(site_file(tmp_path, 0, models=()), tables())


def test_a_pinned_experiment_is_the_only_one(tmp_path):
    pinned = site_file(tmp_path, 0, digest=digest(EXPERIMENT))
    permitted(pinned, tables())
    for changes in ({"run__seed": 6}, {"algorithm__lr": 0.3}, {"model__hidden": [9]}, {"risk__lam": 2.0}):
        with pytest.raises(UserError, match="not the one that the site has pinned"):
            permitted(pinned, tables(**changes))


def test_the_digest_that_the_command_prints_is_the_one_that_sites_compute(tmp_path):
    folders.init(["a"], tmp_path / "f", config=config("fedxl2"))  # which switches on what is safe
    file = tmp_path / "f" / "server" / "server.toml"
    command = [sys.executable, "-m", "fedxl", "deploy", "digest", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert permitted(
        site_file(tmp_path, 0, digest=printed),
        tables(**{f"algorithm__{name}": value for name, value in folders.SAFE.items()}),
    )


def test_requests_are_counted_over_all_runs_and_restarts(tmp_path):
    mine = site_file(tmp_path, 0, rounds=3, evaluations=1)
    for _ in range(3):
        count(mine, "train")
    with pytest.raises(UserError, match=r"answered 3 requests to train, as many as its site.toml allows \(rounds\)"):
        count(mine, "train")
    count(mine, "evaluate")
    with pytest.raises(UserError, match="answered 1 requests to evaluate"):
        count(mine, "evaluate")
    count(replace(mine, settings=replace(mine.settings, rounds=4)), "train")  # its owner has allowed more
    (mine.state / COUNTS).write_text("[]")
    with pytest.raises(UserError, match="its owner must correct or remove it"):
        count(mine, "train")


def test_a_site_that_has_given_enough_is_left_out_of_the_run(tmp_path):
    carrier = InProcess(tmp_path)
    carrier.sites["100"] = site_file(tmp_path, 0, rounds=2)
    lines: list[str] = []
    deployed(tmp_path, config("local_sgd", cohort=0), carrier, Hooks(say=lines.append), minimum=3)
    assert sum("nothing from a: this site has answered 2 requests to train" in line for line in lines) == 1


def test_init_allows_what_its_experiment_needs_and_nothing_else(tmp_path):
    folders.init(["a"], tmp_path / "f", config=config("codasca", rounds=7))
    found = read_site(Path(tmp_path / "f" / "sites" / "a" / "site.toml")).settings
    assert (found.models, found.risks, found.algorithms) == (("mlp",), ("auroc",), ("codasca",))
    assert (found.rounds, found.steps, found.evaluate) == (34, 3, "none")
    assert (found.batch, found.training_epsilon, found.training_delta) == (4096, 0.0, 1e-5)
    folders.init(["a"], tmp_path / "g", config=config("codasca", batch1=8000))
    assert read_site(Path(tmp_path / "g" / "sites" / "a" / "site.toml")).settings.batch == 8005


def test_init_allows_the_metrics_of_its_experiment(tmp_path):
    own = {"metrics": ["mine.scores:recall@0.2", "auroc"], "select": "-mine.scores:brier"}
    folders.init(["a"], tmp_path / "f", config=config("codasca", **own))
    found = read_site(Path(tmp_path / "f" / "sites" / "a" / "site.toml"))
    assert found.settings.metrics == ("mine.scores:brier", "mine.scores:recall")
    tables = config("codasca", **own).tables()
    assert permitted(found, json.dumps({**tables, "run": {**tables["run"], "local_steps": 3}}))
    folders.init(["a"], tmp_path / "g", config=config("codasca"))
    assert read_site(Path(tmp_path / "g" / "sites" / "a" / "site.toml")).settings.metrics == ()


def test_an_experiment_that_would_share_exact_times_is_refused_by_init(tmp_path):
    timed = replace(config("fedxl2"), risk={"name": "cox"})
    with pytest.raises(UserError, match=r"real sites share times in public bins: set time_bins in \[risk\]"):
        folders.init(["a"], tmp_path / "f", config=timed)
    assert not (tmp_path / "f").exists()
    folders.init(["a"], tmp_path / "g", config=replace(timed, risk={"name": "cox", "time_bins": 10}))
    folders.init(["a"], tmp_path / "h", config=replace(timed, algorithm={"name": "local_pair", "lr": 0.1}))

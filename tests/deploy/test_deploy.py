"""Real processes over TLS with keys: the same numbers as the simulator, and what happens when somebody dies."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("cryptography", reason="needs fedxl[deploy]")

from cryptography import x509
from typer.testing import CliRunner

from fedxl import UserError
from fedxl.cli.main import app
from fedxl.deploy.provision import approval, folders
from fedxl.deploy.provision.settings import read_server, read_site
from fedxl.deploy.provision.templates import fill
from fedxl.training.run_writer import load_latest
from tests.deploy.deployment import Deployment
from tests.deploy.federated import SITES, assert_equals_simulator, config
from tests.training.faults import Disk, failing

GONE = ("it is not approved", "it is no longer approved", "it is not connected, or busy with an earlier request")
ANSWER = 60.0  # seconds that a site has to answer: enough for ten times the load, and a lost answer costs as much


def run(folder, algorithm: str) -> None:
    experiment = config(algorithm, rounds=3)
    with Deployment(folder, SITES, experiment) as federation:
        for name in ("server", *SITES):
            federation.start(name)
        federation.finished()
        assert_equals_simulator(federation.folder, experiment)
        assert federation.dropped() == []


@pytest.mark.deploy
def test_four_sites_over_tls_come_to_what_the_simulator_does(tmp_path):
    run(tmp_path / "federation", "fedxl2")


@pytest.mark.deploy
def test_an_algorithm_with_other_states_does(tmp_path):
    run(tmp_path / "federation", "codasca")


@pytest.mark.deploy
def test_an_algorithm_of_ones_own_is_deployed(tmp_path, monkeypatch):
    """It is installed at every party, and each site's own file allows it by its name."""
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(examples), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.syspath_prepend(examples)
    experiment = replace(config("fedxl2"), algorithm={"name": "own_algorithm:FeDXLProx", "lr": 0.3, "mu": 0.05})
    with Deployment(tmp_path / "federation", SITES, experiment) as federation:
        allowed = (tmp_path / "federation" / "sites" / SITES[0] / "site.toml").read_text()
        assert 'algorithms = ["own_algorithm:FeDXLProx"]' in allowed
        for name in ("server", *SITES):
            federation.start(name)
        federation.finished()
        assert_equals_simulator(federation.folder, experiment)


@pytest.mark.deploy
def test_a_site_dies_mid_round_the_run_goes_on_and_the_site_returns(tmp_path):
    experiment = config("fedxl2", rounds=100_000, cohort=0, eval_every=1)
    with Deployment(tmp_path / "federation", SITES[:3], experiment, minimum=2, deadline=ANSWER) as federation:
        for name in ("server", *SITES[:3]):
            federation.start(name)
        federation.until(lambda: federation.round() >= 1, "round 1")
        federation.kill("b")
        federation.until(lambda: bool(federation.dropped()), "a round without b")
        federation.start("b")

        def used_again() -> bool:
            # Two rounds: the first one's checkpoint is on disk once there is a record of the second.
            rows = federation.records()[-2:]
            met = [each["sites"] for row in rows for each in row["participants"]]
            return len(met) >= 2 and all("b" in sites for sites in met) and not any("dropped" in row for row in rows)

        federation.until(used_again, "two rounds with b again")
        federation.kill("server")
        last, _ = load_latest(federation.run / "checkpoints")
        lost = {entry["round"] for entry in federation.dropped()}
        assert {entry["site"] for entry in federation.dropped()} == {"b"}
        done = int(last.tensors["population.base.b"])
        assert done > max(lost)
        assert int(last.tensors["population.visits.b"]) == done + 1 - len(lost), "with the right count of its rounds"
        assert "is lost" not in federation.log("server"), "its state had survived"


@pytest.mark.deploy
def test_every_process_may_die_at_any_time_and_nothing_is_lost(tmp_path):
    """Twenty kills in one run, of anybody, whatever they are doing: the simulator's bits, and every round's sites."""
    rng, experiment, sites = random.Random(0), config("fedxl2", rounds=60), SITES[:3]
    experiment = replace(experiment, data={**experiment.data, "clients": 3})
    parties = ("server", *sites)
    with Deployment(tmp_path / "f", sites, experiment, minimum=3, deadline=ANSWER, patience=99) as federation:
        for name in parties:
            federation.start(name)
        for number in range(20):
            federation.until(lambda least=2 * number: federation.round() >= least, f"round {2 * number}")
            federation.pause(rng.uniform(0, 0.3))
            federation.kill_and_restart(rng.choice(parties) if number else "server")
        federation.finished()
        assert_equals_simulator(federation.folder, experiment, tolerance=0)
        took_part = [entry for record in federation.records() for entry in record.get("participants", [])]
        assert [(entry["round"], entry["sites"]) for entry in took_part] == [
            (round, list(sites)) for round in range(61)
        ]


@pytest.mark.deploy
def test_a_revoked_site_is_left_out_of_a_run_and_comes_back_when_it_is_approved_again(tmp_path):
    experiment = config("local_sgd", rounds=100_000, cohort=0, eval_every=1)
    place = tmp_path / "federation"
    with Deployment(place, SITES[:2], experiment, minimum=1, deadline=ANSWER) as federation:
        for name in ("server", *SITES[:2]):
            federation.start(name)
        federation.until(lambda: federation.round() >= 1, "round 1")
        approval.revoke(place, "b")
        federation.until(lambda: any(entry["site"] == "b" for entry in federation.dropped()), "a round without b")
        file, shown = approval.request(place / "sites" / "b")
        approval.accept(place / "sites" / "b", approval.approve(place, file, 5000, lambda _, found: found == shown))
        federation.until(lambda: "dropped" not in federation.records()[-1], "a round with b, without any restart")
        assert {entry["site"] for entry in federation.dropped()} == {"b"}
        assert all(entry["reason"] in GONE for entry in federation.dropped())


HOOK = '''
import importlib.abc, importlib.machinery, sys

class Spoil(importlib.abc.MetaPathFinder):
    """Has a site do something else than it should, in every process of its own."""

    def find_spec(self, name, path, target=None):
        if name != "fedxl.deploy.site.requests":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            spoil(module)

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Spoil())
'''
FAULTS = {
    "garbage": (
        "    work = requests.train\n"
        "    def lie(*args):\n"
        "        answer = work(*args)\n"
        "        spoilt = {name: t * float('nan') for name, t in answer.tensors.items() if t.is_floating_point()}\n"
        "        return answer._replace(tensors={**answer.tensors, **spoilt})\n"
        "    requests.HANDLERS['train'] = lie\n",
        "NaN or infinity",
    ),
    "silence": (
        "    import time\n    requests.HANDLERS['train'] = lambda *args: time.sleep(100_000)\n",
        "no reply within 60 s",
    ),
    "a full disk": (
        "    import errno\n"
        "    def full(*args, **kwargs):\n"
        "        raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "    requests.save_checkpoint = full\n",
        "No space left on device; earlier states are intact",
    ),
}


@pytest.mark.deploy
@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_site_that_is_of_no_use_is_left_out_with_a_reason(tmp_path, fault):
    body, reason = FAULTS[fault]
    (tmp_path / "sitecustomize.py").write_text(f"{HOOK}\ndef spoil(requests):\n{body}")
    experiment = config("fedxl2", rounds=1, cohort=0)
    with Deployment(tmp_path / "federation", SITES[:3], experiment, minimum=2, deadline=ANSWER) as federation:
        federation.start("server")
        federation.start("a", PYTHONPATH=str(tmp_path))
        for name in SITES[1:3]:
            federation.start(name)
        last = federation.finished()
        assert {entry["site"] for entry in federation.dropped()} == {"a"}
        first, *later = [entry["reason"] for entry in federation.dropped()]
        assert reason in first
        assert all(reason in each or each in GONE for each in later)
        assert int(last.tensors["population.base.a"]) == -1
        assert all(torch.isfinite(t).all() for name, t in last.tensors.items() if name.startswith("server.weights"))


def test_init_puts_every_secret_where_it_belongs_and_nowhere_else(tmp_path):
    place = tmp_path / "federation"
    folders.init(SITES, place, host="server.example.org", port=4443, config=config("fedxl2"))
    secrets = {path.relative_to(place): path.read_bytes() for path in place.rglob("*.key")}
    assert sorted(map(str, secrets)) == sorted(
        ["authority/ca.key", "server/server.key", *(f"sites/{name}/site.key" for name in SITES)]
    )
    assert len(set(secrets.values())) == len(secrets)
    for path in place.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert not path.name.endswith(".key") or mode == 0o600, path
        others = [text for name, text in secrets.items() if name != path.relative_to(place)]
        assert path.is_dir() or not any(text in path.read_bytes() for text in others), path
    certificate = x509.load_pem_x509_certificate((place / "server" / "server.crt").read_bytes())
    authority = x509.load_pem_x509_certificate((place / "authority" / "ca.crt").read_bytes())
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "server.example.org" in names.get_values_for_type(x509.DNSName)
    written = read_server(place / "server" / "server.toml").config
    assert {name: written.algorithm.pop(name) for name in folders.SAFE} == folders.SAFE, "which init switches on"
    assert written == config("fedxl2")
    for number, name in enumerate(SITES):
        site = read_site(place / "sites" / name / "site.toml")
        assert (site.settings.name, site.settings.part, site.data) == (name, number, config("fedxl2").data)
        subprocess.run(["sh", "-n", str(place / "sites" / name / "start.sh")], check=True)
    with pytest.raises(UserError, match="is not empty"):
        folders.init(SITES, place)
    with pytest.raises(UserError, match="is not a valid site name"):
        folders.init(["../up"], tmp_path / "other")


def test_a_template_is_filled_in_whole_or_not_at_all():
    assert fill("tls/site/start.sh").startswith("#!/bin/sh\n")
    with pytest.raises(KeyError, match="host"):
        fill("nvflare/server/project.yml", port=1)


def test_a_full_disk_is_one_line_when_folders_are_made(tmp_path):
    words = ["deploy", "init", str(tmp_path / "f"), "--sites", "a,b"]
    with failing(Disk(tmp_path, at=9, full=True)) as disk:
        error = CliRunner().invoke(app, words).exception
    assert disk.fired
    assert isinstance(error, UserError)
    assert "No space left on device; free some space, remove the folder and run it again" in str(error)


def test_a_folder_that_is_not_one_is_one_line(tmp_path):
    command = [sys.executable, "-m", "fedxl", "deploy"]
    for role in ("serve", "join", "local"):
        found = subprocess.run([*command, role, str(tmp_path)], capture_output=True, text=True)
        assert found.returncode == 2
        assert found.stderr.startswith("fedxl: there is no file")
        assert found.stderr.count("\n") == 1

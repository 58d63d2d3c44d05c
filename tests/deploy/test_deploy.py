"""Real processes over TLS with keys: the same numbers as the simulator, and what happens when somebody dies."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="needs fedxl[flower]")

from cryptography import x509

from fedxl import UserError, tree
from fedxl.cli.processes import free_port
from fedxl.deploy.protocol import records
from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.provision import approval, folders
from fedxl.deploy.provision.settings import read_server, read_site
from fedxl.deploy.supervise import children, status
from fedxl.training.run_writer import load_latest
from fedxl.wire import RefusedError
from tests.deploy.deployment import Deployment
from tests.deploy.federated import SITES, config, secrets_of, simulated

ANSWER = 60.0  # seconds that a site has to answer: enough for ten times the load, and a lost answer costs as much


def assert_equals_simulator(found, experiment) -> None:
    """All of the server's state, to 1e-12 of what a simulation with the same secrets comes to."""
    place = found.path.parents[3]
    algorithm = read_server(place / "server" / "server.toml").config.algorithm
    secrets = secrets_of(place / "server" / "run", place / "sites")
    assert secrets.pool, "`fedxl deploy init` switches it on"
    expected = tree.pack(simulated(replace(experiment, algorithm=algorithm), secrets).server)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found.tensors[f"server.{name}"],
            tensor,
            rtol=0,
            atol=1e-12,
            equal_nan=True,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def run(folder, algorithm: str) -> None:
    experiment = config(algorithm, rounds=3)
    with Deployment(folder, SITES, experiment) as federation:
        for name in ("server", *SITES):
            federation.start(name)
        assert_equals_simulator(federation.finished(), experiment)
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
        assert_equals_simulator(federation.finished(), experiment)


def test_a_message_that_is_too_large_is_refused_before_it_is_opened():
    content = records.to_records(Envelope({"a": 1}, {"x": torch.zeros(1000)}))
    assert torch.equal(records.from_records(content, 0.01).tensors["x"], torch.zeros(1000))
    with pytest.raises(RefusedError, match=r"over the limit of 0\.001 MB"):
        records.from_records(content, 0.001)


@pytest.mark.deploy
def test_the_servers_process_dies_mid_round_and_nothing_is_lost(tmp_path):
    experiment = config("fedxl2", rounds=3)
    with Deployment(tmp_path / "federation", SITES, experiment) as federation:
        for name in ("server", *SITES):
            federation.start(name)
        federation.until(lambda: federation.round() >= 1, "round 1")
        os.kill(federation.app(), signal.SIGKILL)
        assert_equals_simulator(federation.finished(), experiment)
        assert "the app crashed" in federation.log("server")


@pytest.mark.deploy
def test_the_whole_server_dies_and_is_started_again(tmp_path):
    experiment = config("fedxl2", rounds=3)
    with Deployment(tmp_path / "federation", SITES, experiment) as federation:
        for name in ("server", *SITES):
            federation.start(name)
        federation.until(lambda: federation.round() >= 1, "round 1")
        federation.kill("server")
        federation.start("server")
        assert_equals_simulator(federation.finished(), experiment)


@pytest.mark.deploy
def test_a_site_dies_mid_round_the_run_goes_on_and_the_site_returns(tmp_path):
    experiment = config("fedxl2", rounds=30, cohort=0)
    with Deployment(tmp_path / "federation", SITES[:3], experiment, minimum=2, deadline=ANSWER) as federation:
        for name in ("server", *SITES[:3]):
            federation.start(name)
        federation.until(lambda: federation.round() >= 1, "round 1")
        federation.kill("b")
        federation.until(lambda: bool(federation.dropped()), "a round without b")
        federation.start("b")
        last = federation.finished()
        lost = {entry["round"] for entry in federation.dropped() if entry["site"] == "b"}
        assert lost, "it was missed"
        assert {entry["site"] for entry in federation.dropped()} == {"b"}
        assert int(last.tensors["population.base.b"]) > max(lost), "and used again when it was back"
        assert int(last.tensors["population.visits.b"]) == 31 - len(lost), "with the right count of its rounds"
        assert "is lost" not in federation.log("server"), "its state had survived"


@pytest.mark.deploy
def test_every_process_may_die_and_nothing_is_lost(tmp_path):
    """Each once, and again while the others are being started: the end is that of an undisturbed run."""
    experiment = config("fedxl2", rounds=6)
    with Deployment(tmp_path / "federation", SITES, experiment, minimum=3, deadline=ANSWER, patience=9) as federation:
        for name in ("server", *SITES):
            federation.start(name)
        victims = [("server", "superlink"), ("server", "gateway"), ("a", "node"), ("server", "app")]
        for number, (party, role) in enumerate([*victims, ("server", "superlink")]):
            federation.until(lambda least=number: federation.round() >= least, f"round {number}")
            federation.replace(party, role)
        assert_equals_simulator(federation.finished(), experiment)
        log = federation.log("server")
        for role in ("superlink", "gateway", "app"):
            assert f"the {role} crashed" in log
        assert "the node crashed" in federation.log("a")


@pytest.mark.deploy
def test_a_revoked_site_is_left_out_of_a_run_and_comes_back_when_it_is_approved_again(tmp_path):
    experiment = config("local_sgd", rounds=30, cohort=0)
    place = tmp_path / "federation"
    with Deployment(place, SITES[:2], experiment, minimum=1, deadline=ANSWER) as federation:
        for name in ("server", *SITES[:2]):
            federation.start(name)
        federation.until(lambda: federation.round() >= 1, "round 1")
        approval.revoke(place, "b")
        federation.until(lambda: any(entry["site"] == "b" for entry in federation.dropped()), "a round without b")
        file, shown = approval.request(place / "sites" / "b")
        approval.accept(place / "sites" / "b", approval.approve(place, file, 5000, lambda _, found: found == shown))
        last = federation.finished()
        lost = [entry["round"] for entry in federation.dropped()]
        assert {entry["site"] for entry in federation.dropped()} == {"b"}
        assert int(last.tensors["population.base.b"]) > max(lost), "used again, without a restart of anything"
        assert "crashed" not in federation.log("server")


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
        "    requests.train = lie\n",
        "NaN or infinity",
    ),
    "silence": ("    import time\n    requests.train = lambda *args: time.sleep(100_000)\n", "no reply within 60 s"),
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
        assert all(reason in entry["reason"] for entry in federation.dropped())
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


def test_a_folder_that_is_not_one_is_one_line(tmp_path):
    command = [sys.executable, "-m", "fedxl", "deploy"]
    for role in ("serve", "join", "local"):
        found = subprocess.run([*command, role, str(tmp_path)], capture_output=True, text=True)
        assert found.returncode == 2
        assert found.stderr.startswith("fedxl: there is no file")
        assert found.stderr.count("\n") == 1


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.deploy
def test_flowers_own_simulation_runs_the_same_apps(tmp_path):
    pytest.importorskip("ray", reason="needs fedxl[simulation]")
    place, home, port = tmp_path / "federation", tmp_path / "home", free_port()
    experiment = config("fedxl2", rounds=2)
    folders.init(SITES, place, config=experiment)
    # As `flwr new` lays a project out: a package with a module for each app.
    package = home / "app" / "hospital"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for role in ("server", "client"):
        (package / f"{role}_app.py").write_text(f"from fedxl.deploy import flower_apps\n\napp = flower_apps.{role}\n")
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "sim"\n[superlink.sim]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    (home / "app" / "pyproject.toml").write_text(
        '[project]\nname = "fedxl-run"\nversion = "1.0.0"\nlicense = "Apache-2.0"\ndependencies = []\n'
        '[tool.flwr.app]\npublisher = "fedxl"\n[tool.flwr.app.components]\n'
        'serverapp = "hospital.server_app:app"\nclientapp = "hospital.client_app:app"\n'
        f'[tool.flwr.app.config]\nserver = "{place / "server" / "server.toml"}"\n'
    )
    programs = Path(sys.executable).parent
    environment = {
        **os.environ, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    link = ["flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    with (home / "log").open("w") as log:
        process = subprocess.Popen(
            [*link, "--disable-runtime-dependency-installation"], env=environment, stdout=log, stderr=log
        )
    try:
        while process.poll() is None and not listening(port):
            time.sleep(0.2)
        size = f"num-supernodes={len(SITES)} client-resources-num-cpus=1 init-args-num-cpus=2"
        subprocess.run(
            ["flwr", "run", "app", "sim", "--federation-config", size],
            cwd=home, env=environment, check=True, capture_output=True,
        )  # fmt: skip
        while (found := status.read(place / "server")) is None or found.state == status.RUNNING:
            assert process.poll() is None, (home / "log").read_text()[-2000:]
            time.sleep(0.5)
        assert found.state == status.FINISHED, found.message
    finally:
        relatives = children.descendants(process.pid)
        process.terminate()
        process.wait(30)
        for pid in relatives:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    last, _ = load_latest(place / "server" / "run" / "checkpoints")
    assert_equals_simulator(last, experiment)

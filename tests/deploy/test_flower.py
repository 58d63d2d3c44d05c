"""The Flower engine, in memory and with Flower's own processes behind nginx, equals the simulator."""

from __future__ import annotations

import hashlib
import http.client
import inspect
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_overloads

import pytest
import torch

pytest.importorskip("flwr", reason="needs fedxl[flower]")

from flwr.app import Array, ArrayRecord, Context, Error, Message, MessageType, Metadata, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedxl import UserError
from fedxl.cli.processes import free_port
from fedxl.config.experiment import Config
from fedxl.deploy.protocol.envelope import Envelope, Failure
from fedxl.deploy.protocol.message import encode
from fedxl.deploy.provision import approval, folders
from fedxl.deploy.transport.flower import apps, grid, project
from fedxl.training.run_folder import read_metrics
from tests.deploy.federated import STILL, assert_equals_simulator, config

SITES = ("a", "b", "c")
needs_nginx = pytest.mark.skipif(not shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin"), reason="no nginx")


def experiment_of(rounds: int) -> Config:
    experiment = config("fedxl2", rounds=rounds, cohort=0)
    return replace(experiment, data={**experiment.data, "clients": len(SITES)})


def initialise(out: Path, experiment: Config, port: int = 18000, host: str = "127.0.0.1") -> None:
    """The folders of a federation on Flower."""
    config = replace(experiment, run={**experiment.run, "executor": "auto"})
    folders.init(SITES, out, host=host, port=port, config=config, engine="flower")
    if os.geteuid() == 0:  # as in containers: nginx would give up the right to read a folder of pytest's
        for path in out.rglob("nginx.conf"):
            path.write_text("user root;\n" + path.read_text())


# Without processes.


def parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_the_public_interface_of_flower_that_we_use_is_there():
    told = "Flower has changed its public interface: adapt fedxl/deploy/transport/flower, or the versions we allow"
    signatures = [parameters(each) for each in get_overloads(Message.__init__)]
    assert {"self", "content", "dst_node_id", "message_type", "ttl"} <= signatures[0], told
    assert any({"self", "content", "reply_to"} <= each for each in signatures), told
    assert {"has_error", "error", "content", "metadata"} <= set(dir(Message)), told
    assert Error(code=2, reason="x").reason == "x", told
    assert {"message_ids"} <= parameters(Grid.pull_messages), told
    assert {"messages"} <= parameters(Grid.push_messages), told
    assert {"self"} == parameters(Grid.get_node_ids), told
    assert {"node_config", "run_config"} <= parameters(Context), told
    assert Array("uint8", (1,), "bytes", b"1").data == b"1", told
    record = RecordDict({"x": ArrayRecord({"train": Array("uint8", (1,), "bytes", b"1")})})
    assert list(record.array_records["x"]) == ["train"], told
    assert MessageType.QUERY == "query", told
    assert callable(ServerApp().main()), told
    assert callable(ClientApp().query()), told


class Nodes:
    """A Grid whose nodes are called at once, in this process."""

    def __init__(self, contexts: dict[int, Context]) -> None:
        self.contexts = contexts
        self.replies: dict[str, list[Message]] = {}
        self.faults: dict[int, str] = {}  # by node: what goes wrong with its next training
        self.ttl = set[float]()

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str | None]:
        return [self._call(message) for message in messages]

    def _call(self, message: Message) -> str | None:
        node, ticket = message.metadata.dst_node_id, message.metadata.message_id
        self.ttl.add(message.metadata.ttl)
        kind, _ = grid.unpack(message.content)
        fault = self.faults.pop(node, "") if kind == "train" else ""
        if fault == "error":
            self.replies[ticket] = [Message(Error(code=8, reason="it has\ncrashed"), reply_to=message)]
        elif fault == "other app":
            self.replies[ticket] = [Message(RecordDict(), reply_to=message)]
        elif fault != "damaged":
            self.replies[ticket] = [apps.client(message, self.contexts[node])]
        return None if fault == "refused" else ticket

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        (ticket,) = message_ids
        return self.replies.pop(ticket)  # KeyError, as Flower raises whatever it does, if a reply is damaged


@pytest.fixture
def in_memory(tmp_path, monkeypatch) -> Callable[[Config], Nodes]:
    """Folders of a federation, and a Grid of its sites."""
    sent = iter(range(10**6))

    def message(content: RecordDict, dst_node_id: int, message_type: str, *, ttl: float) -> Message:
        # Flower's own constructor takes the sender from the process of a run.
        metadata = Metadata(1, f"id {next(sent)}", 1, dst_node_id, "", "", time.time(), ttl, message_type)
        return Message(content=content, metadata=metadata)

    def make(experiment: Config) -> Nodes:
        initialise(tmp_path / "f", experiment)
        places = [str(tmp_path / "f" / "sites" / name / "site.toml") for name in SITES]
        return Nodes({n: Context(1, n, {"site": at}, RecordDict(), {}) for n, at in enumerate(places, 101)})

    monkeypatch.setattr(grid, "Message", message)
    return make


def serve(nodes: Nodes, out: Path) -> None:
    apps.server(nodes, Context(1, 1, {}, RecordDict(), {"server": str(out / "server" / "server.toml")}))


def test_the_two_apps_come_to_what_the_simulator_does(in_memory, tmp_path):
    experiment = experiment_of(3)
    nodes = in_memory(experiment)
    serve(nodes, tmp_path / "f")
    assert_equals_simulator(tmp_path / "f", experiment)
    assert max(nodes.ttl) == 600.0, "requests expire with their deadline"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("error", "Flower reports error 8: it has\\ncrashed"),
        ("refused", "Flower did not take the message"),
        ("damaged", "its reply cannot be fetched: 'id "),
        ("other app", "its reply cannot be fetched: "),
    ],
)
def test_one_bad_node_does_not_end_the_run(in_memory, tmp_path, fault, reason):
    nodes = in_memory(experiment_of(2))
    nodes.faults[102] = fault
    serve(nodes, tmp_path / "f")
    rows = read_metrics(tmp_path / "f" / "server" / "run")[0]
    (dropped,) = [entry for row in rows for entry in row.get("dropped", [])]
    assert dropped["site"] == "b"
    assert dropped["reason"].startswith(reason)


def test_a_reply_belongs_to_the_node_that_was_asked_whatever_it_says_of_itself(in_memory):
    nodes = in_memory(experiment_of(1))
    carrier = grid.GridCarrier(nodes, 100.0)
    tickets = carrier.send({node: Envelope({"version": "0"}, {}) for node in carrier.nodes()}, "hello", 5.0)
    first, second, _ = nodes.replies
    nodes.replies[first] = nodes.replies[second]  # it names another request in `reply_to_message_id`
    assert [tickets[ticket] for ticket, _ in carrier.replies(list(tickets))] == ["101", "102", "103"]


def test_a_reply_that_is_too_large_is_refused(in_memory):
    nodes = in_memory(experiment_of(1))
    carrier = grid.GridCarrier(nodes, 0.0001)
    (ticket,) = carrier.send({"101": Envelope({"version": "0"}, {})}, "hello", 5.0)
    content = encode(Envelope({}, {"x": torch.zeros(1000)}))
    nodes.replies[ticket][0].content = grid.pack("hello", content)
    ((_, reply),) = carrier.replies([ticket])
    assert isinstance(reply, Failure)
    assert "over the limit" in reply.reason


def test_a_nodes_own_configuration_alone_decides_which_site_it_is(tmp_path):
    initialise(tmp_path / "f", experiment_of(1))
    server, sites = tmp_path / "f" / "server" / "server.toml", tmp_path / "f" / "sites"
    run = {"server": str(server), "sites": str(sites)}
    deployed = Context(1, 1, {"site": "/mine/site.toml", "partition-id": 1}, RecordDict(), run)
    assert apps.site_file(deployed) == Path("/mine/site.toml")
    simulated_node = Context(1, 1, {"partition-id": 1, "num-partitions": 3}, RecordDict(), run)
    assert apps.site_file(simulated_node) == sites / "b" / "site.toml"
    for node, config_of_run in (({}, run), ({"partition-id": 1}, {"server": str(server), "sites": ""})):
        with pytest.raises(UserError, match="start this node with --node-config"):
            apps.site_file(Context(1, 1, node, RecordDict(), config_of_run))


def test_the_app_is_looked_at_without_loading_torch():
    look = "import sys, fedxl.deploy.transport.flower.apps; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look]).returncode == 0


def test_the_app_names_components_that_exist():
    app = tomllib.loads(project.files(SITES, "127.0.0.1", 18000, True)["app/pyproject.toml"])["tool"]["flwr"]["app"]
    for reference, kind in zip(app["components"].values(), (ServerApp, ClientApp), strict=True):
        module, _, name = reference.partition(":")
        assert isinstance(getattr(import_module(module), name), kind)
    assert app["config"].keys() == {"server", "sites"}


# With Flower's own processes.


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        first = free_port()
        with suppress(OSError, OverflowError):
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first


class Federation:
    """A federation's scripts as processes; `with` ends them all, and what they have started."""

    def __init__(self, out: Path, experiment: Config, nginx: bool = True) -> None:
        self.out, self.port = out, free_ports(2 + 2 * len(SITES))
        self.processes: list[subprocess.Popen[bytes]] = []
        initialise(out, experiment, self.port)
        if not nginx:  # SuperNodes connect to SuperLink; `tail` takes the place of nginx
            for script in out.rglob("start.sh"):
                text = script.read_text().replace('nginx -p "$PWD" -e stderr -c nginx.conf', "tail -f /dev/null")
                for number in range(len(SITES)):
                    text = text.replace(f":{self.port + 2 + 2 * number} ", f":{self.port + 1} ")
                script.write_text(text)

    def start(self, place: str, script: str = "start.sh") -> subprocess.Popen[bytes]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
        modules = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PATH": path, "PYTHONPATH": modules, "OMP_NUM_THREADS": "1"}
        with (self.out / place / f"{script}.log").open("ab") as log:
            command = [str(self.out / place / script)]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self.processes.append(process)
        return process

    def until(self, reached: Callable[[], object], what: str) -> None:
        """Wait for as long as anything happens."""
        seen, since = self.standing(), time.monotonic()
        while not reached():
            now = self.standing()
            seen, since = (now, time.monotonic()) if now != seen else (seen, since)
            going = not any(process.poll() for process in self.processes) and time.monotonic() - since < STILL
            assert going, f"{what} did not happen; {self.logs()}"
            time.sleep(0.2)

    def standing(self) -> object:
        """What changes as long as anything happens."""
        # SuperLink's own log grows with every heartbeat.
        logs = (self.out / "server" / "run.sh.log", *self.out.glob("sites/*/start.sh.log"))
        return [path.stat().st_size for path in logs if path.exists()], self.round()

    def logs(self) -> str:
        return "".join(f"\n{path}\n{path.read_text(errors='replace')[-2000:]}" for path in self.out.rglob("*.sh.log"))

    def start_all(self) -> None:
        """The server, and then the sites, whose data take a while."""
        self.start("server")
        self.until(lambda: self.answers(self.port + 1), "SuperLink")
        for name in SITES:
            self.start(f"sites/{name}")

    @staticmethod
    def answers(port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def round(self) -> int:
        """The last one on disk."""
        files = sorted((self.out / "server" / "run" / "checkpoints").glob("round-*.safetensors"))
        return int(files[-1].stem.partition("-")[2]) if files else -1

    def pids(self, *words: str) -> list[int]:
        """The processes of this federation whose command holds one of these words."""
        return [pid for pid, line in self.commands() if any(word in line for word in words)]

    def commands(self) -> Iterator[tuple[int, str]]:
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"={self.out}/".encode() in (place / "environ").read_bytes():  # FLWR_HOME
                    yield int(place.name), (place / "cmdline").read_bytes().decode(errors="replace")

    def train(self, experiment: Config) -> None:
        self.start("server", "run.sh")
        # When the log ends, the run need not have: its record tells.
        run = self.out / "server" / "run"
        self.until(lambda: '"best_round"' in "".join(p.read_text() for p in run.glob("metrics.jsonl")), "the end")
        self.until(lambda: not self.pids("flwr-serverapp"), "the end of the server's process")
        assert_equals_simulator(self.out, experiment)
        assert not [entry for row in read_metrics(run)[0] for entry in row.get("dropped", [])]

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.terminate()  # the scripts end what they have started
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and any(process.poll() is None for process in self.processes):
            time.sleep(0.1)
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        while left := self.pids(""):  # what has a session of its own
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


@pytest.mark.deploy
@needs_nginx
def test_three_sites_behind_nginx_come_to_what_the_simulator_does(tmp_path):
    experiment = experiment_of(2)
    with Federation(tmp_path / "f", experiment) as federation:
        federation.start_all()
        federation.train(experiment)


@pytest.mark.deploy
def test_a_server_that_is_killed_goes_on_from_its_checkpoint_when_the_app_is_run_again(tmp_path):
    experiment = experiment_of(4)
    with Federation(tmp_path / "f", experiment, nginx=False) as federation:
        federation.start_all()
        federation.start("server", "run.sh")
        federation.until(lambda: federation.round() >= 1, "round 1")
        (server,) = federation.pids("flwr-serverapp")
        os.kill(server, signal.SIGKILL)
        federation.train(experiment)
        shown = (federation.out / "server" / "run.sh.log").read_text().rpartition("Successfully started run")[2]
        assert "round 4 of 4" in shown
        assert "round 1 of 4" not in shown, "it goes on, and does not begin anew"


def call(federation: Federation, path: str, identity: Path | None) -> int:
    """The status of a request from outside, with the certificate of a party or none."""
    folder = federation.out / "sites" / "a"
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    if identity:
        context.load_cert_chain(identity.with_suffix(".crt"), identity.with_suffix(".key"))
    connection = http.client.HTTPSConnection("127.0.0.1", federation.port, context=context, timeout=60)
    try:
        connection.request("POST", path, b"")
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.deploy
@needs_nginx
def test_from_outside_only_approved_sites_get_in_and_to_what_supernodes_need(tmp_path):
    with Federation(tmp_path / "f", experiment_of(1)) as federation:
        federation.start("server")
        federation.until(lambda: all(map(federation.answers, (federation.port, federation.port + 1))), "both")
        site = federation.out / "sites" / "a" / "site"
        closed = ["/v1/control/list-runs", "/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/v1/fleet/"]
        closed += ["/v1/fleet/../control/list-runs", "/v1/fleet/get-run%2f..%2f..%2fcontrol/list-runs"]
        for path in (*closed, "//v1/control/list-runs", "/"):
            assert call(federation, path, None) == 400, path
            assert call(federation, path, federation.out / "server" / "server") == 400, path
            assert call(federation, path, site) == 403, path
        assert call(federation, "/v1/control/list-runs/../../fleet/get-run", site) == 415, "what the list names"
        for name in project.FLEET:
            path = f"/v1/fleet/{name}"
            assert call(federation, path, site) == 415, f"{path}: Flower itself refuses the body"
            assert call(federation, path, None) == 400, path
        approval.revoke(federation.out, "a")
        assert {call(federation, f"/v1/fleet/{name}", site) for name in project.FLEET} == {403}
        stolen = site.with_name("stolen")
        for suffix in (".key", ".crt"):
            site.with_suffix(suffix).rename(stolen.with_suffix(suffix))
        admit(federation.out, "a")
        assert call(federation, "/v1/fleet/get-run", site) == 415
        assert call(federation, "/v1/fleet/get-run", stolen) == 403, "the new key does not let the old one in"


def admit(out: Path, name: str) -> None:
    """Approve a new key of a site."""
    file, _ = approval.request(out / "sites" / name)
    approval.accept(out / "sites" / name, approval.approve(out, file, 100, lambda *told: True))


def test_nginx_is_told_which_certificates_are_approved_not_which_names(tmp_path):
    """Or a stolen key would be good again as soon as the site has a new one."""

    def fingerprint(file: Path) -> str:
        return hashlib.sha1(ssl.PEM_cert_to_DER_cert(file.read_text())).hexdigest()

    def approved() -> set[str]:
        return {path.name for path in (out / "server" / "members" / "a").glob("*")}

    out = tmp_path / "f"
    initialise(out, experiment_of(1))
    site = out / "sites" / "a"
    first = fingerprint(site / "site.crt")
    assert approved() == {first}
    admit(out, "a")
    assert approved() == {first, fingerprint(site / "site.crt")}, "the site uses the old one until it has the new one"
    approval.revoke(out, "a")
    assert not approved()
    (site / "site.key").unlink()
    admit(out, "a")
    assert approved() == {fingerprint(site / "site.crt")}
    assert "members/$site/$ssl_client_fingerprint" in (out / "server" / "nginx.conf").read_text()


@needs_nginx
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_nginx_accepts_the_files(tmp_path, host):
    initialise(tmp_path / "f", experiment_of(1), free_ports(8), host)
    for place in ("server", "sites/b"):
        check = ["nginx", "-p", str(tmp_path / "f" / place), "-e", "stderr", "-c", "nginx.conf", "-t"]
        path = f"{os.environ['PATH']}:/usr/sbin"
        shown = subprocess.run(check, capture_output=True, text=True, env={**os.environ, "PATH": path})
        assert shown.returncode == 0, shown.stderr

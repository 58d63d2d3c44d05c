"""Attacks on a real deployment: by an outsider, a site with a valid key, another local user, a hostile server."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import httpx
import pytest

pytest.importorskip("flwr", reason="needs fedxl[flower]")

from flwr.cli.build import build_fab_from_files
from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest, StartRunRequest, StreamLogsRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

from fedxl import UserError
from fedxl.cli.processes import free_port
from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.protocol.http_clients import client
from fedxl.deploy.provision import folders, keys, members
from fedxl.deploy.provision.connection import tls_for_site
from fedxl.deploy.site import requests
from fedxl.deploy.supervise import processes
from fedxl.deploy.supervise.children import descendants
from fedxl.deploy.supervise.processes import private
from fedxl.deploy.supervise.supervisor import Child, command, environment
from tests.deploy.deployment import Deployment
from tests.deploy.federated import SITES, config
from tests.deploy.test_deploy import assert_equals_simulator, listening

HOSTILE_APP = {
    "pyproject.toml": b"""
[project]
name = "hostile"
version = "1.0.0"
description = "runs code where it should not"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "outsider"
[tool.flwr.app.components]
serverapp = "hostile.app:server"
clientapp = "hostile.app:client"
[tool.flwr.app.config]
""",
    "hostile/__init__.py": b"",
}


def hostile_app(mark: Path) -> Fab:
    """An app whose import leaves a mark on the disk."""
    code = f"""
        from pathlib import Path
        with Path({str(mark)!r}).open("a") as file:
            file.write("ran")
        from flwr.clientapp import ClientApp
        from flwr.serverapp import ServerApp
        client, server = ClientApp(), ServerApp()
        """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Flower's own
        content, _ = build_fab_from_files({**HOSTILE_APP, "hostile/app.py": textwrap.dedent(code).encode()})
    return Fab(content=content)


def attempts(over: httpx.HTTPTransport, url: str, mark: Path) -> dict[str, object]:
    """Everything that took over the deployment before: what each call is answered."""
    control = client(ControlHttpClient, "flwr", over, url=url)
    runtime = client(RuntimeHttpClient, "SuperExec", over, url=url)
    with_token = client(RuntimeHttpClient, "flwr-serverapp", over, RuntimeTokenHttpInterceptor("0" * 64), url=url)
    key = keys.public_pem(keys.new_key().public_key())
    calls = {
        "list runs": lambda: control.ListRuns(ListRunsRequest()),
        "submit a run": lambda: control.StartRun(StartRunRequest(fab=hostile_app(mark))),
        "register a key": lambda: control.RegisterNode(RegisterNodeRequest(public_key=key)),
        "read logs": lambda: list(control.StreamLogs(StreamLogsRequest(run_id=1))),
        "acquire a task": lambda: runtime.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"])),
        "pull a task's input": lambda: with_token.PullTaskInput(PullTaskInputRequest()),
        "docs": lambda: control._client.get(f"{url}/docs").raise_for_status(),
        "openapi": lambda: control._client.get(f"{url}/openapi.json").raise_for_status(),
    }
    found: dict[str, object] = {}
    for name, call in calls.items():
        try:
            found[name] = call()
        except httpx.HTTPStatusError as error:
            found[name] = error.response.status_code
        except httpx.TransportError as error:
            found[name] = type(error)
    for used in (control, runtime, with_token):
        used.close()
    return found


# Run by another user of the machine: every file of the server, and its socket.
OTHER_USER = """
import os, pathlib, socket, sys
os.setgid(65534); os.setuid(65534)
folder = pathlib.Path(sys.argv[1])
socket_path = folder / "flower" / "link.sock"
reached = []
for path in [folder / "server.key", folder / "server.toml", folder / "members" / "a.json", socket_path]:
    try:
        path.stat(); reached.append(str(path))
    except PermissionError:
        pass
try:
    link = socket.socket(socket.AF_UNIX); link.connect(os.path.relpath(socket_path, "/")); reached.append("link")
except PermissionError:
    pass
print(reached)
"""


@pytest.mark.deploy
def test_an_outsider_a_site_and_another_user_get_nowhere_and_the_run_goes_on(tmp_path):
    mark, experiment = tmp_path / "mark", config("fedxl2", rounds=3)
    tmp_path.chmod(0o755)
    with Deployment(tmp_path / "f", SITES, experiment) as federation:
        for name in ("server", *SITES):
            federation.start(name)
        federation.until(lambda: federation.round() >= 0, "the first round")
        url, server = f"https://127.0.0.1:{federation.port}", tmp_path / "f" / "server"
        outside = attempts(httpx.HTTPTransport(verify=False), url, mark)
        assert all(isinstance(answer, type) for answer in outside.values()), f"an outsider: {outside}"
        inside = attempts(httpx.HTTPTransport(verify=tls_for_site(tmp_path / "f" / "sites" / "a")), url, mark)
        assert set(inside.values()) == {404}, f"a site with a valid key: {inside}"
        if os.getuid() == 0:
            os.chmod(tmp_path.parent, 0o755)
            code = [sys.executable, "-I", "-c", OTHER_USER, str(server)]
            found = subprocess.run(code, capture_output=True, text=True, cwd="/")
            assert found.stdout.strip() == "[]", f"another user: {found.stdout} {found.stderr}"
        assert listeners(federation) == {federation.port}, "the gateway's port and no other"
        assert_equals_simulator(federation.finished(), experiment)
        assert federation.dropped() == []
    assert not mark.exists()


def listeners(federation: Deployment) -> set[int]:
    """TCP ports on which any process of the federation listens, as /proc tells."""
    inodes = set()
    for process in federation.processes.values():
        for pid in [process.pid, *(descendants(process.pid))]:
            for file in Path(f"/proc/{pid}/fd").glob("*"):
                try:
                    inodes.add(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
                except OSError:
                    continue
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                found.add(int(columns[1].rpartition(":")[2], 16))
    return found


@pytest.mark.deploy
def test_the_same_attack_works_on_a_superlink_without_a_gateway(tmp_path):
    """So the test above can fail: an open SuperLink, as it was generated before, answers all of it."""
    folders.init(["a"], tmp_path / "f")
    server, port = tmp_path / "f" / "server", free_port()
    home = private(server / "flower")
    program = str(Path(sys.executable).parent / "flower-superlink")
    link = Child("superlink", [
        program, "--host", "127.0.0.1", "--port", str(port), "--isolation", "process", "--enable-supernode-auth",
        "--ssl-ca-certfile", str(server / "ca.crt"), "--ssl-certfile", str(server / "server.crt"),
        "--ssl-keyfile", str(server / "server.key"), "--disable-runtime-dependency-installation",
    ], home)  # fmt: skip
    process = link.start(environment(home, "FLWR_HOME"))
    try:
        while process.poll() is None and not listening(port):
            time.sleep(0.2)
        found = attempts(httpx.HTTPTransport(verify=False), f"https://127.0.0.1:{port}", tmp_path / "mark")
        answered = {name for name, answer in found.items() if not isinstance(answer, (int, type))}
        assert answered >= {"list runs", "submit a run", "register a key", "acquire a task", "docs", "openapi"}
    finally:
        process.kill()
        process.wait()


HOSTILE_SERVER = """
import hashlib, os, sys, time
from pathlib import Path
import httpx
from flwr.app import ConfigRecord, Message, RecordDict, ArrayRecord
from flwr.proto.control_pb2 import StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.common.serde import run_from_proto
from fedxl.deploy.protocol.http_clients import client
from fedxl.deploy.provision.connection import LINK
from fedxl.deploy.server.grid import LinkGrid, Registry
from fedxl.deploy.provision.members import Members

os.chdir(sys.argv[1])
over = httpx.HTTPTransport(uds=str(LINK))
while True:
    try:
        httpx.Client(transport=over).get("http://superlink/docs")
        break
    except httpx.TransportError:
        time.sleep(0.2)
over = httpx.HTTPTransport(uds=str(LINK))
control = client(ControlHttpClient, "flwr", over)
Registry(Members(Path(sys.argv[1])), control).refresh()
content = Path(sys.argv[2]).read_bytes()
control.StartRun(StartRunRequest(fab=Fab(content=content, hash_str=hashlib.sha256(content).hexdigest())))
asking = AcquireTaskRequest(supported_task_types=["flwr-serverapp"])
task = client(RuntimeHttpClient, "SuperExec", over).AcquireTask(asking)
runtime = client(RuntimeHttpClient, "flwr-serverapp", over, RuntimeTokenHttpInterceptor(task.token))
given = runtime.PullTaskInput(PullTaskInputRequest())
TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
TaskIdentity.node_id = given.context.node_id
grid = LinkGrid(runtime, 10.0)
grid.set_run(run_from_proto(given.run))
while not (nodes := list(grid.get_node_ids())):
    time.sleep(0.2)
for kind in ("train", "evaluate", "query", "train.hostile", "system"):
    facts = ConfigRecord({"version": "0", "code": "import os"})
    content = RecordDict({"tensors": ArrayRecord({}), "facts": facts})
    try:
        [ticket] = grid.push_messages([Message(content=content, dst_node_id=nodes[0], message_type=kind, ttl=3600.0)])
    except Exception as error:
        print(kind, "not sent:", type(error).__name__, flush=True)
        continue
    while not (answers := list(grid.pull_messages([ticket]))):
        time.sleep(0.2)
    print(kind, dict(answers[0].content.config_records["facts"].items()), flush=True)
"""


@pytest.mark.deploy
def test_nothing_runs_at_a_site_of_what_a_hostile_server_submits(tmp_path):
    """A server of the right federation, with keys and all, whose app brings code of its own."""
    mark = tmp_path / "mark"
    with Deployment(tmp_path / "f", SITES[:1], config("fedxl2", cohort=0)) as federation:
        server = tmp_path / "f" / "server"
        home = private(server / "flower")
        (tmp_path / "hostile.fab").write_bytes(hostile_app(mark).content)
        started = [
            Child(role, command(role, server, *more), home).start(environment(home, "FLWR_HOME"))
            for role, *more in (("superlink",), ("gateway", "10"))
        ]
        try:
            federation.start("a")
            found = subprocess.run(
                [sys.executable, "-c", HOSTILE_SERVER, str(server), str(tmp_path / "hostile.fab")],
                capture_output=True, text=True, env=environment(home, "FLWR_HOME"),
            )  # fmt: skip
            assert found.returncode == 0, found.stderr
            said = dict(line.split(" ", 1) for line in found.stdout.strip().splitlines())
            assert "they must be the same" in said["train"], said
            assert "they must be the same" in said["evaluate"], said
            assert "'site': 'a'" in said["query"], "it says hello, and that is all"
            assert (
                "sites do not handle requests of this kind" in said["train.hostile"]
                or "not sent" in said["train.hostile"]
            )
        finally:
            for process in started:
                process.kill()
                process.wait()
    assert not mark.exists(), "no code that was sent has run"


def test_a_site_never_asks_for_an_app():
    """Neither does its program name the call, nor would the gateway pass it on."""
    from fedxl.deploy.server import fleet

    package = Path(requests.__file__).parent
    for file in package.glob("*.py"):
        assert "GetFab" not in file.read_text(), file
        assert "install_from_fab" not in file.read_text(), file
    assert "/v1/fleet/get-fab" in fleet.WITHHELD


def test_flowers_code_that_runs_apps_is_not_even_loaded():
    """The processes of a server and of a site import nothing that would install or execute an app."""
    code = (
        "import sys, fedxl.deploy.server.app, fedxl.deploy.site.node, fedxl.deploy.server.gateway_process\n"
        "runners = ('run_clientapp', 'run_serverapp', 'cli.install', 'run_superexec')\n"
        "print([module for module in sys.modules if module.endswith(runners)])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_request_with_code_in_its_settings_is_refused(tmp_path):
    folders.init(["a"], tmp_path / "f", config=config("fedxl2"))
    from fedxl.deploy.provision.settings import read_site

    mine = read_site(tmp_path / "f" / "sites" / "a" / "site.toml")
    facts = {"version": requests.__version__, "run": "0123456789abcdef", "config": '{"model": {"name": "os:system"}}'}
    with pytest.raises(UserError, match=r"does not allow the model 'os:system'; its site\.toml allows: mlp"):
        requests.train(mine, Envelope(facts, {}))


def test_a_server_that_others_can_enter_does_not_start(tmp_path):
    folders.init(["a"], tmp_path / "f")
    server = tmp_path / "f" / "server"
    (server / "flower").mkdir(mode=0o755)
    (server / "flower").chmod(0o755)
    found = subprocess.run(command("superlink", server), capture_output=True, text=True)
    assert found.returncode == 2
    assert "is accessible to others: chmod 700" in found.stdout


@pytest.mark.parametrize(
    ("open_to_others", "mode", "why"),
    [("server", 0o777, "others can write to"), ("server/members", 0o777, "others can write to"),
     ("server/server.key", 0o644, "server.key: chmod 600")],
)  # fmt: skip
def test_a_server_whose_folder_was_opened_by_copying_does_not_start(tmp_path, open_to_others, mode, why):
    folders.init(["a"], tmp_path / "f")
    (tmp_path / "f" / open_to_others).chmod(mode)
    with pytest.raises(UserError, match=why):
        processes.serve(tmp_path / "f" / "server", print)


def test_members_are_read_anew(tmp_path):
    folders.init(["a", "b"], tmp_path / "f")
    known = members.Members(tmp_path / "f" / "server")
    assert known.refresh()
    assert not known.refresh()
    assert sorted(known.approved) == ["a", "b"]
    members.remove(tmp_path / "f" / "server", "a")
    assert known.refresh()
    assert sorted(known.by_key.values()) == ["b"]

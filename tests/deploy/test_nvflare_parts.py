"""Each part of the FLARE transport in one process, and the public interface of FLARE that they use."""

from __future__ import annotations

import inspect
import json
import operator
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="needs fedxl[nvflare]")

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from nvflare.fuel.flare_api import flare_api
from nvflare.fuel.flare_api.api_spec import ClientInfo, JobInfo, SystemInfo

from fedxl.config.experiment import Config, dump
from fedxl.deploy.protocol.envelope import Failure
from fedxl.deploy.protocol.message import read_reply
from fedxl.deploy.provision import folders
from fedxl.deploy.provision.settings import ServerFile, ServerSettings
from fedxl.deploy.server.serve import serve
from fedxl.deploy.storage import remember
from fedxl.deploy.transport.nvflare import job, project
from fedxl.deploy.transport.nvflare.controller import AbortedError, FlareCarrier
from fedxl.deploy.transport.nvflare.executor import FedxlExecutor
from fedxl.errors import UserError
from tests.deploy.federated import QUIET, assert_same, config, secrets_of, simulated
from tests.deploy.test_nvflare import HOST, SITES, three, write


class Together(Controller):
    """FLARE in one process: gives each task to the site's Executor, and calls back as FLARE does."""

    start_controller = stop_controller = control_flow = process_result_of_unknown_task = lambda *given: None

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.kits = {name: kit(folder / "kits" / name, folder / "sites" / name / "site.toml") for name in SITES}
        self.cancelled: list[Task] = []

    def send(self, task, fl_ctx, targets):
        client_task = ClientTask(Client(targets[0], ""), task)
        client_task.result = FedxlExecutor().execute(task.name, task.data, self.kits[targets[0]], Signal())
        task.result_received_cb(client_task=client_task, fl_ctx=fl_ctx)
        assert client_task.result is None, "FLARE would keep it in memory"
        task.task_done_cb(task=task, fl_ctx=fl_ctx)

    def get_client_disconnect_time(self, client_name):
        return None

    def cancel_task(self, task):
        self.cancelled.append(task)

    def get_clients(self):
        return [Client(name, "") for name in SITES]


def kit(folder: Path, settings: Path) -> FLContext:
    """What FLARE tells a party of the folder of its startup kit, in which start.sh has put a link."""
    write(folder, {"startup/fed.json": "", "local/resources.json": ""})
    (folder / "local" / settings.name).symlink_to(settings)
    found = FLContext()
    found.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(folder)))
    return found


def together(folder: Path, experiment: Config, aborted: Signal) -> FlareCarrier:
    for number, name in enumerate(SITES):
        write(folder / "sites" / name, {"site.toml": folders.site_toml(name, number, experiment)})
    controller, of_server = Together(folder), FLContext()
    of_server.set_prop(ReservedKey.ENGINE, controller)
    return FlareCarrier(controller, of_server, aborted, 1000.0)


def test_a_run_in_one_process_equals_the_simulators(tmp_path):
    experiment, server = three(config("fedxl1")), tmp_path / "server"
    settings = ServerSettings(SITES, private_draws=True, deadline=60.0, join=60.0)
    found = serve(ServerFile(settings, experiment, server), together(tmp_path, experiment, Signal()), QUIET)
    assert_same(found, simulated(experiment, secrets_of(server / "run", tmp_path / "sites", SITES)))


def test_a_job_that_flare_aborts_ends_at_once(tmp_path):
    aborted = Signal()
    carrier = together(tmp_path, three(config("fedxl1")), aborted)
    assert carrier.nodes() == {name: name for name in SITES}
    aborted.trigger(True)
    for action in (carrier.nodes, lambda: carrier.wait(60.0), lambda: list(carrier.replies([]))):
        with pytest.raises(AbortedError):
            action()


@pytest.mark.parametrize("content", [None, "text", b"", b"\0" * 9])
def test_a_site_answers_whatever_comes_with_a_refusal(tmp_path, content):
    carrier = together(tmp_path, three(config("fedxl1")), Signal())
    request = Shareable()
    if content is not None:
        request["content"] = content
    reply = FedxlExecutor().execute("train", request, carrier.controller.kits["a"], Signal())
    assert isinstance(read_reply(reply["content"], 1.0), Failure)


class Session:
    """FLARE's admin interface, as far as we use it; each job ends as the test says."""

    def __init__(self, ends: list[Callable[[str], str]]) -> None:
        self.ends, self.jobs, self.aborted = ends, dict[str, str](), list[str]()
        self.running, self.idle = set[str](), list[str]()
        self.names = list(SITES)

    def get_system_info(self) -> SystemInfo:
        return SystemInfo(
            None, [ClientInfo(name, 0) for name in self.names], [JobInfo(name, "") for name in self.running]
        )

    def list_jobs(self, name_prefix: str, reverse: bool) -> list[dict[str, str]]:
        return [{"job_id": name, "status": status} for name, status in self.jobs.items()]

    def submit_job(self, job_definition_path: str) -> str:
        assert json.loads(Path(job_definition_path, "meta.json").read_text())["deploy_map"] == {
            "app": ["server", *SITES]
        }
        name = f"job {len(self.jobs)}"
        self.jobs[name] = "SUBMITTED"
        return name

    def get_job_meta(self, job_id: str) -> dict[str, str]:
        if self.jobs[job_id] == "SUBMITTED":
            self.jobs[job_id] = self.ends.pop(0)(job_id)
        return {"status": self.jobs[job_id]}

    def get_client_job_status(self) -> list[dict[str, str]]:
        return [{"client_name": name, "status": "no_jobs"} for name in self.idle]

    def abort_job(self, job_id: str) -> None:
        self.aborted.append(job_id)
        if job_id not in self.running:
            raise RuntimeError("it is not running")
        self.jobs[job_id] = "FINISHED:ABORTED"

    def close(self) -> None: ...


@pytest.fixture
def submitting(tmp_path, monkeypatch):
    """Runs the loop with jobs that end in these ways; what it says."""
    server = tmp_path / "server"
    settings = ServerSettings(SITES)
    write(
        tmp_path,
        {"server/server.toml": folders.server_toml(settings, dump(three(config("fedxl1")))), "admin/startup/x": ""},
    )
    monkeypatch.setattr(job, "POLL", 0.0)
    monkeypatch.setattr(job, "PAUSE", (0.0, 0.0))

    def run(*ends: Callable[[str], str], change: Callable[[Session], None] = lambda session: None) -> list[str]:
        session, lines = Session(list(ends)), []
        change(session)
        monkeypatch.setattr(flare_api, "new_secure_session", lambda username, startup_kit_location: session)
        run.session = session
        job.submit(tmp_path, tmp_path / "admin", lines.append)
        return lines

    run.folder = server
    return run


def ends(submitting: Any, reason: str) -> Callable[[str], str]:
    def outcome(name: str) -> str:
        remember(submitting.folder / "job.json", {"job": name, "reason": reason})
        return "FINISHED:COMPLETED"

    return outcome


def dies(name: str) -> str:
    return "FINISHED:ABNORMAL"


def progresses(submitting: Any, round: int) -> Callable[[str], str]:
    def outcome(name: str) -> str:
        write(submitting.folder / "run/checkpoints", {f"round-{round:08d}.safetensors": ""})
        return dies(name)

    return outcome


def test_a_job_that_dies_is_submitted_again(submitting):
    lines = submitting(*(progresses(submitting, n) for n in range(9)), dies, ends(submitting, ""))
    assert len(submitting.session.jobs) == 11
    assert "job job 8 ended with FINISHED:ABNORMAL; going on from round-00000008 in 0 s" in lines


def test_the_loop_stops_with_the_users_error(submitting):
    with pytest.raises(UserError, match=r"^lr must be positive$"):
        submitting(dies, ends(submitting, "lr must be positive"))


def test_the_loop_gives_up_without_progress(submitting):
    with pytest.raises(UserError, match="6 jobs in a row have finished no round"):
        submitting(progresses(submitting, 1), *[dies] * 9)
    assert len(submitting.session.jobs) == 1 + 6


def test_a_job_that_flare_has_forgotten_is_left(submitting):
    lines = submitting(lambda name: "RUNNING", ends(submitting, ""))
    assert submitting.session.aborted == ["job 0"]
    assert "aborting job job 0: not running at the server" in lines


def test_a_job_without_a_site_that_is_there_is_aborted(submitting):
    def change(session: Session) -> None:
        session.idle, session.running = ["b", "no site of ours"], {"job 0"}

    lines = submitting(lambda name: "RUNNING", ends(submitting, ""), change=change)
    assert "aborting job job 0: not running at b" in lines


def test_a_job_that_is_running_is_followed(submitting):
    def change(session: Session) -> None:
        session.jobs["job 0"] = "SUBMITTED"

    submitting(ends(submitting, ""), change=change)
    assert list(submitting.session.jobs) == ["job 0"]


def test_a_run_begins_with_all_sites(submitting):
    file = submitting.folder / "server.toml"
    file.write_text(file.read_text().replace("[server]", "[server]\njoin = 0.01"))
    with pytest.raises(UserError, match=r"c did not connect within 0\.01 s; are they running\?"):
        submitting(change=lambda session: session.names.remove("c"))


def test_files_name_hosts_and_sites_that_flare_takes():
    for sites, host in ((("server",), HOST), (("a",), "::1")):
        with pytest.raises(UserError, match="FLARE takes no IPv6 address"):
            project.files(sites, host, 18000, True)


def test_each_partys_policy_allows_the_one_class_that_the_job_names():
    files, texts = project.files(("a",), HOST, 18000, True), project.job(("a",), 1)
    server, client = (json.loads(texts[f"app/config/config_fed_{part}.json"]) for part in ("server", "client"))
    named = {"server": server["workflows"][0]["path"], "sites/a": client["executors"][0]["executor"]["path"]}
    for place, path in named.items():
        assert json.loads(files[f"{place}/local/resources.json"])["class_allow_list"] == [path]
        module, _, name = path.rpartition(".")
        assert getattr(import_module(module), name)


USED = {  # FLARE's public interface, with the parameters that we pass, or that it passes to us
    "nvflare.apis.impl.controller:Controller.__init__": "task_check_period",
    "nvflare.apis.impl.controller:Controller.send": "task fl_ctx targets",
    "nvflare.apis.impl.controller:Controller.cancel_task": "task",
    "nvflare.apis.impl.controller:Controller.get_client_disconnect_time": "client_name",
    "nvflare.apis.controller_spec:ControllerSpec.control_flow": "abort_signal fl_ctx",
    "nvflare.apis.controller_spec:ControllerSpec.start_controller": "fl_ctx",
    "nvflare.apis.controller_spec:ControllerSpec.stop_controller": "fl_ctx",
    "nvflare.apis.controller_spec:ControllerSpec.process_result_of_unknown_task": (
        "client task_name client_task_id result fl_ctx"
    ),
    "nvflare.apis.controller_spec:Task.__init__": "name data timeout result_received_cb task_done_cb",
    "nvflare.apis.controller_spec:result_received_cb_signature": "client_task fl_ctx",
    "nvflare.apis.controller_spec:task_done_cb_signature": "task fl_ctx",
    "nvflare.apis.executor:Executor.execute": "task_name shareable fl_ctx abort_signal",
    "nvflare.apis.fl_component:FLComponent.system_panic": "reason fl_ctx",
    "nvflare.apis.fl_constant:FLContextKey.WORKSPACE_OBJECT": "",
    "nvflare.apis.fl_context:FLContext.get_engine": "",
    "nvflare.apis.fl_context:FLContext.get_job_id": "",
    "nvflare.apis.fl_context:FLContext.get_prop": "key",
    "nvflare.apis.server_engine_spec:ServerEngineSpec.get_clients": "",
    "nvflare.apis.shareable:Shareable.get_return_code": "",
    "nvflare.apis.shareable:make_reply": "rc",
    "nvflare.apis.signal:Signal.triggered": "",
    "nvflare.apis.workspace:Workspace.get_site_config_dir": "",
    "nvflare.fuel.flare_api.flare_api:new_secure_session": "username startup_kit_location",
    "nvflare.fuel.flare_api.flare_api:Session.submit_job": "job_definition_path",
    "nvflare.fuel.flare_api.flare_api:Session.get_job_meta": "job_id",
    "nvflare.fuel.flare_api.flare_api:Session.list_jobs": "name_prefix reverse",
    "nvflare.fuel.flare_api.flare_api:Session.abort_job": "job_id",
    "nvflare.fuel.flare_api.flare_api:Session.get_system_info": "",
    "nvflare.fuel.flare_api.flare_api:Session.get_client_job_status": "",
    "nvflare.fuel.flare_api.flare_api:Session.close": "",
}


def test_flares_public_interface_is_as_we_use_it():
    """Known to hold for 2.9; older ones have no class_allow_list, which the sites' policy needs."""
    files = project.files(("a",), HOST, 1, True)
    policies = [json.loads(text) for path, text in files.items() if path.endswith("resources.json")]
    parts = [each["path"] for policy in policies for each in policy["components"]]
    named = {**USED, **{":".join(path.rsplit(".", 1)): "" for path in parts}}
    for path, parameters in named.items():
        module, _, name = path.partition(":")
        try:
            found = operator.attrgetter(name)(import_module(module))
            known = inspect.signature(found).parameters if parameters else ()
            changed = [each for each in parameters.split() if each not in known]
        except (ImportError, AttributeError):
            changed = ["all of it"]
        assert not changed, f"NVFlare {version('nvflare')} has changed {path} ({', '.join(changed)}); fedxl uses 2.9"

"""The server's end: the server's loop as the workflow of a FLARE job, and FLARE's tasks as its carrier."""

from __future__ import annotations

import gc
import math
import os
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from threading import Event

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from fedxl.deploy import named, say
from fedxl.deploy.processes import only_process
from fedxl.deploy.protocol.envelope import POLL, Envelope, Failure, Kind
from fedxl.deploy.protocol.message import encode, read_reply
from fedxl.deploy.provision.settings import read_server
from fedxl.deploy.server.serve import run
from fedxl.deploy.storage import remember
from fedxl.deploy.transport.nvflare.executor import CONTENT, own_file
from fedxl.errors import UserError

OUTCOME = "job.json"  # beside server.toml: how the last job ended that was neither killed nor aborted
LOG = "fedxl.log"
CHECK = 0.05  # seconds between two looks at tasks


class AbortedError(Exception):
    """FLARE has ended the job."""


class FedxlController(Controller):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(task_check_period=CHECK)

    def start_controller(self, fl_ctx: FLContext) -> None: ...

    def stop_controller(self, fl_ctx: FLContext) -> None: ...

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Drop a reply that was forgotten meanwhile."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run the server's loop. Its folder is that of server.toml, because FLARE removes a job's own folder."""
        os.umask(0o077)
        file = own_file(fl_ctx, "server.toml")
        # A job whose FLARE parent has died may not have ended yet. This one fails then, and is submitted again.
        with only_process(file.parent), (file.parent / LOG).open("a") as log:

            def write(line: str) -> None:
                with redirect_stdout(log):
                    say(line)

            note = named("server", write)
            reason = ""
            try:
                server = read_server(file)
                run(server, FlareCarrier(self, fl_ctx, abort_signal, server.settings.megabytes), note)
            except AbortedError:
                note("the job was aborted")
                return
            except UserError as error:
                note(reason := str(error))
            except Exception:
                note(traceback.format_exc())
                raise
            remember(file.parent / OUTCOME, {"job": fl_ctx.get_job_id(), "reason": reason})
            if reason:
                self.system_panic(reason, fl_ctx)


class FlareCarrier:
    """Sends each request as a task of its own. Nodes are FLARE clients, whose certificates have shown their names."""

    def __init__(self, controller: Controller, fl_ctx: FLContext, aborted: Signal, megabytes: float) -> None:
        self.controller, self.fl_ctx, self.aborted, self.megabytes = controller, fl_ctx, aborted, megabytes
        self.tasks: dict[str, Task] = {}  # by ticket
        self.found: dict[str, bytes | Failure] = {}  # by ticket
        self.news = Event()

    def nodes(self) -> Mapping[str, str]:
        self._require_running()
        names = [client.name for client in self.fl_ctx.get_engine().get_clients()]
        return {name: name for name in names if self.controller.get_client_disconnect_time(name) is None}

    def approved(self) -> None:
        """FLARE has no list with numbers of examples."""

    def send(self, requests: Mapping[str, Envelope], kind: Kind, seconds: float) -> Mapping[str, str]:
        sent = {}
        for node, envelope in requests.items():
            ticket, data = uuid.uuid4().hex, Shareable()
            data[CONTENT] = b"".join(encode(envelope))
            done = {"result_received_cb": partial(self._receive, ticket), "task_done_cb": partial(self._end, ticket)}
            self.tasks[ticket] = Task(kind, data, timeout=math.ceil(seconds), **done)
            self.controller.send(self.tasks[ticket], self.fl_ctx, targets=[node])
            sent[ticket] = node
        return sent

    def replies(self, tickets: Sequence[str]) -> Iterator[tuple[str, Envelope | Failure]]:
        self._require_running()
        for ticket in [each for each in tickets if each in self.found]:
            self.tasks.pop(ticket)
            found = self.found.pop(ticket)
            yield ticket, found if isinstance(found, Failure) else read_reply(found, self.megabytes)

    def forget(self, tickets: Sequence[str]) -> None:
        for ticket in tickets:
            self.controller.cancel_task(self.tasks.pop(ticket))
            self.found.pop(ticket, None)
        gc.collect()  # FLARE keeps messages in reference cycles: 2.9 GB after some rounds of 45 MB, 0.45 GB with this

    def wait(self, seconds: float) -> None:
        self.news.wait(min(seconds, POLL))
        self.news.clear()
        self._require_running()

    def _require_running(self) -> None:
        if self.aborted.triggered:
            raise AbortedError

    # Called by FLARE's threads, with these names of parameters.

    def _receive(self, ticket: str, client_task: ClientTask, fl_ctx: FLContext) -> None:
        result, client_task.result = client_task.result, None
        code = result.get_return_code()
        failed = code != ReturnCode.OK or not isinstance(result.get(CONTENT), bytes)
        self._settle(ticket, Failure(f"its FLARE client sends no reply: {code}") if failed else result[CONTENT])

    def _end(self, ticket: str, task: Task, fl_ctx: FLContext) -> None:
        self._settle(ticket, Failure(f"no reply to its task: {task.completion_status}"))

    def _settle(self, ticket: str, found: bytes | Failure) -> None:
        if ticket in self.tasks:
            self.found.setdefault(ticket, found)
            self.news.set()

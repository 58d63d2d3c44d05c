"""The server's connection to its own SuperLink, over the Unix socket: nodes, messages and registered keys.

The app is this process: it submits a run without code, takes its task itself, and loads no code from the network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from fedxl.deploy.flower import common, protobuf, server
from fedxl.deploy.protocol.http_clients import client
from fedxl.deploy.protocol.records import assemble, object_ids, require_small
from fedxl.deploy.provision.members import Members
from fedxl.deploy.server.carrier import REFUSED
from fedxl.errors import RefusedError, require

# An app without code: SuperLink requires one.
EMPTY_APP = b"""[project]
name = "fedxl-run"
version = "1.0.0"
description = "fedxl runs the installed package; there is no code here"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedxl"

[tool.flwr.app.components]
serverapp = "fedxl:installed"
clientapp = "fedxl:installed"
"""


@dataclass
class Arriving:
    """A reply of which some objects may not have arrived."""

    message: protobuf.Message
    root: str
    missing: list[str]
    objects: dict[str, bytes] = field(default_factory=dict)
    size: int = 0


class LinkGrid(server.HttpGrid):
    """Flower's grid over the socket. It never blocks, and refuses a reply that is too large before decoding it."""

    def __init__(self, runtime: server.RuntimeHttpClient, megabytes: float) -> None:
        super().__init__("superlink", insecure=True, token="in the client")
        self._client, self.megabytes = runtime, megabytes
        self.arriving: dict[str, Arriving] = {}  # by ticket

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[common.Message]:
        """The replies that have arrived completely. A refused reply is returned as an error, with its request."""
        for ticket in message_ids:
            if ticket not in self.arriving:
                found = self._runtime_client.PullMessages(server.PullAppMessagesRequest(message_ids=[ticket]))
                for proto, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                    self.arriving[ticket] = Arriving(proto, tree.object_id, object_ids(tree))
            reply = self.arriving.get(ticket)
            if reply is not None and (message := self._complete(reply)) is not None:
                self.forget(ticket)
                yield message

    def forget(self, ticket: str) -> None:
        """Discard a reply, here and at SuperLink."""
        if (reply := self.arriving.pop(ticket, None)) is not None:
            done = protobuf.ConfirmMessageReceivedRequest(
                node=self.node, run_id=self.run.run_id, message_object_id=reply.message.metadata.message_id
            )
            self._runtime_client.ConfirmMessageReceived(done)

    def _complete(self, reply: Arriving) -> common.Message | None:
        """The reply, or the error for which we refuse it; None while objects are missing."""
        pull = common.make_pull_object_fn_protobuf(self._runtime_client.PullObject, self.node, self.run.run_id)
        claimed = reply.message.metadata
        try:
            while reply.missing:
                content = pull(reply.missing[-1])
                reply.size += len(content)
                require_small(reply.size, self.megabytes * 1.1 + 1)  # leaves room for headers and ids
                reply.objects[reply.missing.pop()] = content
            message = assemble(reply.root, reply.objects, self.megabytes)
            same = message.metadata.reply_to_message_id == claimed.reply_to_message_id
            if not same or message.metadata.src_node_id != claimed.src_node_id:
                raise RefusedError("its content belongs to another reply")
            return message
        except common.ObjectUnavailableError:
            return None
        except httpx.HTTPError:
            raise
        except Exception as error:  # a damaged or hostile reply may raise anything
            reason = str(error) if isinstance(error, RefusedError) else type(error).__name__
            return common.make_message(
                metadata=common.metadata_from_proto(claimed), error=common.Error(REFUSED, reason)
            )


class Registry:
    """Registers the keys of approved sites at SuperLink, and maps nodes to sites.

    SuperLink never accepts a key twice, so a revoked site's node stays registered. Here it belongs to no site.
    """

    def __init__(self, members: Members, control: server.ControlHttpClient) -> None:
        self.members, self.control = members, control
        self.names: dict[int, str] = {}  # by node
        self.limits: dict[str, int] = {}  # by site: the most examples it may claim

    def refresh(self) -> None:
        if not self.members.refresh() and self.names:
            return
        wanted = self.members.by_key
        known = {
            bytes(each.public_key): each.node_id
            for each in self.control.ListNodes(server.ListNodesRequest()).nodes_info
        }
        for key in wanted.keys() - known.keys():
            known[key] = self.control.RegisterNode(server.RegisterNodeRequest(public_key=key)).node_id
        self.names.clear()  # in place: other objects hold the same tables
        self.names.update({known[key]: name for key, name in wanted.items()})
        self.limits.clear()
        self.limits.update({name: member.examples for name, member in self.members.approved.items()})


@contextmanager
def task(link: Path, megabytes: float) -> Iterator[LinkGrid]:
    """Start a run at SuperLink and take its task; end both on exit."""
    transport = httpx.HTTPTransport(uds=str(link), retries=0)
    app, _ = server.build_fab_from_files({"pyproject.toml": EMPTY_APP})
    submitted = server.Fab(content=app, hash_str=hashlib.sha256(app).hexdigest())
    control = client(server.ControlHttpClient, "flwr", transport)
    for number, old in control.ListRuns(server.ListRunsRequest()).run_dict.items():
        if old.status.status != server.Status.FINISHED:
            # The app of this run was killed. Sites would wait for the rest of its messages.
            control.StopRun(server.StopRunRequest(run_id=number))
    run = control.StartRun(server.StartRunRequest(fab=submitted)).run_id
    request = server.AcquireTaskRequest(supported_task_types=[server.TaskType.SERVER_APP])
    acquired = client(server.RuntimeHttpClient, "SuperExec", transport).AcquireTask(request)
    require(acquired.task.run_id == run and bool(acquired.token), "SuperLink returned a task of another run")
    token = server.RuntimeTokenHttpInterceptor(acquired.token)
    runtime = client(server.RuntimeHttpClient, "flwr-serverapp", httpx.HTTPTransport(uds=str(link)), token)
    heartbeat = server.HeartbeatSender(server.make_task_heartbeat_fn_http(runtime))
    heartbeat.start()
    outcome = server.SubStatus.FAILED
    try:
        given = runtime.PullTaskInput(server.PullTaskInputRequest())
        common.TaskIdentity.task_id, common.TaskIdentity.run_id = given.task_id, given.run.run_id
        common.TaskIdentity.node_id = given.context.node_id
        grid = LinkGrid(runtime, megabytes)
        grid.set_run(common.run_from_proto(given.run))
        yield grid
        outcome = server.SubStatus.COMPLETED
    finally:
        heartbeat.stop()
        with suppress(httpx.HTTPError):  # SuperLink may be gone
            runtime.PushTaskOutput(server.PushTaskOutputRequest(sub_status=outcome))

"""The server's end of Flower's grid: it waits for no reply, and takes none for another."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

pytest.importorskip("flwr", reason="needs fedxl[flower]")

from flwr.app import Message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesResponse
from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, PullObjectResponse, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedxl.deploy.protocol.envelope import Envelope, Failure
from fedxl.deploy.protocol.records import sealed
from fedxl.deploy.server.app import MemberCarrier
from fedxl.deploy.server.carrier import GridCarrier
from fedxl.deploy.server.grid import LinkGrid
from fedxl.deploy.site.node import Link


@dataclass
class FakeRuntime:
    """SuperLink with one reply, whose parts may be missing."""

    message: Message
    claims: str  # which request it answers, as its head says
    missing: set[str] = field(default_factory=set)
    confirmed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.message.metadata.__dict__["_message_id"] = self.message.object_id
        self.objects = {name: each.deflate() for name, each in get_all_nested_objects(self.message).items()}

    def PullMessages(self, request) -> PullAppMessagesResponse:
        proto = message_to_proto(Message(sealed(Envelope({}, {})), dst_node_id=1, message_type="train"))
        proto.ClearField("content")
        proto.metadata.message_id = self.message.object_id
        proto.metadata.reply_to_message_id = self.claims
        proto.metadata.src_node_id = self.message.metadata.src_node_id
        return PullAppMessagesResponse(messages_list=[proto], message_object_trees=[get_object_tree(self.message)])

    def PullObject(self, request) -> PullObjectResponse:
        here = request.object_id not in self.missing
        content = self.objects[request.object_id] if here else b""
        return PullObjectResponse(object_found=True, object_available=here, object_content=content)

    def ConfirmMessageReceived(self, request) -> ConfirmMessageReceivedResponse:
        self.confirmed.append(request.message_object_id)
        return ConfirmMessageReceivedResponse()


@pytest.fixture
def reply() -> Message:
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 7
    asked = Message(sealed(Envelope({}, {})), dst_node_id=7, message_type="train", ttl=60.0)
    asked.metadata.__dict__["_message_id"] = "asked"
    return Message(sealed(Envelope({"round": 1}, {"x": torch.randn(2_000_000)})), reply_to=asked)


def grid(runtime: FakeRuntime, megabytes: float = 100) -> LinkGrid:
    made = LinkGrid(runtime, megabytes)
    made.set_run(Run.create_empty(run_id=7))
    return made


def test_a_reply_is_handed_out_once_it_is_whole_and_nobody_is_waited_for(reply):
    runtime = FakeRuntime(reply, "asked")
    carrier = GridCarrier(grid(runtime), 100)
    runtime.missing = set(list(runtime.objects)[:2])  # never sent: a round goes on without it, at its deadline
    for _ in range(3):
        assert list(carrier.answers(["asked"])) == []
    runtime.missing = set()
    [(ticket, letter)] = carrier.answers(["asked"])
    assert (ticket, letter.facts) == ("asked", {"round": 1})
    assert runtime.confirmed == [reply.object_id]


def test_nothing_is_kept_of_a_reply_that_never_came_in_full(reply):
    runtime = FakeRuntime(reply, "asked")
    runtime.missing = {reply.object_id}
    link = grid(runtime)
    assert list(GridCarrier(link, 100).answers(["asked"])) == []
    link.forget("asked")
    assert not link.arriving
    assert runtime.confirmed == [reply.object_id], "and SuperLink is told"


def test_a_reply_that_says_it_answers_something_else_is_refused_under_its_own_ticket(reply):
    """What a reply says of itself, its sender has written: it once ended the server's app."""
    carrier = GridCarrier(grid(FakeRuntime(reply, "another request")), 100)
    [(ticket, found)] = carrier.answers(["another request"])
    assert ticket == "another request"
    assert found == Failure("its answer is not taken: it says that it is another reply than it is")


def test_a_reply_that_is_too_large_is_refused_before_all_of_it_is_here(reply):
    runtime = FakeRuntime(reply, "asked")
    [(_, found)] = GridCarrier(grid(runtime, 5), 5).answers(["asked"])
    assert isinstance(found, Failure)
    assert "larger than what is taken here" in found.reason
    assert runtime.confirmed, "and SuperLink need not keep it"


def test_a_reply_of_a_site_that_was_revoked_meanwhile_is_dropped(reply):
    class Registry:
        names: dict[int, str] = {}  # noqa: RUF012

        def refresh(self) -> None: ...

    carrier = MemberCarrier(grid(FakeRuntime(reply, "asked")), 100, Registry())
    carrier.sent["asked"] = 7
    assert list(carrier.answers(["asked"])) == [("asked", Failure("it is no longer approved"))]


def test_a_site_whose_reply_comes_too_late_goes_on(reply, tmp_path, caplog):
    """The server has forgotten the round, and SuperLink stores nothing of it any more."""

    class Fleet:
        def PushMessages(self, request) -> PushMessagesResponse:
            return PushMessagesResponse(objects_to_push=[reply.object_id], session_id="over")

        def PushObject(self, request) -> PushObjectResponse:
            return PushObjectResponse(stored=False)

    Link(tmp_path, Fleet(), Node(node_id=7))._send(reply, 7)
    assert "a reply was not taken" in caplog.text

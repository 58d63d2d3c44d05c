"""What a site may ask of Flower's SuperLink: a list of paths, and for each site what it has been asked itself.

Flower checks who a node is. It does not check that a reply answers a message which this node was sent, nor how much
a node stores. Both are checked here, on the few small messages that tell.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

PREFIX = "/v1/fleet/"
SMALL = 2**16  # bytes of a request that names a node, a run or an object
# Paths that a site needs, and the most bytes of a request. An object is a piece of 5 MiB at the most, and its name.
ALLOWED = {
    f"{PREFIX}activate-node": SMALL,
    f"{PREFIX}deactivate-node": SMALL,
    f"{PREFIX}send-node-heartbeat": SMALL,
    f"{PREFIX}pull-messages": SMALL,
    f"{PREFIX}push-messages": 2**21,
    f"{PREFIX}pull-object": SMALL,
    f"{PREFIX}push-object": 6 * 2**20,
    f"{PREFIX}confirm-message-received": SMALL,
}
# Paths of the same interface that no site of ours needs. Sites run no code that they are sent, so they fetch none.
WITHHELD = {f"{PREFIX}{name}" for name in ("register-node", "unregister-node", "get-run", "get-fab")}
MOST_OBJECTS = 5_000  # that a reply may announce: a piece of 5 MiB each, or an array, or a record
MOST_UNANSWERED = 64  # messages that a site has fetched and not answered


class RefusedRequestError(ValueError):
    """Why a request is not passed on, in one line."""


@dataclass
class Ledger:
    """What one site has been sent, and how much it may still send in reply."""

    most_bytes: int  # of one reply
    unanswered: OrderedDict[str, str] = field(default_factory=OrderedDict)  # message -> its reply, "" if none yet
    objects: dict[str, frozenset[str]] = field(default_factory=dict)  # of each of these messages
    left: int = 0  # bytes of objects that it may still store

    def before(self, path: str, body: bytes) -> None:
        """Check a request; raises if it must not be passed on."""
        try:
            if path == f"{PREFIX}push-messages":
                self._reply(PushMessagesRequest.FromString(body))
            elif path == f"{PREFIX}push-object":
                self._store(len(body))
            elif path == f"{PREFIX}pull-object":
                self._fetch(PullObjectRequest.FromString(body).object_id)
            elif path == f"{PREFIX}confirm-message-received":
                self._confirm(ConfirmMessageReceivedRequest.FromString(body).message_object_id)
        except DecodeError:
            raise RefusedRequestError("it cannot be read") from None

    def after(self, path: str, body: bytes) -> None:
        """Note which messages SuperLink has handed out."""
        if path != f"{PREFIX}pull-messages":
            return
        try:
            found = PullMessagesResponse.FromString(body)
        except DecodeError:
            raise RefusedRequestError("SuperLink's answer cannot be read") from None
        for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            self.unanswered[message.metadata.message_id] = ""
            self.objects[message.metadata.message_id] = frozenset(_named(tree))
        while len(self.unanswered) > MOST_UNANSWERED:
            oldest, _ = self.unanswered.popitem(last=False)
            self.objects.pop(oldest, None)

    def _store(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise RefusedRequestError(f"its reply is larger than {self.most_bytes / 1e6:g} MB")

    def _fetch(self, name: str) -> None:
        if not any(name in names for names in self.objects.values()):
            raise RefusedRequestError("it asks for a part of a message that it was not sent")

    def _confirm(self, name: str) -> None:
        if name not in self.unanswered:
            raise RefusedRequestError("it confirms a message that it was not sent")

    def _reply(self, request: PushMessagesRequest) -> None:
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise RefusedRequestError("it sends several replies at once")
        metadata = request.messages_list[0].metadata
        if metadata.src_node_id != request.node.node_id:
            raise RefusedRequestError("it replies in the name of another node")
        if self.unanswered.get(metadata.reply_to_message_id) not in ("", metadata.message_id):
            raise RefusedRequestError("it replies to a message that it was not sent, or for a second time")
        if sum(1 for _ in islice(_named(request.message_object_trees[0]), MOST_OBJECTS + 1)) > MOST_OBJECTS:
            raise RefusedRequestError(f"its reply has more than {MOST_OBJECTS:,} objects")
        if not self.unanswered[metadata.reply_to_message_id]:
            self.unanswered[metadata.reply_to_message_id] = metadata.message_id
            self.left = self.most_bytes + self.most_bytes // 10 + SMALL  # heads and names of objects are extra


def _named(tree: ObjectTree) -> Iterator[str]:
    """The objects that a tree names, one after the other."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node.object_id
        waiting.extend(node.children)

"""What a site may ask of Flower's SuperLink: a list of paths, and for each site what it has been asked itself.

Flower checks who a node is. It does not check that a reply answers a message which this node was sent, nor how much
a node stores. Both are checked here, on the few small messages that tell.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fedxl.deploy.flower.protobuf import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullMessagesResponse,
    PullObjectRequest,
    PushMessagesRequest,
)

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
MOST_INNER = 100_000  # objects with parts that are remembered
MOST_REPEATS = 5  # of one reply
DEEPEST = 5  # a message, its records, their arrays, their pieces
MOST_UNANSWERED = 64  # messages that a site has fetched and not answered


class RefusedRequestError(ValueError):
    """Why a request is not passed on, in one line."""


@dataclass
class Ledger:
    """What one site has been sent, and how much it may still send in reply."""

    most_bytes: int  # of one reply
    # By message: the digest of its reply, or "" as long as there is none.
    unanswered: OrderedDict[str, str] = field(default_factory=OrderedDict)
    objects: dict[str, frozenset[str]] = field(default_factory=dict)  # of each of these messages
    left: int = 0  # bytes of objects that it may still store
    repeats: int = 0  # of the last reply
    inner: dict[str, None] = field(default_factory=dict)  # objects with parts; all sites share it

    def before(self, path: str, body: bytes) -> None:
        """Check a request; raises if it must not be passed on."""
        try:
            if path == f"{PREFIX}push-messages":
                self._reply(PushMessagesRequest.FromString(body), body)
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
            nodes = list(_nodes(tree))
            self.objects[message.metadata.message_id] = frozenset(node.object_id for node in nodes)
            self._remember(node.object_id for node in nodes if node.children)
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

    def _reply(self, request: PushMessagesRequest, body: bytes) -> None:
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise RefusedRequestError("it sends several replies at once")
        metadata, tree = request.messages_list[0].metadata, request.message_object_trees[0]
        if metadata.src_node_id != request.node.node_id:
            raise RefusedRequestError("it replies in the name of another node")
        digest, known = hashlib.sha256(body).hexdigest(), self.unanswered.get(metadata.reply_to_message_id)
        if known == digest and self.repeats < MOST_REPEATS:
            self.repeats += 1  # the same again, after a lost connection: it grants nothing more
            return
        if known != "":
            raise RefusedRequestError("it replies to a message that it was not sent, or for a second time")
        self._check_tree(tree, metadata.message_id)
        self.unanswered[metadata.reply_to_message_id], self.repeats = digest, 0
        self.left = self.most_bytes + self.most_bytes // 10 + SMALL  # heads and names of objects are extra

    def _check_tree(self, tree: ObjectTree, root: str) -> None:
        """A reply's objects, as Flower lays them out.

        SuperLink keeps an object's parts by its name, and would multiply them wherever the name stands again. So only
        an object without parts may be named twice, and one that has parts is never named without them.
        """
        if tree.object_id != root:
            raise RefusedRequestError("its objects are those of another reply")
        inner, leaves, level = set[str](), set[str](), [tree]
        for _ in range(DEEPEST):
            for node in level:
                if node.children and node.object_id in inner:
                    raise RefusedRequestError("it names an object with its parts twice")
                (inner if node.children else leaves).add(node.object_id)
            level = [child for node in level for child in node.children]
            if len(inner) + len(leaves) + len(level) > MOST_OBJECTS:
                raise RefusedRequestError(f"its reply has more than {MOST_OBJECTS:,} objects")
        if level:
            raise RefusedRequestError("its objects nest too deep")
        if leaves & (inner | self.inner.keys()):
            raise RefusedRequestError("it names an object that has parts without them")
        self._remember(inner)

    def _remember(self, inner: Iterable[str]) -> None:
        self.inner.update(dict.fromkeys(inner))
        while len(self.inner) > MOST_INNER:
            del self.inner[next(iter(self.inner))]


def _nodes(tree: ObjectTree) -> Iterator[ObjectTree]:
    """A tree's nodes, one after the other."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children)

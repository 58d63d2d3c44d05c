"""Which requests of a site the gateway forwards to Flower's SuperLink: the paths, and what the site was sent.

Flower authenticates a node. It does not check that a reply belongs to a message which that node was sent, nor how
much a node stores. We check both here, on the small messages that show it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fedxl.deploy.flower import protobuf

PREFIX = "/v1/fleet/"
SMALL = 2**16  # bytes of a request that names a node, a run or an object
# The paths that a site needs, and the largest request to each. An object has at most 5 MiB, and its id.
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
# Paths of the same interface that our sites do not need. Sites run no code that they receive, so they fetch none.
WITHHELD = {f"{PREFIX}{name}" for name in ("register-node", "unregister-node", "get-run", "get-fab")}
MAX_OBJECTS = 5_000  # in one reply: chunks of 5 MiB, arrays and records
MAX_PARENTS = 100_000  # ids of objects with children that we remember
MAX_REPEATS = 5  # of one reply
MAX_DEPTH = 5  # a message, its records, their arrays, their chunks
MAX_UNANSWERED = 64  # messages that a site has fetched without replying


class RefusedRequestError(ValueError):
    """Why the gateway does not forward a request, in one line."""


@dataclass
class Ledger:
    """What one site was sent, and how much it may still send in reply."""

    reply_bytes: int  # the most of one reply
    # By message: the digest of its reply, or "" while there is none.
    unanswered: OrderedDict[str, str] = field(default_factory=OrderedDict)
    objects: dict[str, frozenset[str]] = field(default_factory=dict)  # of each of these messages
    bytes_left: int = 0  # of objects that it may still store
    repeats: int = 0  # of the last reply
    parents: dict[str, None] = field(default_factory=dict)  # objects with children; all sites share it

    def check_request(self, path: str, body: bytes) -> None:
        """Raise if the gateway must not forward this request."""
        try:
            if path == f"{PREFIX}push-messages":
                self._reply(protobuf.PushMessagesRequest.FromString(body), body)
            elif path == f"{PREFIX}push-object":
                self.bytes_left -= len(body)
                if self.bytes_left < 0:
                    raise RefusedRequestError(f"its reply is larger than {self.reply_bytes / 1e6:g} MB")
            elif path == f"{PREFIX}pull-object":
                name = protobuf.PullObjectRequest.FromString(body).object_id
                if not any(name in names for names in self.objects.values()):
                    raise RefusedRequestError("it fetches an object of a message that it was not sent")
            elif path == f"{PREFIX}confirm-message-received":
                name = protobuf.ConfirmMessageReceivedRequest.FromString(body).message_object_id
                if name not in self.unanswered:
                    raise RefusedRequestError("it confirms a message that it was not sent")
        except DecodeError:
            raise RefusedRequestError("it cannot be read") from None

    def note_response(self, path: str, body: bytes) -> None:
        """Note which messages SuperLink has given to the site."""
        if path != f"{PREFIX}pull-messages":
            return
        try:
            found = protobuf.PullMessagesResponse.FromString(body)
        except DecodeError:
            raise RefusedRequestError("SuperLink's response cannot be read") from None
        for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            self.unanswered[message.metadata.message_id] = ""
            nodes = [tree]
            for node in nodes:  # the list grows during the loop
                nodes.extend(node.children)
            self.objects[message.metadata.message_id] = frozenset(node.object_id for node in nodes)
            self._remember(node.object_id for node in nodes if node.children)
        while len(self.unanswered) > MAX_UNANSWERED:
            oldest, _ = self.unanswered.popitem(last=False)
            self.objects.pop(oldest, None)

    def _reply(self, request: protobuf.PushMessagesRequest, body: bytes) -> None:
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise RefusedRequestError("it sends several replies at once")
        metadata, tree = request.messages_list[0].metadata, request.message_object_trees[0]
        if metadata.src_node_id != request.node.node_id:
            raise RefusedRequestError("it replies in the name of another node")
        digest, known = hashlib.sha256(body).hexdigest(), self.unanswered.get(metadata.reply_to_message_id)
        if known == digest and self.repeats < MAX_REPEATS:
            self.repeats += 1  # the same reply again, after a lost connection: it may not store more
            return
        if known != "":
            raise RefusedRequestError("it replies to a message that it was not sent, or replies twice")
        self._check_tree(tree, metadata.message_id)
        self.unanswered[metadata.reply_to_message_id], self.repeats = digest, 0
        self.bytes_left = self.reply_bytes + self.reply_bytes // 10 + SMALL  # leaves room for headers and ids

    def _check_tree(self, tree: protobuf.ObjectTree, root: str) -> None:
        """Refuse trees that could grow without bound: SuperLink repeats an object's children wherever its id occurs.

        Only an object without children may occur twice, and one with children never occurs without them.
        """
        if tree.object_id != root:
            raise RefusedRequestError("its objects belong to another reply")
        parents, leaves, level = set[str](), set[str](), [tree]
        for _ in range(MAX_DEPTH):
            for node in level:
                if node.children and node.object_id in parents:
                    raise RefusedRequestError("it names an object and its children twice")
                (parents if node.children else leaves).add(node.object_id)
            level = [child for node in level for child in node.children]
            if len(parents) + len(leaves) + len(level) > MAX_OBJECTS:
                raise RefusedRequestError(f"its reply has more than {MAX_OBJECTS:,} objects")
        if level:
            raise RefusedRequestError("its objects are nested too deeply")
        if leaves & (parents | self.parents.keys()):
            raise RefusedRequestError("it names an object without its children")
        self._remember(parents)

    def _remember(self, parents: Iterable[str]) -> None:
        self.parents.update(dict.fromkeys(parents))
        while len(self.parents) > MAX_PARENTS:
            del self.parents[next(iter(self.parents))]

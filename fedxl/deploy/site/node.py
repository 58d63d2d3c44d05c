"""A site's process: it connects outwards, takes one request at a time, and runs the fedxl that is installed here.

It speaks to the server's gateway as one of Flower's nodes, with TLS on both sides. It listens on nothing, fetches no
app, and runs no code that it is sent: a message holds numbers and settings, which `site.py` checks.
"""

from __future__ import annotations

import json
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from cryptography import x509

from fedxl.deploy.flower.common import (
    Message,
    ObjectPushError,
    TaskIdentity,
    get_all_nested_objects,
    get_object_tree,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
    message_to_proto,
    no_object_id_recompute,
    push_objects,
    remove_content_from_message,
)
from fedxl.deploy.flower.protobuf import (
    ActivateNodeRequest,
    ConfirmMessageReceivedRequest,
    DeactivateNodeRequest,
    Node,
    ObjectTree,
    PullMessagesRequest,
    PushMessagesRequest,
    SendNodeHeartbeatRequest,
)
from fedxl.deploy.flower.site import FleetHttpClient, NodeAuthHttpInterceptor
from fedxl.deploy.protocol.http_clients import client
from fedxl.deploy.protocol.records import pulled
from fedxl.deploy.provision import keys, tls
from fedxl.deploy.provision.connection import HOME_FOLDER, read_connection, read_server_key
from fedxl.deploy.provision.settings import SiteFile, read_site
from fedxl.deploy.server.gateway import Say
from fedxl.deploy.site.replies import reply
from fedxl.errors import first_line, printable

POLL = (0.2, 2.0)  # seconds between two looks for a message: while a run is busy, and while nothing happens
AGAIN = (0.5, 30.0)  # seconds between two tries to connect: at first, and at the most
BEAT = 20.0  # seconds; a node that has been silent for twice as long is taken for dead
log = logging.getLogger("fedxl")


def main(folder: Path, say: Say) -> None:
    """Stay in the federation until this process is told to stop."""
    file = read_site(folder / "site.toml")
    name, (host, port) = file.settings.name, read_connection(folder)
    pause = Pause(lambda reason: say(f"site {name}: not connected: {reason}; trying again"))
    while True:
        try:
            with connected(folder, host, port) as link:
                say(f"site {name}: connected to {host}:{port}")
                pause.well()
                link.work(pause)
        except (httpx.HTTPError, OSError, ssl.SSLError) as error:
            pause.after(error)


class Pause:
    """Between two tries: longer each time, and one line for each new reason."""

    def __init__(self, say: Say) -> None:
        self.say, self.told, self.seconds = say, "", AGAIN[0]

    def well(self) -> None:
        self.told, self.seconds = "", AGAIN[0]

    def after(self, error: Exception) -> None:
        reason = explained(error)
        if reason != self.told:
            self.say(reason)
        self.told = reason
        time.sleep(self.seconds)
        self.seconds = min(self.seconds * 2, AGAIN[1])


class Link:
    """A connection to the gateway, as one of Flower's nodes."""

    def __init__(self, folder: Path, fleet: FleetHttpClient, node: Node) -> None:
        self.folder, self.fleet, self.node = folder, fleet, node

    def work(self, pause: Pause) -> None:
        """Answer one message after the other, for as long as the server knows this node."""
        wait = POLL[0]
        while True:
            try:
                found = self.fleet.PullMessages(PullMessagesRequest(node=self.node))
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                if not _passing(error):
                    raise
                pause.after(error)  # the gateway is being started again, say: we are still the same node
                continue
            pause.well()
            for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                wait = POLL[0]
                self._answer(tree, message.metadata.run_id)
            time.sleep(wait)
            wait = min(wait * 1.2, POLL[1])

    def _site(self) -> SiteFile:
        return read_site(self.folder / "site.toml")  # anew: its owner may have changed what is allowed

    def _answer(self, tree: ObjectTree, run: int) -> None:
        try:
            pull = make_pull_object_fn_protobuf(self.fleet.PullObject, self.node, run)
            message = pulled(tree, pull, self._site().settings.megabytes)
        except httpx.TransportError:
            raise
        except Exception as error:  # whatever a damaged or hostile message may raise
            log.error("a message is not taken: %s", explained(error))
            return
        self.fleet.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=tree.object_id)
        )
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, self.node.node_id, 1
        self._send(reply(message, self._site), run)

    def _send(self, answer: Message, run: int) -> None:
        with no_object_id_recompute():
            answer.metadata.__dict__["_message_id"] = answer.object_id
            request = PushMessagesRequest(
                node=self.node,
                messages_list=[message_to_proto(remove_content_from_message(answer))],
                message_object_trees=[get_object_tree(answer)],
                clientapp_runtime_list=[0.0],
            )
            try:
                given = self.fleet.PushMessages(request)
                push = make_push_object_fn_protobuf(self.fleet.PushObject, self.node, run, given.session_id)
                push_objects(get_all_nested_objects(answer), push, object_ids_to_push=set(given.objects_to_push))
            except (httpx.HTTPStatusError, ObjectPushError) as error:
                # The run is over, or the round went on without us, at its deadline: nobody waits for this any more.
                log.error("a reply was not taken: %s", explained(error))


def _passing(error: Exception) -> bool:
    """Whether the same request may be answered a little later."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in (429, 503)
    return True


@contextmanager
def connected(folder: Path, host: str, port: int) -> Iterator[Link]:
    """Known to the server as long as this lasts, by heartbeats."""
    key = keys.read_key(folder / "site.key")
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    signed = NodeAuthHttpInterceptor(key, key.public_key())
    transport = httpx.HTTPTransport(verify=tls.for_site(folder))
    check = only_from(read_server_key(folder))
    with client(
        FleetHttpClient, "SuperNode", transport, signed, url=f"https://{address}", on_response=check
    ) as fleet:
        node = _activated(fleet, keys.public_pem(key.public_key()), folder / HOME_FOLDER / "node.id")
        done = threading.Event()
        beats = threading.Thread(target=_heartbeats, args=(fleet, node, done), daemon=True)
        beats.start()
        try:
            yield Link(folder, fleet, node)
        finally:
            done.set()
            with suppress(httpx.HTTPError, OSError):
                fleet.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))


def only_from(pinned: str) -> Callable[[httpx.Response], None]:
    """Refuse whatever comes from another key than the pinned one: the authority's key may have been stolen."""

    def check(response: httpx.Response) -> None:
        shown = response.extensions["network_stream"].get_extra_info("ssl_object").getpeercert(True)
        found = keys.fingerprint(keys.public_key(x509.load_der_x509_certificate(shown)))
        if found != pinned:
            raise ssl.SSLError("the server's key is another one than connection.toml has pinned; ask its operator")

    return check if pinned else lambda response: None


def _activated(fleet: FleetHttpClient, key: bytes, note: Path) -> Node:
    """This site's node. One that was killed is still taken for connected: it is ended first, by its noted number."""
    asked = ActivateNodeRequest(public_key=key, heartbeat_interval=BEAT)
    try:
        found = fleet.ActivateNode(asked)
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.PRECONDITION_FAILED or not note.exists():
            raise
        fleet.DeactivateNode(DeactivateNodeRequest(node_id=int(note.read_text() or 0)))
        found = fleet.ActivateNode(asked)
    note.write_text(str(found.node_id))
    return Node(node_id=found.node_id)


def _heartbeats(fleet: FleetHttpClient, node: Node, done: threading.Event) -> None:
    beat = SendNodeHeartbeatRequest(node=node, heartbeat_interval=BEAT)
    while not done.wait(BEAT / 3):
        with suppress(httpx.HTTPError, OSError, RuntimeError):  # whoever pulls messages notices, too, and acts
            fleet.SendNodeHeartbeat(beat)


def explained(error: Exception) -> str:
    """Why there is no connection, in words that say what to do."""
    text = str(error)
    if isinstance(error, httpx.HTTPStatusError):
        if error.response.status_code in (httpx.codes.PRECONDITION_FAILED, httpx.codes.UNAUTHORIZED):
            return "the server is starting"
        said = error.response.text.strip().removeprefix("fedxl: ")
        with suppress(ValueError, KeyError, TypeError):
            said = json.loads(said)["detail"]  # as Flower puts it
        return f"the server answers {error.response.status_code}: {printable(said or 'nothing')}"
    for sign, meaning in REASONS.items():
        if sign in text:
            return meaning
    return printable(first_line(error))


REASONS = {
    "certificate has expired": "the server's certificate has expired; its operator must renew it",
    "self-signed certificate in certificate chain": "the server's certificate is of another federation's authority",
    "unable to get local issuer certificate": "the server's certificate is of another federation's authority",
    "alert certificate expired": "this site's certificate has expired; ask for a new one: fedxl deploy request",
    "alert unknown ca": "the server does not know the authority of this site's certificate",
    "Connection refused": "nobody listens there; is the server running, and is connection.toml right?",
    "Name or service not known": "there is no such host; see connection.toml",
    "WRONG_VERSION_NUMBER": "what answers there speaks no TLS; see connection.toml",
    "Server disconnected": "the server closes the connection: this site's key is not approved, or was revoked",
    "Connection reset by peer": "the server closes the connection: this site's key is not approved, or was revoked",
}

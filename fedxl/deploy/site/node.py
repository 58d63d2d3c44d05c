"""A site's process: it connects to the gateway as one of Flower's nodes, and handles one request at a time.

It opens no port, fetches no app, and runs no code but the installed fedxl: `requests.py` checks what it receives.
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

from fedxl.deploy import Say
from fedxl.deploy.flower import common, protobuf
from fedxl.deploy.flower.site import FleetHttpClient, NodeAuthHttpInterceptor
from fedxl.deploy.protocol.http_clients import client
from fedxl.deploy.protocol.records import pull_message
from fedxl.deploy.provision import keys
from fedxl.deploy.provision.connection import HOME_FOLDER, read_connection, read_server_key, tls_for_site
from fedxl.deploy.provision.settings import SiteFile, read_site
from fedxl.deploy.site.replies import reply
from fedxl.errors import first_line, printable

POLL = (0.2, 2.0)  # seconds between two polls for messages: during a run, and when idle
RETRY = (0.5, 30.0)  # seconds between two attempts to connect: the first, and the longest
HEARTBEAT = 20.0  # seconds; SuperLink considers a node dead after twice as long without one
log = logging.getLogger("fedxl")


def main(folder: Path, say: Say) -> None:
    """Stay connected until this process is stopped."""
    file = read_site(folder / "site.toml")
    name, (host, port) = file.settings.name, read_connection(folder)
    backoff = Backoff(lambda reason: say(f"site {name}: not connected: {reason}; retrying"))
    while True:
        try:
            with connect(folder, host, port) as connection:
                say(f"site {name}: connected to {host}:{port}")
                backoff.reset()
                connection.work(backoff)
        except (httpx.HTTPError, OSError, ssl.SSLError) as error:
            backoff.wait_after(error)


class Backoff:
    """Waits between two attempts: longer each time. Logs each new reason once."""

    def __init__(self, say: Say) -> None:
        self.say, self.reason, self.seconds = say, "", RETRY[0]

    def reset(self) -> None:
        self.reason, self.seconds = "", RETRY[0]

    def wait_after(self, error: Exception) -> None:
        reason = explain(error)
        if reason != self.reason:
            self.say(reason)
        self.reason = reason
        time.sleep(self.seconds)
        self.seconds = min(self.seconds * 2, RETRY[1])


class Connection:
    """A connection to the gateway, as one of Flower's nodes."""

    def __init__(self, folder: Path, fleet: FleetHttpClient, node: protobuf.Node) -> None:
        self.folder, self.fleet, self.node = folder, fleet, node

    def work(self, backoff: Backoff) -> None:
        """Reply to one message after the other, as long as the server knows this node."""
        wait = POLL[0]
        while True:
            try:
                found = self.fleet.PullMessages(protobuf.PullMessagesRequest(node=self.node))
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                if isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in (429, 503):
                    raise
                backoff.wait_after(error)  # the gateway may be restarting; SuperLink still knows this node
                continue
            backoff.reset()
            for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                wait = POLL[0]
                self._reply(tree, message.metadata.run_id)
            time.sleep(wait)
            wait = min(wait * 1.2, POLL[1])

    def _site(self) -> SiteFile:
        return read_site(self.folder / "site.toml")  # each time: its owner may have changed what is allowed

    def _reply(self, tree: protobuf.ObjectTree, run: int) -> None:
        try:
            pull = common.make_pull_object_fn_protobuf(self.fleet.PullObject, self.node, run)
            message = pull_message(tree, pull, self._site().settings.megabytes)
        except httpx.TransportError:
            raise
        except Exception as error:  # a damaged or hostile message may raise anything
            log.error("refused a message: %s", explain(error))
            return
        self.fleet.ConfirmMessageReceived(
            protobuf.ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=tree.object_id)
        )
        common.TaskIdentity.run_id, common.TaskIdentity.node_id, common.TaskIdentity.task_id = (
            run,
            self.node.node_id,
            1,
        )
        self._send(reply(message, self._site), run)

    def _send(self, message: common.Message, run: int) -> None:
        with common.no_object_id_recompute():
            message.metadata.__dict__["_message_id"] = message.object_id
            request = protobuf.PushMessagesRequest(
                node=self.node,
                messages_list=[common.message_to_proto(common.remove_content_from_message(message))],
                message_object_trees=[common.get_object_tree(message)],
                clientapp_runtime_list=[0.0],
            )
            try:
                accepted = self.fleet.PushMessages(request)
                push = common.make_push_object_fn_protobuf(self.fleet.PushObject, self.node, run, accepted.session_id)
                common.push_objects(
                    common.get_all_nested_objects(message), push, object_ids_to_push=set(accepted.objects_to_push)
                )
            except (httpx.HTTPStatusError, common.ObjectPushError) as error:
                # The run is over, or the round ended at its deadline without us: nobody waits for this reply.
                log.error("the server did not accept a reply: %s", explain(error))


@contextmanager
def connect(folder: Path, host: str, port: int) -> Iterator[Connection]:
    """Register this node at the server and send heartbeats until exit."""
    key = keys.read_key(folder / "site.key")
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    signed = NodeAuthHttpInterceptor(key, key.public_key())
    transport = httpx.HTTPTransport(verify=tls_for_site(folder))
    check = require_server_key(read_server_key(folder))
    with client(
        FleetHttpClient, "SuperNode", transport, signed, url=f"https://{address}", on_response=check
    ) as fleet:
        node = _activate(fleet, keys.public_pem(key.public_key()), folder / HOME_FOLDER / "node.id")
        done = threading.Event()
        beats = threading.Thread(target=_heartbeats, args=(fleet, node, done), daemon=True)
        beats.start()
        try:
            yield Connection(folder, fleet, node)
        finally:
            done.set()
            with suppress(httpx.HTTPError, OSError):
                fleet.DeactivateNode(protobuf.DeactivateNodeRequest(node_id=node.node_id))


def require_server_key(pinned: str) -> Callable[[httpx.Response], None]:
    """Refuse a server whose key is not the pinned one, even if the authority signed it: that key may be stolen."""

    def check(response: httpx.Response) -> None:
        shown = response.extensions["network_stream"].get_extra_info("ssl_object").getpeercert(True)
        found = keys.fingerprint(keys.public_key(x509.load_der_x509_certificate(shown)))
        if found != pinned:
            raise ssl.SSLError("the server's key is not the one pinned in connection.toml; ask its operator")

    return check if pinned else lambda response: None


def _activate(fleet: FleetHttpClient, key: bytes, id_file: Path) -> protobuf.Node:
    """This site's node. If an earlier process was killed, its node still counts as connected: deactivate it first."""
    request = protobuf.ActivateNodeRequest(public_key=key, heartbeat_interval=HEARTBEAT)
    try:
        activated = fleet.ActivateNode(request)
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.PRECONDITION_FAILED or not id_file.exists():
            raise
        fleet.DeactivateNode(protobuf.DeactivateNodeRequest(node_id=int(id_file.read_text() or 0)))
        activated = fleet.ActivateNode(request)
    id_file.write_text(str(activated.node_id))
    return protobuf.Node(node_id=activated.node_id)


def _heartbeats(fleet: FleetHttpClient, node: protobuf.Node, done: threading.Event) -> None:
    heartbeat = protobuf.SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT)
    while not done.wait(HEARTBEAT / 3):
        with suppress(httpx.HTTPError, OSError, RuntimeError):  # the thread that pulls messages handles it
            fleet.SendNodeHeartbeat(heartbeat)


def explain(error: Exception) -> str:
    """Why there is no connection, and what to do."""
    if isinstance(error, httpx.HTTPStatusError):
        if error.response.status_code in (httpx.codes.PRECONDITION_FAILED, httpx.codes.UNAUTHORIZED):
            return "the server is starting"
        said = error.response.text.strip().removeprefix("fedxl: ")
        with suppress(ValueError, KeyError, TypeError):
            said = json.loads(said)["detail"]  # Flower's format
        return f"the server responds {error.response.status_code}: {printable(said or 'no reason')}"
    known = (meaning for sign, meaning in REASONS.items() if sign in str(error))
    return next(known, printable(first_line(error)))


REASONS = {
    "certificate has expired": "the server's certificate has expired; its operator must renew it",
    "self-signed certificate in certificate chain": "the server's certificate is from another federation's authority",
    "unable to get local issuer certificate": "the server's certificate is from another federation's authority",
    "alert certificate expired": "this site's certificate has expired; request a new one: fedxl deploy request",
    "alert unknown ca": "the server does not know the authority of this site's certificate",
    "Connection refused": "connection refused; is the server running, and is connection.toml right?",
    "Name or service not known": "there is no such host; see connection.toml",
    "WRONG_VERSION_NUMBER": "the server does not use TLS; see connection.toml",
    "Server disconnected": "the server closed the connection: this site's key is not approved, or was revoked",
    "Connection reset by peer": "the server closed the connection: this site's key is not approved, or was revoked",
}

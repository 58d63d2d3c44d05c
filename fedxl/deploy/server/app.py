"""The server's app: the process that runs the training. SuperLink and the gateway run beside it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import torch

from fedxl.deploy import Say
from fedxl.deploy.flower.server import ControlHttpClient
from fedxl.deploy.protocol.envelope import Envelope, Failure, Kind
from fedxl.deploy.protocol.http_clients import client
from fedxl.deploy.provision.connection import LINK
from fedxl.deploy.provision.members import Members
from fedxl.deploy.provision.settings import read_server
from fedxl.deploy.server.carrier import GridCarrier
from fedxl.deploy.server.grid import LinkGrid, Registry, task
from fedxl.deploy.server.serve import serve
from fedxl.deploy.supervise import status
from fedxl.errors import UserError, first_line
from fedxl.reporting.text import evaluation_in_words
from fedxl.training.settings import Hooks, Progress

POLL = 0.2


class MemberCarrier(GridCarrier):
    """Sends only to nodes of approved sites, and refuses replies of sites that have been revoked."""

    def __init__(self, grid: LinkGrid, megabytes: float, registry: Registry) -> None:
        super().__init__(grid, megabytes)
        self.link, self.registry = grid, registry
        self.sent: dict[str, int] = {}  # by ticket: the node

    def nodes(self) -> Sequence[int]:
        self.registry.refresh()
        return [node for node in super().nodes() if node in self.registry.names]

    def send(self, requests: Mapping[int, Envelope], kind: Kind, seconds: float) -> Mapping[str, int]:
        sent = super().send(requests, kind, seconds)
        self.sent.update(sent)
        return sent

    def replies(self, tickets: Sequence[str]) -> Iterator[tuple[str, Envelope | Failure]]:
        self.registry.refresh()
        for ticket, reply in super().replies(tickets):
            member = self.sent.pop(ticket, 0) in self.registry.names
            yield ticket, reply if member else Failure("it is no longer approved")

    def forget(self, tickets: Sequence[str]) -> None:
        for ticket in tickets:
            self.sent.pop(ticket, None)
            self.link.forget(ticket)


def main(folder: Path, say: Say) -> None:
    """Run the training, from the last checkpoint if there is one."""

    def show(progress: Progress) -> None:
        fresh = progress.record if progress.record and progress.record["round"] == progress.round else {}
        told = evaluation_in_words(fresh, "validation")
        say(f"round {progress.round} of {progress.rounds}  {told}".rstrip())

    torch.set_num_threads(1)
    os.chdir(folder)  # then the socket's path is relative: an absolute one may exceed the system's limit
    status.write(folder, status.RUNNING)
    try:
        server = read_server(folder / "server.toml")
        control = _connect()
        registry = Registry(Members(folder), control)
        registry.refresh()
        with task(LINK, server.settings.megabytes) as grid:
            carrier = MemberCarrier(grid, server.settings.megabytes, registry)
            serve(server, carrier, Hooks(show, say), registry.names, registry.limits)
    except UserError as error:
        status.write(folder, status.FAILED, str(error))
        raise
    except httpx.HTTPError as error:
        say(f"SuperLink does not respond: {first_line(error)}")
        sys.exit(1)  # the supervisor restarts both
    status.write(folder, status.FINISHED)


def _connect() -> ControlHttpClient:
    """Wait for SuperLink, which starts at the same time."""
    transport = httpx.HTTPTransport(uds=str(LINK))
    with httpx.Client(transport=transport, timeout=30.0, trust_env=False) as probe:
        while True:
            with suppress(httpx.TransportError):
                probe.get("http://superlink/health")
                break
            time.sleep(POLL)
    return client(ControlHttpClient, "flwr", httpx.HTTPTransport(uds=str(LINK)))

"""What sites get once: the weights that do not train, before any other request, and in the end the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedxl import wire
from fedxl.deploy.protocol.envelope import POLL, Envelope, Failure, Kind, RunHeader
from fedxl.deploy.protocol.message import FACTS_ALONE
from fedxl.deploy.server.directory import Directory
from fedxl.errors import printable
from fedxl.models import frozen_tensors


@dataclass
class Backbone:
    """`exchange` with sites that have the run's frozen weights, or get them first."""

    directory: Directory
    head: RunHeader
    model: nn.Module
    have: set[str] = field(default_factory=set)  # nodes that have them

    def exchange(
        self, requests: Mapping[str, Envelope], kind: Kind, seconds: float
    ) -> Iterator[tuple[str, Envelope | Failure]]:
        """Send requests and yield each node with its reply, or with why it did not get the frozen weights."""
        unknown = set(requests) - self.have if self.head.frozen else set[str]()
        weights = partial(wire.flatten, frozen_tensors(self.model))
        offered = offer(self.directory, "frozen", self.head.facts, weights, unknown, seconds)
        failures = {node: failure for node, failure in offered.items() if failure}
        self.have |= offered.keys() - failures.keys()
        yield from failures.items()
        ready = {node: each for node, each in requests.items() if node not in failures}
        for node, reply in self.directory.exchange(ready, kind, seconds):
            if isinstance(reply, Failure):  # its disk may have lost them
                self.have.discard(node)
            yield node, reply


def offer(
    directory: Directory,
    kind: Kind,
    facts: Mapping[str, Any],
    content: Callable[[], Mapping[str, Tensor]],
    nodes: Collection[str],
    seconds: float,
) -> dict[str, Failure | None]:
    """Send content to the nodes that lack it. Returns why each has not got it; None: it has."""
    found = dict[str, Failure | None]()
    for tensors in (dict, content):  # first a question: a site that comes back has it already
        if lacking := sorted(set(nodes) - found.keys()):
            request = Envelope(facts, tensors(), FACTS_ALONE)
            for node, reply in directory.exchange(dict.fromkeys(lacking, request), kind, seconds):
                if isinstance(reply, Failure) or reply.facts.get("has") is True:
                    found[node] = reply if isinstance(reply, Failure) else None
    why = Failure(f"it did not keep the {'frozen weights' if kind == 'frozen' else 'model'} of this run")
    return dict.fromkeys(nodes, why) | found


def deliver(directory: Directory, head: RunHeader, run: Path) -> None:
    """Send the model of a finished run to its sites. Waits for those that are away, so long as settings say."""
    from fedxl.prediction.export import DESCRIPTION, digest, for_sites  # loads scipy, which training does not need

    files = for_sites(run)
    facts = {**head.facts, "digest": digest(files[DESCRIPTION])}
    most = f"at most {directory.settings.deliver:g} s"
    directory.say(f"the run is done; each site gets the model, waiting {most} for those that are away")
    awaited, deadline = set(directory.settings.sites), time.monotonic() + directory.settings.deliver
    while (left := deadline - time.monotonic()) > 0 and any(map(directory.is_approved, awaited)):
        nodes = {node: name for name, node in directory.nodes().items() if name in awaited}
        offered = offer(directory, "model", facts, partial(_as_tensors, files), nodes, left)
        for node, failure in offered.items():
            told = f"has not taken the model: {printable(failure.reason)}" if failure else "has the model"
            directory.say(f"{nodes[node]} {told}")
            if failure is None or node in directory.carrier.nodes():  # one whose connection broke is asked again
                awaited.remove(nodes[node])
        directory.carrier.wait(POLL)


def _as_tensors(files: Mapping[str, bytes]) -> dict[str, Tensor]:
    return {name: torch.frombuffer(bytearray(content), dtype=torch.uint8) for name, content in files.items()}

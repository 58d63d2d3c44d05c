"""The Flower apps, and the only file that imports flwr: Flower's messages to our envelopes and back, nothing else.

An app of Flower's names them in its pyproject.toml:

    [tool.flwr.app.components]
    serverapp = "fedxl.flower.apps:server"
    clientapp = "fedxl.flower.apps:client"
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from fedxl.errors import UserError, first_line, require
from fedxl.flower import site, status, turns
from fedxl.flower.envelope import WORDS, Envelope, Failure, Kind
from fedxl.flower.server import serve
from fedxl.flower.settings import SiteFile, read_server, read_site
from fedxl.run import Hooks
from fedxl.wire import RefusedError

KINDS: Mapping[Kind, str] = {
    "hello": MessageType.QUERY,
    "train": MessageType.TRAIN,
    "evaluate": MessageType.EVALUATE,
}
UNSENT = "not sent to"  # in place of a ticket
log = logging.getLogger("flwr")
server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    torch.set_num_threads(1)
    file = Path(str(context.run_config["server"]))
    status.write(file.parent, status.RUNNING)
    try:
        settings = read_server(file)
        carrier = GridCarrier(grid, settings.settings.megabytes)
        serve(settings, carrier, Hooks(say=lambda line: log.info("%s", line)))
    except UserError as error:
        status.write(file.parent, status.FAILED, str(error))
        log.error("fedxl: %s", error)
        raise SystemExit(2) from None
    status.write(file.parent, status.FINISHED)


@client.query()
def hello(message: Message, context: Context) -> Message:
    return _answered(message, context)


@client.train()
def train(message: Message, context: Context) -> Message:
    return _answered(message, context)


@client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    return _answered(message, context)


def _answered(message: Message, context: Context) -> Message:
    """What the site says; a mistake or a refusal goes back in words instead of ending the process."""
    torch.set_num_threads(1)
    try:
        mine = _site(context)
        with turns.taken():
            letter = opened(message.content, mine.settings.megabytes)
            answer = _answer(message.metadata.message_type, mine, letter)
    except (UserError, RefusedError) as error:
        log.error("fedxl: %s", error)
        answer = Envelope({"failure": first_line(error)}, {})
    except Exception:  # whatever it says stays here: it may tell of the data
        log.exception("fedxl: an error of the program")
        answer = Envelope({"failure": "an error of the program; the site's log has it"}, {})
    return Message(sealed(answer), reply_to=message)


def _answer(kind: str, mine: SiteFile, letter: Envelope) -> Envelope:
    if kind == MessageType.TRAIN:
        return site.work(mine, letter)
    return site.evaluate(mine, letter) if kind == MessageType.EVALUATE else site.hello(mine)


def _site(context: Context) -> SiteFile:
    """The file that this node was started with; in Flower's own simulation, that of the site with its number."""
    if "site" in context.node_config:
        return read_site(Path(str(context.node_config["site"])))
    server_file = Path(str(context.run_config["server"]))
    name = read_server(server_file).settings.sites[int(context.node_config["partition-id"])]
    return read_site(server_file.parent.parent / "sites" / name / "site.toml")


def sealed(letter: Envelope, known: dict[int, Array] | None = None) -> RecordDict:
    """An envelope as Flower's records. Tensors that several letters share are packed once, and noted in `known`."""
    known = {} if known is None else known
    for tensor in letter.tensors.values():
        if id(tensor) not in known:
            known[id(tensor)] = Array(tensor.numpy())
    arrays = ArrayRecord({name: known[id(tensor)] for name, tensor in letter.tensors.items()})
    return RecordDict({"tensors": arrays, "facts": ConfigRecord(dict(letter.facts))})


def opened(content: RecordDict, megabytes: float) -> Envelope:
    """An envelope out of Flower's records; only plain arrays are taken, and not too many bytes of them."""
    arrays = content.array_records["tensors"]
    facts: dict[str, Any] = dict(content.config_records["facts"].items())
    size = (sum(len(array.data) for array in arrays.values()) + sum(len(str(fact)) for fact in facts.values())) / 1e6
    if size > megabytes:
        raise RefusedError(f"a message of {size:.0f} MB is larger than what is taken here, {megabytes:g} MB")
    tensors: dict[str, Tensor] = {}
    for name, array in arrays.items():
        try:
            tensors[name] = torch.from_numpy(array.numpy().copy())
        except (TypeError, ValueError) as error:
            raise RefusedError(f"{name} is no array of numbers: {first_line(error)}") from None
    return Envelope(facts, tensors)


class GridCarrier:
    """Flower's grid as a carrier of envelopes."""

    def __init__(self, grid: Grid, megabytes: float) -> None:
        self.grid, self.megabytes = grid, megabytes

    def nodes(self) -> Sequence[int]:
        return sorted(self.grid.get_node_ids())

    def send(self, letters: Mapping[int, Envelope], kind: Kind, seconds: float) -> Mapping[str, int]:
        nodes, known = sorted(letters), dict[int, Array]()
        messages = [
            Message(content=sealed(letters[node], known), dst_node_id=node, message_type=KINDS[kind], ttl=seconds)
            for node in nodes
        ]
        tickets = list(self.grid.push_messages(messages))
        require(len(tickets) == len(nodes), "Flower takes no messages of this size; see its log")
        return {ticket or f"{UNSENT} {node}": node for ticket, node in zip(tickets, nodes, strict=True)}

    def answers(self, tickets: Sequence[str]) -> Iterator[tuple[str, Envelope | Failure]]:
        # One by one, however many are here: each is as large as the network.
        for ticket in tickets:
            if ticket.startswith(UNSENT):
                yield ticket, Failure("Flower has not taken the message")
                continue
            for message in self.grid.pull_messages([ticket]):
                # An error's sender is Flower itself; only the ticket says whose it is.
                yield message.metadata.reply_to_message_id, _read(message, self.megabytes)


def _read(message: Message, megabytes: float) -> Envelope | Failure:
    if message.has_error():
        return Failure(f"Flower reports error {message.error.code}: {message.error.reason or 'no reason given'}")
    try:
        letter = opened(message.content, megabytes)
    except Exception as error:  # whatever a damaged or hostile answer may raise
        return Failure(f"its answer cannot be read: {first_line(error)}")
    reason = letter.facts.get("failure")
    return Failure(str(reason)[:WORDS]) if reason else letter

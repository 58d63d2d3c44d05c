"""A site's reply to one of Flower's messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from fedxl.deploy.flower.common import Message, MessageType
from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.protocol.records import KINDS, from_records, to_records
from fedxl.deploy.provision.settings import SiteFile
from fedxl.deploy.site import requests, secure
from fedxl.deploy.storage import turn
from fedxl.errors import RefusedError, UserError, for_others, printable, refuse

HANDLERS: Mapping[str, Callable[[SiteFile, Envelope], Envelope]] = {
    MessageType.QUERY: lambda site, request: requests.hello(site),
    MessageType.TRAIN: requests.train,
    MessageType.EVALUATE: requests.evaluate,
    KINDS["secure"]: secure.step,
}
log = logging.getLogger("fedxl")


def reply(message: Message, read: Callable[[], SiteFile]) -> Message:
    """Handle a request. A refusal or an error becomes a reply that says why, and the process goes on."""
    torch.set_num_threads(1)
    try:
        site = read()
        with turn():
            request = from_records(message.content, site.settings.megabytes)
            kind = message.metadata.message_type
            refuse(kind not in HANDLERS, "sites do not handle requests of this kind")
            envelope = HANDLERS[kind](site, request)
    except (UserError, RefusedError) as error:
        log.error("refused: %s", printable(error))
        envelope = Envelope({"failure": for_others(error)}, {})
    except Exception:  # the text stays in the site's own log: it may reveal data
        log.exception("an internal error")
        envelope = Envelope({"failure": "an internal error; see the site's log"}, {})
    return Message(to_records(envelope), reply_to=message)

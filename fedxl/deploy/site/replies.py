"""A site's reply to one of Flower's messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from fedxl.deploy.flower.common import Message, MessageType
from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.protocol.records import opened, sealed
from fedxl.deploy.provision.settings import SiteFile
from fedxl.deploy.site import requests, slots
from fedxl.errors import RefusedError, UserError, first_line, printable

WORK: Mapping[str, Callable[[SiteFile, Envelope], Envelope]] = {
    MessageType.QUERY: lambda mine, letter: requests.hello(mine),
    MessageType.TRAIN: requests.train,
    MessageType.EVALUATE: requests.evaluate,
}
log = logging.getLogger("fedxl")


def reply(message: Message, read: Callable[[], SiteFile]) -> Message:
    """What the site says; a mistake or a refusal goes back in words instead of ending the process."""
    torch.set_num_threads(1)
    try:
        mine = read()
        with slots.taken():
            letter = opened(message.content, mine.settings.megabytes)
            kind = message.metadata.message_type
            if kind not in WORK:
                raise RefusedError("it asks for something that sites do not do")
            answer = WORK[kind](mine, letter)
    except (UserError, RefusedError) as error:
        log.error("refused: %s", printable(error))
        answer = Envelope({"failure": first_line(error)}, {})
    except Exception:  # whatever it says stays here: it may tell of the data
        log.exception("an error of the program")
        answer = Envelope({"failure": "an error of the program; the site's log has it"}, {})
    return Message(sealed(answer), reply_to=message)

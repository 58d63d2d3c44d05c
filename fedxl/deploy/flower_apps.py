"""The apps for Flower's own simulation (docs/deployment.md). In a deployment, `app.py` and `node.py` do it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from fedxl.deploy.flower.common import ClientApp, Context, Grid, Message, ServerApp
from fedxl.deploy.provision.settings import SiteFile, read_server, read_site
from fedxl.deploy.server.carrier import GridCarrier
from fedxl.deploy.server.serve import serve
from fedxl.deploy.site.replies import reply
from fedxl.deploy.supervise import status
from fedxl.errors import UserError
from fedxl.training.settings import Hooks

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
@client.query("secure")
@client.train()
@client.evaluate()
def answer(message: Message, context: Context) -> Message:
    return reply(message, lambda: _site(context))


def _site(context: Context) -> SiteFile:
    """The site.toml that this node was started with; in Flower's own simulation, that of the site with its number."""
    if "site" in context.node_config:
        return read_site(Path(str(context.node_config["site"])))
    server_file = Path(str(context.run_config["server"]))
    name = read_server(server_file).settings.sites[int(context.node_config["partition-id"])]
    return read_site(server_file.parent.parent / "sites" / name / "site.toml")

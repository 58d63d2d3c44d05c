"""The app that `flwr run` starts. Torch is loaded by processes that need it, not by those that look at the app."""

from __future__ import annotations

import os
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedxl.errors import require

server = ServerApp()
client = ClientApp()


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Run the server of a federation until its run has finished, from the last checkpoint if there is one."""
    from fedxl.deploy import named
    from fedxl.deploy.processes import only_process
    from fedxl.deploy.provision.settings import read_server
    from fedxl.deploy.server.serve import run
    from fedxl.deploy.transport.flower.grid import GridCarrier

    os.umask(0o077)  # every file we write is readable by our user alone
    file = read_server(Path(str(context.run_config["server"])))
    with only_process(file.folder):
        run(file, GridCarrier(grid, file.settings.megabytes), named("server"))


@client.query()
def reply(message: Message, context: Context) -> Message:
    """Answer one request. Flower starts a process for each."""
    from fedxl.deploy.site.requests import answer
    from fedxl.deploy.transport.flower.grid import pack, unpack

    os.umask(0o077)
    kind, content = unpack(message.content)
    return Message(pack(kind, answer(site_file(context), kind, content)), reply_to=message)


def site_file(context: Context) -> Path:
    """The site.toml that this node was started with; in a simulation, that of the site with the node's number."""
    node, run = context.node_config, context.run_config
    if "site" in node:
        return Path(str(node["site"])).absolute()
    simulated = "partition-id" in node and bool(run.get("sites"))
    require(simulated, "start this node with --node-config 'site=\"/path/to/site.toml\"'")
    from fedxl.deploy.provision.settings import read_server

    names = read_server(Path(str(run["server"]))).settings.sites
    return Path(str(run["sites"])) / names[int(node["partition-id"])] / "site.toml"

"""The files of a federation on Flower, templates/flower/: the app, nginx at every party, scripts and READMEs."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from fedxl.deploy.provision.templates import fill_folder

OWN_KEYS = False  # nginx checks those of fedxl's own provisioning
# What a SuperNode calls; nothing else of SuperLink's one port may be reached from outside.
FLEET = (
    "register-node", "activate-node", "deactivate-node", "unregister-node", "send-node-heartbeat", "pull-messages",
    "push-messages", "get-run", "get-fab", "push-object", "pull-object", "confirm-message-received",
)  # fmt: skip

VERSIONS = "flwr>=1.41,<1.43"  # with which the scripts, their options and the paths above were tested


def files(sites: Sequence[str], host: str, port: int, keys_at_sites: bool, more: str = "") -> dict[str, str]:
    """The text of each file, by its path below the federation's folder. `port` and the next few are used."""
    shared = {"versions": VERSIONS, "more": more, "host": host, "port": port}
    link, names, paths = port + 1, ", ".join(sites), "|".join(FLEET)
    bracketed = f"[{host}]" if ":" in host else host
    listen = f"[::]:{port}" if ":" in host else port
    found = fill_folder("flower/app/", "app/")
    found |= fill_folder("flower/server/", "server/", **shared, sites=names, link=link, listen=listen, paths=paths)
    for number, name in enumerate(sites):
        # Different ports, so that all parties can run on one machine.
        own = {"name": name, "local": link + 2 * number + 1, "runtime": link + 2 * number + 2}
        server = {"address": f"{bracketed}:{port}", "certified": _certified(host)}
        found |= fill_folder("flower/site/", f"sites/{name}/", **shared, **own, **server)
    return found


def steps(out: str, keys_at_sites: bool) -> Sequence[str]:
    return (
        "send sites/NAME to each site; README.md in each folder says what to do",
        f"once server/start.sh and each site's start.sh run: {out}/server/run.sh",
    )


def _certified(host: str) -> str:
    """A name in the server's certificate: nginx compares no addresses, but the certificate holds this one, too."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host
    return "localhost"

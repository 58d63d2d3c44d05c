"""Flower's SuperLink behind a Unix socket instead of a port.

SuperLink serves its interfaces for sites, for operators and for apps on one port, and asks nobody who talks to the
last two. Here it gets a socket in a folder that only its owner can enter: no other user of the machine reaches it,
and nobody from outside does. SuperLink itself is started as its own command starts it.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn

from fedxl.deploy.flower.superlink import flower_superlink
from fedxl.deploy.provision.connection import LINK
from fedxl.deploy.server.gateway import Say
from fedxl.errors import require

NOWHERE = "192.0.2.1"  # an address that no machine has (RFC 5737): should SuperLink try to listen itself, it fails


def main(folder: Path, say: Say) -> None:
    """Serve SuperLink at the socket in this folder until the process is told to stop."""
    path = folder / LINK
    require((path.parent.stat().st_mode & 0o077) == 0, f"{path.parent} is open to others: chmod 700 {path.parent}")
    path.unlink(missing_ok=True)
    os.chdir(path.parent)  # a socket's whole path may be too long for the system
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(path.name)
        serve, served = uvicorn.run, list[Any]()

        def on_socket(app: Any, **settings: Any) -> None:
            served.append(app)
            # Not where SuperLink wants to listen, and without TLS, which the gateway does. Sites' requests are many.
            serve(app, fd=door.fileno(), log_config=settings.get("log_config"), access_log=False)

        uvicorn.run = on_socket
        sys.argv = [
            "flower-superlink", "--host", NOWHERE, "--port", "1", "--isolation", "process",
            "--enable-supernode-auth", "--disable-runtime-dependency-installation",
            # Node authentication insists on them. They are not used: nothing listens on a port.
            "--ssl-ca-certfile", str(folder / "ca.crt"), "--ssl-certfile", str(folder / "server.crt"),
            "--ssl-keyfile", str(folder / "server.key"),
        ]  # fmt: skip
        say(f"SuperLink at {path}")
        flower_superlink()
        require(bool(served), "this version of Flower does not start SuperLink as was expected; see SECURITY.md")

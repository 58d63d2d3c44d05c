"""Flower's SuperLink behind a Unix socket instead of a port.

SuperLink authenticates only sites, not operators and apps. In a folder that only its owner can enter, neither other
users of the machine nor other machines can reach it.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn

from fedxl.deploy import Say
from fedxl.deploy.flower.superlink import flower_superlink
from fedxl.deploy.provision.connection import LINK
from fedxl.errors import require

NOWHERE = "192.0.2.1"  # an address that no machine has (RFC 5737): if SuperLink tried to open a port, it would fail


def main(folder: Path, say: Say) -> None:
    """Serve SuperLink at the socket in this folder until this process is stopped."""
    path = folder / LINK
    private = path.parent.stat().st_mode & 0o077 == 0
    require(private, f"{path.parent} is accessible to others: chmod 700 {path.parent}")
    path.unlink(missing_ok=True)
    os.chdir(path.parent)  # an absolute path may exceed the system's limit for sockets
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(path.name)
        serve, served = uvicorn.run, list[Any]()

        def on_socket(app: Any, **settings: Any) -> None:
            served.append(app)
            # On our socket instead of SuperLink's port, and without TLS: the gateway terminates it. An access log
            # would grow with every poll of every site.
            serve(app, fd=listening.fileno(), log_config=settings.get("log_config"), access_log=False)

        uvicorn.run = on_socket
        sys.argv = [
            "flower-superlink", "--host", NOWHERE, "--port", "1", "--isolation", "process",
            "--enable-supernode-auth", "--disable-runtime-dependency-installation",
            # Node authentication requires these. They are not used: nothing listens on a port.
            "--ssl-ca-certfile", str(folder / "ca.crt"), "--ssl-certfile", str(folder / "server.crt"),
            "--ssl-keyfile", str(folder / "server.key"),
        ]  # fmt: skip
        say(f"SuperLink at {path}")
        flower_superlink()
        require(bool(served), "this version of Flower does not start SuperLink as expected; see SECURITY.md")

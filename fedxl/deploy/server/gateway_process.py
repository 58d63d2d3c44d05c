"""The gateway's process: it opens the port and reloads a renewed certificate."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
from pathlib import Path

from fedxl.deploy import Say
from fedxl.deploy.provision.connection import LINK, read_connection, tls_for_server
from fedxl.deploy.provision.members import Members
from fedxl.deploy.server.gateway import Gateway
from fedxl.errors import UserError

WATCH = 5.0  # seconds between checks of the certificate's files


def listener(host: str, port: int) -> socket.socket:
    """A socket that listens on all addresses, or on the loopback address if all parties run on this machine."""
    local = host in ("127.0.0.1", "localhost")
    try:
        if not local and socket.has_dualstack_ipv6():
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
        return socket.create_server(("127.0.0.1" if local else "0.0.0.0", port), backlog=256)
    except OSError as error:
        raise UserError(
            f"cannot listen on port {port}: {os.strerror(error.errno or 0)}; stop what "
            "uses it, or change the port in connection.toml here and at every site"
        ) from None


async def serve(gateway: Gateway, folder: Path, port: socket.socket) -> None:
    """Serve until cancelled. New connections use a renewed certificate."""
    context = tls_for_server(folder)
    renewal = asyncio.create_task(_renew(context, folder, gateway.say))
    try:
        await gateway.serve(port, context)
    finally:
        renewal.cancel()


async def _renew(context: ssl.SSLContext, folder: Path, say: Say) -> None:
    certificate, key = folder / "server.crt", folder / "server.key"
    seen = certificate.stat().st_mtime_ns
    while True:
        await asyncio.sleep(WATCH)
        now = certificate.stat().st_mtime_ns if certificate.exists() else 0
        if now != seen:
            with contextlib.suppress(OSError, ssl.SSLError):  # certificate and key do not match yet: retry
                context.load_cert_chain(certificate, key)
                seen = now
                say("using the server's renewed certificate")


def main(folder: Path, say: Say, megabytes: str) -> None:
    """Serve until this process receives SIGTERM or SIGINT. megabytes: the largest reply of a site."""
    host, port = read_connection(folder)
    os.chdir(folder)  # then the socket's path is relative: an absolute one may exceed the system's limit
    gateway = Gateway(Members(folder), LINK, int(float(megabytes) * 1e6), say=say)

    async def run() -> None:
        serving = asyncio.current_task()
        assert serving
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        with listener(host, port) as listening, contextlib.suppress(asyncio.CancelledError):
            say(f"listening at {host}:{port}")
            await serve(gateway, folder, listening)

    asyncio.run(run())

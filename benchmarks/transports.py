"""Our transport beside gRPC: what carries bytes between a server and three sites, without anything to compute.

python benchmarks/transports.py [--turns 2]

Mutual TLS 1.3 with the keys of `fedxl deploy init`. Each site is a process that sends back what it gets. Both ends of
either transport use fedxl's own messages, and send pieces of 1 MB. It needs `grpcio`, which `fedxl[flower]` brings.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from common import machine

from fedxl.cli.processes import free_port
from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.protocol.message import encode, read_reply
from fedxl.deploy.provision import folders
from fedxl.deploy.provision.connection import read_connection
from fedxl.deploy.transport.tls.frames import HEAD, Head, chunks
from fedxl.deploy.transport.tls.hub import Hub, open_hub
from fedxl.deploy.transport.tls.listener import listen
from fedxl.deploy.transport.tls.site import _read, connect

SITES = ("a", "b", "c")
SIZES = {"20 kB": (5_000, 200), "45 MB": (11_250_000, 8)}  # weights, rounds
PIECE = 2**20
METHOD = "/fedxl/Work"
UNLIMITED = [("grpc.max_receive_message_length", -1)]
Exchange = Callable[[Envelope], None]  # a request to all sites, and all replies


def echo_tls(folder: Path) -> None:
    with connect(folder, read_connection(folder)) as connection:
        while True:
            head = Head.parse(_read(connection, HEAD.size))
            for piece in chunks(head.ticket, head.kind, [_read(connection, head.length)]):
                connection.sendall(piece)


@contextmanager
def tls(out: Path, port: int) -> Iterator[Exchange]:
    hub = Hub(out / "server", 100.0, say=lambda line: None)
    with open_hub(hub, listen("127.0.0.1", port)), echoing("tls", out, port):
        while len(hub.nodes()) < len(SITES):
            time.sleep(0.05)

        def exchange(envelope: Envelope) -> None:
            left = set(hub.send(dict.fromkeys(hub.nodes(), envelope), "train", 100.0))
            while left:
                left -= {ticket for ticket, _ in hub.replies(list(left))}
                if left:
                    hub.wait(1.0)

        yield exchange


def pieces_of(content: Any) -> Iterator[bytes]:
    view = memoryview(content).cast("B")
    return (bytes(view[start : start + PIECE]) for start in range(0, len(view), PIECE))


async def read_message(read: Callable[[], Any]) -> memoryview:
    """A length, then pieces."""
    found, received = np.empty(int.from_bytes(await read(), "big"), np.uint8).data, 0
    while received < len(found):
        piece = await read()
        found[received : received + len(piece)] = piece
        received += len(piece)
    return found


async def echo_grpc(folder: Path, port: int) -> None:
    names = "ca.crt", "site.key", "site.crt"
    keys = grpc.ssl_channel_credentials(*((folder / name).read_bytes() for name in names))
    async with grpc.aio.secure_channel(f"localhost:{port}", keys, UNLIMITED) as channel:
        call = channel.stream_stream(METHOD)()
        await call.write(b"hello")
        while True:
            found = await read_message(call.read)
            await call.write(len(found).to_bytes(8, "big"))
            for piece in pieces_of(found):
                await call.write(piece)


@contextmanager
def over_grpc(out: Path, port: int) -> Iterator[Exchange]:
    loop, sites, done = asyncio.new_event_loop(), list[asyncio.Queue[Any]](), asyncio.Queue[memoryview]()

    async def work(requests: Any, context: Any) -> None:
        await context.read()
        mine: asyncio.Queue[Any] = asyncio.Queue()
        sites.append(mine)
        while True:
            message = await mine.get()
            await context.write(sum(memoryview(piece).nbytes for piece in message).to_bytes(8, "big"))
            for piece in (part for each in message for part in pieces_of(each)):
                await context.write(piece)
            await done.put(await read_message(context.read))

    async def start() -> Any:
        server = grpc.aio.server(options=UNLIMITED)
        handler = grpc.stream_stream_rpc_method_handler(work)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("fedxl", {"Work": handler}),))
        key, certificate, root = (
            (out / "server" / name).read_bytes() for name in ("server.key", "server.crt", "ca.crt")
        )
        server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([(key, certificate)], root, True))
        await server.start()
        return server

    threading.Thread(target=loop.run_forever, daemon=True).start()
    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    with echoing("grpc", out, port):
        while len(sites) < len(SITES):
            time.sleep(0.05)

        def exchange(envelope: Envelope) -> None:
            for each in sites:
                loop.call_soon_threadsafe(each.put_nowait, encode(envelope))
            for _ in sites:
                read_reply(asyncio.run_coroutine_threadsafe(done.get(), loop).result(), 100.0)

        yield exchange
    del server  # one that nobody holds stops


@contextmanager
def echoing(transport: str, out: Path, port: int) -> Iterator[None]:
    """The processes of all sites."""
    command = [sys.executable, __file__, "--port", str(port), "--echo", transport]
    processes = [subprocess.Popen([*command, str(out / "sites" / name)]) for name in SITES]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(transport: str) -> None:
    """In a process of its own, so that memory and threads are those of one transport."""
    with tempfile.TemporaryDirectory() as folder:
        out, port = Path(folder) / "f", free_port()
        folders.init(SITES, out, host="localhost", port=port)
        with (tls if transport == "tls" else over_grpc)(out, port) as exchange:
            for name, (weights, rounds) in SIZES.items():
                envelope = Envelope({}, {"weights": torch.zeros(weights)}, float("inf"))
                exchange(envelope)
                began, cpu = time.monotonic(), time.process_time()
                for _ in range(rounds):
                    exchange(envelope)
                each, busy = (1e3 * spent / rounds for spent in (time.monotonic() - began, time.process_time() - cpu))
                print(
                    f"{transport:5} {name} each way: {each:7.1f} ms per round, {busy:6.1f} ms of the server's CPU",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--echo", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.echo:
        transport, folder = given.echo
        echo_tls(Path(folder)) if transport == "tls" else asyncio.run(echo_grpc(Path(folder), given.port))
    elif given.only:
        measure(given.only)
    else:
        print(machine())
        for transport in ("tls", "grpc") * given.turns:
            subprocess.run([sys.executable, __file__, "--only", transport], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()

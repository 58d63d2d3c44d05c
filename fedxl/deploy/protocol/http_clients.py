"""Flower's HTTP clients over our own transports: a Unix socket at the server, mutual TLS at a site."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import httpx

from fedxl.deploy.flower.common import ProtobufClient, ProtobufClientInterceptor, RuntimeVersionHttpInterceptor

C = TypeVar("C", bound=ProtobufClient)
TIMEOUT = 60.0  # seconds for one response


def client(
    kind: type[C],
    component: str,
    transport: httpx.HTTPTransport,
    *more: ProtobufClientInterceptor,
    url: str = "http://superlink",
    on_response: Callable[[httpx.Response], None] = lambda response: None,
) -> C:
    """One of Flower's clients. It follows no redirects and ignores proxies from the environment."""
    made = kind(url, interceptors=[RuntimeVersionHttpInterceptor(component_name=component), *more])
    made._client.close()
    made._client = httpx.Client(
        transport=transport,
        timeout=TIMEOUT,
        trust_env=False,
        headers={"accept-encoding": "identity"},
        event_hooks={"response": [on_response]},
    )
    return made

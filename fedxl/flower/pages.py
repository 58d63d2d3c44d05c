"""The texts of a party's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fedxl.flower.settings import ServerSettings

SERVER_START = """#!/bin/sh
# Runs the server of this federation until its run is done; started again, it goes on where it was.
cd "$(dirname "$0")" && exec fedxl deploy serve .
"""
SITE_START = """#!/bin/sh
# Keeps this site in the federation until it is stopped (Ctrl-C).
cd "$(dirname "$0")" && exec fedxl deploy join .
"""


def server_toml(settings: ServerSettings, experiment: str) -> str:
    return f"""# The experiment. Sites bring the training data; [data] here is the server's own, to validate on.
# Leave [data] out if there is none.

[server]
sites = {json.dumps(list(settings.sites))}  # their order numbers them; do not change it during a run
minimum = {settings.minimum}  # updates without which a round does not count
deadline = {settings.deadline}  # seconds that a site has to answer
wire = "{settings.wire}"  # bfloat16: weights at half the bytes
evaluate = "{settings.evaluate}"  # sites: on what they have held back, as far as each lets its results go

{experiment}"""


def site_toml(name: str, part: int, data: Mapping[str, Any]) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in data.items()]
    return "\n".join(
        [
            "# This site. What is in [data] stays here; put your own data there: see `fedxl data list`.",
            "",
            "[site]",
            f'name = "{name}"',
            f"part = {part}  # which part of the data below is this site's; 0 where all of them are",
            'evaluate = "none"  # what may leave of evaluations here: "none", "figures" (AUROC, ...) or all "scores"',
            "",
            "[data]",
            *lines,
            "",
        ]
    )


def connection(host: str, port: int) -> str:
    return f'host = "{host}"\nport = {port}\n'


def server_readme(sites: Sequence[str], host: str, port: int) -> str:
    return f"""# The server of this federation

It sends the model out, averages what comes back, and merges the scores that sites have pooled. It sees no example.

1. Install: `pip install 'fedxl[flower]'`, the same version as at the sites.
2. Say in `server.toml` what to train. Sites must be able to reach {host}, port {port}.
3. `./start.sh`. It waits for {", ".join(sites)}, then trains. Stop it with Ctrl-C and start it again: it goes on.

The model and its figures are in `run/`: model.safetensors, metrics.jsonl, checkpoints/. To begin anew, remove `run/`.

`server.key` is secret. `keys/` holds the sites' public keys: whoever is not there is refused.
`fedxl-server.service` is an example for systemd. The folder `authority/`, which came with this one, signs
certificates; keep it off this machine.
"""


def site_readme(name: str, host: str, port: int) -> str:
    return f"""# Site {name}

1. Install: `pip install 'fedxl[flower]'`, the same version as at the server.
2. Say in `site.toml`, under [data], where your examples are. They stay on this machine.
3. `./start.sh`. It prepares your data once, connects to {host}, port {port} (outgoing only), and works when asked.

What leaves this machine: how many positive and negative examples you have, their shape, and in each round the trained
weights and the scores of the examples that were used; docs/privacy.md says what they reveal. Results on your
validation and test data leave only if `evaluate` in `site.toml` says so. `state/` holds what training remembers about
your examples, and never leaves. `node.key` is secret: it is how the server knows you.
`fedxl-site.service` is an example for systemd.
"""


def unit(role: str, name: str) -> str:
    command = "serve" if role == "server" else "join"
    return f"""[Unit]
Description=fedxl {role} {name}
Wants=network-online.target
After=network-online.target

[Service]
# Change both to where this folder is, and to the user it belongs to.
WorkingDirectory=/srv/fedxl/{name}
User=fedxl
ExecStart=/srv/fedxl/venv/bin/fedxl deploy {command} .
Restart=on-failure
RestartSec=20
UMask=0077
NoNewPrivileges=true
ProtectSystem=strict
ReadWritePaths=/srv/fedxl/{name}
PrivateTmp=true

[Install]
WantedBy=multi-user.target
"""

"""The texts of a party's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence

from fedxl import metrics
from fedxl.config.experiment import Config
from fedxl.deploy.provision.settings import ServerSettings

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


def site_toml(name: str, part: int, config: Config) -> str:
    rounds = int(config.run.get("rounds", 100))
    lines = [f"{key} = {json.dumps(value)}" for key, value in config.data.items()]
    names = {key: json.dumps(str(table["name"])) for key, table in config.tables().items() if "name" in table}
    asked = [str(name) for name in (config.run.get("select", ""), *config.run.get("metrics", ()))]
    return "\n".join(
        [
            "# This site. What is in [data] stays here; put your own data there: see `fedxl data list`.",
            "",
            "[site]",
            f'name = "{name}"',
            f"part = {part}  # leave it at 0 with data of your own; which part of shared data is this site's",
            "",
            "# What a server may ask for. Everything else is refused, whoever asks.",
            f"models = [{names.get('model', json.dumps('mlp'))}]  # networks; a linear one gives examples away",
            f"risks = [{names['risk']}]",
            f"algorithms = [{names['algorithm']}]",
            f"metrics = {json.dumps(sorted(metrics.own(asked)))}  # of your own, package.module:function; "
            "fedxl's are always allowed",
            f"rounds = {2 * rounds + 20}  # requests to train that this site answers, in all runs together",
            f"steps = {int(config.run.get('local_steps', 32))}  # local steps in one request",
            'evaluate = "none"  # what may leave of evaluations here: "none", "metrics" (AUROC, ...) or all "scores"',
            f"evaluations = {4 * rounds + 20}  # requests to evaluate that this site answers, in all runs together",
            'digest = ""  # of the one experiment that is allowed, as `fedxl deploy digest` prints it; "": any',
            "",
            "[data]",
            *lines,
            "",
        ]
    )


def connection(host: str, port: int, server_key: str = "") -> str:
    pinned = f'server_key = "{server_key}"  # the fingerprint of the one key that is taken for the server\'s\n'
    return f'host = "{host}"\nport = {port}\n' + (pinned if server_key else "")


def server_readme(sites: Sequence[str], host: str, port: int) -> str:
    return f"""# The server of this federation

It sends the model out, averages what comes back, and merges the scores that sites have pooled. It sees no example.

1. Install: `pip install 'fedxl[flower]'`, the same version as at the sites.
2. Say in `server.toml` what to train. Sites must be able to reach {host}, port {port}.
3. `./start.sh`. It waits for {", ".join(sites)}, then trains. Stop it with Ctrl-C and start it again: it goes on.

The model and its metrics are in `run/`: model.safetensors, metrics.jsonl, checkpoints/. Logs are in `flower/`. To
begin anew, remove `run/`; sites count requests over all runs, and may have to allow more.

Port {port} is the only one that listens. It lets in approved sites alone, and passes on only what sites need.
`members/` holds the approved sites. OUT below is the folder that holds `server/` and `authority/`.

- `fedxl deploy approve OUT REQUEST --examples N` lets a site in. Compare its key's fingerprint with the site's people
  first. N is the most examples that it may say it has.
- `fedxl deploy list OUT` shows who is approved; `fedxl deploy revoke OUT SITE` takes a site out at once.
- `fedxl deploy renew OUT` renews the server's own certificate, which is good for a year.

None of them needs a restart. `server.key` is secret. `fedxl-server.service` is an example for systemd. The folder
`authority/`, which came with this one, signs certificates; keep it off this machine, and name it with `--authority`.
"""


KEY_STEPS = """3. `fedxl deploy request .` makes your key, `site.key`, which never leaves this machine, and a
   request, `request.csr`. Send the request to the server's operator, and read the printed fingerprint to them over
   the telephone.
4. They send a certificate back: `fedxl deploy accept . CERTIFICATE`.
5. """


def site_readme(name: str, host: str, port: int, keys_at_sites: bool) -> str:
    steps = KEY_STEPS if keys_at_sites else "3. "
    return f"""# Site {name}

1. Install: `pip install 'fedxl[flower]'`, the same version as at the server.
2. Say in `site.toml`, under [data], where your examples are, and under [site] what a server may ask for. Examples
   stay on this machine.
{steps}`./start.sh`. It prepares your data once, connects to {host}, port {port} (outgoing only), and works when
   asked. It listens on no port, and runs no code but the fedxl that is installed here.

Logs are in `flower/`. `connection.toml` says where the server is.

What leaves this machine: how many positive and negative examples you have, their shape, and in each round the trained
weights and the scores of the examples that were used; docs/privacy.md says what they reveal. Results on your
validation and test data leave only if `evaluate` in `site.toml` says so. `state/` holds what training remembers about
your examples, and never leaves. `site.key` is secret: it is how the server knows you.
The certificate `site.crt` is good for a year. In its last 30 days `./start.sh` warns
you: make a new request then, and accept what comes back.
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

"""What `fedxl deploy init` writes for the default transport, besides settings and keys: READMEs, scripts, units."""

from __future__ import annotations

from collections.abc import Sequence

OWN_KEYS = False  # it uses those of fedxl's own provisioning

SERVER_START = """#!/bin/sh
# Runs the server of this federation until its run is done. Started again, it resumes from its last checkpoint.
cd "$(dirname "$0")" && exec fedxl deploy serve .
"""
SITE_START = """#!/bin/sh
# Runs this site of the federation until it is stopped (Ctrl-C).
cd "$(dirname "$0")" && exec fedxl deploy join .
"""
KEY_STEPS = """3. `fedxl deploy request .` creates your key, `site.key`, which never leaves this machine, and a
   request, `request.csr`. Send the request to the server's operator, and read the printed fingerprint to them by
   telephone.
4. Install the certificate that they send back: `fedxl deploy accept . CERTIFICATE`."""
LEAVES = """\
What fedxl sends from here: the numbers of positive and negative examples, their shape, and in each round the trained
weights and the scores of the examples that were used. docs/privacy.md describes what they reveal. Of a table, the
names, counts, means and squared deviations of its columns leave, and its frequent categories, if `summary` in
`site.toml` allows it; of images, their size, the names of labels and columns, and the two values of the label.
Results on your validation and test data leave only if `evaluate` in `site.toml` allows it.
`state/` holds what training remembers about your examples, and the seed from which it draws them; it never leaves."""


def files(sites: Sequence[str], host: str, port: int, keys_at_sites: bool) -> dict[str, str]:
    """Texts by their paths below the federation's folder."""
    found = {
        "server/start.sh": SERVER_START,
        "server/README.md": _server_readme(sites, host, port),
        "server/fedxl-server.service": _unit("server", "server"),
    }
    for name in sites:
        found |= {
            f"sites/{name}/start.sh": SITE_START,
            f"sites/{name}/README.md": _site_readme(name, host, port, keys_at_sites),
            f"sites/{name}/fedxl-site.service": _unit("site", name),
        }
    return found


def steps(out: str, keys_at_sites: bool) -> Sequence[str]:
    if keys_at_sites:
        return (
            "send sites/NAME to each site; the site makes its key: fedxl deploy request NAME",
            f"then approve its request here: fedxl deploy approve {out} REQUEST --examples N",
        )
    return (f"run the whole federation on this machine: fedxl deploy local {out}",)


def _server_readme(sites: Sequence[str], host: str, port: int) -> str:
    return f"""# The server of this federation

The server sends the model to the sites, averages their updates, and merges the scores that they pool. It never sees
an example.

1. Install: `pip install 'fedxl[deploy]'`, the same version as at the sites.
2. Set in `server.toml` what to train. Sites must be able to reach {host}, port {port}.
3. Run `./start.sh`. It waits for {", ".join(sites)}, then trains. You can stop it with Ctrl-C: started again, it
   resumes from its last checkpoint.

The results are in `run/`: model.safetensors, metrics.jsonl, checkpoints/. To start a new run, remove `run/`. Sites
count requests over all runs, so they may have to raise their limits.

Port {port} is the only open port. It accepts approved sites only.
`members/` holds the approved sites. OUT below is the folder that holds `server/` and `authority/`.

- `fedxl deploy approve OUT REQUEST --examples N` admits a site. First compare the fingerprint of its key with the
  site's staff. N is the most examples that it may claim.
- `fedxl deploy list OUT` lists the approved sites; `fedxl deploy revoke OUT SITE` revokes a site at once.
- `fedxl deploy renew OUT` renews the server's own certificate, which is valid for a year.
- `fedxl deploy status OUT` shows rounds, sites, metrics and refusals in a browser on this machine.

None of them needs a restart. `server.key` is secret, and so is `run/private.seed`, with which sites could work out
whose scores they read. `fedxl-server.service` is an example for systemd. The folder `authority/`, created with this
one, signs certificates: keep it off this machine, and name it with `--authority`.
"""


def _site_readme(name: str, host: str, port: int, keys_at_sites: bool) -> str:
    steps = f"{KEY_STEPS}\n5. " if keys_at_sites else "3. "
    return f"""# Site {name}

1. Install: `pip install 'fedxl[deploy]'`, the same version as at the server.
2. Set in `site.toml`, under [data], where your examples are, and under [site] what a server may request. Examples
   never leave this machine.
{steps}Run `./start.sh`. It prepares your data once, connects to {host}, port {port} (outgoing only), and handles the
   server's requests. It opens no port, and runs only the fedxl that is installed here.

`connection.toml` holds the server's address and the fingerprint of its key.

{LEAVES}

After the last round the server sends the model, into `model/`: `fedxl predict model FILE`. If this site was away
then, `fedxl deploy fetch .` gets it, once the server runs again.

`site.key` is secret: the server recognises you by it. The certificate `site.crt` is valid for a year. In its last 30
days `./start.sh` warns you: then make a new request, and accept the new certificate.
`fedxl-site.service` is an example for systemd.
"""


def _unit(role: str, name: str) -> str:
    command = "serve" if role == "server" else "join"
    return f"""[Unit]
Description=fedxl {role} {name}
Wants=network-online.target
After=network-online.target

[Service]
# Change both: the path of this folder, and the user who owns it.
WorkingDirectory=/srv/fedxl/{name}
User=fedxl
ExecStart=/srv/fedxl/venv/bin/fedxl deploy {command} .
Restart=on-failure
RestartSec=20
# Code 2: it has said what its user must do. Restarting would not help.
RestartPreventExitStatus=2
UMask=0077
NoNewPrivileges=true
ProtectSystem=strict
ReadWritePaths=/srv/fedxl/{name}
PrivateTmp=true

[Install]
WantedBy=multi-user.target
"""

"""The files of a federation on Flower: the app, nginx in front of SuperLink and at each site, scripts and READMEs."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from fedxl import __version__
from fedxl.deploy.transport.tls.project import KEY_STEPS, LEAVES

OWN_KEYS = False  # nginx checks those of fedxl's own provisioning
# What a SuperNode calls; nothing else of SuperLink's one port may be reached from outside.
FLEET = (
    "register-node", "activate-node", "deactivate-node", "unregister-node", "send-node-heartbeat", "pull-messages",
    "push-messages", "get-run", "get-fab", "push-object", "pull-object", "confirm-message-received",
)  # fmt: skip

VERSIONS = "flwr>=1.41,<1.43"  # with which scripts, options and paths below were tested
# Of READMEs; steps and what leaves a site are those of the default transport, whose keys these are.
SHARED = {"versions": VERSIONS, "key_steps": KEY_STEPS, "leaves": LEAVES}

APP = f"""# The app that `flwr run` starts: no code of its own, but the fedxl that is installed at every party.

[project]
name = "fedxl-federation"
version = "{__version__}"
description = "Runs the installed fedxl"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedxl"

[tool.flwr.app.components]
serverapp = "fedxl.deploy.transport.flower.apps:server"
clientapp = "fedxl.deploy.transport.flower.apps:client"

[tool.flwr.app.config]
server = "server.toml"  # relative to the folder in which SuperLink was started
sites = ""  # in Flower's simulation only: the folder that holds a folder for each site
"""

NGINX = """worker_processes 1;
daemon off;
pid nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path tmp;
    proxy_temp_path tmp;
    fastcgi_temp_path tmp;
    uwsgi_temp_path tmp;
    scgi_temp_path tmp;
    client_max_body_size 16m;  # Flower sends arrays in pieces of 5 MB
    proxy_request_buffering off;
    proxy_buffering off;
{content}}}
"""

SERVER_NGINX = """\
    map $ssl_client_s_dn $site {{
        default "";
        "~^CN=(?<name>[a-z0-9-]+)$" $name;
    }}
    server {{
        listen {port} ssl;
        ssl_protocols TLSv1.3;
        ssl_certificate server.crt;
        ssl_certificate_key server.key;
        ssl_client_certificate ca.crt;
        ssl_verify_client on;
        ssl_verify_depth 1;
        ssl_session_tickets off;
        location / {{
            return 403;
        }}
        location ~ ^/v1/fleet/(?<call>{paths})$ {{
            # Looked up at each request: a site is revoked at once, and a stolen key stays revoked.
            if (!-f members/$site/$ssl_client_fingerprint) {{
                return 403;
            }}
            proxy_pass http://127.0.0.1:{link}/v1/fleet/$call;
        }}
    }}
"""

SITE_NGINX = """\
    upstream federation {{
        server {address};
        keepalive 4;
    }}
    server {{
        listen 127.0.0.1:{local};
        location /v1/fleet/ {{
            proxy_pass https://federation;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_ssl_protocols TLSv1.3;
            proxy_ssl_certificate site.crt;
            proxy_ssl_certificate_key site.key;
            proxy_ssl_trusted_certificate ca.crt;
            proxy_ssl_verify on;
            proxy_ssl_name {name};
        }}
    }}
"""

START = """#!/bin/sh
# {what} Stop it with Ctrl-C.
cd "$(dirname "$0")" && umask 077 || exit 1
export FLWR_HOME="$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
trap 'kill $proxy $node 2>/dev/null; wait' EXIT
trap exit INT TERM
{prepare}nginx -p "$PWD" -e stderr -c nginx.conf & proxy=$!
while kill -0 $proxy 2>/dev/null; do  # nginx has said why if it stops
    {command} & node=$!
    wait $node
    sleep 5
done
"""

SUPERLINK = "flower-superlink --insecure --host 127.0.0.1 --port {link} --disable-runtime-dependency-installation"
SUPERNODE = """flower-supernode --insecure --superlink 127.0.0.1:{local} --port {runtime} \\
        --node-config "site=\\"$PWD/site.toml\\"\""""

RUN = """#!/bin/sh
# Submits a run, which resumes from its last checkpoint if there is one, and shows its log.
cd "$(dirname "$0")" || exit 1
export FLWR_HOME="$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
exec flwr run ../app fedxl --stream
"""

CONNECTION = """[superlink]
default = "fedxl"

[superlink.fedxl]
address = "127.0.0.1:{link}"
insecure = true  # on this machine only
"""

SERVER_README = """# The server of this federation, on Flower

Run it as a user of its own, not as root. It needs nginx.

1. Install: `pip install 'fedxl[flower]' '{versions}'`, the same fedxl as at the sites. Scripts and `nginx.conf` are
   for these versions of Flower; fedxl's app runs with others, too.
2. Set in `server.toml` what to train. Sites must be able to reach {host}, port {port}.
3. Run `./start.sh`: SuperLink, and nginx in front of it.
4. Run `./run.sh`. It waits for {names}, then trains. It may stop showing the log before the run ends: `run/` tells.

If a run dies, `./run.sh` goes on from its last checkpoint; if the old one still runs, it says so. To end a run:
`FLWR_HOME=$PWD/flower flwr stop ID fedxl`. The results are in `run/`: model.safetensors, metrics.jsonl, checkpoints/.
To start a new run, remove `run/`.

The app also runs in other federations of Flower: `flwr run app --run-config 'server="/path/to/server.toml"'`, with
`--node-config 'site="/path/to/site.toml"'` for each SuperNode. In Flower's simulation, with as many SuperNodes as
sites, name the sites' folder: `--run-config 'server="/path/to/server/server.toml" sites="/path/to/sites"'`.

Who can do what:

- From outside, port {port} is open. nginx lets in the certificates in `members/`, and passes on only what
  SuperNodes need. `fedxl deploy approve`, `list`, `revoke` and `renew` manage them; a site is revoked at once.
  After `fedxl deploy renew`, run `kill -HUP $(cat nginx.pid)`.
- Every user of this machine can reach SuperLink at 127.0.0.1:{link}, start runs, and so run code here and at every
  site. Let nobody else log in.
- Approved sites can take each other's names, and can fill this machine's memory: Flower loads a reply whole before
  fedxl can look at its size.
"""

SITE_README = """# Site {name}, on Flower

Run it as a user of its own, not as root. It needs nginx.

1. Install: `pip install 'fedxl[flower]' '{versions}'`, the same fedxl as at the server.
2. Set in `site.toml`, under [data], where your examples are, and under [site] what a server may request.
{key_steps}
5. Run `./start.sh`. It prepares your data once, and connects to {host}, port {port} (outgoing only), through nginx.

Steps 3 and 4 are done if there is a file `site.crt`. It is valid for a year: then repeat them, and start again.

**You trust the server.** Flower runs any app that the server's operator submits, as the user who runs `start.sh`.
`site.toml` limits what fedxl does, and nothing else. Let this user read only what you would show that operator. The
default engine of fedxl runs no code that a server sends.

{leaves}

Every user of this machine can reach the ports {local} and {runtime} of 127.0.0.1, and speak as this site.
"""


def files(sites: Sequence[str], host: str, port: int, keys_at_sites: bool) -> dict[str, str]:
    """The text of each file, by its path below the federation's folder. `port` and the next few are used."""
    link = port + 1
    found = {
        "app/pyproject.toml": APP,
        "server/nginx.conf": _nginx(SERVER_NGINX.format(port=_listen(host, port), link=link, paths="|".join(FLEET))),
        "server/start.sh": _start("SuperLink, behind nginx.", SUPERLINK.format(link=link)),
        "server/run.sh": RUN,
        "server/flower/config.toml": CONNECTION.format(link=link),
        "server/README.md": SERVER_README.format(**SHARED, host=host, port=port, link=link, names=", ".join(sites)),
    }
    for number, name in enumerate(sites):
        # Different ports, so that all parties can run on one machine.
        local, runtime, folder = link + 2 * number + 1, link + 2 * number + 2, f"sites/{name}"
        where = {"local": local, "runtime": runtime}
        nginx = SITE_NGINX.format(local=local, address=_address(host, port), name=_certified(host))
        prepare = "fedxl site prepare . --if-needed || exit 1\n"
        found |= {
            f"{folder}/nginx.conf": _nginx(nginx),
            f"{folder}/start.sh": _start("A SuperNode, and nginx to connect it.", SUPERNODE.format(**where), prepare),
            f"{folder}/README.md": SITE_README.format(name=name, host=host, port=port, **where, **SHARED),
        }
    return found


def steps(out: str, keys_at_sites: bool) -> Sequence[str]:
    return (
        "send sites/NAME to each site; README.md in each folder says what to do",
        f"once server/start.sh and each site's start.sh run: {out}/server/run.sh",
    )


def _nginx(content: str) -> str:
    return NGINX.format(content=content)


def _start(what: str, command: str, prepare: str = "") -> str:
    return START.format(what=what, command=command, prepare=prepare)


def _listen(host: str, port: int) -> str:
    return f"[::]:{port}" if ":" in host else str(port)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _certified(host: str) -> str:
    """A name in the server's certificate: nginx compares no addresses, but the certificate holds this one, too."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host
    return "localhost"

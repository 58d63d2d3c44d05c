"""`fedxl deploy init`: a folder for each party, with its keys, settings, start script and README."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedxl import metrics, registry
from fedxl.algorithms import ALGORITHMS
from fedxl.config.experiment import Config, dump
from fedxl.data import DATASETS, NAMED
from fedxl.deploy.provision import approval, keys
from fedxl.deploy.provision.settings import ServerSettings
from fedxl.errors import require
from fedxl.options import accepted

# What a new federation switches on: none of it has a cost that could be measured (docs/privacy.md).
# order: the server cannot follow an example by the place of its score. pool_u: one site cannot end the training of
# all others by what it says about its scores. clip_change: no site moves the model much further than others do.
SAFE: Mapping[str, Any] = {"order": "sorted", "pool_u": "server", "clip_change": 2.0}

PORT = 18000
EXAMPLES = 1_000_000  # the most that a site may claim in a trial
# The demo task, used if there is no other experiment: handwritten digits, a part at each site.
DEMO = Config(
    data={"name": "digits"},
    model={"name": "mlp", "hidden": [64]},
    risk={"name": "pauc"},
    algorithm={"name": "fedxl2", "lr": 0.3},
    run={"rounds": 5, "local_steps": 16, "batch1": 8, "batch2": 8, "eval_every": 1, "checkpoint_every": 1},
)

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
4. Install the certificate that they send back: `fedxl deploy accept . CERTIFICATE`.
5. """


def init(
    sites: Sequence[str],
    out: Path,
    host: str = "127.0.0.1",
    port: int = PORT,
    config: Config = DEMO,
    keys_at_sites: bool = False,
    examples: int = EXAMPLES,
) -> None:
    """Create server/, sites/NAME/ and authority/ in `out`, which must be new.

    keys_at_sites: each site makes its own key and requests approval, as real federations should. Otherwise all keys
    are made here and every site is approved for so many `examples`: for a trial on one machine.
    """
    require(len(sites) > 0, "name at least one site, as in --sites a,b,c")
    for name in sites:
        keys.require_site_name(name)
    require(len(set(sites)) == len(sites), "two sites have the same name")
    keys.check_host(host, port)
    require(not out.exists() or not any(out.iterdir()), f"{out} is not empty; name a new folder")
    config = _completed(config, len(sites))
    out.mkdir(parents=True, exist_ok=True)
    authority_key, authority = keys.authority()
    root = keys.certificate_pem(authority)
    _folder(out / "authority", {"ca.crt": root}, {"ca.key": keys.private_pem(authority_key)})
    key = keys.new_key()
    signed = keys.server_certificate(key.public_key(), authority_key, authority, approval.server_hosts(host))
    settings = ServerSettings(tuple(sites), minimum=max(1, (len(sites) + 1) // 2), private_draws=True)
    public: dict[str, str | bytes] = {
        "ca.crt": root,
        "server.crt": keys.certificate_pem(signed),
        "server.toml": _server_toml(settings, dump(config)),
        "connection.toml": _connection(host, port),
        "start.sh": SERVER_START,
        "README.md": _server_readme(sites, host, port),
        "fedxl-server.service": _unit("server", "server"),
    }
    _folder(out / "server", public, {"server.key": keys.private_pem(key)})
    for number, name in enumerate(sites):
        folder = out / "sites" / name
        public = {
            "ca.crt": root,
            "site.toml": _site_toml(name, number, config),
            "connection.toml": _connection(host, port, keys.fingerprint(key.public_key())),
            "start.sh": SITE_START,
            "README.md": _site_readme(name, host, port, keys_at_sites),
            "fedxl-site.service": _unit("site", name),
        }
        _folder(folder, public, {})
        if not keys_at_sites:
            _admit(out, folder, examples)


def _admit(out: Path, folder: Path, examples: int) -> None:
    file, mine = approval.request(folder)
    approval.accept(folder, approval.approve(out, file, examples, lambda name, shown: shown == mine))


def _completed(config: Config, sites: int) -> Config:
    """Split the demo's data by site, set one seed for all parties, and switch on what is `SAFE` unless it is set."""
    if config is DEMO:
        config = replace(DEMO, data={"name": "digits", "clients": sites})
    if config.data and "seed" in accepted(registry.find("data set", str(config.data["name"]), DATASETS)):
        # Sites do not know the run's seed. With the same seed, their data and the server's do not overlap.
        config = replace(config, data={"seed": config.run.get("seed", 0), **config.data})
    if known := ALGORITHMS.get(str(config.algorithm.get("name"))):
        taken = {name: value for name, value in SAFE.items() if name in accepted(known)}
        if config.algorithm.get("fixed_point"):
            taken.pop("clip_change", None)  # whoever sees only the sum of all changes cannot clip one
        config = replace(config, algorithm={**taken, **config.algorithm})
    return config


def _folder(folder: Path, public: Mapping[str, str | bytes], private: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, mode=0o700)
    for name, content in private.items():
        keys.write_private(folder / name, content)
    for name, text in public.items():
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
        if name.endswith(".sh"):
            (folder / name).chmod(0o755)


def _server_toml(settings: ServerSettings, experiment: str) -> str:
    return f"""# The experiment. Sites hold the training data; [data] here is the server's own, for validation.
# Leave [data] out if the server has none.

[server]
sites = {json.dumps(list(settings.sites))}  # their order sets their numbers; do not change it during a run
minimum = {settings.minimum}  # updates that a round needs
deadline = {settings.deadline}  # seconds that a site has to reply
wire = "{settings.wire}"  # bfloat16: half the bytes for weights
private_draws = {json.dumps(settings.private_draws)}  # sites cannot work out whose pooled scores they read
evaluate = "{settings.evaluate}"  # "sites": on their own data, as far as each site discloses results

{experiment}"""


def _site_toml(name: str, part: int, config: Config) -> str:
    rounds = int(config.run.get("rounds", 100))
    data = "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.data.items())
    names = {key: json.dumps(str(table["name"])) for key, table in config.tables().items() if "name" in table}
    named = [str(name) for name in (config.run.get("select", ""), *config.run.get("metrics", ()))]
    return f"""# This site. Name your own data in [data]: see `fedxl data list`. They never leave this machine.

[site]
name = "{name}"
part = {part}  # the site's part of a shared data set; 0 if you use your own data

# What a server may request. This site refuses everything else.
models = [{names.get("model", json.dumps("mlp"))}]  # networks; a linear one reveals examples
risks = [{names["risk"]}]
algorithms = [{names["algorithm"]}]
metrics = {json.dumps(sorted(metrics.own(named)))}  # your own, as package.module:function; fedxl's are always allowed
rounds = {2 * rounds + 20}  # requests to train that this site accepts, over all runs
steps = {int(config.run.get("local_steps", 32))}  # local steps in one request
private_draws = true  # which examples are read in which round: from a seed that never leaves this site
sorted_scores = {json.dumps(config.algorithm.get("order") == "sorted")}  # refuse runs that pool \
scores in the order of these draws
evaluate = "none"  # results that may leave this site: "none", "metrics" (AUROC, ...), \
"curve" (counts of scores in bins) or all "scores"
epsilon = 0.0  # differential privacy of each curve; 0: no noise
epsilon_total = 0.0  # of all curves together, over all runs
evaluations = {4 * rounds + 20}  # requests to evaluate that this site accepts, over all runs
summary = {json.dumps(config.data.get("name") in NAMED)}  # whether counts, means and squares of a \
table's columns may leave this site, so that all sites scale them alike; of images: their size, \
the names of labels and columns, and the label's two values
digest = ""  # allow only the experiment with this digest (`fedxl deploy digest`); "": any

[data]
{data}"""


def _connection(host: str, port: int, server_key: str = "") -> str:
    pinned = f'server_key = "{server_key}"  # fingerprint of the server\'s key\n'
    return f'host = "{host}"\nport = {port}\n' + (pinned if server_key else "")


def _server_readme(sites: Sequence[str], host: str, port: int) -> str:
    return f"""# The server of this federation

The server sends the model to the sites, averages their updates, and merges the scores that they pool. It never sees
an example.

1. Install: `pip install 'fedxl[flower]'`, the same version as at the sites.
2. Set in `server.toml` what to train. Sites must be able to reach {host}, port {port}.
3. Run `./start.sh`. It waits for {", ".join(sites)}, then trains. You can stop it with Ctrl-C: started again, it
   resumes from its last checkpoint.

The results are in `run/`: model.safetensors, metrics.jsonl, checkpoints/. Logs are in `flower/`. To start a new run,
remove `run/`. Sites count requests over all runs, so they may have to raise their limits.

Port {port} is the only open port. It accepts approved sites only, and forwards only the requests that sites need.
`members/` holds the approved sites. OUT below is the folder that holds `server/` and `authority/`.

- `fedxl deploy approve OUT REQUEST --examples N` admits a site. First compare the fingerprint of its key with the
  site's staff. N is the most examples that it may claim.
- `fedxl deploy list OUT` lists the approved sites; `fedxl deploy revoke OUT SITE` revokes a site at once.
- `fedxl deploy renew OUT` renews the server's own certificate, which is valid for a year.

None of them needs a restart. `server.key` is secret, and so is `run/private.seed`, with which sites could work out
whose scores they read. `fedxl-server.service` is an example for systemd. The folder `authority/`, created with this
one, signs certificates: keep it off this machine, and name it with `--authority`.
"""


def _site_readme(name: str, host: str, port: int, keys_at_sites: bool) -> str:
    steps = KEY_STEPS if keys_at_sites else "3. "
    return f"""# Site {name}

1. Install: `pip install 'fedxl[flower]'`, the same version as at the server.
2. Set in `site.toml`, under [data], where your examples are, and under [site] what a server may request. Examples
   never leave this machine.
{steps}Run `./start.sh`. It prepares your data once, connects to {host}, port {port} (outgoing only), and handles the
   server's requests. It opens no port, and runs only the fedxl that is installed here.

Logs are in `flower/`. `connection.toml` holds the server's address.

What leaves this machine: the numbers of positive and negative examples, their shape, and in each round the trained
weights and the scores of the examples that were used. docs/privacy.md describes what they reveal. Of a table, the
names, counts, means and squared deviations of its columns leave, and its frequent categories, if `summary` in
`site.toml` allows it; of images, their size, the names of labels and columns, and the two values of the label.
Results on your validation and test data leave only if `evaluate` in `site.toml` allows it.
`state/` holds what training remembers about your examples, and the seed from which it draws them; it never leaves.
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
UMask=0077
NoNewPrivileges=true
ProtectSystem=strict
ReadWritePaths=/srv/fedxl/{name}
PrivateTmp=true

[Install]
WantedBy=multi-user.target
"""

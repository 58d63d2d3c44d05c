"""What `fedxl deploy init` writes for FLARE, besides settings: its participants, policies, scripts and READMEs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fedxl.deploy.protocol.envelope import KINDS
from fedxl.errors import require

OWN_KEYS = True  # FLARE's provisioning makes them
NAME = "fedxl"  # of the project, of its organisation, and of every job
ADMIN = "admin@fedxl.org"  # FLARE wants an e-mail address; nothing is sent to it
CONTROLLER = "fedxl.deploy.transport.nvflare.controller.FedxlController"
EXECUTOR = "fedxl.deploy.transport.nvflare.executor.FedxlExecutor"
PARTS, PASSES = "nvflare.app_common", "passthrough_resource"
INTERVAL = 0.05  # seconds after which a client that has no task asks again

SETUP = f"""#!/bin/sh
# Creates the authority of this federation, and the keys and startup kits of its server and its admin. Run it once.
set -eu
umask 077
cd "$(dirname "$0")"
nvflare cert init --profile project.yml -o ../authority
for who in server admin; do
    nvflare cert request -p $who.yml --out requests/$who
    signed=requests/$who.signed.zip
    nvflare cert approve requests/$who/*.request.zip -c ../authority --profile project.yml --out $signed
    nvflare package $signed --request-dir requests/$who -w kit
done
mv kit/{NAME}/prod_00/{ADMIN} ../admin
"""
START = f"""#!/bin/sh
# Starts {{what}} in the background. FLARE reads its policy and {{settings}} from the kit's local folder.
set -eu
umask 077
cd "$(dirname "$0")"
kit=$(echo "$PWD"/kit/{NAME}/prod_00/*)
cp local/*.json "$kit/local/"
ln -sf "$PWD/{{settings}}" "$kit/local/{{settings}}"
{{before}}
"$kit/startup/start.sh"
"""
STORE = 'mkdir -p jobs\nexport NVFL_JOB_STORE_ROOT="$PWD/jobs"'  # FLARE wants an absolute path
PREPARE = "fedxl site prepare . --if-needed"


def files(sites: Sequence[str], host: str, port: int, keys_at_sites: bool) -> dict[str, str]:
    """What FLARE needs besides server.toml and site.toml, by path below the folder of the federation."""
    told = "FLARE takes no IPv6 address as its host, and no site called 'server'"
    require(":" not in host and "server" not in sites, told)
    project = {
        "name": NAME,
        "scheme": "tcp",
        "connection_security": "mtls",
        "server": {"host": host, "fed_learn_port": port, "admin_port": port},
    }
    ports = {"default_host": host, "fed_learn_port": port, "admin_port": port}
    found = {
        "server/project.yml": _json(project),  # which is YAML, too
        "server/server.yml": _participant(host, "server", **ports),
        "server/admin.yml": _participant(ADMIN, "admin", role="lead"),
        "server/setup.sh": SETUP,
        "server/start.sh": START.format(what="the server", settings="server.toml", before=STORE),
        "server/README.md": _server_readme(sites, host, port),
        **_policy("server", _server_resources(), ("submit_job", "manage_job", "view", "operate")),
    }
    for name in sites:
        site = {
            "participant.yml": _participant(name, "client"),
            "start.sh": START.format(what=f"site {name}", settings="site.toml", before=PREPARE),
            "README.md": _site_readme(name, host, port),
        }
        found |= {f"sites/{name}/{path}": text for path, text in site.items()}
        found |= _policy(f"sites/{name}", _site_resources(), ("submit_job", "check_status"))
    return found


def steps(out: str, keys_at_sites: bool) -> Sequence[str]:
    return (
        "send sites/NAME to each site; README.md in each folder says what to do, first in server/",
        f"once server and sites run: fedxl deploy submit {out} --kit {out}/admin",
    )


def _json(content: Any) -> str:
    return json.dumps(content, indent=2) + "\n"


def _participant(name: str, kind: str, **options: Any) -> str:
    return _json({"name": NAME, "participants": [{"name": name, "type": kind, "org": NAME, **options}]})


def _policy(folder: str, resources: dict[str, Any], rights: Sequence[str]) -> dict[str, str]:
    """FLARE's policy of a party. A right that is not listed is nobody's: above all byoc, to bring code in a job."""
    permissions = {"lead": dict.fromkeys(rights, "any")}
    authorization = {"format_version": "1.0", "permissions": permissions}
    common = {"format_version": 2, "class_list_enforcement_mode": "enforce"}
    return {
        f"{folder}/local/authorization.json": _json(authorization),
        f"{folder}/local/resources.json": _json({**common, **resources}),
    }


def _component(name: str, path: str, **arguments: Any) -> dict[str, Any]:
    return {"id": name, "path": f"{PARTS}.{path}", "args": arguments}


def _site_resources() -> dict[str, Any]:
    """Sends no log to the server: a site's own log may reveal data."""
    return {
        "class_allow_list": [EXECUTOR],
        "allow_log_streaming": False,
        "client": {"retry_timeout": 30},
        "components": [
            _component("resource_manager", f"resource_managers.{PASSES}_manager.PassthroughResourceManager"),
            _component("resource_consumer", f"resource_consumers.{PASSES}_consumer.PassthroughResourceConsumer"),
            _component("process_launcher", "job_launcher.client_process_launcher.ClientProcessJobLauncher"),
        ],
    }


def _server_resources() -> dict[str, Any]:
    # By default FLARE waits up to ten minutes before it looks again at a job that it could not start at once, for
    # example because the one before had not ended at a site.
    patience = {"min_schedule_interval": 1.0, "max_schedule_interval": 8.0, "max_schedule_count": 100}
    manager = {"id": "job_manager", "path": "nvflare.apis.impl.job_def_manager.SimpleJobDefManager", "args": {}}
    return {
        "class_allow_list": [CONTROLLER],
        "servers": [{"admin_storage": "transfer", "max_num_clients": 1000, "heart_beat_timeout": 600}],
        "components": [
            _component("job_scheduler", "job_schedulers.job_scheduler.DefaultJobScheduler", max_jobs=1, **patience),
            manager,
            _component("job_store", "storages.filesystem_storage.FilesystemStorage"),
            _component("process_launcher", "job_launcher.server_process_launcher.ServerProcessJobLauncher"),
        ],
    }


def job(sites: Sequence[str], least: int) -> dict[str, str]:
    """The job: it names two installed classes, and nothing else."""
    server = {
        "format_version": 2,
        "server": {"task_request_interval": INTERVAL},
        "workflows": [{"id": NAME, "path": CONTROLLER, "args": {}}],
    }
    client = {"format_version": 2, "executors": [{"tasks": list(KINDS), "executor": {"path": EXECUTOR, "args": {}}}]}
    deployed = {"app": ["server", *sites]}
    meta = {"name": NAME, "resource_spec": {}, "min_clients": least, "deploy_map": deployed}
    return {
        "meta.json": _json(meta),
        "app/config/config_fed_server.json": _json(server),
        "app/config/config_fed_client.json": _json(client),
    }


def _server_readme(sites: Sequence[str], host: str, port: int) -> str:
    return f"""# The server of this federation, by NVIDIA FLARE

1. Install: `pip install 'fedxl[nvflare]'`, the same version as at the sites {", ".join(sites)}.
2. Run `sh setup.sh`. It creates the authority, `../authority`, and prints its fingerprint (rootca_fingerprint); the
   server's startup kit, `kit/`; and the admin's, `../admin`.
3. Each site sends a request. Compare its csr_sha256 with the site's staff by telephone, tell them the authority's
   fingerprint, run `nvflare cert approve NAME.request.zip -c ../authority --profile project.yml`, and send back
   NAME.signed.zip.
4. Set in `server.toml` what to train, and run `sh start.sh`. Sites must be able to reach {host}, port {port}.
5. Run `fedxl deploy submit .. --kit ../admin`. It waits for all sites, then trains until the run has finished. If
   FLARE ends the job early, because a process died, it submits the job again, and training resumes from its last
   checkpoint. Stopped with Ctrl-C and started again, it follows the job that is running.

The results are in `run/`; to start a new run, remove it. Training logs to `fedxl.log`, FLARE to
`kit/{NAME}/prod_00/{host}/log.txt`. In FLARE's console, `../admin/startup/fl_admin.sh` (user {ADMIN}),
`shutdown server` stops the server, and `disable_client NAME` keeps a site out.

All members of a FLARE federation trust its server and one another. Jobs bring no code and run only the classes in
`local/resources.json`; start.sh installs this policy. `../authority/rootCA.key` is secret: keep it off this machine.
So are `../admin`, `kit/`, `requests/` and `run/private.seed`.
"""


def _site_readme(name: str, host: str, port: int) -> str:
    return f"""# Site {name}, by NVIDIA FLARE

1. Install: `pip install 'fedxl[nvflare]'`, the same version as at the server.
2. Set in `site.toml`, under [data], where your examples are, and under [site] what a server may request. Examples
   never leave this machine.
3. `nvflare cert request -p participant.yml` creates your key, which never leaves this machine, and a request,
   `{name}/{name}.request.zip`. Send it to the server's operator. By telephone, compare its csr_sha256, and ask for
   the authority's fingerprint.
4. `nvflare package {name}.signed.zip -w kit --fingerprint FINGERPRINT` makes your startup kit of their answer.
5. `sh start.sh` prepares your data once, connects to {host}, port {port} (outgoing only), and handles the server's
   requests in the background. `kit/{NAME}/prod_00/{name}/startup/stop_fl.sh` stops it.

Logs are in `kit/{NAME}/prod_00/{name}/`, and never sent. What else leaves this machine is what docs/privacy.md
describes. `state/` holds what training remembers about your examples; `kit/` holds your key.

All members of a FLARE federation trust its server and one another. Jobs bring no code and run fedxl's Executor only;
start.sh installs this policy, `local/`. Use a machine whose users you trust, and run FLARE as a user who cannot read
your data: run `fedxl site prepare .` as one who can, then make `cache/`, `state/` and `kit/` FLARE's (chown). FLARE
must be able to read `site.toml`, and should not be able to change it.
"""

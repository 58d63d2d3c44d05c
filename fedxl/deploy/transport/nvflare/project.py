"""What `fedxl deploy init` writes for FLARE, besides settings, and the job: templates/nvflare/.

The policies in local/ grant the rights that authorization.json lists. Nobody has another: above all not byoc, to
bring code in a job. A site sends no log to the server, because its own log may reveal data.

The server's scheduler looks again within 8 s at a job that it could not start at once, for example because the one
before had not ended at a site. By default FLARE waits up to ten minutes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from fedxl.deploy.protocol.envelope import KINDS
from fedxl.deploy.provision.templates import fill_folder
from fedxl.errors import require

OWN_KEYS = True  # FLARE's provisioning makes them
NAME = "fedxl"  # of the project, of its organisation, and of every job
ADMIN = "admin@fedxl.org"  # FLARE wants an e-mail address; nothing is sent to it


def files(sites: Sequence[str], host: str, port: int, keys_at_sites: bool, more: str = "") -> dict[str, str]:
    """What FLARE needs besides server.toml and site.toml, by path below the folder of the federation."""
    told = "FLARE takes no IPv6 address as its host, and no site called 'server'"
    require(":" not in host and "server" not in sites, told)
    found = fill_folder(
        "nvflare/server/", "server/", host=host, port=port, more=more, sites=", ".join(sites), admin=ADMIN
    )
    for name in sites:
        found |= fill_folder("nvflare/site/", f"sites/{name}/", host=host, port=port, more=more, name=name)
    return found


def steps(out: str, keys_at_sites: bool) -> Sequence[str]:
    return (
        "send sites/NAME to each site; README.md in each folder says what to do, first in server/",
        f"once server and sites run: fedxl deploy submit {out} --kit {out}/admin",
    )


def job(sites: Sequence[str], least: int) -> dict[str, str]:
    """The job: it names two installed classes, and nothing else."""
    parties = json.dumps(["server", *sites])
    return fill_folder("nvflare/job/", "", parties=parties, least=least, kinds=json.dumps(KINDS))

"""What `fedxl deploy init` writes for the default transport, besides settings and keys: templates/tls/."""

from __future__ import annotations

from collections.abc import Sequence

from fedxl.deploy.provision.templates import PARTS, fill_folder

OWN_KEYS = False  # it uses those of fedxl's own provisioning


def files(sites: Sequence[str], host: str, port: int, keys_at_sites: bool, more: str = "") -> dict[str, str]:
    """Texts by their paths below the federation's folder."""
    found = fill_folder("tls/server/", "server/", host=host, port=port, more=more, sites=", ".join(sites))
    start = f"{PARTS['key_steps']}\n5." if keys_at_sites else "3."
    for name in sites:
        found |= fill_folder("tls/site/", f"sites/{name}/", host=host, port=port, more=more, name=name, start=start)
    return found


def steps(out: str, keys_at_sites: bool) -> Sequence[str]:
    if keys_at_sites:
        return (
            "send sites/NAME to each site, which makes its key there: fedxl deploy request .",
            f"then approve its request here: fedxl deploy approve {out} REQUEST --examples N",
        )
    return (f"run the whole federation on this machine: fedxl deploy local {out}",)

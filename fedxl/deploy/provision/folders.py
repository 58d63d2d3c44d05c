"""`fedxl deploy init`: a folder for every party, with its keys, its settings, a start script and a page to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedxl import registry
from fedxl.config.experiment import Config, dump
from fedxl.data import DATASETS
from fedxl.deploy.provision import approval, keys, pages
from fedxl.deploy.provision.settings import ServerSettings
from fedxl.errors import require
from fedxl.options import accepted

PORT = 18000
EXAMPLES = 1_000_000  # that a site of a trial may say it has
# The demo task, for a federation that has nothing else to do yet: handwritten digits, a part at each site.
DEMO = Config(
    data={"name": "digits"},
    model={"name": "mlp", "hidden": [64]},
    risk={"name": "pauc"},
    algorithm={"name": "fedxl2", "lr": 0.3},
    run={"rounds": 5, "local_steps": 16, "batch1": 8, "batch2": 8, "eval_every": 1, "checkpoint_every": 1},
)


@dataclass(frozen=True)
class Plan:
    """What all parties' folders have in common."""

    sites: Sequence[str]
    host: str
    port: int
    config: Config


def init(
    sites: Sequence[str],
    out: Path,
    host: str = "127.0.0.1",
    port: int = PORT,
    config: Config = DEMO,
    keys_at_sites: bool = False,
    examples: int = EXAMPLES,
) -> None:
    """server/, sites/NAME/ and authority/ under `out`, which must be new.

    keys_at_sites: each site makes its own key and asks for approval, as it should be. Otherwise all keys are made
    here and every site is approved for so many `examples`: for a trial on one machine.
    """
    require(len(sites) > 0, "name at least one site, as in --sites a,b,c")
    for name in sites:
        known = bool(keys.SITE_NAME.fullmatch(name))
        require(known, f"'{name}' is no name for a site: small letters, digits and dashes only")
    require(len(set(sites)) == len(sites), "two sites have the same name")
    keys.check_host(host, port)
    require(not out.exists() or not any(out.iterdir()), f"{out} is not empty; name a new folder")
    plan = Plan(sites, host, port, _completed(config, len(sites)))
    out.mkdir(parents=True, exist_ok=True)
    authority_key, authority = keys.authority()
    root = keys.certificate_pem(authority)
    _folder(out / "authority", {"ca.crt": root}, {"ca.key": keys.private_pem(authority_key)})
    key = keys.new_key()
    signed = keys.server_certificate(key.public_key(), authority_key, authority, approval.server_hosts(host))
    certificates = {"ca.crt": root, "server.crt": keys.certificate_pem(signed)}
    _server(out / "server", plan, certificates, keys.private_pem(key))
    for name in sites:
        folder = out / "sites" / name
        _site(folder, plan, name, {"ca.crt": root}, keys.fingerprint(key.public_key()), keys_at_sites)
        if not keys_at_sites:
            file, shown = approval.request(folder)
            granted = approval.approve(out, file, examples, _same(shown))
            approval.accept(folder, granted)


def _same(mine: str) -> Callable[[str, str], bool]:
    return lambda name, shown: shown == mine


def _completed(config: Config, sites: int) -> Config:
    """With as many parts of the demo's data as there are sites, and one seed for who holds which."""
    if config is DEMO:
        config = replace(DEMO, data={"name": "digits", "clients": sites})
    if config.data and "seed" in accepted(registry.find("data set", str(config.data["name"]), DATASETS)):
        # Sites do not know the run's seed; what they hold and what the server validates on must not overlap.
        config = replace(config, data={"seed": config.run.get("seed", 0), **config.data})
    return config


def _server(folder: Path, plan: Plan, certificates: dict[str, bytes], private: bytes) -> None:
    settings = ServerSettings(tuple(plan.sites), minimum=max(1, (len(plan.sites) + 1) // 2))
    public = {
        **certificates,
        "server.toml": pages.server_toml(settings, dump(plan.config)).encode(),
        "connection.toml": pages.connection(plan.host, plan.port).encode(),
        "start.sh": pages.SERVER_START.encode(),
        "README.md": pages.server_readme(plan.sites, plan.host, plan.port).encode(),
        "fedxl-server.service": pages.unit("server", folder.name).encode(),
    }
    _folder(folder, public, {"server.key": private})


def _site(
    folder: Path, plan: Plan, name: str, certificates: dict[str, bytes], server_key: str, keys_at_sites: bool
) -> None:
    number = list(plan.sites).index(name)
    public = {
        **certificates,
        "site.toml": pages.site_toml(name, number, plan.config).encode(),
        "connection.toml": pages.connection(plan.host, plan.port, server_key).encode(),
        "start.sh": pages.SITE_START.encode(),
        "README.md": pages.site_readme(name, plan.host, plan.port, keys_at_sites).encode(),
        "fedxl-site.service": pages.unit("site", name).encode(),
    }
    _folder(folder, public, {})


def _folder(folder: Path, public: dict[str, bytes], private: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, mode=0o700)
    for name, content in private.items():
        keys.write_private(folder / name, content)
    for name, content in public.items():
        (folder / name).write_bytes(content)
        if name.endswith(".sh"):
            (folder / name).chmod(0o755)

"""`fedxl deploy init`: a folder for each party, with its keys, settings, start script and README."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedxl import registry
from fedxl.algorithms import ALGORITHMS
from fedxl.config.experiment import Config, dump
from fedxl.data import DATASETS
from fedxl.deploy.provision import approval, folder_texts, keys
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
        "server.toml": folder_texts.server_toml(settings, dump(config)),
        "connection.toml": folder_texts.connection(host, port),
        "start.sh": folder_texts.SERVER_START,
        "README.md": folder_texts.server_readme(sites, host, port),
        "fedxl-server.service": folder_texts.unit("server", "server"),
    }
    _folder(out / "server", public, {"server.key": keys.private_pem(key)})
    for number, name in enumerate(sites):
        folder = out / "sites" / name
        public = {
            "ca.crt": root,
            "site.toml": folder_texts.site_toml(name, number, config),
            "connection.toml": folder_texts.connection(host, port, keys.fingerprint(key.public_key())),
            "start.sh": folder_texts.SITE_START,
            "README.md": folder_texts.site_readme(name, host, port, keys_at_sites),
            "fedxl-site.service": folder_texts.unit("site", name),
        }
        _folder(folder, public, {})
        if not keys_at_sites:
            file, mine = approval.request(folder)
            granted = approval.approve(out, file, examples, _same(mine))
            approval.accept(folder, granted)


def _same(mine: str) -> Callable[[str, str], bool]:
    return lambda name, shown: shown == mine


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

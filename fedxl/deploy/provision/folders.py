"""`fedxl deploy init`: a folder for each party, with its settings, its keys, and what its engine needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from fedxl import metrics, registry
from fedxl.algorithms import ALGORITHMS
from fedxl.config.experiment import Config, build_risk, dump
from fedxl.data import DATASETS, NAMED
from fedxl.deploy.provision import approval, keys
from fedxl.deploy.provision.settings import UNDISCLOSED, ServerSettings, SiteSettings
from fedxl.deploy.provision.templates import fill, write
from fedxl.errors import require, unknown
from fedxl.files import read_bytes, write_atomically
from fedxl.options import accepted
from fedxl.risks import TIME_RISKS
from fedxl.training.run_folder import PREPARATION

# What a new federation switches on: none of it has a cost that could be measured (docs/privacy.md).
# order: the server cannot follow an example by the place of its score. pool_u: one site cannot end the training of
# all others by what it says about its scores. clip_change: no site moves the model much further than others do.
SAFE: Mapping[str, Any] = {"order": "sorted", "pool_u": "server", "clip_change": 2.0}

ENGINES = ("tls", "flower", "nvflare")  # packages of deploy/transport/
PORT = 18000
PLACEHOLDER = "change this"  # a site's own file
OWN_FILES = frozenset({"path", "validation_path", "test_path"})  # settings of [data] that name a site's own files
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
    engine: str = "tls",
    evaluate: str = "",
) -> list[str]:
    """Create server/ and sites/NAME/ in `out`, which must be new, and authority/ unless the engine makes keys itself.

    Returns lines that say what has been done, and what comes next.

    keys_at_sites: each site makes its own key and requests approval, as real federations should. Otherwise all keys
    are made here and every site is approved for so many `examples`: for a trial on one machine.

    evaluate: who evaluates, as in server.toml. By default the server does on the experiment's data, unless these are
    files of sites on other machines.
    """
    require(len(sites) > 0, "name at least one site, as in --sites a,b,c")
    for name in sites:
        keys.require_site_name(name)
    require(len(set(sites)) == len(sites), "two sites have the same name")
    keys.check_host(host, port)
    require(not out.exists() or not any(out.iterdir()), f"{out} is not empty; name a new folder")
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    require_public_times(config)
    project = import_module(f"fedxl.deploy.transport.{engine}.project")
    config = completed(config, len(sites))
    preparation = _public_preparation(config) if keys_at_sites else None
    if preparation is not None:
        config = replace(config, data={**config.data, "preparation": PREPARATION})
    # Files of sites on other machines: each names its own.
    own_files = keys_at_sites and any(config.data.get(key) for key in OWN_FILES)
    if own_files:
        config = replace(config, data={**config.data, **dict.fromkeys(OWN_FILES & config.data.keys(), PLACEHOLDER)})
    evaluate = evaluate or ("sites" if own_files else "server")
    minimum = max(1, (len(sites) + 1) // 2)
    settings = ServerSettings(tuple(sites), minimum=minimum, evaluate=evaluate, private_draws=True)
    experiment = replace(config, data={}) if evaluate == "sites" else config
    described = dump(experiment).removeprefix("[data]\n\n")
    public: dict[str, str | bytes] = {"server/server.toml": server_toml(settings, described)}
    public |= {
        f"sites/{name}/site.toml": site_toml(name, 0 if own_files else number, config)
        for number, name in enumerate(sites)
    }
    texts: dict[str, str] = project.files(
        sites, host, port, keys_at_sites, "".join(f",{one}" for one in extras(config))
    )
    if evaluate == "sites":
        readmes = [path for path in texts if path.endswith("README.md")]
        texts |= {path: f"{texts[path]}\nMetrics: {UNDISCLOSED}.\n" for path in readmes}
    public |= texts
    if preparation is not None:
        parties = ["server"] * bool(experiment.data) + [f"sites/{name}" for name in sites]
        public |= {f"{party}/{PREPARATION}": preparation for party in parties}
    write(out, public)
    if not project.OWN_KEYS:
        _make_keys(out, sites, host, port)
        for name in () if keys_at_sites else sites:
            _admit(out, out / "sites" / name, examples)
    made = "server/ and sites/" if project.OWN_KEYS else "server/, sites/ and authority/ (keep authority/ offline)"
    trial = "all keys were made on this machine, which is for trials only. For real sites use --keys-at-sites"
    notes = [] if project.OWN_KEYS or keys_at_sites else [trial]
    notes += [UNDISCLOSED] if evaluate == "sites" else []
    return [f"created in {out}: {made}", *notes, *project.steps(str(out), keys_at_sites)]


def _public_preparation(config: Config) -> bytes | None:
    """The file with the given preparation of an experiment, which every party gets: it is public by definition."""
    named = config.data.get("preparation") if config.data.get("name") in DATASETS else None
    if not named:
        return None
    require(Path(str(named)).is_file(), f"there is no file {named}, which [data] names as its preparation")
    return read_bytes(Path(str(named)))


def extras(config: Config) -> list[str]:
    """What parties install of fedxl beside the engine, for this experiment."""
    data = config.data.get("name")
    needed = {
        "table": data == "table",
        "images": data in ("folder", "chexpert") or config.data.get("image"),
        "dp": config.algorithm.get("dp_noise"),
    }
    return [name for name, wanted in needed.items() if wanted]


def require_public_times(config: Config) -> None:
    """Raises UserError if an experiment would share exact times of events, which sites refuse."""
    algorithm = ALGORITHMS.get(str(config.algorithm.get("name")))
    if config.risk.get("name") in TIME_RISKS and not getattr(algorithm, "local_pairs", False):
        why = build_risk(config).pairing.why_not_at_sites
        require(not why, why)


def _make_keys(out: Path, sites: Sequence[str], host: str, port: int) -> None:
    """The authority's key and the server's, and for each site the fingerprint of the latter."""
    authority, key = keys.new_authority(), keys.new_key()
    root = keys.certificate_pem(authority.certificate)
    signed = keys.server_certificate(host, key.public_key(), authority)
    pinned = _connection(host, port, keys.fingerprint(key.public_key()))
    for folder in ("authority", "server", *(f"sites/{name}" for name in sites)):
        write(out, {f"{folder}/ca.crt": root})
    write(out, {"server/server.crt": keys.certificate_pem(signed), "server/connection.toml": _connection(host, port)})
    write(out, {f"sites/{name}/connection.toml": pinned for name in sites})
    write_atomically(out / "authority" / "ca.key", keys.private_pem(authority.key), private=True)
    write_atomically(out / "server" / "server.key", keys.private_pem(key), private=True)


def _admit(out: Path, folder: Path, examples: int) -> None:
    file, mine = approval.request(folder)
    approval.accept(folder, approval.approve(out, file, examples, lambda name, shown: shown == mine))


def completed(config: Config, sites: int) -> Config:
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


def server_toml(settings: ServerSettings, experiment: str) -> str:
    return fill("server.toml", **{name: json.dumps(value) for name, value in asdict(settings).items()}) + experiment


def site_toml(name: str, part: int, config: Config) -> str:
    run = config.run
    rounds = int(run.get("rounds", 100))
    named = [str(metric) for metric in (run.get("select", ""), *run.get("metrics", ()))]
    values: dict[str, Any] = {"model": "mlp"}
    values |= {section: str(table["name"]) for section, table in config.tables().items() if "name" in table}
    values |= {
        "name": name,
        "part": part,
        "metrics": sorted(metrics.own(named)),
        "rounds": 2 * rounds + 20,
        "evaluations": 4 * rounds + 20,
        "steps": int(run.get("local_steps", 32)),
        "batch": max(SiteSettings.batch, sum(int(run.get(side, 32)) for side in ("batch1", "batch2"))),
        "sorted_scores": config.algorithm.get("order") == "sorted",
        "summary": config.data.get("name") in NAMED,
        "times": "bins" if config.risk.get("name") in TIME_RISKS else "none",
    }
    data = "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.data.items())
    return fill("site.toml", **{name: json.dumps(value) for name, value in values.items()}) + data


def _connection(host: str, port: int, server_key: str = "") -> str:
    pinned = f'server_key = "{server_key}"  # fingerprint of the server\'s key\n'
    return f'host = "{host}"\nport = {port}\n' + (pinned if server_key else "")

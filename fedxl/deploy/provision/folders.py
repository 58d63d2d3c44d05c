"""`fedxl deploy init`: a folder for each party, with its settings, its keys, and what its engine needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from fedxl import metrics, registry
from fedxl.algorithms import ALGORITHMS
from fedxl.config.experiment import Config, build_risk, dump
from fedxl.data import DATASETS, NAMED
from fedxl.deploy.provision import approval, keys
from fedxl.deploy.provision.settings import UNDISCLOSED, ServerSettings, SiteSettings
from fedxl.errors import require, unknown
from fedxl.options import accepted
from fedxl.risks import TIME_RISKS

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
    # Files of sites on other machines: each names its own.
    own_files = keys_at_sites and any(config.data.get(key) for key in OWN_FILES)
    if own_files:
        config = replace(config, data={**config.data, **dict.fromkeys(OWN_FILES & config.data.keys(), PLACEHOLDER)})
    evaluate = evaluate or ("sites" if own_files else "server")
    minimum = max(1, (len(sites) + 1) // 2)
    settings = ServerSettings(tuple(sites), minimum=minimum, evaluate=evaluate, private_draws=True)
    experiment = replace(config, data={}) if evaluate == "sites" else config
    public = {"server/server.toml": server_toml(settings, dump(experiment))}
    public |= {
        f"sites/{name}/site.toml": site_toml(name, 0 if own_files else number, config)
        for number, name in enumerate(sites)
    }
    public |= project.files(sites, host, port, keys_at_sites)
    if evaluate == "sites":
        readmes = [path for path in public if path.endswith("README.md")]
        public |= {path: f"{public[path]}\nMetrics: {UNDISCLOSED}.\n" for path in readmes}
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


def require_public_times(config: Config) -> None:
    """Raises UserError if an experiment would share exact times of events, which sites refuse."""
    algorithm = ALGORITHMS.get(str(config.algorithm.get("name")))
    if config.risk.get("name") in TIME_RISKS and not getattr(algorithm, "local_pairs", False):
        why = build_risk(config).pairing.why_not_at_sites
        require(not why, why)


def _make_keys(out: Path, sites: Sequence[str], host: str, port: int) -> None:
    """The authority's key and the server's, and for each site the fingerprint of the latter."""
    authority_key, authority = keys.authority()
    key, root = keys.new_key(), keys.certificate_pem(authority)
    signed = keys.server_certificate(key.public_key(), authority_key, authority, approval.server_hosts(host))
    pinned = _connection(host, port, keys.fingerprint(key.public_key()))
    for folder in ("authority", "server", *(f"sites/{name}" for name in sites)):
        write(out, {f"{folder}/ca.crt": root})
    write(out, {"server/server.crt": keys.certificate_pem(signed), "server/connection.toml": _connection(host, port)})
    write(out, {f"sites/{name}/connection.toml": pinned for name in sites})
    keys.write_private(out / "authority" / "ca.key", keys.private_pem(authority_key))
    keys.write_private(out / "server" / "server.key", keys.private_pem(key))


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


def write(out: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files by their paths below a folder; their own folders are for this user alone."""
    for name, text in files.items():
        path = out / name
        for folder in reversed(path.parents[: len(Path(name).parents)]):
            folder.mkdir(mode=0o700, exist_ok=True, parents=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        if path.suffix == ".sh":
            path.chmod(0o755)


def server_toml(settings: ServerSettings, experiment: str) -> str:
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


def site_toml(name: str, part: int, config: Config) -> str:
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
batch = {max(SiteSettings.batch, sum(int(config.run.get(name, 32)) for name in ("batch1", "batch2")))}  # examples \
that a step scores
private_draws = true  # which examples are read in which round: from a seed that never leaves this site
sorted_scores = {json.dumps(config.algorithm.get("order") == "sorted")}  # refuse runs that pool \
scores in the order of these draws
evaluate = "none"  # results that may leave this site: "none", "metrics" (AUROC, ...), \
"curve" (counts of scores in bins) or all "scores"
epsilon = 0.0  # differential privacy of each curve; 0: no noise
epsilon_total = 0.0  # of all curves together, over all runs
training_epsilon = 0.0  # the most that private training may spend of the training examples, over all runs; \
then this site trains no more, nor ever without noise; 0: no limit
training_delta = 1e-5  # the delta of that epsilon; below one in the number of examples
evaluations = {4 * rounds + 20}  # requests to evaluate that this site accepts, over all runs
summary = {json.dumps(config.data.get("name") in NAMED)}  # whether counts, means and squares of a \
table's columns may leave this site, so that all sites scale them alike; of images: their size, \
the names of labels and columns, and the label's two values
times = "{"bins" if config.risk.get("name") in TIME_RISKS else "none"}"  # of events: "none", or "bins": counts \
between public times may leave this site, and pooled scores with their bins
digest = ""  # allow only the experiment with this digest (`fedxl deploy digest`); "": any

[data]
{data}"""


def _connection(host: str, port: int, server_key: str = "") -> str:
    pinned = f'server_key = "{server_key}"  # fingerprint of the server\'s key\n'
    return f'host = "{host}"\nport = {port}\n' + (pinned if server_key else "")

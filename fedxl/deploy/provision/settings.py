"""The settings of a deployment: server.toml (an experiment with [server]) and site.toml ([site] and [data])."""

from __future__ import annotations

import glob
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedxl import toml
from fedxl.config.file import FILES, SECTIONS, Config, Table
from fedxl.errors import require, unknown
from fedxl.evaluation.bins import Bins
from fedxl.evaluation.noise import exactly, written
from fedxl.options import call
from fedxl.wire_precisions import PRECISIONS

EVALUATORS = ("server", "sites")  # who evaluates: the server on its own [data], or each site on its own
TIMES = ("none", "bins")  # what a site may tell of times of events
DISCLOSURES = ("none", "metrics", "curve", "scores")  # which results of an evaluation a site may disclose
UNDISCLOSED = "no site discloses metrics yet; each may set evaluate in its site.toml"


@dataclass(frozen=True)
class ServerSettings:
    """Section [server] of server.toml: the sites, and how long to wait for them. Paths are relative to the file."""

    sites: tuple[str, ...]  # their order sets the clients' numbers, which determine all random draws
    out: str = "run"  # the run's folder: metrics, checkpoints, the model
    minimum: int = 1  # updates that a round needs
    deadline: float = 600.0  # seconds that a site has to reply
    join: float = 600.0  # seconds within which all sites must say hello once
    patience: int = 3  # attempts at a round with too few updates before the run stops
    wire: str = "float32"  # dtype of weights and G in messages; bfloat16: half the bytes
    evaluate: str = "server"  # server: on its own [data]; sites: on theirs, as far as each site discloses results
    bins: int = 512  # in which sites that disclose curves count their scores; fewer if they add noise
    megabytes: float = 1000.0  # of the largest reply that it accepts
    secure: bool = False  # add weights and G of all sites under masks, so that the server sees only their sum
    private_draws: bool = False  # which pooled scores each site reads: from a seed that only the server knows
    deliver: float = 600.0  # seconds after the last round in which each site gets the model; 0: sites get none
    influence: float = 20.0  # times the usual size that an update may have (see algorithms/checks.py); 0: no limit

    def __post_init__(self) -> None:
        require(len(self.sites) > 0, "sites must name at least one site")
        require(len(set(self.sites)) == len(self.sites), f"sites must differ, got {', '.join(self.sites)}")
        told = f"minimum must lie between 1 and the number of sites, {len(self.sites)}, got {self.minimum}"
        require(1 <= self.minimum <= len(self.sites), told)
        for name in ("deadline", "join"):
            require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        require(self.deliver >= 0, f"deliver must not be negative, got {self.deliver}")
        require(self.patience >= 1, f"patience must be at least 1, got {self.patience}")
        require(self.megabytes > 0, f"megabytes must be positive, got {self.megabytes}")
        Bins(self.bins)  # which checks their number
        valid = self.influence == 0 or self.influence > 1
        require(valid, f"influence must be more than 1, or 0 for no limit, got {self.influence}")
        if self.wire not in PRECISIONS:
            raise unknown("wire", self.wire, PRECISIONS)
        if self.evaluate not in EVALUATORS:
            raise unknown("evaluate", self.evaluate, EVALUATORS)
        if self.secure:
            told = f'secure = true sends whole numbers; it needs wire = "{PRECISIONS[0]}"'
            require(self.wire == PRECISIONS[0], told)
            require(len(self.sites) > 1, "secure = true needs at least two sites: a sum of one is no secret")


@dataclass(frozen=True)
class SiteSettings:
    """Section [site] of site.toml: name, folders, and what the site permits. Paths are relative to the file."""

    name: str
    part: int = 0  # which client of a shared data set this site is; 0 for a data set of its own
    state: str = "state"  # u and counters of runs
    cache: str = "cache"  # its data, as memory-mapped arrays
    megabytes: float = 1000.0  # of the largest message that it accepts
    models: tuple[str, ...] = ()  # networks that a run may use; one outside fedxl as package.module:factory
    risks: tuple[str, ...] = ()  # likewise
    algorithms: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()  # outside fedxl, as package.module:function; fedxl's own are always allowed
    rounds: int = 1000  # requests to train that it accepts, over all runs
    steps: int = 1000  # local steps of one request
    batch: int = 4096  # examples that a step of one request scores
    training_epsilon: float = 0.0  # the most that training, always private then, spends in all runs; 0: no limit
    training_delta: float = 1e-5  # the delta of that epsilon; below one in the number of examples
    evaluate: str = "none"  # results that it discloses: none, metrics (AUROC, ...), curve (counts in bins), scores
    bins: int = 512  # the most bins of a curve
    fewest: int = (
        10  # examples of a class that metrics, or a curve without noise, may rest on; none at all are allowed
    )
    epsilon: float = 0.0  # differential privacy of each curve, by noise in its counts; 0: no noise
    epsilon_total: float = 0.0  # of all curves together, over all runs; then it discloses no more
    evaluations: int = 1000  # requests to evaluate that it accepts, over all runs
    private_draws: bool = False  # which examples it reads in which round: from a seed that only this site knows
    sorted_scores: bool = False  # refuse runs that pool scores in the order of their draws (order = "drawn")
    summary: bool = False  # whether a summary of its columns may leave, to scale all alike; of images: size, names
    times: str = "none"  # of events, what it tells: none, or bins (counts between public times, twenty per decade)
    secure: bool = False  # whether it takes part only in runs whose server adds all sites' updates under masks
    sum_of: int = 2  # the fewest sites, this one included, whose masked updates it lets the server add
    own_part: float = 0.8  # the largest part of a sum that its own update may make up, by the sites' shares
    peers: tuple[str, ...] = ()  # fingerprints of the sites whose keys it trusts in a sum; (): all with a certificate
    digest: str = ""  # of the only experiment that it takes part in; "": any that the settings above allow
    device: str = "auto"

    def __post_init__(self) -> None:
        require(bool(self.name), "a site needs a name")
        require(self.part >= 0, f"part must not be negative, got {self.part}")
        for name in ("rounds", "steps", "batch", "evaluations", "fewest"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        finite = 0 <= self.training_epsilon < math.inf
        require(finite, f"training_epsilon must be finite and not negative, got {self.training_epsilon}")
        require(0 < self.training_delta < 1, f"training_delta must lie in (0, 1), got {self.training_delta}")
        require(self.megabytes > 0, f"megabytes must be positive, got {self.megabytes}")
        require(self.sum_of >= 2, f"sum_of must be at least 2, got {self.sum_of}: a sum of one is no secret")
        require(0 < self.own_part < 1, f"own_part must lie between 0 and 1, got {self.own_part}")
        if self.evaluate not in DISCLOSURES:
            raise unknown("evaluate", self.evaluate, DISCLOSURES)
        if self.times not in TIMES:
            raise unknown("times", self.times, TIMES)
        Bins(self.bins)  # which checks their number
        if self.epsilon:
            most = self.epsilon_total
            enough = math.isfinite(most) and exactly(self.epsilon) <= written(most)
            require(enough, f"epsilon_total must be at least epsilon, {self.epsilon:g}, got {most:g}")


@dataclass(frozen=True)
class ServerFile:
    settings: ServerSettings
    config: Config
    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / self.settings.out


@dataclass(frozen=True)
class SiteFile:
    settings: SiteSettings
    data: Table
    folder: Path

    @property
    def state(self) -> Path:
        return self.folder / self.settings.state

    @property
    def cache(self) -> Path:
        return self.folder / self.settings.cache


def files_below(folder: Path, data: Table) -> Table:
    """[data] of one of our data sets, with the files that it names relative to a folder as whole paths."""

    def whole(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [whole(one) for one in value]
        if not isinstance(value, str) or not value:
            return value
        pattern = glob.has_magic(value) and not (folder / value).exists()
        return os.path.join(glob.escape(str(folder)) if pattern else str(folder), value)

    ours = ":" not in str(data.get("name", ""))  # what a setting of somebody else's means is not ours to say
    return {key: whole(value) if ours and key in FILES else value for key, value in data.items()}


def read_server(path: Path) -> ServerFile:
    """An experiment whose clients are sites. Its [data], if any, are the server's own, for validation and test.

    Files that it names are looked for from the folder that it lies in.
    """
    tables = toml.read(path, (*SECTIONS, "server"))
    for name in ("server", "risk", "algorithm"):
        require(name in tables, f"{path} needs a section [{name}]")
    settings, folder = call(ServerSettings, tables.pop("server"), "server"), path.resolve().parent
    return ServerFile(settings, Config(**tables | {"data": files_below(folder, tables.get("data", {}))}), folder)


def read_site(path: Path) -> SiteFile:
    tables = toml.read(path, ("site", "data"))
    for name in ("site", "data"):
        require(name in tables, f"{path} needs a section [{name}]")
    folder = path.resolve().parent  # in which the site's processes run, wherever this file is read
    return SiteFile(call(SiteSettings, tables["site"], "site"), files_below(folder, tables["data"]), folder)

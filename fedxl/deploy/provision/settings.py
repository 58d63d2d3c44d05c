"""The files of a deployment: a server's experiment with a section [server], a site's [data] with a section [site]."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedxl.config.experiment import SECTIONS, Config, Table, read_tables
from fedxl.errors import require, unknown
from fedxl.options import call
from fedxl.wire import PRECISIONS

JUDGES = ("server", "sites")  # who evaluates: the server on its own [data], or each site on its own
PERMITTED = ("none", "metrics", "scores")  # what a site may let go of an evaluation


@dataclass(frozen=True)
class ServerSettings:
    """Who takes part, and how long to wait for them. Paths are relative to the file."""

    sites: tuple[str, ...]  # their order is the clients' numbers, by which everything random is drawn
    out: str = "run"  # the run's folder: metrics, checkpoints, the model
    minimum: int = 1  # updates without which a round is not counted
    deadline: float = 600.0  # seconds that a site has to answer
    join: float = 600.0  # seconds until all sites must have said hello, once
    patience: int = 3  # tries of one round with too few updates, then the run ends
    wire: str = "float32"  # of weights and G on their way; bfloat16: half the bytes
    evaluate: str = "server"  # on the server's own [data]; sites: on theirs, as far as each lets its results go
    megabytes: float = 1000.0  # the largest answer it takes
    influence: float = 20.0  # times the usual size that an update may have (see influence.py); 0: any size

    def __post_init__(self) -> None:
        require(len(self.sites) > 0, "sites must name at least one site")
        require(len(set(self.sites)) == len(self.sites), f"sites must differ, got {', '.join(self.sites)}")
        within = 1 <= self.minimum <= len(self.sites)
        require(within, f"minimum must lie between 1 and the number of sites, {len(self.sites)}, got {self.minimum}")
        for name in ("deadline", "join"):
            require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        require(self.patience >= 1, f"patience must be at least 1, got {self.patience}")
        require(self.megabytes > 0, f"megabytes must be positive, got {self.megabytes}")
        proportionate = self.influence == 0 or self.influence > 1
        require(proportionate, f"influence must be more than 1, or 0 for no limit, got {self.influence}")
        if self.wire not in PRECISIONS:
            raise unknown("wire", self.wire, PRECISIONS)
        if self.evaluate not in JUDGES:
            raise unknown("evaluate", self.evaluate, JUDGES)


@dataclass(frozen=True)
class SiteSettings:
    """Who this site is, where it keeps what is its own, and what it lets happen. Paths are relative to the file."""

    name: str
    part: int = 0  # which client of its data this site is; a site with data of its own has one
    state: str = "state"  # u and counters of runs
    cache: str = "cache"  # its data, ready to be opened at once
    megabytes: float = 1000.0  # the largest message it takes
    models: tuple[str, ...] = ()  # networks that a run may name; one outside fedxl as package.module:factory
    risks: tuple[str, ...] = ()  # likewise
    algorithms: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()  # outside fedxl, as package.module:function; fedxl's own are always allowed
    rounds: int = 1000  # requests to train that it answers, in all runs together
    steps: int = 1000  # local steps of one
    evaluate: str = "none"  # what it lets go of evaluations on its own data: metrics (AUROC, ...), or every score
    evaluations: int = 1000  # requests to evaluate that it answers, in all runs together
    digest: str = ""  # of the one experiment that it takes part in; "": of any that the above allows
    device: str = "auto"

    def __post_init__(self) -> None:
        require(bool(self.name), "a site needs a name")
        require(self.part >= 0, f"part must not be negative, got {self.part}")
        for name in ("rounds", "steps", "evaluations"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        require(self.megabytes > 0, f"megabytes must be positive, got {self.megabytes}")
        require(
            self.evaluate != "figures", 'evaluate = "figures" is called "metrics" now; write evaluate = "metrics"'
        )
        if self.evaluate not in PERMITTED:
            raise unknown("evaluate", self.evaluate, PERMITTED)


@dataclass(frozen=True)
class Server:
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


def read_server(path: Path) -> Server:
    """An experiment whose clients are sites. Its [data], if any, are the server's own, to validate and to test on."""
    tables = read_tables(path, (*SECTIONS, "server"))
    for name in ("server", "risk", "algorithm"):
        require(name in tables, f"{path} needs a section [{name}]")
    settings = call(ServerSettings, tables.pop("server"), "server")
    return Server(settings, Config(**{"data": {}, **tables}), path.resolve().parent)


def read_site(path: Path) -> SiteFile:
    tables = read_tables(path, ("site", "data"))
    for name in ("site", "data"):
        require(name in tables, f"{path} needs a section [{name}]")
    return SiteFile(call(SiteSettings, tables["site"], "site"), tables["data"], path.resolve().parent)

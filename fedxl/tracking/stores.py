"""TensorBoard: event files in the run's folder. MLflow: by default a database beside the run's folder."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fedxl.errors import UserError, require
from fedxl.files import read_json, write_json
from fedxl.tracking.tracker import FINISHED, STOPPED, Row, Tracked, scalars

FOLDER = "tensorboard"
FILE = "mlflow.json"  # in the run's folder: its number in the store
EXPERIMENT = "fedxl"  # unless MLFLOW_EXPERIMENT_NAME says another
STATES = {FINISHED: "FINISHED", STOPPED: "KILLED"}  # in MLflow's words; anything else has FAILED
LONGEST = 500  # characters of a setting; stores differ in what they take
AT_ONCE = 100  # settings in a request, MLflow's limit
# A run must not wait minutes for a server that is gone. What a user has set counts.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class TensorBoard:
    """Writes event files into the run's folder."""

    writer: Any = None

    def __init__(self) -> None:
        try:
            from torch.utils import tensorboard
        except ImportError:
            raise UserError("tracking with TensorBoard needs tensorboard; pip install 'fedxl[tensorboard]'") from None
        self.library = tensorboard

    def begin(self, run: Tracked) -> None:
        # Readers drop what earlier files hold from this step on; what is valid of it is written again.
        purge = max(run.round, 0) if run.resumed else None
        self.writer = self.library.SummaryWriter(str(run.folder / FOLDER), purge_step=purge)
        metrics = {key: None for split in ("validation", "test") for key in scalars({split: {run.metric: 0.0}})}
        plain = (bool, int, float, str)  # what the table of hyper-parameters takes
        shown = {name: v if isinstance(v, plain) else str(v) for name, v in run.settings.items()}
        experiment, start, _ = self.library.summary.hparams(shown, metrics)
        for summary in (experiment, start):
            self.writer.file_writer.add_summary(summary, max(run.round, 0))
        for row in run.history:
            if purge is not None and row["round"] >= purge:
                self.write(row)

    def write(self, row: Row) -> None:
        for name, value in scalars(row).items():
            self.writer.add_scalar(name, value, row["round"])
        self.writer.flush()  # so that whoever looks sees it now, and a kill loses nothing

    def end(self, state: str) -> None:
        self.writer.close()


class MLflow:
    """Writes to the store at `uri`; empty: MLFLOW_TRACKING_URI, else mlflow.db beside the run's folder."""

    def __init__(self, uri: str = "") -> None:
        require(not _password(uri), "tracking_uri must hold no password: it is stored; set MLFLOW_TRACKING_PASSWORD")
        self.given = uri
        try:
            with _quietly():
                import mlflow
                import sqlalchemy  # noqa: F401  (mlflow-skinny leaves out what its database needs)
        except ImportError:
            raise UserError("tracking with MLflow needs mlflow; pip install 'fedxl[mlflow]'") from None
        self.library: Any = mlflow
        self.client: Any = None
        self.id = ""
        self.known: dict[str, int] = {}  # by metric: the last step that the store has

    def begin(self, run: Tracked) -> None:
        local = run.folder.resolve().parent / "mlflow.db"
        uri = self.given or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{local}"
        with _quietly():
            self.client = self.library.MlflowClient(uri)
            self.id = _id(run.folder / FILE, uri) if run.resumed else ""
            if self.id:
                self._take_up()
            else:
                self._create(run, uri, local.parent)
        for row in run.history:
            self.write(row)

    def _create(self, run: Tracked, uri: str, folder: Path) -> None:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self.client.get_experiment_by_name(name)
        # Without a place for artifacts MLflow would take one below the current folder.
        place = (folder / "mlflow-artifacts").as_uri() if uri.startswith("sqlite:") else None
        number = found.experiment_id if found else self.client.create_experiment(name, artifact_location=place)
        self.id = self.client.create_run(number, run_name=run.name).info.run_id
        write_json(run.folder / FILE, {"uri": uri, "run": self.id})
        entities = self.library.entities
        params = [entities.Param(name, str(value)[:LONGEST]) for name, value in run.settings.items()]
        for begin in range(0, len(params), AT_ONCE):
            self.client.log_batch(self.id, params=params[begin : begin + AT_ONCE])

    def _take_up(self) -> None:
        """A store only ever adds. A run that goes on gives the same numbers again; those it has are left out."""
        self.client.update_run(self.id, status="RUNNING")
        for name in (_mark({}), _mark({"test": {}})):
            steps = [metric.step for metric in self.client.get_metric_history(self.id, name)]
            self.known[name] = max(steps, default=-1)

    def write(self, row: Row) -> None:
        mark, step = _mark(row), int(row["round"])
        if step <= self.known.get(mark, -1):
            return
        now = int(time.time() * 1000)
        metrics = [self.library.entities.Metric(name, value, now, step) for name, value in scalars(row).items()]
        with _quietly():
            self.client.log_batch(self.id, metrics=metrics)
        self.known[mark] = step

    def end(self, state: str) -> None:
        with _quietly():
            self.client.set_terminated(self.id, STATES.get(state, "FAILED"))


def _mark(row: Row) -> str:
    """A metric that every row of its kind has: evaluations, and the last row, with the test data."""
    return "run/best_round" if "test" in row else "run/steps"


def _id(file: Path, uri: str) -> str:
    """The number of this run in the store; empty if it was not tracked there."""
    try:
        content = read_json(file)
    except (OSError, UserError):
        return ""
    return str(content.get("run", "")) if content.get("uri") == uri else ""


def _password(uri: str) -> bool:
    try:
        return urlsplit(uri).password is not None
    except ValueError as error:
        raise UserError(f"tracking_uri {uri!r} is no address: {error}") from None


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without MLflow's telemetry, long waits, warnings about its own code and lines about its database."""
    ours = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    loggers = [logging.getLogger(name) for name in ("alembic", "mlflow")]
    levels = [logger.level for logger in loggers]
    os.environ |= ours
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for name in ours:
            os.environ.pop(name, None)

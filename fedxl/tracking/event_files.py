"""TensorBoard: event files in the run's folder, so that `tensorboard --logdir runs` shows all runs below it."""

from __future__ import annotations

from typing import Any

from fedxl.errors import UserError
from fedxl.tracking.tracker import Row, Tracked, scalars

FOLDER = "tensorboard"


class TensorBoard:
    """Writes event files into the run's folder."""

    writer: Any = None

    def __init__(self) -> None:
        self.library = _require_tensorboard()

    def begin(self, run: Tracked) -> None:
        # Readers drop what earlier files hold from this step on; what is valid of it is written again.
        purge = max(run.round, 0) if run.resumed else None
        self.writer = self.library.SummaryWriter(str(run.folder / FOLDER), purge_step=purge)
        metrics = {key: None for split in ("validation", "test") for key in scalars({split: {run.metric: 0.0}})}
        shown = {name: _shown(value) for name, value in run.settings.items()}
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


def _shown(value: Any) -> bool | int | float | str:
    """A setting as the table of hyper-parameters takes it."""
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def _require_tensorboard() -> Any:
    try:
        from torch.utils import tensorboard
    except ImportError:
        raise UserError("tracking with TensorBoard needs tensorboard; pip install 'fedxl[tensorboard]'") from None
    return tensorboard

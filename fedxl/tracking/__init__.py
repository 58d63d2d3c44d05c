"""All trackers by name: where a run's metrics go besides its own folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fedxl import registry
from fedxl.errors import require
from fedxl.options import accepted
from fedxl.tracking.stores import MLflow, TensorBoard
from fedxl.tracking.tracker import Tracker, Trackers

__all__ = ["TRACKERS", "MLflow", "TensorBoard", "Tracker", "trackers"]

TRACKERS: Mapping[str, Callable[..., Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def trackers(names: Sequence[str], uri: str, say: Callable[[str], None]) -> Trackers:
    """The trackers of these names, ours or "package.module:Class". `uri` goes to those that take one."""
    kinds = {name: registry.find("tracker", name, TRACKERS) for name in names}
    takers = [name for name, kind in kinds.items() if "uri" in accepted(kind)]
    require(bool(takers) or not uri, 'tracking_uri is for MLflow: add "mlflow" to track')
    return Trackers({name: kind(uri) if name in takers else kind() for name, kind in kinds.items()}, say)

"""Predictions for new examples: scores, and what they mean by the run's validation scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedxl.data.forms import features, is_frame
from fedxl.data.holders import read
from fedxl.data.preparation import Preparation
from fedxl.data.source import TensorSource, checked
from fedxl.data.table import prepared
from fedxl.errors import UserError, first_line, require
from fedxl.evaluation.scored import Floats, Ints, Scored
from fedxl.models import scorer, weights_of
from fedxl.models.precision import PRECISIONS, products
from fedxl.progress import progress
from fedxl.training.members import Form

if TYPE_CHECKING:  # it loads scipy, which training does not need
    from fedxl.evaluation.decision import Meaning, Wish

BLOCK = 4096  # examples scored at a time
Scorer = Callable[[Tensor], Tensor]  # [B, ...] -> [B], of several labels [B, L]


class Prediction(NamedTuple):
    """For each example its raw score, and where validation scores were kept, its probability and its class.

    Of several labels these are [n, L]. A label without enough validation data has NaN and -1.
    """

    scores: Floats  # [n]
    probabilities: Floats | None  # of the positive class, calibrated
    classes: Ints | None  # 1 at or above the threshold
    labels: tuple[str, ...] = ()  # of several labels, the name of each column
    undecided: Mapping[str, str] = MappingProxyType({})  # by label: why it has none


def scorer_of(network: nn.Module, device: torch.device) -> Scorer:
    """The network as a function of examples, in evaluation mode and full precision."""
    network = network.to(device)
    weights, score = weights_of(network), scorer(network, training=False)

    def scores(x: Tensor) -> Tensor:
        with torch.no_grad(), products(PRECISIONS["fp32"]):
            return score(weights, x.to(device))[0].cpu()

    return scores


def examples(x: Any, form: Form, preparation: Preparation | None = None, where: str = "x") -> TensorSource:
    """Checked examples of the shape and type that the network takes, in any form that `fit` takes.

    preparation: how tables become examples. Then x may be a data frame, or the path of a file, like those of the run.
    """
    if isinstance(x, (str, Path)) or (is_frame(x) and preparation is not None):
        require(preparation is not None, f"{where}: this model was trained on arrays and cannot prepare {x!r}")
        assert preparation is not None
        x = prepared(x, preparation).x if is_frame(x) else preparation.read(x).x
    elif isinstance(x, Dataset):
        x = read(x, where)[0]
    found = features(x, where)
    x = found.x
    if found.columns and form.columns and found.columns != form.columns:
        missing = [name for name in form.columns if name not in found.columns]
        require(not missing, f"{where} lacks the column(s) {', '.join(map(repr, missing[:4]))} of the training data")
        x = x[:, [found.columns.index(name) for name in form.columns]]
    wanted = f"[n, {', '.join(map(str, form.shape))}]"
    right = tuple(x.shape[1:]) == form.shape
    require(right, f"{where}: this model takes examples of shape {wanted}, not {list(x.shape)}")
    whole = not getattr(torch, form.dtype).is_floating_point
    require(not (whole and x.is_floating_point()), f"{where}: this model takes whole numbers, not {x.dtype}")
    return checked(x, torch.zeros(len(x), dtype=torch.int64), where)


def predict(score: Scorer, source: TensorSource, form: Form, decision: Meaning | None) -> Prediction:
    """Score a block of examples at a time."""
    scalar = bool(form.labels) or not form.score_shape
    require(scalar, "this model gives vectors, not scores: there is nothing to decide by")
    found = np.empty((len(source), *form.score_shape), np.float64)
    with progress("scoring", len(source)) as advance:
        for indices in torch.arange(len(source)).split(BLOCK):
            x = source.fetch(indices).to(getattr(torch, form.dtype))
            found[indices.numpy()] = _scored(score, x, form.score_shape)
            advance(len(indices))
    bad = np.flatnonzero(~np.isfinite(found.reshape(len(found), -1)).all(1))
    require(not len(bad), f"{len(bad)} examples have no finite score, the first of them is number {bad[:1]}")
    if decision is None:
        return Prediction(found, None, None, form.labels)
    undecided = getattr(decision, "undecided", {})  # of several labels
    return Prediction(found, decision.probabilities(found), decision.classes(found), form.labels, undecided)


def _scored(score: Scorer, x: Tensor, shape: tuple[int, ...]) -> Floats:
    try:
        h = score(x)
    except UserError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise UserError(
            f"the model cannot score examples of shape {list(x.shape[1:])}: {first_line(error)}"
        ) from error
    h = h[:, None] if shape == (1,) and h.ndim == 1 else h  # one of several labels
    require(h.shape == (len(x), *shape), f"the model gave scores of shape {list(h.shape)} for {len(x)} examples")
    return h.double().numpy()


def decision_for(
    form: Form, scored: Mapping[str, Scored], by_label: Mapping[str, Scored], wish: Wish
) -> tuple[Meaning | None, str]:
    """What scores mean by the validation scores; None, and why, if they cannot say.

    scored: by split, of one label. by_label: the validation scores of each of several labels.
    """
    from fedxl.evaluation.decision import decide, decide_labels, why_undecided

    found: Meaning | None
    if form.labels:
        found, why = decide_labels(form.labels, by_label, wish)
    else:
        why = why_undecided(scored)
        found = None if why else decide(scored, wish)
    require(not (why and wish.asks), f"there is no threshold of {wish.rule}: {why}")
    return found, why

"""How much a client counts for each of several labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from fedxl.algorithms.protocol import Share
from fedxl.data.federation import Federation, Weighting
from fedxl.errors import printable, require
from fedxl.risks import Side

Counts = npt.NDArray[np.int64]


def label_counts(federation: Federation, side: Side) -> Counts:
    """Each client's examples of a side, label by label: [N, L]."""
    counts = np.zeros((len(federation.parts), federation.labels), np.int64)
    for client, held in enumerate(federation.by_label(federation.parts, side)):
        counts[client, list(held)] = [len(found) for found in held.values()]
    return counts


def with_labels(share: Share, first: Counts, second: Counts, seconds: Sequence[int], weighting: Weighting) -> Share:
    """Shares of all clients with their factors for each label.

    first, second: examples of S1 and of S2 by client and label, [N, L]. seconds: those of S2 for any label. For S1
    the rule is that of one label. An example of S2 is drawn whatever its labels are, so a client's part of a label's
    S2 is its part of S2, times the fraction that counts for the label, over the sum of these.
    """
    part = share.part.numpy()
    mass = (first > 0).astype(np.float64) if weighting == "clients" else first.astype(np.float64)
    mass = mass * (part > 0)[:, None]  # who is never there counts for nothing
    drawn = (part * share.second.numpy())[:, None] * second / np.maximum(1, np.array(seconds))[:, None]
    of = np.where(part > 0, part, 1.0)[:, None]
    factors = [each / np.maximum(each.sum(0), 1e-300) / of for each in (mass, drawn)]
    return share._replace(labels=torch.from_numpy(np.stack(factors, 1)))  # [N, 2, L]


def check_labels(first: Counts, second: Counts, names: Sequence[str], needs_both: bool) -> None:
    """One line if some label cannot be trained."""
    for label, name in enumerate(names):
        for side, counts in (("S1", first), ("S2", second)):
            require(
                bool(counts[:, label].any()),
                f"no client holds an example of {side} for the label '{name}'; leave it out",
            )
        both = bool(((first[:, label] > 0) & (second[:, label] > 0)).any())
        require(
            both or not needs_both,
            f"no client holds both classes of the label '{name}', so nobody would train it; leave it out, or set "
            "one_class = 'train'",
        )


def check_label_names(of_risk: Sequence[str], of_data: Sequence[str]) -> None:
    """One line if the risk calls the labels of a table otherwise than the table does, or in another order."""
    same = not of_data or list(of_risk) == list(of_data)
    wanted = ", ".join(f'"{printable(name, 40)}"' for name in of_data)
    require(same, f"the risk must name the labels as the table does, in the same order: labels = [{wanted:.500}]")

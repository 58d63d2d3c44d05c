"""How far one site may move the model: the size of its update is compared with the others'."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

ENOUGH = 3  # updates of one round that can be compared with each other
REMEMBERED = 20  # rounds that are remembered

Sizes = Mapping[str, float]  # what an algorithm's `check_update` found, by name


@dataclass
class Influence:
    """Refuses updates that are out of proportion, and remembers what is usual.

    The usual size is the upper quartile of a round, or the median of this over the last rounds if that is larger: in
    a round in which most sites hardly learn anything, one that does is not to blame. So up to a quarter of the sites
    may be hostile and the usual is still what an honest site has. A round of two updates has the smaller of them as
    its usual size, and a round of one has none of its own. A site that is alone in the first round of a run cannot be
    compared with anything. Sizes of 0 move nothing: they are always accepted, and say nothing of what is usual.

    Honest sizes have heavy tails. Among 29,766 updates of 97 runs (digits at 16 sites, six of one class; all
    algorithms at the learning rates of the demo, all risks; 1 to 64 local steps, cohorts of 1 to 16, either
    weighting, rare positives, strong shifts) the largest was 13.7 times the usual size. The default limit of 20 is
    beyond these. A hostile site may still move the model by as much as a few honest ones; what it does below the
    limit is not noticed.
    """

    most: float  # times the usual size; 0: anything is accepted
    usual: dict[str, list[float]] = field(default_factory=dict)  # by name: of the last rounds, oldest first

    def excesses(self, updates: Mapping[int, Sizes]) -> dict[int, str]:
        """Which updates are out of proportion, and why."""
        usual = {name: self._usual(name, updates.values()) for name in _names(updates.values())}
        found: dict[int, str] = {}
        for row, sizes in updates.items():
            for name, size in sizes.items():
                if self.most and usual[name] and size > self.most * usual[name]:
                    times = f"{size / usual[name]:.3g} times as large as usual"
                    found[row] = f"its {name} is {times}; up to {self.most:g} times is accepted"
        return found

    def remember(self, updates: Iterable[Sizes]) -> None:
        """The sizes of a round whose updates were accepted."""
        accepted = list(updates)
        for name in _names(accepted):
            if present := _present(name, accepted):
                self.usual[name] = [*self.usual.get(name, []), _upper_quartile(present)][-REMEMBERED:]

    def _usual(self, name: str, updates: Iterable[Sizes]) -> float:
        """What a size is compared with; 0: there is nothing."""
        present = _present(name, updates)
        before = median(self.usual[name]) if name in self.usual else 0.0
        if len(present) >= ENOUGH:
            return max(before, _upper_quartile(present))
        return max(before, min(present)) if len(present) > 1 else before


def _names(updates: Iterable[Sizes]) -> set[str]:
    return {name for sizes in updates for name in sizes}


def _present(name: str, updates: Iterable[Sizes]) -> list[float]:
    return [sizes[name] for sizes in updates if sizes.get(name, 0.0) > 0]


def _upper_quartile(sizes: Sequence[float]) -> float:
    """The largest size but for the top quarter of the others."""
    return sorted(sizes)[3 * (len(sizes) - 1) // 4]

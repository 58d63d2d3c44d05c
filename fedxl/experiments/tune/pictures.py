"""A search in one picture: the best value so far against trials, and the metric against each setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedxl.experiments.tune.plan import Plan
from fedxl.experiments.tune.search import Found, natural
from fedxl.experiments.tune.space import Choice, Range
from fedxl.experiments.tune.trials import Trial
from fedxl.reporting.plots import STYLES, require_matplotlib

MARKS = "osD^vPX"  # one an algorithm: told apart without colour, too
ACROSS = 3  # panels in a row


def best_so_far(trials: Sequence[Trial], metric: str) -> list[float]:
    """After each trial, the best metric so far; NaN as long as all have failed."""
    found, best = [], -math.inf
    for trial in trials:
        best = max(best, trial.value)
        found.append(natural(best, metric) if math.isfinite(best) else math.nan)
    return found


def picture(plan: Plan, found: Found, path: Path) -> None:
    plt = require_matplotlib()
    settings = list(dict.fromkeys(name for space in plan.spaces.values() for name in space))
    count = 1 + len(settings)
    across = min(ACROSS, count)
    down = math.ceil(count / across)
    figure, axes = plt.subplots(down, across, figsize=(4.2 * across, 3.4 * down), layout="constrained", squeeze=False)
    panels = list(axes.flat)
    metric = plan.metric.removeprefix("-")
    styles = {name: (*STYLES[i % len(STYLES)], MARKS[i % len(MARKS)]) for i, name in enumerate(found)}
    for name, trials in found.items():
        colour, style, _ = styles[name]
        numbers = range(1, len(trials) + 1)
        values = best_so_far(trials, plan.metric)
        panels[0].step(numbers, values, where="post", color=colour, ls=style, lw=1.8, label=name)
        panels[0].plot(numbers[-1:], values[-1:], "o", color=colour, ms=4)
    panels[0].set(xlabel="trials", ylabel=f"best {metric} so far", title="Validation data")
    panels[0].legend(frameon=False, fontsize=8)
    low, high = _limits(plan, found)
    for axis, setting in zip(panels[1:], settings, strict=False):
        for name, trials in found.items():
            if setting in plan.spaces[name]:
                _against(axis, plan, setting, trials, styles[name], low)
        _scale(axis, [space[setting] for space in plan.spaces.values() if setting in space])
        axis.set(xlabel=setting, ylabel=metric, ylim=(low - 0.06 * (high - low), high + 0.06 * (high - low)))
    for axis in panels[count:]:
        axis.set_visible(False)
    for axis in panels[:count]:
        axis.grid(alpha=0.25)
    longest = plan.rungs[-1].rounds
    small = f"; small marks: fewer than {longest} rounds" if len(plan.rungs) > 1 else ""
    figure.suptitle(
        f"{plan.settings.trials} trials for each algorithm (x: diverged or collapsed{small})", fontsize=10
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _limits(plan: Plan, found: Found) -> tuple[float, float]:
    """The range of metrics shown: the worst of the trials may be far away from all others, so a tenth is left out."""
    values = sorted(
        natural(t.value, plan.metric) for trials in found.values() for t in trials if math.isfinite(t.value)
    )
    if not values:
        return 0.0, 1.0
    cut = len(values) // 10
    worst_first = plan.metric.startswith("-")
    low, high = (values[0], values[-1 - cut]) if worst_first else (values[cut], values[-1])
    return (low, high) if high > low else (low - 0.01, high + 0.01)


def _against(
    axis: Any, plan: Plan, setting: str, trials: Sequence[Trial], style: tuple[Any, ...], floor: float
) -> None:
    colour, _, mark = style
    longest = plan.rungs[-1].rounds
    for trial in trials:
        if trial.last is None:
            continue
        x = _place(plan.spaces[trial.algorithm][setting], trial.settings[setting])
        if not math.isfinite(trial.value):
            axis.plot(x, floor, "x", color=colour, ms=5, clip_on=False)
            continue
        whole = trial.last.rounds == longest
        y = max(natural(trial.value, plan.metric), floor)  # what lies below the picture stands at its edge
        axis.plot(x, y, mark, color=colour, ms=6 if whole else 3, alpha=0.9 if whole else 0.5)


def _place(space: Range | Choice, value: Any) -> float:
    return float(value) if isinstance(space, Range) else float(space.values.index(value))


def _scale(axis: Any, spaces: Sequence[Range | Choice]) -> None:
    first = spaces[0]
    if isinstance(first, Choice):
        axis.set_xticks(range(len(first.values)), [_word(value) for value in first.values], fontsize=8)
    elif first.log:
        axis.set_xscale("log")


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

"""A search in one picture: the best value so far against trials, and the metric against each setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedxl.experiments.tune.plan import Plan
from fedxl.experiments.tune.search import Found, best_of, in_words, natural, shown
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
        colour, style, mark = styles[name]
        numbers = range(1, len(trials) + 1)
        values = best_so_far(trials, plan.metric)
        line = {"color": colour, "ls": style, "marker": mark, "markevery": [-1], "ms": 6}
        panels[0].step(numbers, values, where="post", lw=1.8, label=name, **line)
    panels[0].set(xlabel="trials", ylabel=f"best {metric} so far", title="Validation data")
    panels[0].xaxis.get_major_locator().set_params(integer=True)
    panels[0].legend(frameon=False, fontsize=8)
    low, high = limits = _limits(plan, found)
    room = 0.12 * (high - low)
    for axis, setting in zip(panels[1:], settings, strict=False):
        for name, trials in found.items():
            if setting in plan.spaces[name]:
                _against(axis, plan, setting, trials, styles[name], limits)
        _scale(axis, [space[setting] for space in plan.spaces.values() if setting in space])
        axis.set(xlabel=setting, ylabel=metric, ylim=(low - room, high + room))
    for axis in panels[count:]:
        axis.set_visible(False)
    for axis in panels[:count]:
        axis.grid(alpha=0.25)
    longest = plan.rungs[-1].rounds
    small = f"; small marks: fewer than {longest} rounds" if len(plan.rungs) > 1 else ""
    told = f"{plan.settings.trials} trials for each algorithm (x: diverged or collapsed{small})"
    figure.suptitle(f"{_message(plan, found)}\n{told}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _message(plan: Plan, found: Found) -> str:
    """What the picture says."""
    best = [trial for trials in found.values() if (trial := best_of(trials)) is not None]
    if not best:
        return "Every trial failed"
    winner = max(best, key=lambda trial: trial.value)
    return f"Best: {shown(winner.value, plan.metric)} by {winner.algorithm} with {in_words(winner.settings)}"


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
    axis: Any,
    plan: Plan,
    setting: str,
    trials: Sequence[Trial],
    style: tuple[Any, ...],
    limits: tuple[float, float],
) -> None:
    """One mark a trial. What lies beyond the limits stands at the edge, and what failed beyond the worse edge."""
    colour, _, mark = style
    low, high = limits
    room, longest = 0.07 * (high - low), plan.rungs[-1].rounds
    beyond = high + room if plan.metric.startswith("-") else low - room
    for trial in trials:
        if trial.last is None:
            continue
        x = _place(plan.spaces[trial.algorithm][setting], trial.settings[setting])
        if not math.isfinite(trial.value):
            axis.plot(x, beyond, "x", color=colour, ms=5)
            continue
        whole = trial.last.rounds == longest
        y = min(max(natural(trial.value, plan.metric), low), high)
        axis.plot(x, y, mark, color=colour, ms=6 if whole else 3, alpha=0.9 if whole else 0.5)


def _place(space: Range | Choice, value: Any) -> float:
    return float(value) if isinstance(space, Range) else float(space.values.index(value))


def _scale(axis: Any, spaces: Sequence[Range | Choice]) -> None:
    first = spaces[0]
    if isinstance(first, Choice):
        axis.set_xticks(range(len(first.values)), [_word(value) for value in first.values], fontsize=8)
        axis.set_xlim(-0.4, len(first.values) - 0.6)
        return
    axis.set_xlim(min(_end(each, 0) for each in spaces), max(_end(each, 1) for each in spaces))
    if first.log:
        from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.tick_params(axis="x", labelsize=8)


def _end(space: Range | Choice, side: int) -> float:
    """A little beyond the end of a range, so that marks at the end are whole."""
    if isinstance(space, Choice):
        return float(side * (len(space.values) - 1))
    room = 0.04
    if space.log:
        factor = math.exp(room * math.log(space.high / space.low))
        return space.high * factor if side else space.low / factor
    return space.high + room * (space.high - space.low) if side else space.low - room * (space.high - space.low)


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

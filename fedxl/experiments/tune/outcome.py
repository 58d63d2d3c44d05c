"""What a search came to: a table, a picture, and the best settings as configs that are ready to run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedxl.config.experiment import dump
from fedxl.errors import UserError, printable, require
from fedxl.experiments.tune.plan import Choice, Distribution, Plan, Range
from fedxl.experiments.tune.search import Found, best_of, in_words, natural, number_text, ranked, shown
from fedxl.experiments.tune.trials import Trial
from fedxl.files import write_atomically, write_json
from fedxl.reporting.plots import STYLES, require_matplotlib
from fedxl.reporting.text import as_markdown, mean_with_spread, over_seeds

TOP = 5  # trials of each algorithm in the longer table
ALL_FAILED = "every trial has diverged or collapsed; search smaller learning rates"
MARKS = "osD^vPX"  # one per algorithm: told apart without colour, too
ACROSS = 3  # panels in a row


def columns(plan: Plan) -> list[str]:
    return ["algorithm", f"validation {plan.metric.removeprefix('-')}", "settings", "trial", "failed", "rounds"]


def rows(plan: Plan, found: Found) -> list[list[str]]:
    """The best trial of each algorithm, the best algorithm first."""
    lines = []
    for name, trials in found.items():
        best = best_of(trials)
        failed = sum(bool(trial.last.failed) for trial in trials)
        spent = sum(trial.last.spent for trial in trials)
        cells = ["all failed", "", ""]
        if best:
            cells = [_value(plan, best), in_words(best.settings), f"{best.number} of {len(trials)}"]
        row = [name, *cells, str(failed), f"{spent} of {plan.budget}"]
        lines.append((best.value if best else -math.inf, row))
    return [row for _, row in sorted(lines, key=lambda line: -line[0])]


def top(plan: Plan, found: Found) -> list[list[str]]:
    """The best trials of each algorithm, those that trained longest first."""
    lines: list[list[str]] = []
    for name, trials in found.items():
        for trial in ranked(trials)[:TOP]:
            rounds = str(trial.last.rounds)
            lines.append([name, str(trial.number), _value(plan, trial), rounds, in_words(trial.settings)])
    return lines


def _value(plan: Plan, trial: Trial) -> str:
    return mean_with_spread([natural(value, plan.metric) for value in trial.last.values])


def save(plan: Plan, found: Found, folder: Path, say: Callable[[str], None]) -> list[str]:
    """tune.md, results.json, best.toml, one config for each algorithm and tune.png: the names of what was written."""
    names = ["best.toml", "tune.md", "results.json"]
    ended = {name: trial for name, trials in found.items() if (trial := best_of(trials)) is not None}
    require(bool(ended), ALL_FAILED)
    write_json(folder / "results.json", _as_json(plan, found, ended))
    write_atomically(folder / "tune.md", _as_markdown(plan, found).encode())
    for name, trial in ended.items():
        stem = "".join(char if char.isalnum() or char in "_-." else "_" for char in name)
        write_atomically(folder / f"best-{stem}.toml", _as_toml(plan, trial, len(found[name])).encode())
    winner = max(ended.values(), key=lambda trial: trial.value)
    write_atomically(folder / "best.toml", _as_toml(plan, winner, len(found[winner.algorithm])).encode())
    try:
        picture(plan, found, winner, folder / "tune.png")
        names.append("tune.png")
    except UserError as error:
        say(f"no picture: {error}")
    return names


def _as_toml(plan: Plan, trial: Trial, trials: int) -> str:
    head = (
        f"# Chosen by `fedxl tune`: trial {trial.number} of {trials} of {printable(trial.algorithm)}, "
        f"validation {plan.metric.removeprefix('-')} {_value(plan, trial)} ({over_seeds(plan.settings.seeds)}).\n"
        "# The best of many trials looks better on validation data than it is: test data were not used.\n\n"
    )
    return head + dump(plan.configure(trial.algorithm, trial.settings))


def _as_markdown(plan: Plan, found: Found) -> str:
    tune = plan.settings
    rungs = ", ".join(f"{rung.trials} to round {rung.rounds}" for rung in plan.rungs)
    head = (
        f"# Settings by {tune.sampler}\n\n{tune.trials} trials for each algorithm ({rungs}); "
        f"{over_seeds(tune.seeds)}; validation data only.\n\n"
    )
    best = as_markdown(rows(plan, found), columns(plan))
    more = as_markdown(top(plan, found), ["algorithm", "trial", columns(plan)[1], "rounds", "settings"])
    return f"{head}{best}\n## The best trials\n\n{more}"


def _as_json(plan: Plan, found: Found, best: Mapping[str, Trial]) -> dict[str, Any]:
    return {
        "metric": plan.metric,
        "budget": plan.budget,
        "rungs": [rung._asdict() for rung in plan.rungs],
        "best": {name: numbers(plan, trial) for name, trial in best.items()},
        "trials": {name: [numbers(plan, trial) for trial in trials] for name, trials in found.items()},
    }


def numbers(plan: Plan, trial: Trial) -> dict[str, Any]:
    last = trial.last
    return {
        "trial": trial.number,
        "settings": trial.settings,
        "value": None if last.value is None else natural(last.value, plan.metric),
        "rounds": last.rounds,
        "spent": last.spent,
        "failed": last.failed,
    }


def best_so_far(trials: Sequence[Trial], metric: str) -> list[float]:
    """After each trial, the best metric so far; NaN as long as all have failed."""
    best = itertools.accumulate((trial.value for trial in trials), max)
    return [natural(value, metric) if math.isfinite(value) else math.nan for value in best]


def picture(plan: Plan, found: Found, winner: Trial, path: Path) -> None:
    plt = require_matplotlib()
    settings = list(dict.fromkeys(name for space in plan.spaces.values() for name in space))
    count = 1 + len(settings)
    across = min(ACROSS, count)
    down = math.ceil(count / across)
    figure, axes = plt.subplots(down, across, figsize=(4.2 * across, 3.4 * down), layout="constrained", squeeze=False)
    panels, metric = list(axes.flat), plan.metric.removeprefix("-")
    styles = {name: (*STYLES[i % len(STYLES)], MARKS[i % len(MARKS)]) for i, name in enumerate(found)}
    for name, trials in found.items():
        colour, style, mark = styles[name]
        numbers = range(1, len(trials) + 1)
        line = {"color": colour, "ls": style, "lw": 1.8, "marker": mark, "markevery": [-1], "ms": 6}
        panels[0].step(numbers, best_so_far(trials, plan.metric), where="post", label=name, **line)
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
    for number, axis in enumerate(panels):
        axis.grid(alpha=0.25)
        axis.set_visible(number < count)
    longest = plan.rungs[-1].rounds
    small = f"; small marks: fewer than {longest} rounds" if len(plan.rungs) > 1 else ""
    told = f"{plan.settings.trials} trials for each algorithm (x: diverged or collapsed{small})"
    message = f"Best: {shown(winner.value, plan.metric)} by {winner.algorithm} with {in_words(winner.settings)}"
    figure.suptitle(f"{message}\n{told}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _limits(plan: Plan, found: Found) -> tuple[float, float]:
    """The range of metrics shown: the worst of the trials may be far away from all others, so a tenth is left out."""
    finite = [trial.value for trials in found.values() for trial in trials if math.isfinite(trial.value)]
    values = sorted(natural(value, plan.metric) for value in finite)
    cut = len(values) // 10
    worst_first = plan.metric.startswith("-")
    low, high = (values[0], values[-1 - cut]) if worst_first else (values[cut], values[-1])
    return (low, high) if high > low else (low - 0.01, high + 0.01)


def _against(
    axis: Any, plan: Plan, setting: str, trials: Sequence[Trial], style: Sequence[Any], limits: tuple[float, float]
) -> None:
    """One mark per trial. What lies beyond the limits stands at the edge, and what failed beyond the worse edge."""
    colour, _, mark = style
    low, high = limits
    room, longest = 0.07 * (high - low), plan.rungs[-1].rounds
    beyond = high + room if plan.metric.startswith("-") else low - room
    for trial in trials:
        if not trial.outcomes:
            continue
        space, value = plan.spaces[trial.algorithm][setting], trial.settings[setting]
        x = value if isinstance(space, Range) else space.values.index(value)
        if not math.isfinite(trial.value):
            axis.plot(x, beyond, "x", color=colour, ms=5)
            continue
        whole = trial.last.rounds == longest
        y = min(max(natural(trial.value, plan.metric), low), high)
        axis.plot(x, y, mark, color=colour, ms=6 if whole else 3, alpha=0.9 if whole else 0.5)


def _scale(axis: Any, spaces: Sequence[Distribution]) -> None:
    first = spaces[0]
    if isinstance(first, Choice):
        axis.set_xticks(range(len(first.values)), [number_text(value) for value in first.values], fontsize=8)
        axis.set_xlim(-0.4, len(first.values) - 0.6)
        return
    axis.set_xlim(min(_end(each, 0) for each in spaces), max(_end(each, 1) for each in spaces))
    if first.kind == "log":
        from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.tick_params(axis="x", labelsize=8)


def _end(space: Distribution, side: int) -> float:
    """A little beyond the end of a range, so that marks at the end are whole."""
    if isinstance(space, Choice):
        return float(side * (len(space.values) - 1))
    room, end, other = 0.04, *((space.high, space.low) if side else (space.low, space.high))
    return end * (end / other) ** room if space.kind == "log" else end + room * (end - other)

"""What a search came to: a table, a picture, and the best settings as configs that are ready to run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedxl.config.experiment import dump
from fedxl.errors import UserError, printable, require
from fedxl.experiments.tune.pictures import picture
from fedxl.experiments.tune.plan import Plan
from fedxl.experiments.tune.search import Found, best_of, in_words, natural
from fedxl.experiments.tune.trials import Trial
from fedxl.files import write_atomically, write_json
from fedxl.reporting.text import as_markdown, mean_with_spread, over_seeds

TOP = 5  # trials of each algorithm in the longer table


def columns(plan: Plan) -> list[str]:
    return ["algorithm", f"validation {plan.metric.removeprefix('-')}", "settings", "trial", "failed", "rounds"]


def rows(plan: Plan, found: Found) -> list[list[str]]:
    """The best trial of each algorithm, the best algorithm first."""
    best = {name: best_of(trials) for name, trials in found.items()}
    order = sorted(found, key=lambda name: -(best[name].value if best[name] else -math.inf))  # type: ignore[union-attr]
    return [_row(plan, name, best[name], found[name]) for name in order]


def _row(plan: Plan, name: str, best: Trial | None, trials: Sequence[Trial]) -> list[str]:
    failed = sum(trial.last is not None and trial.last.value is None for trial in trials)
    spent = sum(trial.last.spent for trial in trials if trial.last)
    value = _value(plan, best) if best else "all failed"
    return [
        name,
        value,
        in_words(best.settings) if best else "",
        f"{best.number} of {len(trials)}" if best else "",
        str(failed),
        f"{spent} of {plan.budget}",
    ]


def top(plan: Plan, found: Found) -> list[list[str]]:
    """The best trials of each algorithm, those that trained longest first."""
    lines: list[list[str]] = []
    for name, trials in found.items():
        ended = [trial for trial in trials if math.isfinite(trial.value) and trial.last]
        ended.sort(key=lambda trial: (-(trial.last.rounds if trial.last else 0), -trial.value, trial.number))
        for trial in ended[:TOP]:
            rounds = str(trial.last.rounds if trial.last else 0)
            lines.append([name, str(trial.number), _value(plan, trial), rounds, in_words(trial.settings)])
    return lines


def _value(plan: Plan, trial: Trial) -> str:
    values = trial.last.values if trial.last else ()
    return mean_with_spread([natural(value, plan.metric) for value in values])


def save(plan: Plan, found: Found, folder: Path, say: Callable[[str], None]) -> list[str]:
    """tune.md, results.json, best.toml, one config for each algorithm and tune.png: the names of what was written."""
    names = ["best.toml", "tune.md", "results.json"]
    best = {name: best_of(trials) for name, trials in found.items()}
    ended = {name: trial for name, trial in best.items() if trial is not None}
    require(bool(ended), "every trial has diverged or collapsed; search smaller learning rates")
    write_json(folder / "results.json", _as_json(plan, found, ended))
    write_atomically(folder / "tune.md", _as_markdown(plan, found).encode())
    for name, trial in ended.items():
        write_atomically(folder / f"best-{_stem(name)}.toml", _as_toml(plan, trial, len(found[name])).encode())
    winner = max(ended.values(), key=lambda trial: trial.value)
    write_atomically(folder / "best.toml", _as_toml(plan, winner, len(found[winner.algorithm])).encode())
    try:
        picture(plan, found, folder / "tune.png")
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
        "best": {name: {"trial": trial.number, **_numbers(plan, trial)} for name, trial in best.items()},
        "trials": {
            name: [{"trial": trial.number, **_numbers(plan, trial)} for trial in trials]
            for name, trials in found.items()
        },
    }


def _numbers(plan: Plan, trial: Trial) -> dict[str, Any]:
    last = trial.last
    return {
        "settings": trial.settings,
        "value": None if last is None or last.value is None else natural(last.value, plan.metric),
        "rounds": last.rounds if last else 0,
        "spent": last.spent if last else 0,
        "failed": last.failed if last else "",
    }


def _stem(name: str) -> str:
    return "".join(char if char.isalnum() or char in "_-." else "_" for char in name)

"""Where a trial's settings come from: drawn at random, or proposed by Optuna from the trials before it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from fedxl.errors import UserError
from fedxl.experiments.tune.space import Distribution, Range, draw
from fedxl.experiments.tune.trials import Trial


def propose(
    sampler: str, space: Mapping[str, Distribution], seed: int, algorithm: str, number: int, before: Sequence[Trial]
) -> dict[str, Any]:
    """The settings of a trial. before: the finished ones of this algorithm, which random draws do not look at."""
    if sampler == "optuna":
        return _by_optuna(space, seed, algorithm, number, before)
    return draw(space, seed, algorithm, number)


def _by_optuna(
    space: Mapping[str, Distribution], seed: int, algorithm: str, number: int, before: Sequence[Trial]
) -> dict[str, Any]:
    """By TPE (Bergstra et al. 2011). The study is built anew from the trials, so that a search can be resumed."""
    optuna = require_optuna()
    known = {name: _distribution(optuna, each) for name, each in space.items()}
    own = zlib.crc32(f"{seed} {algorithm} {number}".encode())
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=own))
    for trial in before:
        study.add_trial(_told(optuna, trial, space, known))
    asked = study.ask(known).params
    return {name: _value(space[name], asked[name]) for name in space}


def _told(optuna: Any, trial: Trial, space: Mapping[str, Distribution], known: Mapping[str, Any]) -> Any:
    params = {name: _param(space[name], trial.settings[name]) for name in space}
    if math.isfinite(trial.value):
        return optuna.trial.create_trial(params=params, distributions=dict(known), value=trial.value)
    # Optuna ignores failed trials, but keeps away from those that were given up with a bad value.
    pruned = optuna.trial.TrialState.PRUNED
    return optuna.trial.create_trial(
        params=params, distributions=dict(known), state=pruned, intermediate_values={0: -math.inf}
    )


def _distribution(optuna: Any, given: Distribution) -> Any:
    kinds = optuna.distributions
    if not isinstance(given, Range):
        return kinds.CategoricalDistribution(range(len(given.values)))  # by place: a value may be a list
    if given.whole:
        return kinds.IntDistribution(int(given.low), int(given.high))
    return kinds.FloatDistribution(given.low, given.high, log=given.log)


def _value(given: Distribution, param: Any) -> Any:
    if not isinstance(given, Range):
        return given.values[param]
    return param if given.whole else given.rounded(param)


def _param(given: Distribution, value: Any) -> Any:
    return value if isinstance(given, Range) else given.values.index(value)


def require_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError("sampler = 'optuna' needs optuna; pip install 'fedxl[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna

"""What fits a federation by its counts alone (`RULES`): algorithm, weighting, norm, local steps and a first rate."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from fedxl import display
from fedxl.algorithms import ALGORITHMS
from fedxl.algorithms.level import Level
from fedxl.data.examples import Examples, Holding, Splits, facts_about
from fedxl.data.inputs import Clients, as_splits
from fedxl.data.targets import Label
from fedxl.errors import kind_of, printable, require
from fedxl.models.layers import norms_features, norms_scores
from fedxl.risks import Side, XRisk, cox, partial_auc

APART = 0.25  # from here on classes lie at different sites; equal shards of some hundred examples are below 0.1
UNEQUAL = 4.0  # from here on sites are of different size
NORM_OPTIONS = ("norm", "score_norm")
THEN = "try three times the rate and a third of it next"
FEW = 6  # numbers that are listed before "and others"


@dataclass(frozen=True)
class Facts:
    """What is known of a federation: how much of which side lies where. Sides are those of the risk's pairs."""

    sites: int
    examples: int
    one_class: int  # sites that hold one side only
    one_class_share: float  # of all examples, at these sites
    one_class_trains: bool  # whether fedxl trains at these sites by default, or takes their scores alone
    rarest: Side  # the side with fewer examples
    rarest_total: int
    rarest_fewest: int  # at the site with the fewest of those that hold any
    apart: float  # total variation distance between the places of both sides: 0 the same mix everywhere, 1 disjoint
    unequal: float  # the largest site against the smallest
    linear: bool  # whether the risk's outer function is
    timed: bool = False  # whether pairs depend on the times of events
    network: frozenset[str] = frozenset(NORM_OPTIONS)  # which of these options the network has

    @property
    def skewed(self) -> bool:
        return self.one_class > 0 or self.apart > APART

    @property
    def words(self) -> dict[str, Any]:
        """What a rule's text may name."""
        fedxl, centralized = ("fedxl1", "sgd") if self.linear else ("fedxl2", "sox")
        rarest = examples_of(self.rarest, self.timed)
        return {**asdict(self), "fedxl": fedxl, "centralized": centralized, "rarest_examples": rarest}


def examples_of(side: Side, timed: bool) -> str:
    if side == "positive" and timed:
        return "events"
    return "examples" if side == "all" else f"{side} examples"


class Rule(NamedTuple):
    """If it applies, these settings, for this reason. Settings and reason may name facts in braces."""

    when: str  # in words
    applies: Callable[[Facts], bool]
    settings: Mapping[str, Any]
    why: str


# By topic; the first rule that applies is taken.
RULES: Mapping[str, Sequence[Rule]] = {
    "algorithm": (
        Rule(
            "there is one site",
            lambda facts: facts.sites == 1,
            {"algorithm.name": "{centralized}"},
            "one site holds all {examples:,} examples, so nothing needs to be federated",
        ),
        Rule(
            "examples have times of events",
            lambda facts: facts.timed,
            {"algorithm.name": "{fedxl}"},
            "who has an event is compared with all who are at risk then, at any of {sites} sites; local_pair "
            "compares within a site (sites without an event: {one_class})",
        ),
        Rule(
            "no site holds both classes, or all that hold one hold the same, and most of its examples",
            lambda facts: facts.one_class_trains,
            {"algorithm.name": "{fedxl}"},
            "{one_class} of {sites} sites hold one class, with {one_class_share:.0%} of the examples, and train on "
            "it, paired with the scores of others; local_pair leaves them out",
        ),
        Rule(
            "some sites hold one class",
            lambda facts: facts.one_class > 0,
            {"algorithm.name": "{fedxl}"},
            "{one_class} of {sites} sites hold one class, with {one_class_share:.0%} of the examples; the others are "
            "compared with their scores, which local_pair leaves out",
        ),
        Rule(
            f"classes lie at different sites (distance above {APART:g})",
            lambda facts: facts.skewed,
            {"algorithm.name": "{fedxl}"},
            "all {sites} sites hold both classes, but in different mixes (distance {apart:.2f}; 0 is alike), so "
            "pairs within a site are not those of all data",
        ),
        Rule(
            "otherwise",
            lambda facts: True,
            {"algorithm.name": "local_pair"},
            "all {sites} sites hold both classes, and {apart:.0%} of the positives would have to move for one mix "
            "everywhere, so pairs within a site are nearly those of all data, and local_pair sends no scores",
        ),
    ),
    "weighting": (
        Rule(
            "sites with one class train",
            lambda facts: facts.one_class_trains,
            {"run.weighting": "clients"},
            "by samples, sites with one class would count for {one_class_share:.0%} of every average",
        ),
        Rule(
            f"some sites hold one class, or the largest site is more than {UNEQUAL:g} times the smallest",
            lambda facts: facts.one_class > 0 or facts.unequal > UNEQUAL,
            {"run.weighting": "samples"},
            "the {rarest_examples} are the rarest side ({rarest_total:,} of {examples:,}), and a site with "
            "{rarest_fewest:,} of them must not count as much as one with many",
        ),
        Rule(
            "otherwise",
            lambda facts: True,
            {"run.weighting": "clients"},
            "sites are of similar size, so it makes no difference",
        ),
    ),
    "norm": (
        Rule(
            "the network has no norm",
            lambda facts: "norm" not in facts.network,
            {},
            "the network has no norm to choose",
        ),
        Rule(
            "sites are skewed",
            lambda facts: facts.skewed,
            {"model.norm": "group"},
            "batch norm would mix the statistics of sites that differ",
        ),
        Rule(
            "otherwise, if the network can norm its scores",
            lambda facts: "score_norm" in facts.network,
            {"model.norm": "batch", "model.score_norm": True},
            "sites are alike, and normed scores tolerate high learning rates",
        ),
        Rule("otherwise", lambda facts: True, {"model.norm": "batch"}, "sites are alike"),
    ),
    "steps": (
        Rule(
            "examples have times of events",
            lambda facts: facts.timed,
            {"run.local_steps": 8, "algorithm.lr": 0.03},
            "scores of time to event have no bounds and need low learning rates; " + THEN,
        ),
        Rule(
            "sites are skewed, and the network has no norm (it is small)",
            lambda facts: facts.skewed and "norm" not in facts.network,
            {"run.local_steps": 8, "algorithm.lr": 1.0},
            "skewed sites drift apart within a round, and small networks tolerate high learning rates; " + THEN,
        ),
        Rule(
            "sites are skewed",
            lambda facts: facts.skewed,
            {"run.local_steps": 8, "algorithm.lr": 0.1},
            "skewed sites drift apart within a round; " + THEN,
        ),
        Rule(
            "the network has no norm (it is small)",
            lambda facts: "norm" not in facts.network,
            {"run.local_steps": 32, "algorithm.lr": 0.3},
            "the paper's K, and small networks tolerate high learning rates; " + THEN,
        ),
        Rule("otherwise", lambda facts: True, {"run.local_steps": 32, "algorithm.lr": 0.1}, "the paper's K; " + THEN),
    ),
}
LINES: Sequence[Sequence[str]] = (("algorithm",), ("weighting", "norm"), ("steps",))  # topics of each line


@dataclass(frozen=True, repr=False)
class Advice:
    """Settings that fit a federation, each with its reason, and what to look at besides."""

    facts: Facts
    chosen: Sequence[tuple[Mapping[str, Any], str]]  # settings as configs name them, and why, by topic
    flags: Sequence[str]
    in_toml: bool = False  # whether texts show settings as a config does, or as Python

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for settings, _ in self.chosen for name, value in settings.items()}

    @property
    def reasons(self) -> list[tuple[str, str]]:
        """Settings as text, and why."""
        name = ALGORITHMS[self.settings["algorithm.name"]].__name__
        return [(_as_toml(each) if self.in_toml else _as_python(each, name), why) for each, why in self.chosen]

    @property
    def lines(self) -> list[str]:
        parts = iter([": ".join(filter(None, each)) for each in self.reasons])
        return ["; ".join(islice(parts, len(topics))) for topics in LINES]

    def __str__(self) -> str:
        return "\n".join([*self.lines, *self.flags])

    __repr__ = __str__
    _repr_html_ = display.html

    def as_json(self) -> dict[str, Any]:
        facts = {**asdict(self.facts), "network": sorted(self.facts.network)}
        return {"facts": facts, "settings": self.settings, "lines": self.lines, "flags": [*self.flags]}


def _as_toml(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())


def _as_python(settings: Mapping[str, Any], algorithm: str) -> str:
    """algorithm: the name of its class."""
    calls = {"algorithm": f"fedxl.{algorithm}(..., {{}})", "run": "fit(..., {})", "model": "the network with {}"}
    given: dict[str, list[str]] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        shown = json.dumps(value) if isinstance(value, str) else repr(value)
        given.setdefault(section, []).extend([f"{key}={shown}"] if key != "name" else [])
    return ", ".join(calls[each].format(", ".join(found)).replace(", )", ")") for each, found in given.items())


def advise(
    clients: Examples | Splits | Clients,
    risk: XRisk | None = None,
    batch_size: int | tuple[int, int] = (32, 32),
    network: Collection[str] | None = None,
    positive: Label | None = None,
    model: nn.Module | None = None,
) -> Advice:
    """What fits these clients, in three lines; one more for each side of which some hold less than a batch.

    Args:
        clients: Their data, in any form that `fit` takes.
        risk: What is to be optimised; by default the partial AUC, of time to event `cox`.
        batch_size: Examples of S1 and of S2 per step; one number for both sides.
        network: Which of the options norm and score_norm the network has; by default as `model` says, and without
            one both for images, and none where an example is a row of numbers.
        positive: The label that counts as positive, as for `fit`.
        model: The network that is to be trained.

    >>> import torch
    >>> advice = advise([(torch.zeros(40, 2), torch.ones(40)), (torch.zeros(60, 2), torch.zeros(60))])
    >>> advice.settings["algorithm.name"], advice.facts.one_class_trains
    ('fedxl2', True)
    """
    right = risk is None or isinstance(risk, XRisk)
    require(right, f"risk must be an object such as fedxl.partial_auc(), not {kind_of(risk)}")
    sizes = (batch_size, batch_size) if isinstance(batch_size, int) else tuple(batch_size)
    whole = len(sizes) == 2 and all(isinstance(size, int) for size in sizes)
    require(whole, f"batch_size must be one whole number or two, got {printable(batch_size, 40)}")
    named = network is None or (isinstance(network, Collection) and not isinstance(network, str))
    require(named, f"network must list which of {', '.join(NORM_OPTIONS)} it has, not {printable(network, 40)}")
    module = model is None or isinstance(model, nn.Module)
    require(module, f"model must be a torch.nn.Module, not {kind_of(model)}")
    splits = as_splits(clients, positive, len(risk.pairing.labels) if risk else 0)
    risk = risk or (cox() if splits.train.time is not None else partial_auc())
    holdings = splits.train.holdings()
    options = _norm_options(model, splits.train.shape) if network is None else network
    facts = facts_of(holdings, risk, options)
    chosen = []
    for topic in (topic for topics in LINES for topic in topics):
        rule = next(rule for rule in RULES[topic] if rule.applies(facts))
        settings = {name: _filled(value, facts) for name, value in rule.settings.items()}
        chosen.append((settings, _filled(rule.why, facts)))
    return Advice(facts, chosen, list(_flags(holdings, splits.names, risk, sizes)))


def _norm_options(model: nn.Module | None, shape: Sequence[int]) -> Collection[str]:
    """Which of the options a network has. Of one that is not known, examples of this shape say it."""
    if model is None:
        return NORM_OPTIONS if len(shape) > 1 else ()
    has = (norms_features(model), norms_scores(model))
    return [name for name, found in zip(NORM_OPTIONS, has, strict=True) if found]


def facts_of(holdings: Sequence[Holding], risk: XRisk, network: Collection[str] = NORM_OPTIONS) -> Facts:
    counts = np.array([[holding.count(side) for side in risk.sides] for holding in holdings])  # [sites, 2]
    sizes = np.array([holding.count("all") for holding in holdings])
    one_sided = (counts == 0).any(1)
    totals = counts.sum(0)
    rarest = int(totals.argmin())
    held = counts[counts[:, rarest] > 0, rarest]
    places = counts / np.maximum(totals, 1)
    better = facts_about(holdings, "clients").one_class
    return Facts(
        sites=len(holdings),
        examples=int(sizes.sum()),
        one_class=int(one_sided.sum()),
        one_class_share=float(sizes[one_sided].sum() / sizes.sum()),
        one_class_trains=bool(one_sided.any()) and Level().trains_one_class(risk, better),
        rarest=risk.sides[rarest],
        rarest_total=int(totals[rarest]),
        rarest_fewest=int(held.min()) if len(held) else 0,
        apart=float(np.abs(places[:, 0] - places[:, 1]).sum() / 2),
        unequal=float(sizes.max() / sizes.min()),
        linear=risk.linear,
        timed=risk.pairing.timed,
        network=frozenset(NORM_OPTIONS) & frozenset(network),
    )


def _flags(
    holdings: Sequence[Holding], names: Sequence[str], risk: XRisk, batch_size: Sequence[int]
) -> Iterable[str]:
    """Sites that hold some examples of a side, but fewer than a step reads."""
    for number, (side, batch) in enumerate(zip(risk.sides, batch_size, strict=True), 1):
        counts = [(name, held.count(side)) for name, held in zip(names, holdings, strict=True)]
        short = [(printable(name, 40), count) for name, count in counts if 0 < count < batch]
        if short:
            listed = ", ".join(f"{site}: {count}" for site, count in short[:FEW])
            more = ", and others" if len(short) > FEW else ""
            who = "one site holds" if len(short) == 1 else f"{len(short)} sites hold"
            what = examples_of(side, risk.pairing.timed)
            yield (
                f"{who} fewer {what} than batch{number} = {batch}, so a step reads some twice; "
                f"the least is {min(count for _, count in short)} ({listed}{more})"
            )


def _filled(text: Any, facts: Facts) -> Any:
    return text.format(**facts.words) if isinstance(text, str) else text

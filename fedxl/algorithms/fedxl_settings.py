"""FeDXL's settings: what they are, and which of them do not go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from fedxl.algorithms.compositional import Compositional
from fedxl.algorithms.fedxl_state import FeDXLServer, FeDXLUpdate, PoolU
from fedxl.algorithms.level import Level, OneClass
from fedxl.algorithms.ordering import Order
from fedxl.algorithms.private import (
    PrivacySettings,
    check_method,
    check_settings,
)
from fedxl.errors import require, unknown


@dataclass(frozen=True, kw_only=True, eq=False)
class FeDXLSettings(Compositional[FeDXLServer, FeDXLUpdate]):
    """Everything about FeDXL that a user can set."""

    first_round: ClassVar[int] = 0

    pool_rounds: int = 1  # rounds of which the pool keeps the scores
    uploads: int = 0  # scores that a client uploads for each side in a round; 0: all K * B of them
    level: Level = "even"  # what steps may do to the level of all scores: even, balanced, bounded; free: the paper
    one_class: OneClass = "auto"  # clients with one class: lend scores, train (the paper), or centre their pull
    reach: float = 0.0  # how far a client with one class that trains may move its scores in a round; 0: any distance
    mix: float = 0.0  # weight of a client's own fresh pairs; 1/N: as much as they have in the whole risk
    pool_u: PoolU = "clients"  # u of pooled scores: the clients' running estimates, or the server's own (server)
    pool_share: float = 1.0  # the share of a side of the pool that one client may fill; 1: all
    order: Order = "drawn"  # of uploaded scores: drawn, from which the server knows the examples; or sorted
    fresh: bool = False  # pool scores of fresh examples (the paper's z-hat, an extra forward pass), not of the batch
    dp_clip: float = 0.0  # differential privacy: the length that an example's gradient is cut to; 0: no privacy
    dp_noise: float = 0.0  # standard deviation of the noise on the sum of a step's gradients, in units of dp_clip
    dp_score_noise: float = 0.0  # standard deviation of the noise on an uploaded score, which lies in [0, 1]
    dp_delta: float = 1e-5  # the delta at which epsilon is reported; below one in the number of examples

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.pool_rounds >= 1, f"pool_rounds must be at least 1, got {self.pool_rounds}")
        if self.one_class not in get_args(OneClass):
            raise unknown("way with one_class", self.one_class, get_args(OneClass))
        if self.pool_u not in get_args(PoolU):
            raise unknown("pool_u", self.pool_u, get_args(PoolU))
        if self.order not in get_args(Order):
            raise unknown("order", self.order, get_args(Order))
        require(self.reach >= 0, f"reach must not be negative (0: no limit), got {self.reach}")
        trains = self.with_one_class == "train"
        require(
            trains or not self.reach, "reach is for clients with one class that train: set one_class = 'train', too"
        )
        plain = self.descent == "sgd" or not self.reach
        require(plain, f"reach measures steps along G: set descent = 'sgd' (it is '{self.descent}'), or reach = 0")
        require(0 <= self.mix < 1, f"mix must lie in [0, 1), got {self.mix}")
        require(0 < self.pool_share <= 1, f"pool_share must lie in (0, 1], got {self.pool_share}")
        require(self.uploads >= 0, f"uploads must not be negative (0: all), got {self.uploads}")
        check_settings(self.privacy)
        if self.private:
            check_method(self)
        if self.worst_site:
            require(not self.mix, "worst_site and mix cannot be combined: own pairs would count twice; set mix = 0")
            plain = self.risk.lam_outer is None
            require(plain, "worst_site needs a risk that is a mean over S1; for tpauc set normalised = false")
        single = not (self.mix or self.reach or self.one_class == "centre")
        require(
            single or not self.risk.labels, "mix, reach and one_class = 'centre' are for one label, not for several"
        )
        if self.risk.queries:
            plain = (self.pool_rounds, self.uploads, self.mix, self.pool_share, self.fresh) == (1, 0, 0, 1, False)
            told = "with queries, the pool keeps each client's latest scores of each query, all of them"
            require(plain, f"{told}: leave pool_rounds, uploads, mix, pool_share and fresh out")
            require(self.order == "drawn", "scores of queries are pooled with their query; leave order out")

    @property
    def private(self) -> bool:
        return self.dp_clip > 0

    @property
    def privacy(self) -> PrivacySettings:
        return PrivacySettings(self.dp_clip, self.dp_noise, self.dp_score_noise, self.dp_delta)

    @property
    def with_one_class(self) -> OneClass:
        """What a client with one class does; never `auto`."""
        if self.one_class != "auto":
            return self.one_class
        return "lend" if self.level in ("even", "balanced") else "train"

    @property
    def needs_both_classes(self) -> bool:
        """If clients with one class only lend their scores, somebody else must train."""
        return self.with_one_class == "lend"

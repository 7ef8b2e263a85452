"""Pinned places given anew while a sequence is decoded (``ring="resnap"``).

What an elastic ring forgets is whatever is old. Here a prompt gets three quarters of the pinned places, for good.
Before anything that was not looked at yet falls out of the ring, all entries behind those compete for the last quarter
by how unlike the others their keys are (KeyDiff, arXiv 2504.15364); the others become the ring, oldest first. Nothing
is dropped by that: entries change places, and the next tokens overwrite those that lost. As seldom as once per ring
(R-KV, arXiv 2505.24133), and always after the same number of tokens of a sequence, whoever else is being decoded.
"""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.compression import Layout
from snapstream.compression.policies.keydiff import KeyDifferences
from snapstream.config import CacheBudget

NEWEST = 16
"""Most entries at the end that do not compete yet: a text may end before some of them, and then they are taken back."""


@dataclass(frozen=True)
class Stand:
    """Where a sequence's cache stands since its places were given.

    Attributes:
        layout: Of the cache at that time.
        decoded: Tokens that had been decoded and stored by then.
        renewals: How often they were given anew.
    """

    layout: Layout
    decoded: int = 0
    renewals: int = 0

    def count(self, decoded: int) -> int:
        """Entries ever stored, as the layout counts, when ``decoded`` tokens have been."""
        return self.layout.count + decoded - self.decoded

    @property
    def judged(self) -> bool:
        """Whether places were given to anything by choice."""
        return self.layout.dropped > 0 or self.renewals > 0

    def due(self, budget: CacheBudget) -> int | None:
        """Decoded tokens after which places are given anew; ``None`` for never."""
        if budget.ring != "resnap":
            return None
        layout = self.layout
        full = self.decoded + layout.limit - layout.count
        if not self.judged:
            return full
        return max(full, self.decoded + layout.limit - layout.base - newest(budget))


def newest(budget: CacheBudget) -> int:
    """Entries at the end that do not compete yet."""
    return min(NEWEST, budget.recent // 2)


def renewed(layout: Layout, budget: CacheBudget) -> Layout:
    """The layout of a full cache whose places were given anew."""
    base = max(budget.sink, layout.limit - budget.recent)
    return Layout(layout.limit, layout.limit - newest(budget), base, layout.limit, layout.limit)


def choice(stand: Stand, budget: CacheBudget) -> CacheBudget:
    """How places are given next: everything before the candidates is a sink to it."""
    layout = renewed(stand.layout, budget)
    fixed = budget.fixed if stand.judged else budget.sink
    return CacheBudget(fixed, layout.limit - layout.base, layout.base - fixed, policy=KeyDifferences())

"""Pinned places given anew while a sequence is decoded (``ring="resnap"``).

What an elastic ring forgets is whatever is old. Here a prompt gets at most three quarters of the pinned places, and
keeps them. Before an entry that has not competed yet falls out of the ring, all entries behind the prompt's compete for
the other places by how unlike each other their keys are (KeyDiff, arXiv 2504.15364); the losers become the ring, oldest
first. Nothing is dropped by that: entries change places, and the next tokens overwrite the losers. It happens about
once per ring (R-KV, arXiv 2505.24133), and always after the same number of tokens of a sequence, whoever else is there.
"""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.compression import Layout
from snapstream.compression.policies.keydiff import KeyDifferences
from snapstream.config import CacheBudget

NEWEST = 16
"""Most entries at the end that do not compete yet: a text may end before some of them, and then they are taken back."""


@dataclass(frozen=True)
class Placement:
    """How a sequence's cache was laid out when its places were given.

    Attributes:
        layout: Of the cache then.
        fixed: Entries at the beginning that keep their places for good.
        waiting: Entries at the end that have not competed.
        decoded: Tokens that had been decoded and stored by then.
    """

    layout: Layout
    fixed: int
    waiting: int
    decoded: int = 0

    @classmethod
    def of_prompt(cls, layout: Layout, budget: CacheBudget) -> Placement:
        """That of a prompt which has been read; what fits without a choice has not competed."""
        waiting = layout.length - layout.candidate_end if layout.dropped else layout.count - layout.base
        return cls(layout, max(budget.sink, min(layout.base, budget.fixed)), waiting)

    def count(self, decoded: int) -> int:
        """Entries ever stored, as the layout counts, when ``decoded`` tokens have been."""
        return self.layout.count + decoded - self.decoded

    def due(self, budget: CacheBudget) -> int | None:
        """Decoded tokens after which places are given anew; ``None`` for never."""
        if budget.ring != "resnap":
            return None
        limit, count, base = self.layout.limit, self.layout.count, self.layout.base
        return self.decoded + max(limit - count, limit - base - self.waiting)

    def renewed(self, decoded: int, budget: CacheBudget) -> Placement:
        """What comes after it, when the cache is full and ``decoded`` tokens have been stored."""
        limit, waiting = self.layout.limit, newest(budget)
        layout = Layout(limit, limit - waiting, max(self.fixed, limit - budget.recent), limit, limit)
        return Placement(layout, self.fixed, waiting, decoded)

    def choice(self) -> CacheBudget:
        """How the entries behind the fixed ones were chosen, as a cache in which those are sinks."""
        layout = self.layout
        return CacheBudget(self.fixed, layout.limit - layout.base, layout.base - self.fixed, policy=KeyDifferences())


def newest(budget: CacheBudget) -> int:
    """Entries at the end that do not compete yet."""
    return min(NEWEST, budget.recent // 2)

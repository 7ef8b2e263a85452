"""Reassigns pinned places while a sequence is decoded (``ring="resnap"``).

An elastic ring always evicts its oldest entry. With ``resnap``, the prompt gets at most three quarters of the pinned
places, and keeps them. Before an entry that has not competed yet would be evicted from the ring, all entries after the
prompt's compete for the remaining places, scored by the dissimilarity of their keys (KeyDiff, arXiv 2504.15364). The
losers become the ring, oldest first.

A renewal itself drops nothing: entries change places, and later tokens overwrite the losers. It happens about once per
turn of the ring (R-KV, arXiv 2505.24133), always after the same number of tokens of a sequence, whatever other requests
are running.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from snapstream.compression import Layout
from snapstream.compression.policies.keydiff import KeyDifferences
from snapstream.config import CacheBudget

NEWEST = 16
"""Maximum number of newest entries that do not compete yet: if the text ends before some of them, they are removed."""


@dataclass(frozen=True)
class Placement:
    """The layout of a sequence's cache when its places were last assigned.

    Attributes:
        layout: Layout of the cache at that time.
        fixed: Number of entries at the start that keep their places permanently.
        waiting: Number of entries at the end that have not competed.
        decoded: Tokens that had been decoded and stored at that time.
        positions: Per layer, true positions of its entries at that time, int32 ``[N, count]``; empty if they are not
            tracked.
    """

    layout: Layout
    fixed: int
    waiting: int
    decoded: int = 0
    positions: Sequence[Tensor] = field(default=(), compare=False)

    @classmethod
    def of_prompt(cls, layout: Layout, budget: CacheBudget, positions: Sequence[Tensor] = ()) -> Placement:
        """Placement after prefill; entries that fit without a selection have not competed."""
        waiting = layout.length - layout.candidate_end if layout.selects else layout.count - layout.base
        return cls(layout, max(budget.sink, min(layout.base, budget.fixed)), waiting, positions=positions)

    def count(self, decoded: int) -> int:
        """Entries ever stored, as the layout counts them, after ``decoded`` decoded tokens."""
        return self.layout.count + decoded - self.decoded

    def due(self, budget: CacheBudget) -> int | None:
        """Number of decoded tokens after which places are renewed; ``None`` for never."""
        if budget.ring != "resnap":
            return None
        limit, count, base = self.layout.limit, self.layout.count, self.layout.base
        return self.decoded + max(limit - count, limit - base - self.waiting)

    def renewed(self, decoded: int, budget: CacheBudget) -> Placement:
        """The next placement, when the cache is full and ``decoded`` tokens have been stored; without positions."""
        limit, waiting = self.layout.limit, newest(budget)
        layout = Layout(limit, limit - waiting, max(self.fixed, limit - budget.recent), limit, limit)
        return Placement(layout, self.fixed, waiting, decoded)

    def choice(self) -> CacheBudget:
        """The selection among the entries after the fixed ones, as a budget in which the fixed ones are sinks."""
        layout = self.layout
        return CacheBudget(self.fixed, layout.limit - layout.base, layout.base - self.fixed, policy=KeyDifferences())


def newest(budget: CacheBudget) -> int:
    """Number of newest entries that do not compete yet."""
    return min(NEWEST, budget.recent // 2)

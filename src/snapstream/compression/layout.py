"""Where entries live in a compressed cache: three integers and the arithmetic between them.

Keys are rotated before they are cached, so the order of entries means nothing to attention, and this layout needs no
mask, only a length::

    [ sink | pinned top-K | ring of recent tokens ]
      0..S   S..base        base..limit

Entries below ``base`` stay as they are (with ``ring="resnap"`` not all: :mod:`snapstream.engine.renewal`). ``count`` is
the number of tokens ever stored; valid entries are the prefix ``[0, min(count, limit))``. Recent tokens are stored in
order, so the ring starts with its oldest entry at ``base`` and the first overwrite hits the right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from snapstream.config import CacheBudget
from snapstream.transfers import to_device


@dataclass(frozen=True)
class Layout:
    """The layout of one sequence when its prefill ends, or its places were given anew.

    Attributes:
        length: Prompt tokens, 1 or more; later, entries.
        candidate_end: End of the evictable range ``[S, candidate_end)``; empty if not above ``S``.
        base: First entry of the ring.
        count: Entries in use, ``min(length, limit)``.
        limit: End of the ring, so the most entries ever in use.
        first_voter: First token whose query is known and may vote; above 0 where the prompt continues from a cache.
    """

    length: int
    candidate_end: int
    base: int
    count: int
    limit: int
    first_voter: int = 0

    @property
    def dropped(self) -> int:
        """Prompt tokens that compression leaves out."""
        return self.length - self.count

    def turned_to(self, count: int) -> Layout:
        """The layout when ``count`` entries are stored oldest first: what was pinned, then the ring from its start."""
        return replace(self, count=count, length=max(self.length, count))


@dataclass(frozen=True)
class LayoutTensors:
    """:class:`Layout` for ``B`` sequences, as int64 tensors of shape ``[B]``."""

    length: Tensor
    candidate_end: Tensor
    base: Tensor
    count: Tensor
    limit: Tensor
    first_voter: Tensor


def lay_out(length: int, budget: CacheBudget, first_voter: int = 0) -> Layout:
    """Lay out the cache of a prompt of ``length`` tokens (1 or more)."""
    pinned = min(max(length - budget.sink - budget.recent, 0), budget.fixed - budget.sink)
    base = budget.sink + pinned
    limit = base + budget.recent if budget.ring == "paper" else budget.capacity
    # Of a prompt that fits, entry i is token i under every policy.
    protected = 0 if budget.policy.pins_recent and length > limit else budget.recent
    return Layout(length, max(length - protected, 0), base, min(length, limit), limit, first_voter)


def layout_tensors(layouts: Sequence[Layout], device: torch.device | str = "cpu") -> LayoutTensors:
    """Stack layouts of several sequences into tensors of shape ``[B]``."""
    columns = list(zip(*map(astuple, layouts), strict=True))
    return LayoutTensors(*to_device(columns, device).unbind())


def next_slot(count: Tensor, base: Tensor, limit: Tensor) -> Tensor:
    """Entry that the next token of each sequence takes; all arguments and the result are int64 ``[B]``.

    The cache fills up to ``limit``; from then on the ring ``[base, limit)`` turns. (Equation 4 of the paper; its offset
    is read as ``base``.)
    """
    return torch.where(count < limit, count, base + (count - base) % (limit - base).clamp(min=1))


def surviving_tokens(layout: Layout, count: int, written: int) -> list[int]:
    """Which of the first ``count`` tokens stored are still in the cache after ``written`` were, oldest first.

    Args:
        layout: The sequence's layout.
        count: Tokens to look at; what was stored after them is to be forgotten.
        written: Tokens stored in all, ``count`` or more. Where exactly is not known, a higher number is safe.

    Returns:
        Their indices in the order of storing; :func:`entry_of` says where each one is.
    """
    oldest = max(layout.base, written - (layout.limit - layout.base))
    return [*range(min(layout.base, count)), *range(oldest, count)]


def entry_of(layout: Layout, index: int) -> int:
    """Entry of the token that was stored ``index``-th; :func:`next_slot` in plain numbers."""
    return index if index < layout.limit else layout.base + (index - layout.base) % max(layout.limit - layout.base, 1)

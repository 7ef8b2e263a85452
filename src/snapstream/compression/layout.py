"""The layout of a compressed cache: three integers and the arithmetic between them.

Keys are rotated before they are cached, so the order of entries means nothing to attention. The layout therefore needs
no mask, only a length::

    [ sink | pinned top-K | ring of recent tokens ]
      0..S   S..base        base..limit

Entries below ``base`` never change after prefill, except with ``ring="resnap"``
(:mod:`snapstream.engine.decode.renewal`).

``count`` is the number of tokens ever stored; valid entries are the prefix ``[0, min(count, limit))``. When a layout is
computed, nothing has been overwritten yet, so ``count`` is also the number of entries in use. From then on every
decoded token adds one.

Recent tokens are stored in order. The ring therefore starts with its oldest entry at ``base``, which is also the first
one to be overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from snapstream.config import CacheBudget
from snapstream.config.pins import last_end
from snapstream.transfers import to_device


@dataclass(frozen=True)
class Layout:
    """The layout of one sequence at the end of prefill, or after its pinned entries were chosen again.

    Attributes:
        length: Prompt tokens, 1 or more. A layout that is computed during decoding may count entries instead.
        candidate_end: End of the evictable range ``[S, candidate_end)``, which is empty if this is not above ``S``.
            Not above ``base`` if there is nothing to select.
        base: First entry of the ring.
        count: Tokens stored: ``min(length, limit)`` at the end of prefill. Also the number of entries in use, as none
            has been overwritten yet.
        limit: End of the ring, and so the maximum number of entries in use.
        first_voter: First token whose query is available and may vote; above 0 if the prompt continues from a cache.
        pinned_end: End of the tokens among which the budget's pins are; 0 if there are none.
    """

    length: int
    candidate_end: int
    base: int
    count: int
    limit: int
    first_voter: int = 0
    pinned_end: int = 0

    @property
    def dropped(self) -> int:
        """Prompt tokens that compression drops."""
        return self.length - self.count

    @property
    def selects(self) -> bool:
        """Whether entries are selected; otherwise, they are the last tokens, in order."""
        return max(self.candidate_end, self.pinned_end) > self.base

    def turned_to(self, held: int) -> Layout:
        """The layout after its ``held`` entries were copied in order: pinned ones, then the ring, oldest first."""
        return replace(self, count=held, length=max(self.length, held), pinned_end=0)


@dataclass(frozen=True)
class LayoutTensors:
    """:class:`Layout` for ``B`` sequences, as int64 tensors of shape ``[B]``."""

    length: Tensor
    candidate_end: Tensor
    base: Tensor
    count: Tensor
    limit: Tensor
    first_voter: Tensor


def lay_out(length: int, budget: CacheBudget, first_voter: int = 0, pinned_end: int | None = None) -> Layout:
    """Lay out the cache of a prompt.

    Args:
        length: Tokens of the prompt, 1 or more.
        budget: Its budget.
        first_voter: See :class:`Layout`.
        pinned_end: See :class:`Layout`; by default, where the budget's pins end.
    """
    pinned_end = last_end(budget.pin, length) if pinned_end is None else pinned_end
    if not budget.top_k:  # there are no places for them
        pinned_end = 0
    # An elastic ring leaves places to the prompt as long as there are any: a long answer would overwrite its end, which
    # is the question. The paper's ring has all recent tokens, unless pins are among them.
    wanted = (max(length - budget.recent, pinned_end) if budget.ring == "paper" else length) - budget.sink
    pinned = min(max(wanted, 0), budget.fixed - budget.sink)
    base = budget.sink + pinned
    limit = base + budget.recent if budget.ring == "paper" else budget.capacity
    # A policy that pins recent tokens also selects among those of a prompt that fits, if not all of it can be pinned.
    # The paper's ring always holds the recent tokens.
    if budget.policy.pins_recent and budget.top_k and length > (limit if budget.ring == "paper" else base):
        candidate_end = length
    else:  # nothing is selected from a prompt that fits, except pins
        candidate_end = min(max(length - budget.recent, 0), base if length <= limit else length)
    return Layout(length, candidate_end, base, min(length, limit), limit, first_voter, pinned_end)


def lay_out_window(length: int, window: int) -> Layout:
    """Lay out the cache of a prompt of ``length`` tokens in a layer that attends to the last ``window`` tokens only."""
    return Layout(length, 0, 0, min(length, window), window)


def layout_tensors(layouts: Sequence[Layout], device: torch.device | str = "cpu") -> LayoutTensors:
    """Stack layouts of several sequences into tensors of shape ``[B]``."""
    names = [one.name for one in fields(LayoutTensors)]
    columns = [[getattr(layout, name) for layout in layouts] for name in names]
    return LayoutTensors(*to_device(columns, device).unbind())


def next_entry(count: Tensor, base: Tensor, limit: Tensor) -> Tensor:
    """Entry that the next token of each sequence is written to; all arguments and the result are int64 ``[B]``.

    The cache fills up to ``limit``; from then on the ring ``[base, limit)`` wraps around. (Equation 4 of the paper,
    with its offset read as ``base``.)
    """
    return torch.where(count < limit, count, base + (count - base) % (limit - base).clamp(min=1))


def surviving_tokens(layout: Layout, until: int, count: int) -> list[int]:
    """Which of the first ``until`` tokens stored are still in the cache after ``count`` were stored, oldest first.

    Args:
        layout: The sequence's layout.
        until: Tokens to consider; those stored after them are to be discarded.
        count: Tokens ever stored, ``until`` or more. If the exact number is unknown, a higher one is safe.

    Returns:
        Their indices in storage order; :func:`entry_of` maps an index to its entry.
    """
    oldest = max(layout.base, count - (layout.limit - layout.base))
    return [*range(min(layout.base, until)), *range(oldest, until)]


def entry_of(layout: Layout, index: int) -> int:
    """Entry of the token with storage index ``index``; :func:`next_entry` for plain integers."""
    return index if index < layout.limit else layout.base + (index - layout.base) % max(layout.limit - layout.base, 1)

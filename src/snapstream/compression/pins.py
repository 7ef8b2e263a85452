"""Pinned spans: tokens that are selected before any others.

At most half of the places for selected tokens are for pinned ones. Spans are considered in the order they were given:
one that still fits is kept whole. Of those that do not fit, the tokens with the best scores get what is left of that
half; the others compete like any other token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from snapstream.compression.layout import LayoutTensors
from snapstream.compression.ranks import taken_in_turn
from snapstream.config import CacheBudget
from snapstream.config.pins import last_end

WHOLE, SCORED = 2, 1
"""Levels of a pinned token: it is certainly kept, or it competes for what is left; others have level 0."""


class PastEntries(NamedTuple):
    """A cache that a prompt continues from.

    Attributes:
        entries: Its entries, with which the prompt begins.
        tokens: Tokens of the conversation that it was built from.
        base: First entry of its ring.
        ring_has_pins: Whether pinned tokens are in its ring: generated ones, or pins that are new.
    """

    entries: int
    tokens: int
    base: int
    ring_has_pins: bool


def most_pinned(budget: CacheBudget) -> int:
    """Maximum number of tokens that are kept because they are pinned, without those that are sinks."""
    return budget.top_k // 2


def end_of_pins(budget: CacheBudget, total: int, past: PastEntries | None = None) -> int:
    """End of the tokens of a prompt among which pinned ones are, as ``Layout.pinned_end``; 0 if there are none.

    Args:
        budget: The budget with the pins.
        total: Tokens of the conversation.
        past: What the prompt continues from.
    """
    end = last_end(budget.pin, total)
    if past is None or not end:
        return end
    if end > past.tokens:
        return past.entries + end - past.tokens
    return past.entries if past.ring_has_pins else min(past.base, past.entries)


def pinned_levels(budget: CacheBudget, length: int) -> Tensor:
    """Level of each token of a prompt of ``length`` tokens: int8 ``[length]``, on the CPU."""
    levels, room = torch.zeros(length, dtype=torch.int8), most_pinned(budget)
    for start, end in budget.pin:
        span = levels[max(start, budget.sink) : end]
        new = int((span < WHOLE).sum())
        if new <= room:
            span.fill_(WHOLE)
            room -= new
        else:
            span.clamp_(min=SCORED)
    return levels


def pins_compete(levels: Tensor) -> bool:
    """Whether more tokens are pinned than fit; ``levels`` are on the CPU."""
    return bool((levels == SCORED).any())


def prefer_pinned(
    scores: Tensor, levels: Tensor, layout: LayoutTensors, *, sink: int, most: int, compete: bool = True
) -> Tensor:
    """Raise the scores of pinned tokens above all others.

    Args:
        scores: Scores for :func:`~snapstream.compression.compress.select_entries`, ``[B, N, L]``.
        levels: int8 ``[B, N or 1, L]``; see :func:`pinned_levels`.
        layout: Layout of each sequence.
        sink: Sinks (``S``).
        most: Maximum number of pinned tokens that are kept.
        compete: Whether there may be tokens of the level :data:`SCORED`.

    Returns:
        The same with pinned tokens raised, recent ones as well: the ring must not overwrite them.
    """
    is_pinned, limits = (levels > 0) & (scores >= 0), torch.finfo(scores.dtype)
    if not compete:
        return scores.masked_fill(is_pinned, limits.max)
    own = torch.where(levels == WHOLE, limits.max, scores.clamp(min=limits.tiny)).masked_fill(~is_pinned, 0.0)
    rounds: Tensor = taken_in_turn([own], torch.ones_like(layout.length)[None], layout.length, sink, most)
    is_preferred = is_pinned & (rounds > 1.0 / (1.0 + most))
    return scores.masked_fill(is_preferred, limits.max)

"""Which prompt token goes to which entry of a cache of fixed size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from snapstream.compression.layout import LayoutTensors
from snapstream.compression.pins import most_pinned, prefer_pinned
from snapstream.compression.ranks import ordered
from snapstream.compression.scoring import candidate_mask
from snapstream.config import CacheBudget, LayerPrompt
from snapstream.errors import ConfigurationError
from snapstream.operators import Operator


def select_entries(scores: Tensor, layout: LayoutTensors, *, sink: int, top_k: int, capacity: int) -> Tensor:
    """Choose the prompt position of every cache entry.

    Sinks come first, then the best-scored tokens in prompt order, then the last of all other tokens in prompt
    order. Ties always go to the earlier token.

    Args:
        scores: float32 ``[B, N, L]``, negative for sinks and padding, non-negative for all other tokens.
        layout: Layout of each sequence.
        sink: Sinks (``S``).
        top_k: Maximum number of tokens kept for their scores (``K``); the layout determines the actual number.
        capacity: Cache entries (``C``).

    Returns:
        Positions ``[B, N, C]``, int64; -1 for entries beyond ``layout.count``.
    """
    lengths = (layout.base, layout.count, layout.length)
    return selected(scores, *lengths, sink, top_k, capacity)


def plain_selected(
    scores: Tensor, base: Tensor, count: Tensor, length: Tensor, sink: int, top_k: int, capacity: int
) -> Tensor:
    """Plain-torch :func:`select_entries`; ``base``, ``count`` and ``length`` come from the layouts."""
    B, N, L = scores.shape
    device = scores.device
    position = torch.arange(L, device=device)
    base, count, length = base[:, None, None], count[:, None, None], length[:, None, None]
    is_pinned = torch.zeros(scores.shape, dtype=torch.bool, device=device)
    kept = min(top_k, L)
    if kept:
        chosen = ordered(scores).topk(kept, dim=-1).indices
        is_real = torch.arange(kept, device=device) < base - sink
        is_pinned.scatter_(-1, chosen, is_real.expand(chosen.shape))
    is_other = (position >= sink) & (position < length) & ~is_pinned
    # The last of the other tokens fill entries base to count; the first length - count of them are dropped.
    entry_of_other = base + is_other.cumsum(-1) - 1 - (length - count)
    target = torch.where(is_pinned, sink + is_pinned.cumsum(-1) - 1, entry_of_other)
    target = torch.where(position < sink, position, target)
    is_kept = (position < length) & ~(is_other & (entry_of_other < base))
    target = torch.where(is_kept, target, capacity)
    positions = torch.full((B, N, capacity + 1), -1, device=device, dtype=torch.int64)
    positions.scatter_(-1, target, position.expand(scores.shape))
    return positions[..., :capacity]


def _selected_shape(
    scores: Tensor, base: Tensor, count: Tensor, length: Tensor, sink: int, top_k: int, capacity: int
) -> Tensor:
    return scores.new_empty((*scores.shape[:2], capacity), dtype=torch.int64)


selected = Operator("selected", plain_selected, _selected_shape)
""":func:`plain_selected`, for which devices have kernels."""


def choose_entries(
    prompt: LayerPrompt, budget: CacheBudget, *, combine: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Decide which prompt tokens one layer keeps: votes, smoothing, pins, selection.

    A pure function of fixed shapes: no shape depends on data, so a static graph can contain it.

    Args:
        prompt: The layer's prompt.
        budget: Capacity and policy; ``prompt.layout`` must be computed from it.
        combine: Applied to the votes ``[V * B, N, L]`` (``V`` kinds of votes) before smoothing; must keep the first
            axis. A host that splits the query heads of a KV head across devices sums their votes here. Otherwise each
            device would keep different tokens.

    Returns:
        Positions ``[B, N, C]``, int64; -1 for entries beyond ``layout.count``.

    Raises:
        ConfigurationError: The policy returned votes or scores of the wrong shape or dtype.
    """
    keys, layout = prompt.keys, prompt.layout
    is_candidate = candidate_mask(keys, layout.candidate_end, prompt.sink)
    if budget.top_k == 0:  # nothing is chosen, so nothing has to be scored
        scores = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
    else:
        votes = budget.policy.votes(prompt)
        if votes.dtype != torch.float32 or votes.shape[-3:] != keys.shape[:3] or votes.dim() > 4:
            raise ConfigurationError(
                f"policy {budget.policy.name} returned votes {tuple(votes.shape)} of {votes.dtype}; expected "
                f"{tuple(keys.shape[:3])} of torch.float32, or several stacked along a new first axis"
            )
        if combine is not None:
            kinds = votes.shape[:-3]
            combined = combine(votes.flatten(0, -3))
            votes = combined.view(*kinds, len(keys), *combined.shape[1:])
        votes = torch.where(is_candidate & (votes > 0), votes, 0.0)  # also clears NaN from a broken prompt
        # Pinned tokens are ranked among themselves, so the order of those that are not selected may matter, too.
        ranked = keys.shape[2] if prompt.pinned is not None and prompt.pins_compete else budget.top_k
        scores = budget.policy.smooth(votes, replace(prompt, top_k=ranked))
        if scores.dtype != torch.float32 or scores.shape != votes.shape[-3:]:
            raise ConfigurationError(
                f"policy {budget.policy.name} returned scores {tuple(scores.shape)} of {scores.dtype} for votes "
                f"{tuple(votes.shape)}; expected {tuple(votes.shape[-3:])} of torch.float32"
            )
        scores = torch.where(scores > 0, scores, 0.0)  # select_entries() compares bits: no negative zero, no NaN
    # Recent tokens come last: a prompt that fits may have places for them, too.
    is_after_sinks = candidate_mask(keys, layout.length, prompt.sink)
    scores = scores.masked_fill(~is_candidate, 0.0).masked_fill(~is_after_sinks, -1.0)
    if prompt.pinned is not None:
        most, compete = most_pinned(budget), prompt.pins_compete
        scores = prefer_pinned(scores, prompt.pinned, layout, sink=budget.sink, most=most, compete=compete)
    return select_entries(scores, layout, sink=budget.sink, top_k=budget.top_k, capacity=budget.capacity)

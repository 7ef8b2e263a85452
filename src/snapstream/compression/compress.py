"""Which prompt token goes to which entry of a cache of fixed size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from snapstream.compression.layout import LayoutTensors
from snapstream.compression.ranks import ordered
from snapstream.compression.scoring import candidate_mask
from snapstream.config import CacheBudget, LayerPrompt
from snapstream.errors import ConfigurationError


def select_entries(scores: Tensor, layout: LayoutTensors, *, sink: int, top_k: int, capacity: int) -> Tensor:
    """Choose the prompt position of every cache entry.

    Sinks first, then the best-scored candidates in prompt order, then the last of all other tokens in prompt order.
    Equal scores go to the earlier token, always.

    Args:
        scores: ``[B, N, L]`` float32, not negative for candidates, negative for the rest.
        layout: Layout of each sequence.
        sink: Sinks (``S``).
        top_k: Most candidates kept (``K``); how many of them are real follows from the layout.
        capacity: Cache entries (``C``).

    Returns:
        Positions ``[B, N, C]``, int64; -1 for entries beyond ``layout.count``.
    """
    lengths = (layout.base, layout.count, layout.length)
    positions: Tensor = selected(scores, *lengths, sink, top_k, capacity)
    return positions


def plain_selected(
    scores: Tensor, base: Tensor, count: Tensor, length: Tensor, sink: int, top_k: int, capacity: int
) -> Tensor:
    """See :func:`select_entries`; ``base``, ``count`` and ``length`` are of the layouts."""
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
    # Of the others, the last ones fill the entries from base to count; length - count come before them.
    entry_of_other = base + is_other.cumsum(-1) - 1 - (length - count)
    target = torch.where(is_pinned, sink + is_pinned.cumsum(-1) - 1, entry_of_other)
    target = torch.where(position < sink, position, target)
    is_kept = (position < length) & ~(is_other & (entry_of_other < base))
    target = torch.where(is_kept, target, capacity)
    positions = torch.full((B, N, capacity + 1), -1, device=device, dtype=torch.int64)
    positions.scatter_(-1, target, position.expand(scores.shape))
    return positions[..., :capacity]


selected = torch.library.custom_op("snapstream::selected", plain_selected, mutates_args=())
""":func:`plain_selected` as an operation, so that a device may have a kernel for it."""


@selected.register_fake
def _selected_shape(
    scores: Tensor, base: Tensor, count: Tensor, length: Tensor, sink: int, top_k: int, capacity: int
) -> Tensor:
    return scores.new_empty((*scores.shape[:2], capacity), dtype=torch.int64)


def choose_entries(
    prompt: LayerPrompt, budget: CacheBudget, *, combine: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Decide which prompt tokens one layer keeps: votes, smoothing, choice.

    A pure function of fixed shapes: nothing about the result's shape depends on the data, so it may live in a static
    graph.

    Args:
        prompt: The layer.
        budget: Capacity and policy; ``prompt.layout`` is of this budget.
        combine: Applied to votes ``[V * B, N, L]``, of ``V`` kinds, before they are smoothed; the first axis stays. A
            host that splits the query heads of a KV head over devices sums their votes here, or each device would keep
            other tokens.

    Returns:
        Positions ``[B, N, C]``, int64; -1 for entries beyond ``layout.count``.
    """
    keys, layout = prompt.keys, prompt.layout
    is_candidate = candidate_mask(keys, layout.candidate_end, prompt.sink)
    if budget.top_k == 0:  # nothing is chosen, so nothing has to be scored
        scores = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
    else:
        votes = budget.policy.votes(prompt)
        if votes.dtype != torch.float32 or votes.shape[-3:] != keys.shape[:3] or votes.dim() > 4:
            raise ConfigurationError(
                f"policy {budget.policy.name} made votes {tuple(votes.shape)} of {votes.dtype}; they must be "
                f"{tuple(keys.shape[:3])} of torch.float32, or several of them, stacked"
            )
        if combine is not None:
            kinds = votes.shape[:-3]
            combined = combine(votes.flatten(0, -3))
            votes = combined.view(*kinds, len(keys), *combined.shape[1:])
        votes = torch.where(is_candidate & (votes > 0), votes, 0.0)  # NaN, which a broken prompt makes, included
        scores = budget.policy.smooth(votes, replace(prompt, top_k=budget.top_k))
        if scores.dtype != torch.float32 or scores.shape != votes.shape[-3:]:
            raise ConfigurationError(
                f"policy {budget.policy.name} made scores {tuple(scores.shape)} of {scores.dtype} of votes "
                f"{tuple(votes.shape)}; they must be {tuple(votes.shape[-3:])} of torch.float32"
            )
        scores = torch.where(scores > 0, scores, 0.0)  # select_entries() looks at bits: no negative zero, no NaN
    scores = scores.masked_fill(~is_candidate, -1.0)
    return select_entries(scores, layout, sink=budget.sink, top_k=budget.top_k, capacity=budget.capacity)

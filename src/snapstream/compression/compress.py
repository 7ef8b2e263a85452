"""Prompt cache in, cache of fixed size out."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from snapstream.compression.layout import PlanTensors
from snapstream.compression.scoring import observation_votes, pool_votes, random_votes
from snapstream.config import CacheBudget


class CompressedKV(NamedTuple):
    """One layer of a compressed prompt. Entries at ``plan.count`` and beyond are padding.

    Attributes:
        keys: ``[B, N, C, D]``.
        values: ``[B, N, C, D_v]``.
        positions: Prompt position each entry came from, ``[B, N, C]`` int64; -1 for padding.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor


def select_entries(scores: Tensor, plan: PlanTensors, *, sink: int, top_k: int, capacity: int) -> Tensor:
    """Choose the prompt position of every cache entry.

    Sinks first, then the best-scored candidates in prompt order, then the recent tokens in prompt order. Equal scores
    go to the earlier token, always.

    Args:
        scores: ``[B, N, L]`` float32, not negative for candidates, negative for the rest.
        plan: Layout of each sequence.
        sink: Sinks (``S``).
        top_k: Most candidates kept (``K``); how many of them are real follows from the plan.
        capacity: Cache entries (``C``).

    Returns:
        Positions ``[B, N, C]``, int64; -1 for entries beyond ``plan.count``.
    """
    B, N, L = scores.shape
    device = scores.device
    entry = torch.arange(capacity, device=device)
    base, count, length = plan.base[:, None], plan.count[:, None], plan.length[:, None]
    recent = length - count + entry  # the last entry, count - 1, is the last token
    positions = torch.where(entry < sink, entry, recent)[:, None].expand(B, N, capacity)
    kept = min(top_k, L)
    if kept:
        # topk breaks ties arbitrarily. Bits of a non-negative float order like the float itself, so the score in the
        # high half and the reversed position in the low half make every key unique and the choice stable.
        bits = scores.contiguous().view(torch.int32).to(torch.int64)
        order = bits * 2**32 + (L - 1 - torch.arange(L, device=device))
        chosen = order.topk(kept, dim=-1).indices
        pinned = (plan.base - sink)[:, None, None]
        rank = torch.arange(kept, device=device)
        chosen = torch.where(rank < pinned, chosen, L).sort(-1).values
        lookup = (entry - sink).clamp(0, kept - 1).expand(B, N, capacity)
        voted = chosen.gather(-1, lookup)
        in_pinned = (entry >= sink) & (entry < base)
        positions = torch.where(in_pinned[:, None], voted, positions)
    return torch.where((entry < count)[:, None], positions, -1)


def choose_entries(
    queries: Tensor,
    keys: Tensor,
    plan: PlanTensors,
    budget: CacheBudget,
    *,
    scale: float,
    layer: int | Tensor = 0,
    combine: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Decide which prompt tokens one layer keeps: votes, pooling, choice.

    A pure function of fixed shapes: nothing about the result's shape depends on the data, so it lives in a static
    graph. ``plan`` may come from a smaller budget of the same policy (a per-request limit).

    Args:
        queries: Rotated queries of the observation window, ``[B, H, W, D]``; see
            :func:`~snapstream.compression.scoring.observation_votes`.
        keys: Rotated keys of the padded prompt, ``[B, N, L, D]``.
        plan: Layout of each sequence.
        budget: The policy; its capacity is the cache's (``C``).
        scale: Factor on the attention logits.
        layer: Layer index; only ``random`` selection uses it.
        combine: Applied to the votes ``[B, N, L]`` before pooling. A host that splits the query heads of a KV head
            over devices sums their votes here, or each device would keep other tokens.

    Returns:
        Positions ``[B, N, C]``, int64; -1 for entries beyond ``plan.count``.
    """
    B, N, L = keys.shape[:3]
    kernel = budget.kernel
    if budget.top_k == 0:  # nothing is chosen, so nothing has to be scored
        votes, kernel = torch.zeros(B, N, L, device=keys.device), 1
    elif budget.selection == "random":
        seed = torch.as_tensor(layer, device=keys.device) * 7_919 + budget.seed
        votes, kernel = random_votes(plan, N, L, sink=budget.sink, seed=seed), 1
    else:
        votes = observation_votes(queries, keys, plan, sink=budget.sink, scale=scale, normalize=budget.normalize)
        votes = votes if combine is None else combine(votes)
    scores = pool_votes(votes, plan, sink=budget.sink, pooling=budget.pooling, kernel=kernel)
    return select_entries(scores, plan, sink=budget.sink, top_k=budget.top_k, capacity=budget.capacity)


def compress(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: PlanTensors,
    budget: CacheBudget,
    *,
    scale: float,
    layer: int | Tensor = 0,
) -> CompressedKV:
    """Compress one layer's prompt cache once, at the end of prefill.

    Args:
        queries: As for :func:`choose_entries`, ``[B, H, W, D]``.
        keys: ``[B, N, L, D]``.
        values: ``[B, N, L, D_v]``; give ``keys`` itself where values are part of keys, as in latents (MLA).
        plan: Layout of each sequence.
        budget: The policy.
        scale: Factor on the attention logits.
        layer: Layer index.
    """
    positions = choose_entries(queries, keys, plan, budget, scale=scale, layer=layer)
    source = positions.clamp(min=0)[..., None]
    kept = keys.gather(2, source.expand(-1, -1, -1, keys.shape[-1]))
    if values is keys:
        return CompressedKV(kept, kept, positions)
    return CompressedKV(kept, values.gather(2, source.expand(-1, -1, -1, values.shape[-1])), positions)

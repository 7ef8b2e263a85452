"""Merges several rankings of the same candidates into one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from snapstream.compression.layout import LayoutTensors
from snapstream.compression.scoring import candidate_mask
from snapstream.operators import Operator


def take_in_turn(
    lists: Sequence[Tensor], layout: LayoutTensors, *, sink: int, most: int, every: Tensor | None = None
) -> Tensor:
    """Merge score lists in rounds: the best token of every list, then the second-best of every list, and so on.

    A token is taken in the first round that any list offers it, so one that ranks high on two lists leaves room for the
    next one on either list.

    Args:
        lists: Scores, float32 ``[B, N, L]``, 0 or more; ties go to the earlier token.
        layout: Layout of each sequence. Only candidates are ranked, so padding has no effect.
        sink: Sinks (``S``).
        most: Maximum number of tokens taken (``K``); all rounds from there on are equal.
        every: For each list and sequence, 1 if it offers a token in every round, 2 in every other round, and so on;
            int64 ``[len(lists), B]``, by default 1.

    Returns:
        float32 ``[B, N, L]``, ``1 / (1 + round)``: above 0, at most 1; 0 for tokens that are not candidates.
    """
    if every is None:
        every = torch.ones_like(layout.candidate_end).expand(len(lists), -1)
    return taken_in_turn(list(lists), every, layout.candidate_end, sink, most)


def plain_taken_in_turn(lists: list[Tensor], every: Tensor, candidate_end: Tensor, sink: int, most: int) -> Tensor:
    """Plain-torch :func:`take_in_turn`; ``candidate_end`` comes from the layouts."""
    is_none = ~candidate_mask(lists[0], candidate_end, sink)
    best = torch.full_like(lists[0], most)
    for scores, rounds in zip(lists, every, strict=True):
        torch.minimum(best, _ranks(scores.masked_fill(is_none, -1.0), most) * rounds.view(-1, 1, 1), out=best)
    return (1.0 / (1.0 + best)).masked_fill(is_none, 0.0)


def _taken_in_turn_shape(lists: list[Tensor], every: Tensor, candidate_end: Tensor, sink: int, most: int) -> Tensor:
    return torch.empty_like(lists[0])


taken_in_turn = Operator("taken_in_turn", plain_taken_in_turn, _taken_in_turn_shape)
""":func:`plain_taken_in_turn`, for which devices have kernels."""


def _ranks(scores: Tensor, most: int) -> Tensor:
    """Rank of each score within its row, 0 for the highest, capped at ``most``; float32."""
    best = ordered(scores).topk(min(most, scores.shape[-1]), dim=-1).indices
    places = torch.arange(best.shape[-1], device=scores.device, dtype=torch.float32)
    return torch.full_like(scores, most).scatter_(-1, best, places.expand_as(best))


def ordered(scores: Tensor) -> Tensor:
    """Distinct int64 sort keys, shaped like ``scores``, in the order of the scores; ties go to the earlier token.

    Torch's ``topk`` breaks ties arbitrarily. Read as integers, the bits of non-negative floats sort like the floats
    themselves, and those of negative floats come below them all. With the bits in the high half and the reversed
    position in the low half, no two keys are equal.

    Args:
        scores: float32 ``[B, N, L]``; without negative zeros, and all negative scores must be equal.
    """
    position = torch.arange(scores.shape[-1], device=scores.device)
    bits = scores.contiguous().view(torch.int32).to(torch.int64)
    return bits * 2**32 + (scores.shape[-1] - 1 - position)

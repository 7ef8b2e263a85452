"""Several orders of the same candidates made into one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from snapstream.compression.layout import LayoutTensors
from snapstream.compression.scoring import candidate_mask


def take_in_turn(lists: Sequence[Tensor], layout: LayoutTensors, *, sink: int, most: int) -> Tensor:
    """Scores by which the best of several lists are taken in turn: all first ones, all second ones, and so on.

    A token has the best of its ranks, so what is high on two lists leaves room for what comes next on either.

    Args:
        lists: Scores, float32 ``[B, N, L]``, 0 or more; of equal ones the earlier token is better.
        layout: Layout of each sequence. What is no candidate takes no rank, so that padding does not matter.
        sink: Sinks (``S``).
        most: Most tokens that will be taken (``K``); ranks from there on are all the same.

    Returns:
        float32 ``[B, N, L]``, ``1 / (1 + rank)``: above 0, at most 1; 0 for what is no candidate.
    """
    scores: Tensor = taken_in_turn(list(lists), layout.candidate_end, sink, most)
    return scores


def plain_taken_in_turn(lists: list[Tensor], candidate_end: Tensor, sink: int, most: int) -> Tensor:
    """See :func:`take_in_turn`; ``candidate_end`` is of the layouts."""
    is_none = ~candidate_mask(lists[0], candidate_end, sink)
    best = _ranks(lists[0].masked_fill(is_none, -1.0), most)
    for scores in lists[1:]:
        torch.minimum(best, _ranks(scores.masked_fill(is_none, -1.0), most), out=best)
    return (1.0 / (1.0 + best)).masked_fill(is_none, 0.0)


taken_in_turn = torch.library.custom_op("snapstream::taken_in_turn", plain_taken_in_turn, mutates_args=())
""":func:`plain_taken_in_turn` as an operation, so that a device may have a kernel for it."""


@taken_in_turn.register_fake
def _taken_in_turn_shape(lists: list[Tensor], candidate_end: Tensor, sink: int, most: int) -> Tensor:
    return torch.empty_like(lists[0])


def _ranks(scores: Tensor, most: int) -> Tensor:
    """Place of each score in its row, from 0 for the highest, but no more than ``most``; float32."""
    best = ordered(scores).topk(min(most, scores.shape[-1]), dim=-1).indices
    places = torch.arange(best.shape[-1], device=scores.device, dtype=torch.float32)
    return torch.full_like(scores, most).scatter_(-1, best, places.expand_as(best))


def ordered(scores: Tensor) -> Tensor:
    """Numbers, int64 like ``scores``, that order as scores do, and of equal ones the earlier first.

    Torch's ``topk`` breaks ties as it likes. Bits of a float that is not negative order like the float itself, and
    those of a negative one are below them all; so with the bits in the high half and the reversed position in the low
    half, no two numbers are equal.

    Args:
        scores: float32 ``[B, N, L]``; no negative zero, and negative ones are all the same.
    """
    position = torch.arange(scores.shape[-1], device=scores.device)
    bits = scores.contiguous().view(torch.int32).to(torch.int64)
    return bits * 2**32 + (scores.shape[-1] - 1 - position)

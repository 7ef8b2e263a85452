"""Several orders of the same candidates made into one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from snapstream.compression.layout import LayoutTensors
from snapstream.compression.scoring import candidate_mask


def take_in_turn(lists: Sequence[Tensor], layout: LayoutTensors, *, sink: int) -> Tensor:
    """Scores by which the best of several lists are taken in turn: all first ones, all second ones, and so on.

    A token has the best of its ranks, so what is high on two lists leaves room for what comes next on either.

    Args:
        lists: Scores, float32 ``[B, N, L]``, 0 or more; of equal ones the earlier token is better.
        layout: Layout of each sequence. What is no candidate takes no rank, so that padding does not matter.
        sink: Sinks (``S``).

    Returns:
        float32 ``[B, N, L]``, ``1 / (1 + rank)``: above 0, at most 1.
    """
    is_none = ~candidate_mask(lists[0], layout, sink)
    best = _ranks(lists[0].masked_fill(is_none, -1.0))
    for scores in lists[1:]:
        torch.minimum(best, _ranks(scores.masked_fill(is_none, -1.0)), out=best)
    return 1.0 / (1.0 + best)


def _ranks(scores: Tensor) -> Tensor:
    """Place of each score in its row, from 0 for the highest, float32."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(scores.shape[-1], device=scores.device, dtype=torch.float32)
    return torch.empty_like(scores).scatter_(-1, order, places.expand_as(scores))

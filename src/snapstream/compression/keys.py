"""How unlike the others each key is (KeyDiff, arXiv 2504.15364): what a prompt says once, and no query has asked for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.compression.layout import LayoutTensors
from snapstream.compression.scoring import KEY_CHUNK, candidates


def key_differences(keys: Tensor, layout: LayoutTensors, *, sink: int, key_chunk: int = KEY_CHUNK) -> Tensor:
    """One minus the cosine between each candidate's key and the mean direction of all candidates' keys.

    Args:
        keys: Rotated keys of the padded prompt, ``[B, N, L, D]``.
        layout: Layout of each sequence.
        sink: Sinks (``S``), which are left out of the mean: they point where no other key does.
        key_chunk: Keys looked at together; bounds memory, does not change the result beyond rounding.

    Returns:
        float32 ``[B, N, L]`` from 0 to 2; 0 for what is no candidate.
    """
    B, N, L, D = keys.shape
    position = torch.arange(L, device=keys.device)
    is_candidate = candidates(position, layout.candidate_end, sink)[:, None, :, None]
    starts = range(0, L, key_chunk)

    def directions(start: int) -> Tensor:
        chunk = F.normalize(keys[:, :, start : start + key_chunk].float(), dim=-1)
        return torch.where(is_candidate[:, :, start : start + key_chunk], chunk, 0.0)  # what is padding may be NaN

    mean = torch.zeros(B, N, D, 1, device=keys.device)
    for start in starts:
        mean += directions(start).sum(2)[..., None]
    mean = F.normalize(mean, dim=2)
    cosines = torch.cat([torch.matmul(directions(start), mean)[..., 0] for start in starts], -1)
    return torch.where(is_candidate[..., 0], (1 - cosines).clamp(min=0.0), 0.0)


def take_in_turn(one: Tensor, other: Tensor, layout: LayoutTensors, *, sink: int, others: int) -> Tensor:
    """Scores by which the best are taken from two lists in turn: one from the first, then some from the second.

    A token has the better one of its two ranks, so what both lists put high leaves room for what comes next on either.

    Args:
        one: Scores, float32 ``[B, N, L]``, 0 or more; of equal ones the earlier is better.
        other: The same of another kind.
        layout: Layout of each sequence. What is no candidate takes no rank, so that padding does not matter.
        sink: Sinks (``S``).
        others: How many are taken from ``other`` for each that is taken from ``one``.

    Returns:
        float32 ``[B, N, L]``, ``1 / (1 + rank)``: above 0, at most 1.
    """
    position = torch.arange(one.shape[2], device=one.device)
    is_other = ~candidates(position, layout.candidate_end, sink)[:, None]
    first, second = (_ranks(scores.masked_fill(is_other, -1.0)) for scores in (one, other))
    return 1.0 / (1.0 + torch.minimum(first * others, second))


def _ranks(scores: Tensor) -> Tensor:
    """Place of each score in its row, from 0 for the highest, float32."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(scores.shape[-1], device=scores.device, dtype=torch.float32)
    return torch.empty_like(scores, dtype=torch.float32).scatter_(-1, order, places.expand_as(scores))

"""How unlike the others each key is (KeyDiff, arXiv 2504.15364): what a text says once, asked for or not."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.compression.layout import LayoutTensors
from snapstream.compression.scoring import KEY_CHUNK, candidate_mask


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
    is_candidate = candidate_mask(keys, layout, sink)[..., None]
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

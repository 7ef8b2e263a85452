"""How unlike the others each key is (KeyDiff, arXiv 2504.15364): what a text says once, asked for or not."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.compression.layout import LayoutTensors
from snapstream.compression.scoring import KEY_CHUNK, candidates

SHORTEST = 1e-12
"""Length that a key is taken to have at least."""


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
    differences: Tensor = differences_of_keys(keys, layout.candidate_end, sink, key_chunk)
    return differences


def plain_differences_of_keys(keys: Tensor, candidate_end: Tensor, sink: int, key_chunk: int) -> Tensor:
    """See :func:`key_differences`; ``candidate_end`` is of the layouts."""
    B, N, L, D = keys.shape
    is_candidate = candidates(torch.arange(L, device=keys.device), candidate_end, sink)[:, None]
    starts = range(0, L, key_chunk)

    def chunk_of(start: int) -> Tensor:
        chunk = keys[:, :, start : start + key_chunk].to(torch.float32, copy=True)
        return chunk.nan_to_num_(0.0, 0.0, 0.0)  # what is padding may be NaN

    # Directions are never written out: a key is divided by its length in sums and products.
    factors = torch.empty(B, N, L, device=keys.device)
    mean = torch.zeros(B, N, 1, D, device=keys.device)
    for start in starts:
        chunk = chunk_of(start)
        lengths = torch.linalg.vector_norm(chunk, dim=-1).clamp_(min=SHORTEST)
        factor = is_candidate[..., start : start + key_chunk] / lengths
        factors[..., start : start + key_chunk] = factor
        mean += torch.matmul(factor[:, :, None], chunk)
    mean = F.normalize(mean, dim=-1).mT
    cosines = torch.cat([torch.matmul(chunk_of(start), mean)[..., 0] for start in starts], -1)
    return torch.where(is_candidate, (1 - cosines * factors).clamp_(min=0.0), 0.0)


differences_of_keys = torch.library.custom_op(
    "snapstream::differences_of_keys", plain_differences_of_keys, mutates_args=()
)
""":func:`plain_differences_of_keys` as an operation, so that a device may have a kernel for it."""


@differences_of_keys.register_fake
def _differences_of_keys_shape(keys: Tensor, candidate_end: Tensor, sink: int, key_chunk: int) -> Tensor:
    return keys.new_empty(keys.shape[:3], dtype=torch.float32)

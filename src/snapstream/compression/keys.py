"""Key differences: how dissimilar each key is from others, which finds what a text says only once, without queries.

A key is compared with all others (KeyDiff, arXiv 2504.15364) or with its neighbors. Keys are rotated by position, so
only slowly rotating components survive in the mean over a whole text. The mean over a neighborhood keeps more, so it
also finds keys that differ from the rest of their paragraph. docs/accuracy.md shows what each variant keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.compression.layout import LayoutTensors
from snapstream.compression.scoring import KEY_CHUNK, candidate_mask
from snapstream.operators import Operator

SHORTEST = 1e-12
"""Lower bound on the norm of a key, to avoid division by zero."""
EVERYWHERE = 0
"""Value of ``near`` that compares keys with all others."""


def key_differences(
    keys: Tensor, layout: LayoutTensors, *, sink: int, near: int = EVERYWHERE, key_chunk: int = KEY_CHUNK
) -> Tensor:
    """One minus the cosine between each candidate's key and the mean direction of candidates' keys around it.

    Args:
        keys: Rotated keys of the padded prompt, ``[B, N, L, D]``.
        layout: Layout of each sequence.
        sink: Sinks (``S``), which are excluded from the mean: they point in a direction that no other key does.
        near: Block size in tokens. A key is compared with its own block, the one before it and the one after it;
            :data:`EVERYWHERE` compares with the whole text.
        key_chunk: Keys processed at once, or one block if that is larger. Bounds memory; affects the result only by
            rounding.

    Returns:
        float32 ``[B, N, L]`` from 0 to 2; 0 for tokens that are not candidates.
    """
    near = min(near, keys.shape[2])  # a larger block would only add padding
    return differences_of_keys(keys, layout.candidate_end, sink, near, key_chunk)


def plain_differences_of_keys(keys: Tensor, candidate_end: Tensor, sink: int, near: int, key_chunk: int) -> Tensor:
    """Plain-torch :func:`key_differences`; ``candidate_end`` comes from the layouts."""
    B, N, L, D = keys.shape
    is_candidate = candidate_mask(keys, candidate_end, sink)
    block = near or L
    blocks = -(-L // block)
    step = block * max(1, key_chunk // block) if near else key_chunk  # whole blocks, or parts of the single one
    starts = range(0, L, step)

    def chunk_of(start: int) -> Tensor:
        chunk = keys[:, :, start : start + step].to(torch.float32, copy=True)
        return chunk.nan_to_num_(0.0, 0.0, 0.0)  # padding may be NaN

    def rows_of(start: int, chunk: Tensor) -> tuple[Tensor, slice]:
        """The chunk split into blocks, and the range of these blocks."""
        width = min(block, step)
        rows = F.pad(chunk, (0, 0, 0, -chunk.shape[2] % width)).view(B, N, -1, width, D)
        first = start // block
        return rows, slice(first, first + rows.shape[2])

    # Normalized keys are never materialized: sums and products divide by the norm of each key instead.
    factors = torch.empty(B, N, L, dtype=torch.float32, device=keys.device)
    sums = torch.zeros(B, N, blocks, D, dtype=torch.float32, device=keys.device)
    for start in starts:
        chunk = chunk_of(start)
        lengths = torch.linalg.vector_norm(chunk, dim=-1).clamp_(min=SHORTEST)
        factor = is_candidate[..., start : start + step] / lengths
        factors[..., start : start + step] = factor
        rows, which = rows_of(start, chunk.mul_(factor[..., None]))
        sums[:, :, which] += rows.sum(3)
    around = F.pad(sums, (0, 0, 1, 1)).unfold(2, 3, 1).sum(-1) if near else sums
    around = F.normalize(around, dim=-1)
    cosines = []
    for start in starts:
        rows, which = rows_of(start, chunk_of(start))
        cosines.append(torch.matmul(rows, around[:, :, which, :, None]).view(B, N, -1))
    product = torch.cat(cosines, -1)[..., :L] * factors
    return torch.where(is_candidate, (1 - product).clamp_(min=0.0), 0.0)


def _differences_of_keys_shape(keys: Tensor, candidate_end: Tensor, sink: int, near: int, key_chunk: int) -> Tensor:
    return keys.new_empty(keys.shape[:3], dtype=torch.float32)


differences_of_keys = Operator("differences_of_keys", plain_differences_of_keys, _differences_of_keys_shape)
""":func:`plain_differences_of_keys`, for which devices have kernels."""

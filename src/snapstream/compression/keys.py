"""How unlike others each key is: what a text says once, asked for or not.

Unlike all others (KeyDiff, arXiv 2504.15364), or unlike its neighbours. Keys are rotated by their position, so the mean
over a whole text keeps only what turns slowly. The mean over a neighbourhood keeps more, so a key is found that differs
from its own paragraph's. docs/accuracy.md says what either keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.compression.layout import LayoutTensors
from snapstream.compression.scoring import KEY_CHUNK, candidate_mask

SHORTEST = 1e-12
"""Length that a key is taken to have at least."""
EVERYWHERE = 0
"""In place of ``near``: keys are compared with all others."""


def key_differences(
    keys: Tensor, layout: LayoutTensors, *, sink: int, near: int = EVERYWHERE, key_chunk: int = KEY_CHUNK
) -> Tensor:
    """One minus the cosine between each candidate's key and the mean direction of candidates' keys around it.

    Args:
        keys: Rotated keys of the padded prompt, ``[B, N, L, D]``.
        layout: Layout of each sequence.
        sink: Sinks (``S``), which are left out of the mean: they point where no other key does.
        near: A text is cut into blocks of so many tokens, and what is around a key is its own block, the one before
            it and the one after it; :data:`EVERYWHERE` for the whole text.
        key_chunk: Keys looked at together, or one block's, if these are more; bounds memory, does not change the result
            beyond rounding.

    Returns:
        float32 ``[B, N, L]`` from 0 to 2; 0 for what is no candidate.
    """
    near = min(near, keys.shape[2])  # one block is one block; a larger one would only be padding
    differences: Tensor = differences_of_keys(keys, layout.candidate_end, sink, near, key_chunk)
    return differences


def plain_differences_of_keys(keys: Tensor, candidate_end: Tensor, sink: int, near: int, key_chunk: int) -> Tensor:
    """See :func:`key_differences`; ``candidate_end`` is of the layouts."""
    B, N, L, D = keys.shape
    is_candidate = candidate_mask(keys, candidate_end, sink)
    block = near or L
    blocks = -(-L // block)
    step = block * max(1, key_chunk // block) if near else key_chunk  # whole blocks, or parts of the only one
    starts = range(0, L, step)

    def chunk_of(start: int) -> Tensor:
        chunk = keys[:, :, start : start + step].to(torch.float32, copy=True)
        return chunk.nan_to_num_(0.0, 0.0, 0.0)  # what is padding may be NaN

    def rows_of(start: int, chunk: Tensor) -> tuple[Tensor, slice]:
        """The numbers of a chunk block by block, and which blocks these are."""
        width = min(block, step)
        rows = F.pad(chunk, (0, 0, 0, -chunk.shape[2] % width)).view(B, N, -1, width, D)
        first = start // block
        return rows, slice(first, first + rows.shape[2])

    # Directions are never written out: a key is divided by its length in sums and products.
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


differences_of_keys = torch.library.custom_op(
    "snapstream::differences_of_keys", plain_differences_of_keys, mutates_args=()
)
""":func:`plain_differences_of_keys` as an operation, so that a device may have a kernel for it."""


@differences_of_keys.register_fake
def _differences_of_keys_shape(keys: Tensor, candidate_end: Tensor, sink: int, near: int, key_chunk: int) -> Tensor:
    return keys.new_empty(keys.shape[:3], dtype=torch.float32)

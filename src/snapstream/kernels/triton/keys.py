"""Key differences in two passes over the keys: the sum of each block's directions, then each key beside those around.

Normalized keys are never stored: only one factor per key and one sum per block leave a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from snapstream.compression.keys import EVERYWHERE, SHORTEST
from snapstream.kernels.triton.tiles import load_parts, parts_of

PIECE = 512
"""Keys per sum where a key is compared with all others; the sums are then added up."""


@triton.jit
def _load_keys(keys, key_row, position, is_key, FIRST: tl.constexpr, SECOND: tl.constexpr, SIZE: tl.constexpr):
    """Both parts of keys as float32; numbers that are not finite count as 0."""
    first, second = load_parts(keys, key_row, position, is_key, FIRST, SECOND, SIZE)
    first, second = first.to(tl.float32), second.to(tl.float32)
    first = tl.where(tl.abs(first) < float("inf"), first, 0.0)
    return first, tl.where(tl.abs(second) < float("inf"), second, 0.0)


@triton.jit(do_not_specialize=["entries", "sink", "near", "blocks"])
def _sum_directions(
    keys, candidate_ends, factors, sums, shortest, sequence_stride, head_stride, key_row, entries, sink, near, blocks,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    block, both = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sequence, head = both // KV_HEADS, both % KV_HEADS
    candidate_end = tl.load(candidate_ends + sequence).to(tl.int32)
    keys += sequence * sequence_stride + head * head_stride
    first_sum = tl.zeros([FIRST], tl.float32)
    second_sum = tl.zeros([SECOND if SECOND else 1], tl.float32)
    end = tl.minimum((block + 1) * near, entries)
    for start in range(block * near, end, ROWS):
        position = start + tl.arange(0, ROWS)
        is_candidate = (position < end) & (position >= sink) & (position < candidate_end)
        first, second = _load_keys(keys, key_row, position, is_candidate, FIRST, SECOND, SIZE)
        length = tl.sqrt_rn(tl.sum(first * first, 1) + tl.sum(second * second, 1))
        factor = tl.where(is_candidate, 1.0 / tl.maximum(length, shortest), 0.0)
        tl.store(factors + both * entries + position, factor, mask=position < end)
        first_sum += tl.sum(first * factor[:, None], 0)
        second_sum += tl.sum(second * factor[:, None], 0)
    sums += (both * blocks + block) * SIZE
    column = tl.arange(0, FIRST)
    tl.store(sums + column, first_sum, mask=column < SIZE)
    if SECOND:
        column = FIRST + tl.arange(0, SECOND)
        tl.store(sums + column, second_sum, mask=column < SIZE)


@triton.jit(do_not_specialize=["entries", "sink", "near", "blocks", "tiles"])
def _differ(
    keys, candidate_ends, factors, sums, differences, shortest,
    sequence_stride, head_stride, key_row, entries, sink, near, blocks, tiles,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    block, both = tl.program_id(0) // tiles, tl.program_id(1).to(tl.int64)
    sequence, head = both // KV_HEADS, both % KV_HEADS
    candidate_end = tl.load(candidate_ends + sequence).to(tl.int32)
    keys += sequence * sequence_stride + head * head_stride
    # The direction of the block and of those beside it.
    beside = block - 1 + tl.arange(0, 4)
    is_block = (beside >= 0) & (beside < blocks) & (beside < block + 2)
    first_sums, second_sums = load_parts(sums + both * blocks * SIZE, SIZE, beside, is_block, FIRST, SECOND, SIZE)
    first_around, second_around = tl.sum(first_sums, 0), tl.sum(second_sums, 0)
    length = tl.sqrt_rn(tl.sum(first_around * first_around, 0) + tl.sum(second_around * second_around, 0))
    scale = 1.0 / tl.maximum(length, shortest)
    end = tl.minimum((block + 1) * near, entries)
    position = block * near + tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    is_candidate = (position < end) & (position >= sink) & (position < candidate_end)
    first, second = _load_keys(keys, key_row, position, is_candidate, FIRST, SECOND, SIZE)
    cosine = tl.sum(first * first_around[None, :], 1) + tl.sum(second * second_around[None, :], 1)
    factor = tl.load(factors + both * entries + position, mask=is_candidate, other=0.0)
    difference = tl.where(is_candidate, tl.maximum(1.0 - cosine * scale * factor, 0.0), 0.0)
    tl.store(differences + both * entries + position, difference, mask=position < end)


def key_differences(keys: Tensor, candidate_end: Tensor, sink: int, near: int) -> Tensor:
    """Triton kernels for :func:`snapstream.compression.keys.key_differences`."""
    B, N, L, D = keys.shape
    first, second = parts_of(D)
    factors, differences = (torch.empty(B, N, L, dtype=torch.float32, device=keys.device) for _ in range(2))
    strides = keys.stride()[:3]
    shape = {"KV_HEADS": N, "SIZE": D, "FIRST": first, "SECOND": second}

    width = PIECE if near == EVERYWHERE else near
    blocks, rows = -(-L // width), min(32, next_power_of_2(width))
    sums = torch.empty(B, N, blocks, D, dtype=torch.float32, device=keys.device)
    _sum_directions[(blocks, B * N)](
        keys, candidate_end, factors, sums, SHORTEST, *strides, L, sink, width, blocks, **shape, ROWS=rows, num_warps=4
    )
    if near == EVERYWHERE:
        sums, width, blocks = sums.sum(2), L, 1
    tiles = -(-width // rows)
    _differ[(blocks * tiles, B * N)](
        keys, candidate_end, factors, sums, differences, SHORTEST, *strides, L, sink, width, blocks, tiles, **shape,
        ROWS=rows, num_warps=4,
    )  # fmt: skip
    return differences

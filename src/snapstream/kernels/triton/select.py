"""Selection: which prompt token every cache entry holds, and the copy into the slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

BLOCK = 8192
"""Scores processed at once."""


@triton.jit
def _count(scores, length, bound, BLOCK: tl.constexpr):
    """Number of scores whose bits are not below ``bound``."""
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        bits = tl.load(scores + at, mask=at < length, other=-1.0).to(tl.int32, bitcast=True)
        found += (bits >= bound).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit(do_not_specialize=["heads", "entries", "sink", "capacity"])
def _select(
    scores,
    positions,
    bases,
    counts,
    lengths,
    heads,
    entries,
    sink,
    capacity,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = tl.load(bases + row // heads).to(tl.int32)
    count = tl.load(counts + row // heads).to(tl.int32)
    length = tl.load(lengths + row // heads).to(tl.int32)
    scores += row * entries
    positions += row * capacity
    # Sinks, and unused entries.
    for start in range(0, capacity, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        position = tl.where(entry < count, entry, -1)
        is_neither = (entry >= sink) & (entry < count)
        tl.store(positions + entry, position.to(tl.int64), mask=(entry < capacity) & (is_neither == 0))
    pinned = base - sink
    steps = tl.where(pinned > 0, 31, 0)
    # The score of the last pinned token. The bits of a non-negative float sort like the float, so they are determined
    # from the highest to the lowest: a bit stays set if enough scores are not below the resulting bound.
    last = 0
    for step in range(steps):
        bound = last | (1 << (30 - step))
        last = tl.where(_count(scores, entries, bound, BLOCK) >= pinned, bound, last)
    # All tokens above it are pinned, and the first of those that equal it. The last of the others are in the ring.
    of_equals = pinned - _count(scores, entries, last + 1, BLOCK)
    first_in_ring = length - count
    taken, equals, others = 0, 0, 0
    for start in range(0, entries, BLOCK):
        at = start + tl.arange(0, BLOCK)
        bits = tl.load(scores + at, mask=at < entries, other=-1.0).to(tl.int32, bitcast=True)
        is_equal = (bits == last).to(tl.int32)
        among_equals = equals + tl.cumsum(is_equal, 0)
        is_best = (bits > last) | ((is_equal != 0) & (among_equals <= of_equals))
        is_taken = (is_best & (pinned > 0)).to(tl.int32)
        rank = taken + tl.cumsum(is_taken, 0) - 1
        tl.store(positions + sink + rank, at.to(tl.int64), mask=is_taken != 0)
        is_other = ((at >= sink) & (at < length) & (is_taken == 0)).to(tl.int32)
        in_ring = others + tl.cumsum(is_other, 0) - 1 - first_in_ring
        tl.store(positions + base + in_ring, at.to(tl.int64), mask=(is_other != 0) & (in_ring >= 0))
        taken += tl.sum(is_taken, 0)
        equals += tl.sum(is_equal, 0)
        others += tl.sum(is_other, 0)


@triton.jit(do_not_specialize=["entries", "position_head"])
def _gather(
    source,
    target,
    positions,
    entries,
    source_head,
    source_row,
    target_head,
    target_row,
    position_head,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_entry = entry < entries
    position = tl.load(positions + head * position_head + entry, mask=is_entry, other=0)
    column = tl.arange(0, PADDED)
    mask = is_entry[:, None] & (column < SIZE)[None, :]
    rows = tl.load(source + head * source_head + position[:, None] * source_row + column[None, :], mask=mask)
    tl.store(target + head * target_head + entry.to(tl.int64)[:, None] * target_row + column[None, :], rows, mask=mask)


def select_entries(
    scores: Tensor, base: Tensor, count: Tensor, length: Tensor, sink: int, top_k: int, capacity: int
) -> Tensor:
    """Triton kernel for :func:`snapstream.compression.compress.select_entries`, with the same results for ties."""
    B, N, L = scores.shape
    positions = torch.empty(B, N, capacity, dtype=torch.int64, device=scores.device)
    _select[(B * N,)](
        scores.contiguous(),
        positions,
        base,
        count,
        length,
        N,
        L,
        sink,
        capacity,
        BLOCK=BLOCK,
        num_warps=16,
    )
    return positions


def gather(source: Tensor, positions: Tensor, target: Tensor) -> None:
    """Copy rows ``positions`` ``[N, E]`` of ``source`` ``[N, L, D]`` to the first ``E`` rows of ``target``."""
    N, E = positions.shape
    size = source.shape[2]
    padded = next_power_of_2(size)
    rows = max(1, 4096 // padded)
    _gather[(-(-E // rows), N)](
        source,
        target,
        positions,
        E,
        source.stride(0),
        source.stride(1),
        target.stride(0),
        target.stride(1),
        positions.stride(0),
        SIZE=size,
        PADDED=padded,
        ROWS=rows,
        num_warps=4,
    )

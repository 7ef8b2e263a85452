"""Cache entries as codes of 8 or 4 bits (:mod:`snapstream.cache.codes`): how they are written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from snapstream.cache import LayerCache, QuantizedCache
from snapstream.kernels.triton.places import PENDING, Places, entry_of, rows_of_tokens

MAGIC: tl.constexpr = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding it rounds a number to an integer."""
TINY: tl.constexpr = tl.constexpr(1e-30)


@triton.jit
def rotated(x, ROWS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Rows ``[ROWS, SIZE]``, each ``WIDTH`` neighbors times the normalized Hadamard matrix."""
    for step in tl.static_range(0, 10):
        if 2**step < WIDTH:
            halves = tl.permute(tl.reshape(x, (ROWS * SIZE // 2 // 2**step, 2, 2**step)), (0, 2, 1))
            first, second = tl.split(halves)
            both = tl.permute(tl.join(first + second, first - second), (0, 2, 1))
            x = tl.reshape(both, (ROWS, SIZE))
    return x * (1.0 / WIDTH**0.5)


@triton.jit
def _whole(x):
    return ((x + MAGIC) - MAGIC).to(tl.int32)


@triton.jit
def _finite(x, axis: tl.constexpr):
    """Whether all numbers along an axis are finite."""
    return tl.sum(x * 0.0, axis) == 0.0


@triton.jit
def _store8(y, row_place, is_row, SIZE: tl.constexpr, PADDED: tl.constexpr):
    column = tl.arange(0, PADDED)
    finite, peak = _finite(y, 1), tl.max(tl.abs(y), 1)
    used = finite & (peak > TINY)
    factor = tl.where(used, 127.0 / tl.where(used, peak, 1.0), 0.0)
    code = tl.where(used[:, None], _whole(tl.where(used[:, None], y, 0.0) * factor[:, None]), 0) + 128
    mask = is_row[:, None] & (column < SIZE)[None, :]
    tl.store(row_place[:, None] + column[None, :], code.to(tl.uint8), mask=mask)
    scale = tl.where(finite, tl.where(used, peak / 127.0, 0.0), float("nan"))
    tl.store((row_place + SIZE).to(tl.pointer_type(tl.float32)), scale, mask=is_row)


@triton.jit
def _store4(y, row_place, is_row, ROWS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    PARTS: tl.constexpr = PADDED // 32
    y = tl.reshape(y, (ROWS * PARTS, 32))
    finite, least, most = _finite(y, 1), tl.min(y, 1), tl.max(y, 1)
    furthest = tl.where(most >= -least, most, least)
    scale = tl.where(finite & (tl.abs(furthest) > TINY), furthest / -8.0, 0.0)
    bits = scale.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # as bfloat16
    wide = (bits << 16).to(tl.float32, bitcast=True)
    used = finite & (wide != 0.0)
    factor = tl.where(used, 1.0 / tl.where(used, wide, 1.0), 0.0)
    code = tl.where(used[:, None], _whole(tl.where(used[:, None], y, 0.0) * factor[:, None]), 0) + 8
    code = tl.minimum(code, 15)
    low, high = tl.split(tl.permute(tl.reshape(code, (ROWS * PARTS, 2, 16)), (0, 2, 1)))
    part = tl.arange(0, PARTS)
    both = tl.reshape(low | (high << 4), (ROWS, PARTS, 16)).to(tl.uint8)
    place = row_place[:, None, None] + part[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    there = is_row[:, None] & (part * 32 < SIZE)[None, :]
    tl.store(place, both, mask=there[:, :, None])
    bits = tl.reshape(tl.where(finite, bits, 0x7FC0), (ROWS, PARTS)).to(tl.int16)
    scales = (row_place[:, None] + SIZE // 2 + part[None, :] * 2).to(tl.pointer_type(tl.int16))
    tl.store(scales, bits, mask=there)


@triton.jit(do_not_specialize=["rows", "tokens"])
def _encode(
    numbers,
    frames,
    target,
    count,
    base,
    limit,
    active,
    rows,
    tokens,
    source_slot,
    source_head,
    source_token,
    target_slot,
    target_head,
    target_entry,
    heads,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    ALL_ACTIVE: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    _, is_row, slot, token = rows_of_tokens(active, rows, tokens, ROWS, ALL_ACTIVE)
    column = tl.arange(0, PADDED)
    mask = is_row[:, None] & (column < SIZE)[None, :]
    source = numbers + (slot * source_slot + head * source_head + token * source_token)[:, None] + column[None, :]
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if frames is not None:
        frame = frames + ((slot * heads + head) * 2 * SIZE)[:, None] + column[None, :]
        center, spread = tl.load(frame, mask=mask, other=0.0), tl.load(frame + SIZE, mask=mask, other=1.0)
        x = (x - center) / spread
    y = rotated(x, ROWS, PADDED, WIDTH)
    entry = entry_of(slot, token, count, base, limit, is_row, KIND)
    place = target + slot * target_slot + head * target_head + entry * target_entry
    if BITS == 8:
        _store8(y, place, is_row, SIZE, PADDED)
    else:
        _store4(y, place, is_row, ROWS, SIZE, PADDED)


def _launch(
    numbers: Tensor, frames: Tensor | None, target: Tensor, places: Places, width: int, bits: int, rows_at_once: int
) -> None:
    (B, N, T, D) = numbers.shape
    assert numbers.stride(3) == target.stride(3) == 1
    _encode[(-(-B * T // rows_at_once), N)](
        numbers,
        frames,
        target,
        *places.tensors(),
        B * T,
        T,
        *numbers.stride()[:3],
        *target.stride()[:3],
        N,
        BITS=bits,
        SIZE=D,
        PADDED=next_power_of_2(D),
        WIDTH=width,
        KIND=places.kind,
        ALL_ACTIVE=places.active is None,
        ROWS=rows_at_once,
        num_warps=1,
    )


def encode(numbers: Tensor, frame: Tensor | None, width: int, bits: int, target: Tensor) -> None:
    """Triton kernel for :func:`snapstream.cache.quantized.encode`."""
    frame = None if frame is None else frame.contiguous()
    nothing = torch.zeros(1, dtype=torch.int64, device=numbers.device)
    places = Places(PENDING, numbers.shape[1], nothing)
    _launch(numbers[None], frame, target[None], places, width, bits, rows_at_once=4)


def store_tokens(numbers: LayerCache, cache: QuantizedCache, places: Places) -> None:
    """Store tokens as codes.

    Args:
        numbers: Keys and values of the tokens, ``[B, N, T, D]``.
        cache: ``[B, N, C, bytes]``, or pending entries.
        places: Entries of the tokens.
    """
    frames = (cache.frames, None)
    for codes, new, frame, stored in zip(cache.formats, numbers.tensors, frames, cache.tensors, strict=False):
        _launch(new, frame, stored, places, cache.rotation, codes.bits, rows_at_once=1)

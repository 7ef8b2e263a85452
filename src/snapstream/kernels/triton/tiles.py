"""What the kernels have in common: tiles of rows, their products, and the running softmax over them.

The dimensions of Triton's tiles are powers of two; head sizes need not be. A head of ``size`` elements is read as two
parts, the largest power of two and the rest (96 is 64 and 32, 576 is 512 and 64; :func:`parts_of`), so that there is
little padding.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Whether kernels run in Triton's interpreter on the CPU, which multiplies bfloat16 incorrectly and truncates it."""
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
SMALLEST = 16
"""Minimum number of rows and columns of a product."""


def parts_of(size: int, bits: int = 0) -> tuple[int, int]:
    """Sizes of the two parts of a head. The second may be padded; it is 0 if there is only one.

    With codes of 4 bits, parts are the lower and the upper halves of bytes, which may be padded.
    """
    if bits == 4:
        half = max(SMALLEST, next_power_of_2(size // 2))
        return half, half
    first = max(SMALLEST, next_power_of_2(size + 1) // 2)
    return (first, 0) if size <= first else (first, max(SMALLEST, next_power_of_2(size - first)))


def width_of(size: int, dtype: torch.dtype) -> int:
    """Cost of a row of a tile, in bytes; float32 counts twice, because products split it into TF32 parts."""
    return size * dtype.itemsize * (2 if dtype == torch.float32 else 1)


@triton.jit
def product(a, b):
    """``a @ b`` with float32 sums; float32 inputs are multiplied in almost full precision. Types may differ."""
    if INTERPRETED or a.dtype != b.dtype:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def rounded(x, like):
    """Round float32 values to the dtype that ``like`` points to, ties to even."""
    if INTERPRETED and like.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # noqa: PLR0124 (not of NaN)
    return x.to(like.dtype.element_ty)


@triton.jit
def load_rows(address, stride, rows, is_row, START: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr):
    """Columns ``START .. START + COLUMNS`` of some rows as a tile; 0 where ``is_row`` is false, and beyond ``SIZE``."""
    columns = START + tl.arange(0, COLUMNS)
    place = address + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    mask = is_row[:, None]
    if SIZE < START + COLUMNS:
        mask = mask & (columns < SIZE)[None, :]
    return tl.load(place, mask=mask, other=0.0)


@triton.jit
def load_parts(address, stride, rows, is_row, FIRST: tl.constexpr, SECOND: tl.constexpr, SIZE: tl.constexpr):
    """Both parts of some rows; if there is no second part, it has one column, which is meaningless."""
    first = load_rows(address, stride, rows, is_row, 0, FIRST, SIZE)
    second = load_rows(address, stride, rows, is_row, FIRST, SECOND if SECOND else 1, SIZE)
    return first, second


@triton.jit
def logits_of(
    query_first, query_second, key_first, key_second, constant, scale, cap, SECOND: tl.constexpr, key_factor=None
):
    """Logits of tiles of queries and keys, in base 2.

    ``key_factor`` multiplies the products of each key, ``constant`` is added to those of each query, and ``cap`` is a
    soft cap of logits; ``None`` for none.
    """
    logits = product(query_first, tl.trans(key_first))
    if SECOND:
        logits += product(query_second, tl.trans(key_second))
    if key_factor is not None:
        logits *= key_factor[None, :]
    if constant is not None:
        logits += constant[:, None]
    if cap is not None:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        logits = cap - 2.0 * cap / (tl.exp2(logits * (scale / cap * 2.0 * LOG2_E)) + 1.0)
        return logits * LOG2_E
    return logits * (scale * LOG2_E)


@triton.jit
def with_sinks(peak, total, sinks, head, is_row):
    """Sums of the weights of some rows with those of their sinks, relative to ``peak``; 1 for rows without any."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=is_row, other=0.0) * LOG2_E
        total += tl.exp2(sink - tl.where(peak == float("-inf"), sink, peak))
    return tl.where(total > 0.0, total, 1.0)


@triton.jit
def nothing_seen(ROWS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """A running softmax before its first tile; see :func:`fold`."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    first = tl.zeros([ROWS, FIRST], tl.float32)
    second = tl.zeros([ROWS, SECOND if SECOND else 1], tl.float32)
    return peak, total, first, second


@triton.jit
def weigh(peak, total, logits):
    """Add the logits of a tile: the new peak and total, its weights, and the factor that rescales earlier sums."""
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(logits - safe[:, None])
    fade = tl.exp2(peak - safe)
    return new_peak, total * fade + tl.sum(weights, 1), weights, fade


@triton.jit
def log_total(peak, total):
    """Logarithm, in base 2, of the sum of all weights; minus infinity if nothing was seen."""
    return tl.where(total > 0.0, peak + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))


@triton.jit
def fold(peak, total, first, second, logits, value_first, value_second, SECOND: tl.constexpr, value_factor=None):
    """Add one more tile to a running softmax.

    Args:
        peak: Largest logit so far of each row; minus infinity at first.
        total: Sum of weights so far.
        first: Sum of weighted values so far, first part.
        second: The same, second part.
        logits: In base 2; minus infinity where a row does not see a key.
        value_first: Values of the keys, first part.
        value_second: The same, second part.
        SECOND: Columns of the second part.
        value_factor: Multiplies the value of each key; ``None`` for none.
    """
    peak, total, weights, fade = weigh(peak, total, logits)
    if value_factor is not None:
        weights *= value_factor[None, :]
    if not INTERPRETED:
        weights = weights.to(value_first.dtype)
    first = first * fade[:, None] + product(weights, value_first)
    if SECOND:
        second = second * fade[:, None] + product(weights, value_second)
    return peak, total, first, second


@triton.jit
def store_parts(out, rows, is_row, first, second, FIRST: tl.constexpr, SECOND: tl.constexpr, SIZE: tl.constexpr):
    """Store both parts of some rows, which begin at offsets ``rows``; the inverse of :func:`load_parts`."""
    columns = tl.arange(0, FIRST)
    mask = is_row[:, None] & (columns < SIZE)[None, :]
    tl.store(out + rows[:, None] + columns[None, :], rounded(first, out), mask=mask)
    if SECOND:
        columns = FIRST + tl.arange(0, SECOND)
        mask = is_row[:, None] & (columns < SIZE)[None, :]
        tl.store(out + rows[:, None] + columns[None, :], rounded(second, out), mask=mask)


def shape_of_heads(
    query: Tensor, keys: Tensor, values: Tensor, columns: int, key_bits: int = 0, value_bits: int = 0
) -> dict[str, int | bool]:
    """Compile-time parameters of attention kernels that describe the heads.

    Args:
        query: ``[rows, H, D]``.
        keys: ``[..., N, L, D]``.
        values: As ``keys``; may be the same tensor.
        columns: Elements of a value (``V``).
        key_bits: Bits of a code, if keys are codes, else 0.
        value_bits: The same of values.
    """
    size = query.shape[2]
    is_same = values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride()
    keys_first, keys_second = parts_of(size, key_bits)
    values_first, values_second = parts_of(size if is_same and value_bits == 4 else columns, value_bits)
    return {
        "GROUP": query.shape[1] // keys.shape[-3],
        "SIZE": size,
        "COLUMNS": columns,
        "KEY_FIRST": keys_first,
        "KEY_SECOND": keys_second,
        "VALUE_FIRST": values_first,
        "VALUE_SECOND": values_second,
        # If so, a tile of keys is a tile of values, too.
        "KEYS_ARE_VALUES": is_same and values_first == keys_first and values_second in (keys_second, 0),
    }

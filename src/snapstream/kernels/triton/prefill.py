"""Attention of a prefill chunk to everything before it and to itself; logits never leave a tile.

For what torch's flash kernels do not support (float32, soft caps, sinks, and latents, whose heads are too large), and
for the usual heads on Hopper, where it takes two thirds of their time (docs/gpu.md).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from snapstream.kernels import triton as kernels
from snapstream.kernels.triton import MEMORY
from snapstream.kernels.triton.tiles import (
    fold,
    load_parts,
    logits_of,
    nothing_seen,
    shape_of_heads,
    store_parts,
    width_of,
    with_sinks,
)


@triton.jit(do_not_specialize=["tokens", "window"])
def _attend(
    query,
    keys,
    values,
    out,
    start,
    sinks,
    tokens,
    window,
    scale,
    cap,
    query_token,
    query_head,
    out_token,
    out_head,
    key_head,
    key_entry,
    value_head,
    value_entry,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_FIRST: tl.constexpr,
    KEY_SECOND: tl.constexpr,
    VALUE_FIRST: tl.constexpr,
    VALUE_SECOND: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
    WINDOWED: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    # The last block has the most work, so it comes first.
    block, head = tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(0)
    token = block * ROWS + tl.arange(0, ROWS)
    is_row = token < tokens
    before = tl.load(start).to(tl.int32)
    query_first, query_second = load_parts(
        query + head * query_head, query_token, token, is_row, KEY_FIRST, KEY_SECOND, SIZE
    )
    peak, total, first, second = nothing_seen(ROWS, VALUE_FIRST, VALUE_SECOND)
    keys += (head // GROUP).to(tl.int64) * key_head
    values += (head // GROUP).to(tl.int64) * value_head
    end = before + tl.minimum((block + 1) * ROWS, tokens)
    # All rows see all entries before this one, from `edge` on.
    diagonal = (before + block * ROWS + 1) // ENTRIES * ENTRIES
    edge = 0
    if WINDOWED:
        oldest = tl.maximum(before + block * ROWS + 1 - window, 0) // ENTRIES * ENTRIES
        edge = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), ENTRIES) * ENTRIES, diagonal)
        for at in range(oldest, edge, ENTRIES):
            peak, total, first, second = _fold_entries(
                peak, total, first, second, query_first, query_second, keys, values, before + token, at, end, window,
                scale, cap, key_entry, value_entry, SIZE, COLUMNS, KEY_FIRST, KEY_SECOND, VALUE_FIRST, VALUE_SECOND,
                KEYS_ARE_VALUES, ENTRIES, True, True,
            )  # fmt: skip
    for at in range(edge, diagonal, ENTRIES):
        peak, total, first, second = _fold_entries(
            peak, total, first, second, query_first, query_second, keys, values, before + token, at, end, window,
            scale, cap, key_entry, value_entry, SIZE, COLUMNS, KEY_FIRST, KEY_SECOND, VALUE_FIRST, VALUE_SECOND,
            KEYS_ARE_VALUES, ENTRIES, False, False,
        )  # fmt: skip
    for at in range(diagonal, end, ENTRIES):
        peak, total, first, second = _fold_entries(
            peak, total, first, second, query_first, query_second, keys, values, before + token, at, end, window,
            scale, cap, key_entry, value_entry, SIZE, COLUMNS, KEY_FIRST, KEY_SECOND, VALUE_FIRST, VALUE_SECOND,
            KEYS_ARE_VALUES, ENTRIES, True, WINDOWED,
        )  # fmt: skip
    # Rows past the last token may see nothing.
    target = token.to(tl.int64) * out_token + head * out_head
    divisor = with_sinks(peak, total, sinks, head + token * 0, is_row)[:, None]
    store_parts(out, target, is_row, first / divisor, second / divisor, VALUE_FIRST, VALUE_SECOND, COLUMNS)


@triton.jit
def _fold_entries(
    peak, total, first, second, query_first, query_second, keys, values, position, at, end, window, scale, cap,
    key_entry, value_entry,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, KEY_FIRST: tl.constexpr, KEY_SECOND: tl.constexpr,
    VALUE_FIRST: tl.constexpr, VALUE_SECOND: tl.constexpr, KEYS_ARE_VALUES: tl.constexpr, ENTRIES: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Add a tile of entries to the running softmax; entries that all rows see need no mask."""
    entry = at + tl.arange(0, ENTRIES)
    is_entry = entry < end
    key_first, key_second = load_parts(keys, key_entry, entry, is_entry, KEY_FIRST, KEY_SECOND, SIZE)
    logits = logits_of(query_first, query_second, key_first, key_second, None, scale, cap, KEY_SECOND)
    if MASKED:
        seen = (entry[None, :] <= position[:, None]) & is_entry[None, :]
        if WINDOWED:
            seen = seen & (entry[None, :] > position[:, None] - window)
        logits = tl.where(seen, logits, float("-inf"))
    if KEYS_ARE_VALUES:
        value_first, value_second = key_first, key_second
    else:
        value_first, value_second = load_parts(values, value_entry, entry, is_entry, VALUE_FIRST, VALUE_SECOND, COLUMNS)
    return fold(peak, total, first, second, logits, value_first, value_second, VALUE_SECOND)


def tile_of(size: int, dtype: torch.dtype, memory: int) -> dict[str, int]:
    """Rows and entries of a tile, and options of the compiler, to fit the shared memory of a multiprocessor."""
    wide = width_of(size, dtype)
    if wide <= 256 and memory >= MEMORY:
        return {"ROWS": 128, "ENTRIES": 128, "num_warps": 8, "num_stages": 3}
    if wide <= 256:
        return {"ROWS": 128, "ENTRIES": 64, "num_warps": 8, "num_stages": 3 if wide <= 128 else 2}
    if wide <= 512:
        return {"ROWS": 64, "ENTRIES": 32, "num_warps": 4, "num_stages": 2}
    if wide <= 1152:
        return {"ROWS": 32, "ENTRIES": 32, "num_warps": 8, "num_stages": 1}
    return {"ROWS": 16, "ENTRIES": 16, "num_warps": 8, "num_stages": 1}


def attend_chunk(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of one chunk, as :meth:`snapstream.attention.base.AttentionBackend.prefill` describes it.

    No temporary has the size of ``L``.

    Args:
        query: ``[T, H, D]``.
        keys: ``[N, L, D]``; the elements of a row must be contiguous, rows may have any stride.
        values: ``[N, L, V]``; may be part of the keys.
        start: Entry of the first token, int64 scalar on the device.
        scale: Factor on the logits.
        window: How many tokens a token attends to, itself included; 0 for all.
        cap: Soft cap of the logits; 0 for none.
        sinks: One extra logit per head, without a value, float32 ``[H]``.

    Returns:
        ``[T, H, V]``.
    """
    (T, H, D), V = query.shape, values.shape[2]
    out = query.new_empty(T, H, V)
    options: dict[str, Any] = tile_of(D, query.dtype, kernels.memory_of_processor(query.device))
    _attend[(H, -(-T // options["ROWS"]))](
        query,
        keys,
        values,
        out,
        start,
        sinks,
        T,
        window,
        scale,
        cap or None,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        **shape_of_heads(query, keys, values, V),
        WINDOWED=window > 0,
        **options,
    )
    return out

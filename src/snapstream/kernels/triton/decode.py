"""Attention of a decode step over caches of fixed size.

A program takes the query heads of one group, with all tokens of the step, as rows of one tile, and one part of the
slot's entries. A second kernel merges the parts (flash decoding). The number of entries is read on the device, so the
launch is always the same: the parts share the valid entries, and programs of free slots exit at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from snapstream.cache import LayerCache, QuantizedCache, dense_dtype
from snapstream.kernels.buffers import Slots
from snapstream.kernels.triton import LEAST_ENTRIES, MOST_SPLITS, PROGRAMS_PER_PROCESSOR
from snapstream.kernels.triton.coded_attention import (
    RotatedQueries,
    load_entries,
    load_queries,
    rotated_scratch,
    store_results,
)
from snapstream.kernels.triton.tiles import (
    LOG2_E,
    SMALLEST,
    fold,
    log_total,
    logits_of,
    nothing_seen,
    rounded,
    shape_of_heads,
    width_of,
    with_sinks,
)


@triton.jit
def _attend(
    query,
    keys,
    values,
    pending_keys,
    pending_values,
    out,
    state,
    base,
    count,
    limit,
    active,
    sinks,
    constants,
    scale,
    cap,
    query_row,
    query_head,
    out_row,
    out_head,
    cache_slot,
    cache_head,
    cache_entry,
    value_slot,
    value_head,
    value_entry,
    pending_slot,
    pending_head,
    pending_entry,
    new_value_slot,
    new_value_head,
    new_value_entry,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_FIRST: tl.constexpr,
    KEY_SECOND: tl.constexpr,
    VALUE_FIRST: tl.constexpr,
    VALUE_SECOND: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    split, slot = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head, block = (tl.program_id(1) // BLOCKS).to(tl.int64), tl.program_id(1) % BLOCKS
    if tl.load(active + slot) == 0:
        return
    counted, end = tl.load(count + slot), tl.load(limit + slot)
    # A single token is already in the cache; several are pending, and handled below.
    valid = tl.minimum(counted + (1 if TOKENS == 1 else 0), end).to(tl.int32)
    row = block * ROWS + tl.arange(0, ROWS)
    token, in_group = row // GROUP, row % GROUP
    is_row = token < TOKENS
    query_at = (slot * TOKENS + token) * query_row + (head * GROUP + in_group) * query_head
    query_first, query_second = load_queries(query, query_at, is_row, KEY_FIRST, KEY_SECOND, SIZE, KEY_BITS)
    constant = None
    if constants is not None:
        heads_of_all = tl.num_programs(1) // BLOCKS * GROUP
        constant_at = (slot * TOKENS + token) * heads_of_all + head * GROUP + in_group
        constant = tl.load(constants + constant_at, mask=is_row, other=0.0)
    peak, total, first, second = nothing_seen(ROWS, VALUE_FIRST, VALUE_SECOND)
    keys += slot * cache_slot + head * cache_head
    values += slot * value_slot + head * value_head
    if TOKENS > 1:
        ring_start = tl.load(base + slot).to(tl.int32)
        ring = tl.maximum(end.to(tl.int32) - ring_start, 1)
        # Offset of the next token's entry from the start of the ring.
        turned = (counted - ring_start).to(tl.int32) % ring
    share = tl.cdiv(tl.cdiv(valid, SPLITS), ENTRIES) * ENTRIES
    for start in range(split * share, tl.minimum((split + 1) * share, valid), ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        is_entry = entry < valid
        key_first, key_second, key_factor = load_entries(
            keys, cache_entry, entry, is_entry, query, KEY_FIRST, KEY_SECOND, SIZE, KEY_BITS, ENTRIES
        )
        logits = logits_of(
            query_first, query_second, key_first, key_second, constant, scale, cap, KEY_SECOND, key_factor
        )
        seen = is_entry[None, :] & is_row[:, None]
        if TOKENS > 1:
            # The token of this step that will overwrite the entry: tokens before it still see the entry.
            taken_by = (entry - ring_start - turned + ring) % ring
            seen = seen & ((entry < ring_start)[None, :] | (taken_by[None, :] > token[:, None]))
        logits = tl.where(seen, logits, float("-inf"))
        if KEYS_ARE_VALUES:
            value_first, value_second, value_factor = key_first, key_second, key_factor
        else:
            value_first, value_second, value_factor = load_entries(
                values, value_entry, entry, is_entry, query, VALUE_FIRST, VALUE_SECOND, VALUE_SIZE, VALUE_BITS, ENTRIES
            )
        peak, total, first, second = fold(
            peak, total, first, second, logits, value_first, value_second, VALUE_SECOND, value_factor
        )
    if TOKENS > 1 and split == SPLITS - 1:
        pending_keys += slot * pending_slot + head * pending_head
        pending_values += slot * new_value_slot + head * new_value_head
        for start in range(0, TOKENS, ENTRIES):
            entry = start + tl.arange(0, ENTRIES)
            is_entry = entry < TOKENS
            key_first, key_second, key_factor = load_entries(
                pending_keys, pending_entry, entry, is_entry, query, KEY_FIRST, KEY_SECOND, SIZE, KEY_BITS, ENTRIES
            )
            logits = logits_of(
                query_first, query_second, key_first, key_second, constant, scale, cap, KEY_SECOND, key_factor
            )
            # A token sees itself and those before it, unless one in between overwrites them.
            is_lasting = counted + entry < ring_start
            seen = (entry[None, :] <= token[:, None]) & (is_lasting[None, :] | (entry[None, :] + ring > token[:, None]))
            logits = tl.where(seen & is_entry[None, :] & is_row[:, None], logits, float("-inf"))
            value_first, value_second, value_factor = load_entries(
                pending_values,
                new_value_entry,
                entry,
                is_entry,
                query,
                VALUE_FIRST,
                VALUE_SECOND,
                VALUE_SIZE,
                VALUE_BITS,
                ENTRIES,
            )
            peak, total, first, second = fold(
                peak, total, first, second, logits, value_first, value_second, VALUE_SECOND, value_factor
            )
    divisor = tl.where(total > 0.0, total, 1.0)[:, None]
    if SPLITS == 1:
        divisor = with_sinks(peak, total, sinks, head * GROUP + in_group, is_row)[:, None]
        target = (slot * TOKENS + token) * out_row + (head * GROUP + in_group) * out_head
    else:
        heads = tl.num_programs(1) // BLOCKS * GROUP
        part = ((slot * TOKENS + token) * heads + head * GROUP + in_group) * SPLITS + split
        tl.store(state + part, log_total(peak, total), mask=is_row)
        target = part * COLUMNS
    first, second = first / divisor, second / divisor
    store_results(out, target, is_row, first, second, VALUE_FIRST, VALUE_SECOND, COLUMNS, VALUE_BITS)


@triton.jit
def _merge(
    parts,
    state,
    out,
    active,
    sinks,
    out_row,
    out_head,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if tl.load(active + row // TOKENS) == 0:
        return
    part = (row * heads + head) * SPLITS
    weights = tl.load(state + part + tl.arange(0, SPLITS))
    peak = tl.max(weights, 0)
    weights = tl.exp2(weights - peak)  # one part contains the token itself, so the peak is finite
    total = tl.sum(weights, 0)
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head) * LOG2_E - peak)
    columns = tl.arange(0, PADDED)
    mask = columns < COLUMNS
    result = tl.zeros([PADDED], tl.float32)
    for split in range(SPLITS):
        weight = tl.exp2(tl.load(state + part + split) - peak)
        result += weight * tl.load(parts + (part + split) * COLUMNS + columns, mask=mask, other=0.0)
    tl.store(out + row * out_row + head * out_head + columns, rounded(result / total, out), mask=mask)


def splits_of(slots: int, programs: int, entries: int, processors: int) -> int:
    """Into how many parts the entries of each slot are split.

    Args:
        slots: Slots (``B``).
        programs: Programs per slot if entries were not split.
        entries: Entries of each slot's cache (``C``).
        processors: Multiprocessors of the device.
    """
    wanted = next_power_of_2(-(-PROGRAMS_PER_PROCESSOR * processors // (slots * programs)))
    useful = next_power_of_2(max(1, entries // LEAST_ENTRIES))
    return min(wanted, useful, MOST_SPLITS)


def tile_of(size: int, dtype: torch.dtype, rows: int) -> dict[str, int]:
    """Rows and entries of a tile, and options of the compiler, to fit the shared memory of a multiprocessor."""
    rows, wide = max(SMALLEST, next_power_of_2(rows)), width_of(size, dtype)
    if wide <= 512:
        return {"ROWS": min(64, rows), "ENTRIES": 64 if wide <= 256 else 32, "num_warps": 4, "num_stages": 3}
    if wide <= 1152:
        return {"ROWS": min(32, rows), "ENTRIES": 32, "num_warps": 8, "num_stages": 2 if rows < 32 else 1}
    return {"ROWS": 16, "ENTRIES": 16, "num_warps": 8, "num_stages": 1}


def decode_scratch(rows: int, heads: int, columns: int, splits: int, coded: int = 0) -> int:
    """Elements of float32 scratch that ``rows`` tokens need: the results of all parts, and their weights.

    Args:
        rows: Tokens.
        heads: Query heads.
        columns: Elements of a value.
        splits: See :func:`splits_of`.
        coded: Elements of a key, if entries are codes.
    """
    rotated_queries = rotated_scratch(rows, heads, coded, columns) if coded else 0
    return rotated_queries + (0 if splits == 1 else rows * heads * splits * (columns + 1))


def attend_slots(
    query: Tensor,
    out: Tensor,
    cache: LayerCache,
    pending: LayerCache | None,
    slots: Slots,
    scale: float,
    *,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    splits: int,
    scratch: Tensor | None = None,
    group: int = 0,
) -> None:
    """Attend from the tokens of each slot to its cache, and to each other.

    :class:`~snapstream.kernels.operations.Attend` defines what each token sees.

    Args:
        query: Rotated queries, ``[B * T, H, D]``.
        out: ``[B * T, H, V]``; rows of free slots stay unchanged. If ``V`` is less than ``D``, values are the first
            elements of entries.
        cache: ``[B, N, C, D]``. A single token per slot must already be stored in it.
        pending: ``[B, N, T, D]``, if there are several tokens per slot.
        slots: State of the slots; :attr:`Slots.active` may have any dtype of one byte, nonzero for true.
        scale: Factor on the logits.
        cap: Soft cap of the logits; 0 for none.
        sinks: One extra logit per head, without a value, float32 ``[H]``.
        splits: See :func:`splits_of`.
        scratch: float32, :func:`decode_scratch` elements; allocated if not given.
        group: The group of the cache's layer.
    """
    (B, T), (rows, H, D), V = slots.token.shape, query.shape, out.shape[2]
    N = cache.keys.shape[1]
    options: dict[str, Any] = tile_of(D, torch.promote_types(query.dtype, dense_dtype(cache.entry_type)), H // N * T)
    blocks = -(-H // N * T // options["ROWS"])
    keys, values = cache.keys, cache.values
    waiting = cache if pending is None else pending
    bits, rotated_queries, target = (0, 0), None, out
    coded = D if isinstance(cache, QuantizedCache) else 0
    if scratch is None and (splits > 1 or coded):
        scratch = torch.empty(decode_scratch(rows, H, V, splits, coded), dtype=torch.float32, device=query.device)
    if isinstance(cache, QuantizedCache):
        assert scratch is not None
        assert sinks is None or not cache.entry.latent, "what a sink has of the weights has no center"
        own = rotated_scratch(rows, H, D, V)
        rotated_queries = RotatedQueries(query, out, cache, T, slots.active, scratch[:own])
        query, target, scratch = rotated_queries.query, rotated_queries.out, scratch[own:]
        bits = cache.formats[0].bits, cache.formats[-1].bits
    part_numbers = rows * H * splits * V
    parts, state = (target, target) if scratch is None or splits == 1 else (scratch, scratch[part_numbers:])
    _attend[(splits, N * blocks, B)](
        query,
        keys,
        values,
        waiting.keys,
        waiting.values,
        parts,
        state,
        slots.base[group],
        slots.count[group],
        slots.limit[group],
        slots.active,
        sinks,
        None if rotated_queries is None else rotated_queries.constants,
        scale,
        cap or None,
        query.stride(0),
        query.stride(1),
        target.stride(0),
        target.stride(1),
        *keys.stride()[:3],
        *values.stride()[:3],
        *waiting.keys.stride()[:3],
        *waiting.values.stride()[:3],
        KEY_BITS=bits[0],
        VALUE_BITS=bits[1],
        VALUE_SIZE=D if coded else V,
        TOKENS=T,
        SPLITS=splits,
        BLOCKS=blocks,
        **shape_of_heads(query, keys, values, V, *bits),
        **options,
    )
    if splits > 1:
        _merge[(rows, H)](
            parts,
            state,
            target,
            slots.active,
            sinks,
            target.stride(0),
            target.stride(1),
            TOKENS=T,
            COLUMNS=V,
            PADDED=next_power_of_2(V),
            SPLITS=splits,
            num_warps=4,
        )
    if rotated_queries is not None:
        rotated_queries.write()

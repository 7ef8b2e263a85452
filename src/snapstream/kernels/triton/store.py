"""Cache writes, fused with the norms and the rotation of queries and keys that come before them.

The projection of a token is read once. Its key and value go directly to the token's entry, which is computed on the
device. The same kernels serve decode steps, whose tokens belong to many slots, and prefill chunks, whose tokens belong
to one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from snapstream.cache import LayerCache, QuantizedCache
from snapstream.kernels.buffers import Slots
from snapstream.kernels.triton.places import STRAIGHT, Places, entry_of, rows_of_tokens
from snapstream.kernels.triton.rows import load_turned, normed, scaled, turned
from snapstream.kernels.triton.tiles import rounded


@triton.jit(do_not_specialize=["rows", "tokens"])
def _store_grouped(
    source,
    target,
    cosine,
    sine,
    keys,
    values,
    query_weight,
    key_weight,
    epsilon,
    count,
    base,
    limit,
    active,
    rows,
    tokens,
    source_row,
    target_row,
    angle_row,
    cache_slot,
    cache_head,
    cache_entry,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    NORMED: tl.constexpr,
    WIDE: tl.constexpr,
    TURNED: tl.constexpr,
    KIND: tl.constexpr,
    ALL_ACTIVE: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(1)
    row, is_row, slot, token = rows_of_tokens(active, rows, tokens, ROWS, ALL_ACTIVE)
    column = tl.arange(0, PADDED)
    mask = is_row[:, None] & (column < HALF)[None, :]
    place = source + row[:, None] * source_row + head * 2 * HALF + column[None, :]
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORMED:
            weight = (query_weight if head < HEADS else key_weight) + column
            first_weight = tl.load(weight, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
            second_weight = tl.load(weight + HALF, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
            mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
            scale = 1.0 / tl.sqrt_rn(mean + epsilon)
            first = scaled(first, scale, first_weight, target, WIDE)
            second = scaled(second, scale, second_weight, target, WIDE)
        if TURNED:
            angle = row[:, None] * angle_row + column[None, :]
            c = tl.load(cosine + angle, mask=mask, other=0.0).to(tl.float32)
            s = tl.load(sine + angle, mask=mask, other=0.0).to(tl.float32)
            first, second = turned(first, second, c, s)
    first, second = rounded(first, target), rounded(second, target)
    if head < HEADS:
        written = target + row[:, None] * target_row + head * 2 * HALF + column[None, :]
        tl.store(written, first, mask=mask)
        tl.store(written + HALF, second, mask=mask)
    else:
        entry = entry_of(slot, token, count, base, limit, is_row, KIND)
        at = slot * cache_slot + entry * cache_entry + ((head - HEADS) % KV_HEADS).to(tl.int64) * cache_head
        stored = (keys if head < HEADS + KV_HEADS else values) + at[:, None] + column[None, :]
        tl.store(stored, rounded(first.to(tl.float32), keys), mask=mask)
        tl.store(stored + HALF, rounded(second.to(tl.float32), keys), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _store_latent(
    source,
    cosine,
    sine,
    cache,
    weight,
    epsilon,
    count,
    base,
    limit,
    active,
    tokens,
    source_row,
    angle_row,
    cache_slot,
    cache_entry,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    KIND: tl.constexpr,
    ALL_ACTIVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot, token = row // tokens, row % tokens
    if not ALL_ACTIVE:
        if tl.load(active + slot) == 0:
            return
    written = cache + slot * cache_slot + entry_of(slot, token, count, base, limit, True, KIND) * cache_entry
    source += row * source_row
    column = tl.arange(0, PADDED_RANK)
    mask = column < RANK
    x = tl.load(source + column, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    compressed = normed(x[None, :], w[None, :], epsilon, RANK, source)
    tl.store((written + column)[None, :], rounded(compressed, cache), mask=mask[None, :])
    column = tl.arange(0, PADDED_HALF)
    mask, angle = column < HALF, row * angle_row
    first, second = load_turned(source + RANK, cosine + angle, sine + angle, column, HALF, PAIRS)
    first, second = rounded(first, source).to(tl.float32), rounded(second, source).to(tl.float32)
    tl.store(written + RANK + column, rounded(first, cache), mask=mask)
    tl.store(written + RANK + HALF + column, rounded(second, cache), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _commit(
    pending_keys,
    pending_values,
    keys,
    values,
    accepted,
    count,
    base,
    limit,
    active,
    tokens,
    pending_slot,
    pending_head,
    pending_entry,
    cache_slot,
    cache_head,
    cache_entry,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
):
    token, head, slot = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    if tl.load(active + slot) == 0:
        return
    certain = tl.minimum(tl.load(accepted + slot), tokens)
    start = tl.load(base + slot)
    ring = tl.maximum(tl.load(limit + slot) - start, 1)
    # In a ring that is shorter than the step, a later token takes the same entry; programs run in any order.
    is_replaced = (tl.load(count + slot) + token >= start) & (token + ring < certain)
    if (token >= certain) | is_replaced:
        return
    entry = entry_of(slot, token, count, base, limit, True, 2)
    source = slot * pending_slot + head * pending_head + token * pending_entry
    target = slot * cache_slot + head * cache_head + entry * cache_entry
    column = tl.arange(0, PADDED)
    mask = column < SIZE
    tl.store(keys + target + column, tl.load(pending_keys + source + column, mask=mask), mask=mask)
    if not KEYS_ARE_VALUES:
        tl.store(values + target + column, tl.load(pending_values + source + column, mask=mask), mask=mask)


def commit(pending: LayerCache, cache: LayerCache, slots: Slots, group: int = 0) -> None:
    """Copy the pending entries of accepted tokens to their entries of a cache.

    Args:
        pending: ``[B, N, T, D]``.
        cache: ``[B, N, C, D]``.
        slots: State of the slots, with the number of tokens accepted.
        group: The group of the cache's layer.
    """
    if isinstance(cache, QuantizedCache):
        # Keys and values may have different numbers of bytes.
        for new, mine in zip(pending.tensors[: cache.stored], cache.tensors, strict=False):
            _commit_tensors(new, new, mine, mine, slots, group)
    else:
        _commit_tensors(pending.keys, pending.values, cache.keys, cache.values, slots, group)


def _commit_tensors(
    new_keys: Tensor, new_values: Tensor, keys: Tensor, values: Tensor, slots: Slots, group: int
) -> None:
    assert slots.accepted is not None
    B, N, T, D = new_keys.shape
    _commit[(T, N, B)](
        new_keys,
        new_values,
        keys,
        values,
        slots.accepted,
        slots.count[group],
        slots.base[group],
        slots.limit[group],
        slots.active,
        T,
        *new_keys.stride()[:3],
        *keys.stride()[:3],
        SIZE=D,
        PADDED=next_power_of_2(D),
        KEYS_ARE_VALUES=values.data_ptr() == keys.data_ptr(),
        num_warps=1,
    )


def store_grouped(
    source: Tensor,
    target: Tensor,
    cosine: Tensor | None,
    sine: Tensor | None,
    cache: LayerCache,
    places: Places,
    norms: tuple[Tensor, Tensor, float] | None = None,
    *,
    wide: bool = False,
) -> None:
    """Norm and rotate queries and keys, and write keys and values to a cache.

    Args:
        source: Queries, keys and values of each token, ``[B * T, (H + 2 * N) * D]``; there may be no queries.
        target: Output for queries, ``[B * T, H * D]`` or wider; may be the same memory.
        cosine: ``[B * T, D / 2]`` or wider, with the row stride of ``sine``; ``None``: nothing is rotated.
        sine: As ``cosine``.
        cache: ``[B, N, C, D]``.
        places: Entries of the tokens.
        norms: Weights of the norms of queries and keys, ``[D]``, and their epsilon.
        wide: Whether norms round once only; see :func:`snapstream.kernels.plain.norm`.
    """
    rows = len(source)
    N, _, D = cache.keys.shape[1:]
    heads = source.shape[1] // D - 2 * N
    block = 16 if places.kind == STRAIGHT else min(16, next_power_of_2(rows))
    query_weight, key_weight, epsilon = norms or (source, source, 0.0)
    assert cosine is None or sine is None or cosine.stride(0) == sine.stride(0)
    _store_grouped[(-(-rows // block), heads + 2 * N)](
        source,
        target,
        cosine,
        sine,
        cache.keys,
        cache.values,
        query_weight,
        key_weight,
        epsilon,
        *places.tensors(),
        rows,
        places.tokens,
        source.stride(0),
        target.stride(0),
        0 if cosine is None else cosine.stride(0),
        *cache.keys.stride()[:3],
        HEADS=heads,
        KV_HEADS=N,
        HALF=D // 2,
        PADDED=next_power_of_2(D // 2),
        NORMED=norms is not None,
        WIDE=wide,
        TURNED=cosine is not None,
        KIND=places.kind,
        ALL_ACTIVE=places.active is None,
        ROWS=block,
        num_warps=max(1, block // 4),
    )


def store_latent(
    source: Tensor,
    cosine: Tensor,
    sine: Tensor,
    cache: LayerCache,
    places: Places,
    norm: tuple[Tensor, float],
    *,
    pairs: bool,
) -> None:
    """Norm the compressed part of latents, rotate the rest, and write both to a cache.

    Args:
        source: ``[B * T, D]``: the compressed part, then the part that is rotated.
        cosine: As for :func:`store_grouped`, for the rotated part.
        sine: As ``cosine``.
        cache: ``[B, 1, C, D]``.
        places: Entries of the tokens.
        norm: The norm's weight, whose size is that of the compressed part, and its epsilon.
        pairs: See :func:`snapstream.kernels.plain.rotate`.
    """
    weight, epsilon = norm
    rank = len(weight)
    half = (cache.keys.shape[3] - rank) // 2
    assert cosine.stride(0) == sine.stride(0)
    _store_latent[(len(source),)](
        source,
        cosine,
        sine,
        cache.keys,
        weight,
        epsilon,
        *places.tensors(),
        places.tokens,
        source.stride(0),
        cosine.stride(0),
        cache.keys.stride(0),
        cache.keys.stride(2),
        RANK=rank,
        HALF=half,
        PADDED_RANK=next_power_of_2(rank),
        PADDED_HALF=next_power_of_2(half),
        PAIRS=pairs,
        KIND=places.kind,
        ALL_ACTIVE=places.active is None,
        num_warps=1,
    )

"""Votes of the observation window, in two passes over tiles of keys; then their smoothing.

The first pass finds the normalizers of each voter. The second sums what each key gets from the last voters of every
head of the group, and takes the largest share of each head. Only one value per voter and two per key leave a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from snapstream.kernels.triton.tiles import load_parts, log_total, logits_of, parts_of, weigh, width_of

LN_2 = 0.6931471805599453
KEYS_OF_A_PROGRAM = 2048
"""Keys per program of the first pass."""


@triton.jit
def _logits(
    queries, keys, query_head, query_row, key_row, row, position, length, first_voter, candidate_end, scale, cap,
    window, stride, sink, GROUP: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Logits of a tile, and which of them the softmax includes; every head has ``stride`` rows."""
    member, voter = row // stride, row % stride
    voter_position = length - window + voter
    is_row = (member < GROUP) & (voter < window) & (voter_position >= first_voter)
    is_key = position < length
    query_first, query_second = load_parts(
        queries, 1, member.to(tl.int64) * query_head + voter * query_row, is_row, FIRST, SECOND, SIZE
    )
    key_first, key_second = load_parts(keys, key_row, position, is_key, FIRST, SECOND, SIZE)
    logits = logits_of(query_first, query_second, key_first, key_second, None, scale, cap, SECOND)
    if sink < 0:
        last_seen, first_seen = voter_position, 0
    else:
        last_seen, first_seen = tl.minimum(voter_position, candidate_end - 1), sink
    seen = (position[None, :] <= last_seen[:, None]) & (position >= first_seen)[None, :]
    return logits, seen & is_row[:, None] & is_key[None, :]


@triton.jit(do_not_specialize=["window", "stride", "sink"])
def _normalize(
    queries, keys, lengths, first_voters, candidate_ends, normalizers, scale, cap,
    query_sequence, query_head, query_row, key_sequence, key_head, key_row, window, stride, sink,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    share, block, both = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    sequence, head = both // KV_HEADS, both % KV_HEADS
    length = tl.load(lengths + sequence).to(tl.int32)
    first_voter = tl.load(first_voters + sequence).to(tl.int32)
    candidate_end = tl.load(candidate_ends + sequence).to(tl.int32)
    queries += sequence * query_sequence + head * GROUP * query_head
    keys += sequence * key_sequence + head * key_head
    row = block * ROWS + tl.arange(0, ROWS)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(share * SHARE, tl.minimum((share + 1) * SHARE, length), KEYS):
        position = start + tl.arange(0, KEYS)
        logits, seen = _logits(
            queries, keys, query_head, query_row, key_row, row, position, length, first_voter, candidate_end, scale,
            cap, window, stride, sink, GROUP, SIZE, FIRST, SECOND,
        )  # fmt: skip
        logits = tl.where(seen, logits, float("-inf"))
        peak, total, _, _ = weigh(peak, total, logits)
    place = (both * GROUP * stride + row) * tl.num_programs(0) + share
    tl.store(normalizers + place, log_total(peak, total), mask=row < GROUP * stride)


@triton.jit
def _attention(logits, normalizers, row, is_row, votes):
    normalizer = tl.load(normalizers + row, mask=is_row, other=0.0)
    normalizer = tl.where(normalizer == float("-inf"), 0.0, normalizer)
    return tl.where(votes, tl.exp2(logits - normalizer[:, None]), 0.0)


# One tensor holds both kinds of votes, so the second one may start at any address; likewise below.
@triton.jit(
    do_not_specialize=["entries", "window", "stride", "sink", "summed", "largest", "everything"],
    do_not_specialize_on_alignment=["sums", "shares"],
)
def _reduce(
    queries, keys, lengths, first_voters, candidate_ends, of_sums, of_shares, sums, shares, scale, cap,
    query_sequence, query_head, query_row, key_sequence, key_head, key_row, entries, window, stride, sink,
    summed, largest, everything,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    both = tl.program_id(1).to(tl.int64)
    sequence, head = both // KV_HEADS, both % KV_HEADS
    length = tl.load(lengths + sequence).to(tl.int32)
    first_voter = tl.load(first_voters + sequence).to(tl.int32)
    candidate_end = tl.load(candidate_ends + sequence).to(tl.int32)
    queries += sequence * query_sequence + head * GROUP * query_head
    keys += sequence * key_sequence + head * key_head
    position = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    total = tl.zeros([KEYS], tl.float32)
    result = tl.zeros([KEYS], tl.float32)
    most = tl.zeros([KEYS], tl.float32)
    for start in range(0, GROUP * stride, ROWS):
        row = start + tl.arange(0, ROWS)
        logits, seen = _logits(
            queries, keys, query_head, query_row, key_row, row, position, length, first_voter, candidate_end, scale,
            cap, window, stride, -1, GROUP, SIZE, FIRST, SECOND,
        )  # fmt: skip
        if largest > 0:  # a tile has rows of one head
            votes = seen & (row % stride >= window - largest)[:, None]
            attention = _attention(logits, of_shares + both * GROUP * stride, row, row < GROUP * stride, votes)
            most = tl.maximum(most, tl.max(attention, 0))
            is_last = (start + ROWS) % stride == 0
            result += tl.where(is_last, most, 0.0)
            most = tl.where(is_last, 0.0, most)
        if summed > 0:
            votes = seen & (row % stride >= window - summed)[:, None]
            attention = _attention(logits, of_sums + both * GROUP * stride, row, row < GROUP * stride, votes)
            total += tl.sum(attention, 0)
    # What a softmax over the candidates leaves out may have overflowed.
    is_candidate = (position >= sink) & (position < candidate_end)
    if summed > 0:
        total = tl.where((everything != 0) | is_candidate, total, 0.0)
        tl.store(sums + both * entries + position, total / GROUP, mask=position < entries)
    if largest > 0:
        result = tl.where(is_candidate, result, 0.0)
        tl.store(shares + both * entries + position, result / GROUP, mask=position < entries)


@triton.jit(do_not_specialize=["entries", "width", "before", "largest"], do_not_specialize_on_alignment=["votes"])
def _pool(votes, pooled, entries, width, before, largest, BLOCK: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    for neighbour in range(width):
        at = position + neighbour - before
        vote = tl.load(votes + head * entries + at, mask=(at >= 0) & (at < entries), other=0.0)
        total += vote
        most = tl.maximum(most, vote)
    result = tl.where(largest != 0, most, tl.div_rn(total, tl.zeros([BLOCK], tl.float32) + width))
    tl.store(pooled + head * entries + position, result, mask=position < entries)


def tile_of(size: int, dtype: torch.dtype) -> dict[str, int]:
    """Rows and keys of a tile, and options of the compiler, to fit the shared memory of a multiprocessor."""
    wide = width_of(size, dtype)
    if wide <= 512:
        return {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 2}
    if wide <= 1152:
        return {"ROWS": 32, "KEYS": 32, "num_warps": 8, "num_stages": 1}
    return {"ROWS": 16, "KEYS": 16, "num_warps": 8, "num_stages": 1}


def window_attention(
    queries: Tensor,
    keys: Tensor,
    length: Tensor,
    first_voter: Tensor,
    candidate_end: Tensor,
    scale: float,
    sink: int,
    everything: bool,
    summed: int,
    largest: int,
    key_chunk: int = 0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Triton kernel for :func:`snapstream.compression.scoring.plain_window_attention`; ``key_chunk`` is ignored."""
    (B, H, W, D), (N, L) = queries.shape, keys.shape[1:3]
    group = H // N
    first, second = parts_of(D)
    tile = tile_of(D, keys.dtype)
    rows = tile["ROWS"]
    stride = -(-W // rows) * rows if largest else W
    shares = -(-L // KEYS_OF_A_PROGRAM)
    shape = {
        "KV_HEADS": N,
        "GROUP": group,
        "SIZE": D,
        "FIRST": first,
        "SECOND": second,
    }
    strides = (*queries.stride()[:3], *keys.stride()[:3])

    def normalizers(from_sink: int) -> Tensor:
        parts = torch.empty(B * N, group * stride, shares, dtype=torch.float32, device=keys.device)
        _normalize[(shares, -(-group * stride // rows), B * N)](
            queries, keys, length, first_voter, candidate_end, parts, scale, cap or None, *strides, W, stride,
            from_sink, SHARE=KEYS_OF_A_PROGRAM, **shape, **tile,
        )  # fmt: skip
        found = parts[..., 0] if shares == 1 else (parts * LN_2).logsumexp(-1) / LN_2
        if sinks is not None and from_sink < 0:
            own = sinks.view(1, N, group, 1).expand(B, N, group, stride).reshape(B * N, -1) / LN_2
            found = torch.logaddexp2(found, own)
        return found.contiguous()

    whole = everything and summed > 0
    of_shares = normalizers(-1 if whole and not largest else sink)
    of_sums = normalizers(-1) if whole and largest else of_shares
    votes = torch.empty((summed > 0) + (largest > 0), B, N, L, dtype=torch.float32, device=keys.device)
    _reduce[(-(-L // tile["KEYS"]), B * N)](
        queries, keys, length, first_voter, candidate_end, of_sums, of_shares, votes[0], votes[-1], scale,
        cap or None, *strides,
        L, W, stride, sink, summed, largest, int(whole), **shape, **tile,
    )  # fmt: skip
    return votes


def pool_votes(votes: Tensor, largest: bool, kernel: int, shift: int) -> Tensor:
    """Triton kernel for :func:`snapstream.compression.scoring.pool_votes`; sums from left to right."""
    votes = votes.contiguous()
    B, N, L = votes.shape
    pooled = torch.empty_like(votes)
    before = kernel // 2 + shift
    _pool[(-(-L // 1024), B * N)](votes, pooled, L, kernel, before, int(largest), BLOCK=1024, num_warps=4)
    return pooled

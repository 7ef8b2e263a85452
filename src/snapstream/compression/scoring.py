"""Which prompt tokens matter: votes of the observation window (SnapKV), with fixed shapes.

The last ``W`` queries of the prompt attend to the candidate keys, ``A = softmax(Q_obs K^T * scale)``; a candidate's
vote is the sum of its column of ``A`` over the window, averaged over the query heads that share the KV head, then
pooled along the sequence (paper, equation 3 and listing 6). A policy may take the largest entry of the column as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.compression.layout import LayoutTensors
from snapstream.config import Normalize, Pooling
from snapstream.operators import Operator

KEY_CHUNK = 1024
"""Keys scored at once. The logits of one chunk, ``[B, N, G, W, KEY_CHUNK]`` float32, are the largest temporary."""


def capped(logits: Tensor, cap: float) -> Tensor:
    """Soft cap: ``cap * tanh(logits / cap)``, which is below ``cap``; unchanged if that is 0."""
    return logits if cap == 0.0 else (logits / cap).tanh() * cap


def observation_votes(
    queries: Tensor,
    keys: Tensor,
    layout: LayoutTensors,
    *,
    sink: int,
    scale: float,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    normalize: Normalize = "all",
    key_chunk: int = KEY_CHUNK,
) -> Tensor:
    """Sum the attention that the observation window pays to each candidate.

    Args:
        queries: Rotated queries of the last ``W`` prompt tokens, ``[B, H, W, D]``; the last row belongs to token
            ``length - 1``. Rows before ``first_voter`` (padding, if the prompt is shorter than ``W``) do not vote.
        keys: Rotated keys of the padded prompt, ``[B, N, L, D]``; entries at ``length`` and beyond are ignored.
        layout: Layout of each sequence.
        sink: Sinks (``S``); candidates are the tokens ``[S, candidate_end)``.
        scale: Factor on the logits, usually ``D ** -0.5``.
        cap: Soft cap of the logits; 0 for none.
        sinks: One extra logit per head, without a value, float32 ``[H]``; it takes part in the softmax over all.
        normalize: Softmax over the whole causal prompt (``all``) or over the candidates alone.
        key_chunk: Keys scored at once; bounds memory and affects the result only by rounding.

    Returns:
        Votes ``[B, N, L]``, float32, averaged over the ``G`` query heads of a group; 0 for tokens that are not
        candidates.
    """
    kinds = (normalize == "all", queries.shape[2], 0)
    votes = _attention(queries, keys, layout, scale, cap, sinks, sink, *kinds, key_chunk)
    return votes[0].masked_fill(~candidate_mask(keys, layout.candidate_end, sink), 0.0)


def votes_and_largest_shares(
    queries: Tensor,
    keys: Tensor,
    layout: LayoutTensors,
    *,
    sink: int,
    scale: float,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    normalize: Normalize,
    summed: int,
    largest: int,
    key_chunk: int = KEY_CHUNK,
) -> Tensor:
    """Votes of a short window and the largest shares of a long one, from the same pass over the keys.

    A share is the attention that a query pays to a candidate, divided by what it pays to all candidates. For shares,
    the candidates end before the short window, whose tokens attend to each other most of all.

    Args:
        queries: As for :func:`observation_votes`, and so is what is not listed here; as many as the longer window has.
        keys: ``[B, N, L, D]``.
        layout: Layout of each sequence.
        sink: Sinks (``S``).
        scale: Factor on the logits.
        cap: Soft cap of the logits; 0 for none.
        sinks: One extra logit per head.
        normalize: Softmax of the votes. ``candidates`` are those for shares.
        summed: Queries whose attention is summed.
        largest: Queries of whose shares the largest is taken.
        key_chunk: Keys scored at once.

    Returns:
        float32 ``[2, B, N, L]``, both averaged over the ``G`` query heads of a group. Tokens that are not candidates
        may have votes, too.
    """
    rows = queries.shape[2]  # a prompt may have fewer
    of_shares = replace(layout, candidate_end=torch.minimum(layout.candidate_end, layout.length - summed))
    summed, largest = min(summed, rows), min(largest, rows)
    kinds = (normalize == "all", summed, largest)
    return _attention(queries, keys, of_shares, scale, cap, sinks, sink, *kinds, key_chunk)


def kept_attention(
    queries: Tensor,
    keys: Tensor,
    positions: Tensor,
    layout: LayoutTensors,
    *,
    scale: float,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The share of the observation window's attention that went to kept tokens, of what went to any token.

    A quality metric, not part of the method: decoding loses at least as much as the window would have.

    Args:
        queries: Rotated queries of the last ``W`` prompt tokens, ``[B, H, W, D]``, as for :func:`observation_votes`.
        keys: Rotated keys of the padded prompt, ``[B, N, L, D]``.
        positions: Positions that were kept, ``[B, N, P]``, int64; -1 for none.
        layout: Layout of each sequence.
        scale: Factor on the logits.
        cap: Soft cap of the logits; 0 for none.
        sinks: One extra logit per head.

    Returns:
        Share between 0 and 1, float32 ``[B, N]``, averaged over the window and the ``G`` query heads of a group.
    """
    sums = _attention(queries, keys, layout, scale, cap, sinks, 0, True, queries.shape[2], 0)
    kept = sums[0].gather(2, positions.clamp(min=0)).masked_fill(positions < 0, 0.0).sum(-1)
    if sinks is not None:  # what went to sinks went to no token
        return (kept / sums[0].sum(-1).clamp(min=torch.finfo(sums.dtype).tiny)).clamp(max=1.0)
    voters = (layout.length - layout.first_voter).clamp(max=queries.shape[2])
    return (kept / voters[:, None]).clamp(max=1.0)


def _attention(
    queries: Tensor,
    keys: Tensor,
    layout: LayoutTensors,
    scale: float,
    cap: float,
    sinks: Tensor | None,
    sink: int,
    everything: bool,
    summed: int,
    largest: int,
    key_chunk: int = KEY_CHUNK,
) -> Tensor:
    lengths = (layout.length, layout.first_voter, layout.candidate_end)
    return window_attention(queries, keys, *lengths, scale, sink, everything, summed, largest, key_chunk, cap, sinks)


def plain_window_attention(
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
    key_chunk: int,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention that the voters pay to each token: summed over them, the largest share, or both.

    Args:
        queries: ``[B, H, W, D]``, as for :func:`observation_votes`.
        keys: ``[B, N, L, D]``.
        length: Length of each sequence, int64 ``[B]``; see :class:`LayoutTensors`.
        first_voter: First voter of each sequence, likewise.
        candidate_end: End of the candidates of each sequence, likewise.
        scale: Factor on the logits.
        sink: Number of sinks, behind which the candidates begin.
        everything: Whether the softmax of sums runs over the whole causal prompt; else over the candidates alone, as
            that of shares always does.
        summed: How many of the last voters are summed; 0 for no sums.
        largest: Of how many of the last voters the largest share is taken; 0 for none.
        key_chunk: Keys scored at once.
        cap: Soft cap of the logits; 0 for none.
        sinks: One extra logit per head, without a value, float32 ``[H]``; only in softmaxes over everything.

    Returns:
        float32 ``[kinds, B, N, L]``, sums first, averaged over a group's heads; 0 for tokens that no voter sees or that
        the softmax leaves out.
    """
    B, H, W, D = queries.shape
    N, L = keys.shape[1], keys.shape[2]
    grouped = queries.reshape(B, N, H // N * W, D)
    rows = torch.arange(W, device=keys.device)
    query_position = length[:, None] - W + rows  # [B, W]
    voter = (query_position >= first_voter[:, None])[:, None, None, :, None]

    def logits(start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of one chunk, ``[B, N, G, W, chunk]``, which tokens a voter sees, and which are candidates, too."""
        chunk = keys[:, :, start : start + key_chunk]
        # Products of half-precision inputs are exact in float32, so nothing is lost before they are summed.
        values = capped(torch.matmul(grouped.float(), chunk.float().transpose(-1, -2)) * scale, cap)
        values = values.view(B, N, H // N, W, chunk.shape[2])
        position = torch.arange(start, start + chunk.shape[2], device=keys.device)
        seen = position <= query_position[..., None]  # causal; excludes padding, as positions are below length
        candidate = candidates(position, candidate_end, sink)[:, None] & seen
        return values, seen[:, None, None], candidate[:, None, None]

    # Of each kind: whether its softmax runs over everything, how many last queries vote, and how they are joined.
    kinds: list[tuple[bool, int, Callable[[Tensor, int], Tensor]]]
    kinds = [(everything, summed, torch.sum), (False, largest, torch.amax)]
    kinds = [kind for kind in kinds if kind[1] > 0]
    starts = range(0, L, key_chunk)
    # Two passes (normalizers first, then the sums) cost a second product of W rows but avoid holding all logits.
    normalizers = [torch.full((B, N, H // N, W), -torch.inf, dtype=torch.float32, device=keys.device) for _ in kinds]
    for start in starts:
        values, seen, candidate = logits(start)
        for kind, (whole, *_) in enumerate(kinds):
            member = seen if whole else candidate
            chunk_sum = values.masked_fill(~member, -torch.inf).logsumexp(-1)
            normalizers[kind] = torch.logaddexp(normalizers[kind], chunk_sum)
    for kind, (whole, *_) in enumerate(kinds):
        if whole and sinks is not None:
            normalizers[kind] = torch.logaddexp(normalizers[kind], sinks.view(N, -1, 1))
    normalizers = [total.masked_fill(total == -torch.inf, 0.0)[..., None] for total in normalizers]
    chunks = []
    for start in starts:
        values, seen, candidate = logits(start)
        found = []
        for total, (whole, voters, reduce) in zip(normalizers, kinds, strict=True):
            member = (seen if whole else candidate) & voter
            attention = torch.exp(values - total).masked_fill(~member, 0.0)
            found.append(reduce(attention[:, :, :, W - voters :], 3))
        chunks.append(torch.stack(found).mean(3))
    return torch.cat(chunks, -1)


def _window_attention_shape(queries: Tensor, keys: Tensor, *rest: Any) -> Tensor:
    summed, largest = rest[6:8]
    return keys.new_empty(((summed > 0) + (largest > 0), *keys.shape[:3]), dtype=torch.float32)


window_attention = Operator("window_attention", plain_window_attention, _window_attention_shape)
""":func:`plain_window_attention`, for which devices have kernels."""


def random_votes(heads: int, length: int, *, seed: Tensor) -> Tensor:
    """Uniform votes for the ``random`` baseline, reproducible on any device.

    Args:
        heads: KV heads (``N``); each gets different votes.
        length: Padded prompt length (``L``).
        seed: int64 scalar; use a different one for each layer.

    Returns:
        Votes ``[1, N, L]``, float32 in (0, 1).
    """
    position = torch.arange(length, device=seed.device)
    head = torch.arange(heads, device=seed.device)[:, None]
    return counter_uniform(seed + head * 1_000_003, position)[None]


def pool_votes(votes: Tensor, *, pooling: Pooling, kernel: int, shift: int = 0) -> Tensor:
    """Smooth votes along the sequence.

    Stride 1, same length, zeros beyond the ends of the candidate range; the average always divides by ``kernel``.

    Args:
        votes: ``[B, N, L]``, 0 outside the candidates.
        pooling: ``avg`` or ``max``.
        kernel: Odd width; 1 leaves the votes unchanged, unless they are shifted.
        shift: The votes are centered this many tokens before the token that gets their result; 0 or more.

    Returns:
        ``[B, N, L]``.
    """
    if kernel == 1 and shift == 0:
        return votes
    return smoothed(votes, pooling == "max", kernel, shift)


def plain_smoothed(votes: Tensor, largest: bool, kernel: int, shift: int) -> Tensor:
    """Average, or maximum if ``largest``, of ``kernel`` votes; see :func:`pool_votes`."""
    length = votes.shape[-1]
    padded = F.pad(votes, (kernel // 2 + shift, kernel // 2))
    result = padded[..., :length].clone()  # shifts whole rows: torch's own pooling is slow on a CPU
    for place in range(1, kernel):
        neighbours = padded[..., place : place + length]
        if largest:
            torch.maximum(result, neighbours, out=result)
        else:
            result += neighbours
    return result if largest else result.div_(kernel)


def _smoothed_shape(votes: Tensor, *_: object) -> Tensor:
    return torch.empty_like(votes)


smoothed = Operator("smoothed", plain_smoothed, _smoothed_shape)
""":func:`plain_smoothed`, for which devices have kernels."""


def counter_uniform(seed: Tensor, counter: Tensor) -> Tensor:
    """Uniform numbers in (0, 1) from a seed and a counter: the same on every device, in every batch.

    A counter-based generator (the finalizer of MurmurHash3, twice), so a draw depends only on its arguments.

    Args:
        seed: int64, broadcastable with ``counter``.
        counter: int64.

    Returns:
        float32 of the broadcast shape.
    """
    bits = _mix(_mix(seed & 0xFFFFFFFF) ^ (counter * 0x9E3779B1 & 0xFFFFFFFF) ^ (seed >> 32 & 0xFFFFFFFF))
    return ((bits >> 9).float() + 0.5) * 2.0**-23


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer on int64 tensors that hold 32-bit values."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ (x >> 16)


def candidates(position: Tensor, candidate_end: Tensor, sink: int) -> Tensor:
    """Whether each position of ``[P]`` may be evicted, ``[B, P]``; see :class:`LayoutTensors` for ``candidate_end``."""
    return (position >= sink) & (position < candidate_end[:, None])


def candidate_mask(of_prompt: Tensor, candidate_end: Tensor, sink: int) -> Tensor:
    """Whether each token of keys or scores, ``[B, N, L, ...]``, may be evicted, ``[B, 1, L]``."""
    position = torch.arange(of_prompt.shape[2], device=of_prompt.device)
    return candidates(position, candidate_end, sink)[:, None]

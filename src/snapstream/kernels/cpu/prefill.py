"""Prefill attention: of a chunk to everything before it, and of the last queries, which vote on what is kept."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from snapstream.kernels.cpu import library
from snapstream.kernels.cpu.checks import MULTIPLE, TYPES, check_lengths, check_types, require
from snapstream.kernels.cpu.interface import INSTRUCTIONS, STRUCTURES

BLOCK = 64
"""Keys per block of prefill attention, and of packed values."""


def prefill_instructions(dtype: torch.dtype) -> str:
    """Which of :data:`INSTRUCTIONS` are fastest on this processor for a dtype."""
    return INSTRUCTIONS[library.native().snapstream_best_instructions()] if dtype == torch.bfloat16 else "portable"


def has_instructions(name: str) -> bool:
    """Whether this processor and its operating system support one of :data:`INSTRUCTIONS`."""
    return bool(library.native().snapstream_has_instructions(INSTRUCTIONS.index(name)))


def packed_shape(values: torch.Size, instructions: str) -> tuple[int, ...]:
    """Shape of the packed form of values ``[N, L, V]``, ``[N, blocks, V, BLOCK]``; ``(0,)`` if it is not needed."""
    N, L, V = values
    return (0,) if instructions == "portable" else (N, -(-L // BLOCK), V, BLOCK)


def prefill_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    scale: float,
    *,
    window: int = 0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    packed: Tensor | None = None,
    packed_until: Tensor | None = None,
    instructions: str | None = None,
) -> Tensor:
    """Attend causally from a chunk of tokens to everything before it and to itself.

    The result for a token is the same, bit for bit, however the prompt is split into chunks.

    Args:
        query: ``[T, H, D]``, float32 or bfloat16, ``D`` a multiple of 32.
        keys: ``[N, L, D]``, of the same dtype; the elements of a row must be contiguous, rows may have any stride.
        values: ``[N, L, V]``, ``V`` a multiple of 32; may be part of the keys.
        start: Entry of the first token, int64 scalar; entries ``start .. start + T`` hold the chunk itself.
        scale: Factor on the logits, positive.
        window: How many tokens a token sees, itself included; 0 for all.
        cap: Soft cap of the logits; 0 for none.
        sinks: One extra logit per head, without a value, float32 ``[H]``.
        packed: Buffer of :func:`packed_shape` for values in multiplication order; ``None`` allocates one.
        packed_until: Entries that earlier calls have packed, int64 scalar; this call adds the rest.
        instructions: One of :data:`INSTRUCTIONS`; ``None`` for the fastest.

    Returns:
        ``[T, H, V]``.

    Raises:
        ValueError: Shapes or dtypes do not match.
        MemoryError: There is not enough memory for temporaries.
    """
    T, H, D = query.shape
    N, L, V = values.shape
    name = prefill_instructions(query.dtype) if instructions is None else instructions
    if packed is None or packed_until is None:
        packed = values.new_empty(packed_shape(values.shape, name))
        packed_until = start.new_zeros(())
    at, until = int(start), int(packed_until)
    require(T > 0 and N > 0 and H % N == 0 and keys.shape == (N, L, D), "shapes do not match")
    require(
        D > 0 and V > 0 and D % MULTIPLE == 0 and V % MULTIPLE == 0,
        f"head sizes are {D} and {V}; they must be multiples of {MULTIPLE}",
    )
    _check(name, scale, cap, sinks, query, keys, values)
    require(0 <= at <= L - T, f"tokens {at} to {at + T} do not fit into a cache of {L}")
    require(window >= 0, f"the window is {window}; it must not be negative")
    require(0 <= until <= at, f"{until} entries are packed, but the chunk starts at {at}")
    if name != "portable" and query.dtype == torch.bfloat16:
        fits = packed.dim() == 4 and packed.is_contiguous() and packed.dtype == query.dtype
        fits = fits and packed.shape[0] == N and packed.shape[1] * BLOCK >= at + T and packed.shape[2:] == (V, BLOCK)
        require(fits, f"expected packed values [{N}, blocks, {V}, {BLOCK}], got {tuple(packed.shape)}")
        aligned = not any(stride % 2 for stride in (query.stride(0), query.stride(1), keys.stride(1)))
        require(aligned, "pairs of elements must be aligned")
    out = query.new_empty(T, H, V)
    problem = STRUCTURES["Problem"](
        *(each.data_ptr() for each in (query, keys, values, out, packed)),
        tokens=T,
        heads=H,
        kv_heads=N,
        size=D,
        columns=V,
        query_token=query.stride(0),
        query_head=query.stride(1),
        key_head=keys.stride(0),
        key_row=keys.stride(1),
        value_head=values.stride(0),
        value_row=values.stride(1),
        packed_head=packed.stride(0) if packed.dim() == 4 else 0,
        out_token=out.stride(0),
        out_head=out.stride(1),
        start=at,
        readable=L,
        packed_until=until,
        window=window,
        sinks=None if sinks is None else sinks.data_ptr(),
        scale=scale,
        cap=cap,
    )
    _run("prefill_attention", query.dtype, name, problem)
    return out


def attend_window(
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
    instructions: str | None = None,
    *,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """CPU kernel for :func:`snapstream.compression.scoring.window_attention`.

    Raises:
        ValueError: Shapes or dtypes do not match.
        MemoryError: There is not enough memory for temporaries.
    """
    B, H, W, D = queries.shape
    _, N, L, _ = keys.shape
    name = prefill_instructions(keys.dtype) if instructions is None else instructions
    require(keys.shape[0] == B and keys.shape[3] == D and N > 0 and H % N == 0, "shapes do not match")
    require(D > 0 and D % MULTIPLE == 0, f"the head size is {D}; it must be a multiple of {MULTIPLE}")
    _check(name, scale, cap, sinks, queries, keys)
    require(name == "portable" or keys.stride(2) % 2 == 0, "pairs of elements must be aligned")
    lengths = check_lengths(B, length, first_voter, candidate_end)
    require(0 <= summed <= W and 0 <= largest <= W and summed + largest > 0, "there must be voters")
    require(sink >= 0, "the number of sinks is negative")
    votes = keys.new_zeros(((summed > 0) + (largest > 0), B, N, L), dtype=torch.float32)
    problem = STRUCTURES["Problem"](
        query=queries.data_ptr(),
        keys=keys.data_ptr(),
        tokens=W,
        heads=H,
        kv_heads=N,
        size=D,
        query_token=queries.stride(2),
        query_head=queries.stride(1),
        key_head=keys.stride(1),
        key_row=keys.stride(2),
        readable=L,
        sinks=None if sinks is None else sinks.data_ptr(),
        scale=scale,
        cap=cap,
    )
    voting = STRUCTURES["Voting"](
        *(each.data_ptr() for each in (*lengths, votes)),
        sequences=B,
        query_sequence=queries.stride(0),
        key_sequence=keys.stride(0),
        sink=sink,
        everything=everything,
        summed=summed,
        largest=largest,
    )
    _run("window_attention", keys.dtype, name, problem, voting)
    return votes


def _check(instructions: str, scale: float, cap: float, sinks: Tensor | None, *tensors: Tensor) -> None:
    """Check what both kinds of attention require of queries, which come first, keys and values."""
    require(all(tensor.stride(-1) == 1 for tensor in tensors), "the elements of a head must be contiguous")
    check_types(*tensors)
    require(scale > 0, "the scale must be positive")
    require(cap >= 0, "the soft cap must not be negative")
    if sinks is not None:
        right = sinks.dtype == torch.float32 and sinks.shape == (tensors[0].shape[1],) and sinks.is_contiguous()
        require(right, "sinks must be float32, one per query head")
    require(has_instructions(instructions), f"this processor does not support {instructions!r} instructions")


def _run(function: str, dtype: torch.dtype, instructions: str, *structures: ctypes.Structure) -> None:
    library.run(function, *structures, TYPES.index(dtype), INSTRUCTIONS.index(instructions), of="attention")

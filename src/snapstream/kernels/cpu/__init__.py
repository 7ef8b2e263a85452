"""Kernels for the CPU: attention, products of few rows, and whole decode steps, at the speed of the processor.

An installation brings them ready, or they are compiled when they are first needed (:mod:`.library`). Without them
everything still works, on slower stock operations.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import torch
from torch import Tensor

from snapstream.cache import EntryShape, LayerCache
from snapstream.compression.scoring import plain_window_attention, window_attention
from snapstream.kernels import operations as ops
from snapstream.kernels.cpu import library
from snapstream.kernels.cpu.program import MOST_ROTATED as MOST_ROTATED
from snapstream.kernels.cpu.program import MULTIPLE as MULTIPLE
from snapstream.kernels.cpu.program import CpuProgram, run_rows
from snapstream.kernels.operations import Operation
from snapstream.kernels.parts import Machine, Part, Slots

logger = logging.getLogger(__name__)

BLOCK = 64
"""Keys that prefill attention takes at a time; packed values come in blocks of as many."""
INSTRUCTIONS = ("portable", "pairs", "tiles")
"""How kernels multiply: float32 on any processor, dot products of bfloat16 pairs, tile registers (AMX)."""
SPLIT, STATE = 512, 16
"""Entries that decode attention takes at a time, and numbers that it keeps of each such part beside the output."""
SKINNY_ROWS = 16
"""Most rows of ``x`` for which :func:`skinny_linear` beats the library's matrix product."""
_TYPES = (torch.float32, torch.bfloat16)
_MOST_HEAD_SIZE = 1024

loaded = False
"""Whether :func:`available` has loaded the kernels; products of models look here."""


@functools.cache
def available() -> bool:
    """Load the kernels, building them first if need be; ``False``, with a warning, where that is impossible."""
    if library.load() is None:
        return False
    global loaded  # noqa: PLW0603 (products ask it at every call)
    loaded = True
    logger.info("Prompts in bfloat16 are read with %s.", prefill_instructions(torch.bfloat16))
    return True


def _native() -> ctypes.CDLL:
    native = library.load()
    if native is None:
        raise RuntimeError("the CPU kernels are not available; see the warning above, and docs/install.md")
    return native


class _Problem(ctypes.Structure):
    """``Problem`` of prefill_kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "out", "packed")),
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "kv_heads", "size", "columns")),
        *((name, ctypes.c_int64) for name in ("query_token", "query_head", "key_head", "key_row")),
        *((name, ctypes.c_int64) for name in ("value_head", "value_row", "packed_head")),
        *((name, ctypes.c_int64) for name in ("start", "readable", "packed_until")),
        ("scale", ctypes.c_double),
    )


class _Window(ctypes.Structure):
    """``WindowArguments`` of window_attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("length", "first_voter", "candidate_end", "votes")),
        *((name, ctypes.c_int64) for name in ("sequences", "query_sequence", "key_sequence", "sink")),
    )


@window_attention.register_kernel("cpu")
def _window_attention(queries: Tensor, keys: Tensor, *rest: Any) -> Tensor:
    """See :func:`snapstream.compression.scoring.plain_window_attention`, which does what there is no kernel for."""
    kernel_fits = (
        loaded
        and keys.dtype in _TYPES
        and queries.dtype == keys.dtype
        and keys.shape[3] % MULTIPLE == 0
        and keys.stride(3) == queries.stride(3) == 1
        and keys.stride(2) % 2 == 0
        and rest[3] > 0
    )
    if not kernel_fits:
        return plain_window_attention(queries, keys, *rest)
    return attend_window(queries, keys, *rest[:-1])  # key_chunk is what bounds the plain function's memory


def attend_window(
    queries: Tensor,
    keys: Tensor,
    length: Tensor,
    first_voter: Tensor,
    candidate_end: Tensor,
    scale: float,
    sink: int,
    instructions: str | None = None,
) -> Tensor:
    """What :func:`snapstream.compression.scoring.window_attention` does, by a kernel.

    Raises:
        ValueError: Shapes or types that do not go together.
    """
    B, H, W, D = queries.shape
    _, N, L, _ = keys.shape
    name = prefill_instructions(keys.dtype) if instructions is None else instructions
    _require(keys.shape[0] == B and keys.shape[3] == D and N > 0 and H % N == 0, "shapes do not match")
    _require(D > 0 and D % MULTIPLE == 0, f"the head size is {D}; it must be a multiple of {MULTIPLE}")
    _require(queries.stride(3) == keys.stride(3) == 1, "the numbers of a head must lie side by side")
    _check_types(queries, keys)
    _require(scale > 0, "the scale must be positive")
    _require(has_instructions(name), f"this processor has no {name}")
    _require(name == "portable" or keys.stride(2) % 2 == 0, "pairs of numbers must be aligned")
    lengths = [each.contiguous() for each in (length, first_voter, candidate_end)]
    _require(all(each.dtype == torch.int64 and each.numel() == B for each in lengths), "lengths must be int64 [B]")
    votes = keys.new_zeros((B, N, L), dtype=torch.float32)
    problem = _Problem(
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
        scale=scale,
    )
    window = _Window(
        *(each.data_ptr() for each in (*lengths, votes)),
        sequences=B,
        query_sequence=queries.stride(0),
        key_sequence=keys.stride(0),
        sink=sink,
    )
    done = _native().snapstream_window_attention(
        ctypes.byref(problem), ctypes.byref(window), *_way(keys.dtype, name), torch.get_num_threads()
    )
    return _with_memory(done, votes)


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias`` for few rows, reading the weight once; sums in float32.

    Args:
        x: ``[M, K]``, float32 or bfloat16, ``K`` a multiple of 32.
        weight: ``[N, K]``, contiguous, of the same type.
        bias: ``[N]`` or ``None``.

    Returns:
        ``[M, N]``. Row ``m`` depends on row ``m`` of ``x`` alone, to the bit.

    Raises:
        ValueError: Shapes or types that do not go together.
    """
    _require(x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1], "shapes do not match")
    _require(bias is None or (bias.shape == weight.shape[:1] and bias.dtype == weight.dtype), "bias does not match")
    _check_product(x, weight)
    out = x.new_empty(len(x), len(weight))
    product = ops.Product(Part("x", x.shape[1]), Part("out", out.shape[1]), weight, bias)
    _run_once(product, {"x": x.contiguous(), "out": out}, slots=len(x))
    return out


def takes_rows(x: Tensor) -> bool:
    """Whether :func:`norm`, :func:`rotate` and :func:`gate` can take these rows here and now."""
    ready = loaded and x.device.type == "cpu" and not torch.compiler.is_compiling()
    return ready and x.dtype in _TYPES and x.stride(-1) == 1 and x.shape[0] > 0


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """See :func:`snapstream.kernels.rows.norm`; the last axis must be a multiple of 32."""
    assert weight.shape == x.shape[-1:]
    assert weight.dtype == x.dtype
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    source, target = (each if each.dim() == 3 else each[:, None] for each in (x, out))
    run_rows("norm", source, target, weight=weight.data_ptr(), real=epsilon)
    return out


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, *, pairs: bool) -> Tensor:
    """See :func:`snapstream.kernels.rows.rotate`."""
    half = x.shape[-1] // 2
    angles = torch.cat((cosine[..., :half], sine[..., :half]), -1).float()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    run_rows("rotate", x, out, other=angles, number=(pairs,))
    return out


def gate(x: Tensor) -> Tensor:
    """See :func:`snapstream.kernels.rows.gate`."""
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    run_rows("gate", x[:, None], out[:, None])
    return out


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """See :func:`snapstream.kernels.products.grouped_linear`; sizes as for :func:`skinny_linear`.

    Raises:
        ValueError: Shapes or types that do not go together.
    """
    fits = x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[2] and ends.shape == weight.shape[:1]
    _require(fits, "shapes do not match")
    _require(ends.dtype == torch.int64, f"ends are {ends.dtype}; they must be int64")
    _check_product(x, weight)
    listed = [0, *ends.tolist()]
    _require(listed == sorted(listed), f"ends are not in order: {listed[1:]}")
    _require(listed[-1] == len(x), f"the last end is {listed[-1]}, not the number of rows, {len(x)}")
    out = x.new_empty(len(x), weight.shape[1])
    product = ops.ExpertProduct(
        Part("x", x.shape[1]), Part("out", out.shape[1]), Part("ends", len(ends)), weight, gated=False
    )
    _run_once(product, {"x": x.contiguous(), "out": out, "ends": ends.contiguous()[None]}, slots=1)
    return out


def decode_attention(query: Tensor, keys: Tensor, values: Tensor, valid: Tensor, scale: float) -> Tensor:
    """Attend from one token per sequence to the first ``valid`` entries of its cache, without expanding KV heads.

    Args:
        query: ``[B, H, D]``, float32 or bfloat16, ``D`` a multiple of 32.
        keys: ``[B, N, C, D]``, contiguous.
        values: ``[B, N, C, D]``, contiguous.
        valid: int64 ``[B]``; 0 gives zeros and reads nothing.
        scale: Factor on the logits.

    Returns:
        ``[B, H, D]``. Row ``b`` depends on sequence ``b`` alone, to the bit.

    Raises:
        ValueError: Shapes or types that do not go together.
    """
    B, H, D = query.shape
    fits = keys.shape == values.shape and keys.shape[0] == B and keys.shape[3] == D and H % keys.shape[1] == 0
    _require(fits and valid.shape == (B,) and valid.dtype == torch.int64, "shapes or types do not match")
    _require(D % MULTIPLE == 0 and D <= _MOST_HEAD_SIZE, f"the head size is {D}; it must be a multiple of {MULTIPLE}")
    _require(keys.is_contiguous() and values.is_contiguous(), "caches must be contiguous")
    _check_types(query, keys, values)
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    cache = EntryShape(keys.shape[1], D, latent=False).kind([keys, values])
    operation = ops.Attend(Part("query", D, H), Part("out", D, H), 0, scale)
    _run_once(operation, {"query": query.reshape(B, -1), "out": out.view(B, -1)}, slots=B, cache=cache, valid=valid)
    return out


def _run_once(
    operation: Operation,
    buffers: dict[str, Tensor],
    *,
    slots: int,
    cache: LayerCache | None = None,
    valid: Tensor | None = None,
) -> None:
    """One operation on buffers of the caller's."""
    nothing = torch.zeros(slots, dtype=torch.int64)
    state = Slots(
        token=nothing[:, None],
        position=nothing,
        base=nothing,
        count=nothing if valid is None else valid - 1,
        limit=nothing if cache is None else torch.full_like(nothing, cache.entries),
        active=torch.ones(slots, dtype=torch.bool) if valid is None else valid > 0,
        forced=nothing[:, None],
        taken=nothing[None],
    )
    CpuProgram([operation], Machine(buffers, state, [] if cache is None else [cache], [])).run()


def _check_product(x: Tensor, weight: Tensor) -> None:
    _require(x.shape[1] % MULTIPLE == 0, f"the input size is {x.shape[1]}; it must be a multiple of {MULTIPLE}")
    _check_types(x, weight)
    _require(weight.is_contiguous(), "weight must be contiguous")


def _check_types(*tensors: Tensor) -> None:
    types = {tensor.dtype for tensor in tensors}
    _require(len(types) == 1, f"types do not match: {', '.join(sorted(map(str, types)))}")
    _require(types <= set(_TYPES), f"numbers are {tensors[0].dtype}; they must be float32 or bfloat16")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _with_memory(done: int, result: Tensor) -> Tensor:
    if not done:
        raise MemoryError("no memory for the temporaries of attention")
    return result


def _way(dtype: torch.dtype, instructions: str) -> tuple[int, int]:
    """Type and instructions as the library numbers them."""
    return _TYPES.index(dtype), INSTRUCTIONS.index(instructions)


def prefill_instructions(dtype: torch.dtype) -> str:
    """Which of :data:`INSTRUCTIONS` are fastest on this processor for numbers of a type."""
    return INSTRUCTIONS[_native().snapstream_best_instructions()] if dtype == torch.bfloat16 else "portable"


def has_instructions(name: str) -> bool:
    """Whether this processor, and its system, has one of :data:`INSTRUCTIONS`."""
    return bool(_native().snapstream_has_instructions(INSTRUCTIONS.index(name)))


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
    packed: Tensor | None = None,
    packed_until: Tensor | None = None,
    instructions: str | None = None,
) -> Tensor:
    """Attend causally from a chunk of tokens to everything before it and to itself.

    What comes out for a token is the same to the bit however the prompt is cut into chunks.

    Args:
        query: ``[T, H, D]``, float32 or bfloat16, ``D`` a multiple of 32.
        keys: ``[N, L, D]``, of the same type; the last numbers of a row lie side by side, rows where they like.
        values: ``[N, L, V]``, ``V`` a multiple of 32; may be part of the keys.
        start: Entry of the first token, int64 scalar; entries ``start .. start + T`` hold the chunk itself.
        scale: Factor on the logits, positive.
        packed: Memory of :func:`packed_shape` for values in the order they are multiplied in; its own if ``None``.
        packed_until: How many entries are in ``packed`` since an earlier call, int64 scalar; the rest is added.
        instructions: One of :data:`INSTRUCTIONS`; the fastest ones if ``None``.

    Returns:
        ``[T, H, V]``.

    Raises:
        ValueError: Shapes or types that do not go together.
    """
    T, H, D = query.shape
    N, L, V = values.shape
    name = prefill_instructions(query.dtype) if instructions is None else instructions
    if packed is None or packed_until is None:
        packed = values.new_empty(packed_shape(values.shape, name))
        packed_until = start.new_zeros(())
    at, until = int(start), int(packed_until)
    _require(T > 0 and N > 0 and H % N == 0 and keys.shape == (N, L, D), "shapes do not match")
    _require(
        D > 0 and V > 0 and D % MULTIPLE == 0 and V % MULTIPLE == 0,
        f"head sizes are {D} and {V}; they must be multiples of {MULTIPLE}",
    )
    _require(query.stride(2) == keys.stride(2) == values.stride(2) == 1, "the numbers of a head must lie side by side")
    _check_types(query, keys, values)
    _require(scale > 0, "the scale must be positive")
    _require(0 <= at <= L - T, f"tokens {at} to {at + T} of a cache of {L}")
    _require(0 <= until <= at, f"{until} packed entries before a chunk at {at}")
    _require(has_instructions(name), f"this processor has no {name}")
    if name != "portable" and query.dtype == torch.bfloat16:
        fits = packed.dim() == 4 and packed.is_contiguous() and packed.dtype == query.dtype
        fits = fits and packed.shape[0] == N and packed.shape[1] * BLOCK >= at + T and packed.shape[2:] == (V, BLOCK)
        _require(fits, f"expected packed values [{N}, blocks, {V}, {BLOCK}], got {tuple(packed.shape)}")
        aligned = not any(stride % 2 for stride in (query.stride(0), query.stride(1), keys.stride(1)))
        _require(aligned, "pairs of numbers must be aligned")
    out = query.new_empty(T, H, V)
    problem = _Problem(
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
        start=at,
        readable=L,
        packed_until=until,
        scale=scale,
    )
    done = _native().snapstream_prefill_attention(
        ctypes.byref(problem), *_way(query.dtype, name), torch.get_num_threads()
    )
    return _with_memory(done, out)

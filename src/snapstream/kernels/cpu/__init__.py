"""CPU kernels: attention, products of few rows, and whole decode steps, at hardware speed.

The package ships them prebuilt, or they are compiled when first needed (:mod:`.library`). Without them everything still
works, with slower stock operations.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from snapstream.cache import EntryShape, LayerCache
from snapstream.kernels import operations as ops
from snapstream.kernels.buffers import BufferView, Slots, StepBuffers
from snapstream.kernels.cpu import library
from snapstream.kernels.cpu.checks import MOST_HEAD_SIZE, MULTIPLE, TYPES, check_types, require
from snapstream.kernels.cpu.interface import INSTRUCTIONS
from snapstream.kernels.cpu.prefill import (
    BLOCK,
    attend_window,
    has_instructions,
    packed_shape,
    prefill_attention,
    prefill_instructions,
)
from snapstream.kernels.cpu.program import MOST_ROTATED, CpuProgram, run_rows, unsupported
from snapstream.kernels.operations import Operation
from snapstream.kernels.plain import Activation
from snapstream.kernels.weight import Weight

__all__ = [
    "BLOCK",
    "INSTRUCTIONS",
    "MOST_HEAD_SIZE",
    "MOST_ROTATED",
    "MULTIPLE",
    "SKINNY_ROWS",
    "SPLIT",
    "STATE",
    "CpuProgram",
    "attend_window",
    "available",
    "decode_attention",
    "gate",
    "grouped_linear",
    "has_instructions",
    "loaded",
    "norm",
    "packed_shape",
    "prefill_attention",
    "prefill_instructions",
    "rotate",
    "skinny_linear",
    "takes_rows",
    "unsupported",
]

logger = logging.getLogger(__name__)

SPLIT, STATE = 512, 16
"""Entries per part of decode attention, and floats of state that it keeps per part besides the output."""
SKINNY_ROWS = 16
"""Maximum rows of ``x`` for which :func:`skinny_linear` beats the library's matrix product."""

loaded = False
"""Whether :func:`available` has loaded the kernels; every product checks this."""


@functools.cache
def available() -> bool:
    """Load the kernels, building them first if necessary; ``False``, with a warning, if that is impossible."""
    if library.load() is None:
        return False
    global loaded  # noqa: PLW0603 (checked by every product)
    loaded = True
    logger.info("Prefill in bfloat16 multiplies with %s.", prefill_instructions(torch.bfloat16))
    return True


def skinny_linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias`` for few rows, reading the weight once; sums in float32.

    Args:
        x: ``[M, K]``, float32 or bfloat16, ``K`` a multiple of 32.
        weight: ``[N, K]``, float32 or bfloat16.
        bias: ``[N]``, float32 or bfloat16, or ``None``.

    Returns:
        ``[M, N]``. Row ``m`` depends only on row ``m`` of ``x``, bit for bit.

    Raises:
        ValueError: Shapes or dtypes do not match.
        MemoryError: There is not enough memory for temporaries.
    """
    require(x.dim() == 2 and len(weight.shape) == 2 and x.shape[1] == weight.shape[1], "shapes do not match")
    require(bias is None or bias.shape == weight.shape[:1], "bias does not match")
    out = x.new_empty(len(x), weight.shape[0])
    product = ops.Product(BufferView("x", x.shape[1]), BufferView("out", out.shape[1]), weight, bias)
    _run_once(product, {"x": x.contiguous(), "out": out}, slots=len(x))
    return out


def takes_rows(x: Tensor) -> bool:
    """Whether :func:`norm`, :func:`rotate` and :func:`gate` can process these rows."""
    ready = loaded and x.device.type == "cpu"
    return ready and x.dtype in TYPES and x.stride(-1) == 1 and x.shape[0] > 0


def norm(
    source: Tensor,
    target: Tensor,
    weight: Tensor,
    epsilon: float,
    *,
    add: bool = False,
    wide: bool = False,
    factor: Tensor | None = None,
) -> None:
    """Root-mean-square norm of each head, in float32; see :class:`~snapstream.kernels.operations.Norm`.

    Args:
        source: ``[T, heads, D]``, ``D`` a multiple of 32; the elements of a head must be contiguous.
        target: As ``source``; may be the same memory.
        weight: ``[D]``.
        epsilon: Added to the mean of squares.
        add: Whether the result is added to the target.
        wide: Whether it is multiplied by the weight before it is rounded, instead of after.
        factor: What the result is multiplied by, ``[1]``, if anything.

    Raises:
        ValueError: The weight does not match the rows.
        MemoryError: There is not enough memory for temporaries.
    """
    require(weight.shape == source.shape[-1:], "weight does not match")
    last = {} if factor is None else {"factor": factor}
    run_rows("Norm", source, target, weight=weight, epsilon=epsilon, add=add, wide=wide, **last)


def rotate(source: Tensor, target: Tensor, angles: Tensor, *, pairs: bool) -> None:
    """Rotate heads; see :class:`~snapstream.kernels.operations.Rotate`.

    Args:
        source: ``[T, heads, D]``; the elements of a head must be contiguous.
        target: As ``source``; may be the same memory.
        angles: Cosines, then sines, float32 ``[T, 1, D]``.
        pairs: Rotate neighboring elements together, not the two halves.
    """
    run_rows("Rotate", source, target, angles=angles, pairs=pairs)


def gate(source: Tensor, target: Tensor, activation: Activation = Activation.SILU, up: Tensor | None = None) -> None:
    """The activation of the first half of ``[T, 1, 2 * I]`` times the second, or ``up``, into ``[T, 1, I]``."""
    second = {} if up is None else {"up": up}
    run_rows("Gate", source, target, activation=activation, **second)


def grouped_linear(x: Tensor, weight: Weight, ends: Tensor) -> Tensor:
    """CPU kernel for :func:`snapstream.kernels.products.grouped_linear`; sizes as for :func:`skinny_linear`.

    Raises:
        ValueError: Shapes or dtypes do not match.
        MemoryError: There is not enough memory for temporaries.
    """
    fits = x.dim() == 2 and len(weight.shape) == 3 and x.shape[1] == weight.shape[2] and ends.shape == weight.shape[:1]
    require(fits, "shapes do not match")
    require(ends.dtype == torch.int64, f"ends are {ends.dtype}; they must be int64")
    listed = [0, *ends.tolist()]
    require(listed == sorted(listed), f"ends are not in order: {listed[1:]}")
    require(listed[-1] == len(x), f"the last end is {listed[-1]}, not the number of rows, {len(x)}")
    out = x.new_empty(len(x), weight.shape[1])
    product = ops.ExpertProduct(
        BufferView("x", x.shape[1]),
        BufferView("out", out.shape[1]),
        BufferView("ends", len(ends), dtype=torch.int64),
        weight,
        gated=False,
    )
    _run_once(product, {"x": x.contiguous(), "out": out, "ends": ends.contiguous()[None]}, slots=1)
    return out


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    valid: Tensor,
    scale: float,
    *,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from one token per sequence to the first ``valid`` entries of its cache, without expanding KV heads.

    Args:
        query: ``[B, H, D]``, float32 or bfloat16, ``D`` a multiple of 32.
        keys: ``[B, N, C, D]``, contiguous, float32 or bfloat16.
        values: ``[B, N, C, D]``, contiguous.
        valid: int64 ``[B]``; 0 gives zeros and reads nothing.
        scale: Factor on the logits.
        cap: Soft cap of the logits; 0 for none.
        sinks: One extra logit per head, without a value, float32 ``[H]``.

    Returns:
        ``[B, H, D]``. Row ``b`` depends only on sequence ``b``, bit for bit.

    Raises:
        ValueError: Shapes or dtypes do not match.
        MemoryError: There is not enough memory for temporaries.
    """
    B, H, D = query.shape
    fits = keys.shape == values.shape and keys.shape[0] == B and keys.shape[3] == D and H % keys.shape[1] == 0
    require(fits and valid.shape == (B,) and valid.dtype == torch.int64, "shapes or types do not match")
    require(
        D % MULTIPLE == 0 and D <= MOST_HEAD_SIZE,
        f"the head size is {D}; it must be a multiple of {MULTIPLE} up to {MOST_HEAD_SIZE}",
    )
    require(keys.is_contiguous() and values.is_contiguous(), "caches must be contiguous")
    check_types(keys, values)
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    cache = EntryShape(keys.shape[1], D, latent=False).kind([keys, values])
    operation = ops.Attend(BufferView("query", D, H), BufferView("out", D, H), 0, scale, cap=cap, sinks=sinks)
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
    """Run one operation on the caller's buffers."""
    if valid is None:
        valid = torch.ones(slots, dtype=torch.int64)  # all are active
    state = Slots.that_see(valid, 1 if cache is None else cache.entries)
    layers = [] if cache is None else [cache]
    first = next(iter(buffers.values()))
    CpuProgram([operation], StepBuffers(buffers, state, layers, [], first.dtype)).run()

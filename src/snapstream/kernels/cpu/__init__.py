"""CPU kernels: attention, and the native loop, which runs decode steps and chunks of prompts, at hardware speed.

The package ships them prebuilt, or they are compiled when first needed (:mod:`.library`). Without them everything still
works, with slower stock operations.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from snapstream.cache import EntryShape
from snapstream.kernels import operations as ops
from snapstream.kernels.buffers import BufferView, Slots, StepBuffers
from snapstream.kernels.cpu import library
from snapstream.kernels.cpu.checks import MOST_HEAD_SIZE, MULTIPLE, check_types, require
from snapstream.kernels.cpu.interface import INSTRUCTIONS
from snapstream.kernels.cpu.prefill import (
    BLOCK,
    attend_window,
    has_instructions,
    packed_shape,
    prefill_attention,
    prefill_instructions,
)
from snapstream.kernels.cpu.program import CpuProgram, Scratch, unsupported

__all__ = [
    "BLOCK",
    "INSTRUCTIONS",
    "MOST_HEAD_SIZE",
    "MULTIPLE",
    "SPLIT",
    "STATE",
    "CpuProgram",
    "Scratch",
    "attend_window",
    "available",
    "decode_attention",
    "has_instructions",
    "loaded",
    "packed_shape",
    "prefill_attention",
    "prefill_instructions",
    "unsupported",
]

logger = logging.getLogger(__name__)

SPLIT, STATE = 512, 16
"""Entries per part of decode attention, and floats of state that it keeps per part besides the output."""

loaded = False
"""Whether :func:`available` has loaded the kernels; programs use them only then."""


@functools.cache
def available() -> bool:
    """Load the kernels, building them first if necessary; ``False``, with a warning, if that is impossible."""
    if library.load() is None:
        return False
    global loaded  # noqa: PLW0603 (checked by programs)
    loaded = True
    logger.info("Prefill in bfloat16 multiplies with %s.", prefill_instructions(torch.bfloat16))
    return True


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
    buffers = {"query": query.reshape(B, -1), "out": out.view(B, -1)}
    CpuProgram([operation], StepBuffers(buffers, Slots.that_see(valid, cache.entries), [cache], [], query.dtype)).run()
    return out

"""Attention on a CPU by the kernels of this package, which read valid entries only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from snapstream.attention.base import AttentionBackend
from snapstream.kernels import cpu as kernels
from snapstream.kernels.buffers import PromptChunk, StepBuffers
from snapstream.kernels.cpu.program import CpuProgram, unsupported
from snapstream.kernels.operations import Attend, Operation
from snapstream.kernels.stock import Program


class CpuAttention(AttentionBackend):
    """Needs the kernels of :mod:`snapstream.kernels.cpu`."""

    reads_all_keys_in_prefill = False
    narrow_values = True
    in_loop = True

    @staticmethod
    @override
    def unsupported(device: torch.device, dtype: torch.dtype, *sizes: int) -> str | None:
        """Requires a CPU, float32 or bfloat16, and head sizes that the kernels can read in full vectors."""
        if device.type != "cpu":
            return f"the device is {device}"
        if dtype not in (torch.float32, torch.bfloat16):
            return f"the dtype is {dtype}; float32 and bfloat16 are supported"
        if any(size % kernels.MULTIPLE or size > kernels.MOST_HEAD_SIZE for size in sizes):
            given = " and ".join(map(str, dict.fromkeys(sizes)))
            return f"the head size is {given}; allowed: multiples of {kernels.MULTIPLE} up to {kernels.MOST_HEAD_SIZE}"
        return None

    @classmethod
    @override
    def load(cls, device: torch.device) -> str | None:
        return None if kernels.available() else "its kernels are not available; see the warning above"

    @override
    def program(self, operations: Sequence[Operation], work: StepBuffers) -> Program:
        if unsupported(operations, work.dtype, *(cache.entry_type for cache in work.caches)):
            return super().program(operations, work)
        return CpuProgram(operations, work)

    @override
    def packed_shape(self, values: torch.Size, dtype: torch.dtype) -> tuple[int, ...]:
        return kernels.packed_shape(values, kernels.prefill_instructions(dtype))

    @override
    def prefill_bytes(self, o: Attend, chunk: PromptChunk) -> int:
        # The kernel's copy of the queries, and its sums.
        return 2 * chunk.slots.tokens * o.query.heads * o.query.size * 4

    @override
    def decode_bytes(self, o: Attend, m: StepBuffers) -> int:
        # The state of each head after each part of a cache.
        parts = -(-m.caches[o.layer].entries // kernels.SPLIT)
        return len(m.slots.token) * o.query.heads * parts * (o.target.size + kernels.STATE) * 4

    @override
    def prefill(
        self,
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
    ) -> Tensor:
        return kernels.prefill_attention(
            query,
            keys,
            values,
            start,
            scale,
            window=window,
            cap=cap,
            sinks=sinks,
            packed=packed,
            packed_until=packed_until,
        )

    @override
    def decode(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        valid: Tensor,
        scale: float,
        *,
        cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return kernels.decode_attention(query, keys, values, valid, scale, cap=cap, sinks=sinks)

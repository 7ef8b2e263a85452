"""The CPU: kernels of our own for prefill and decode; both read valid entries only."""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.attention.base import AttentionBackend
from snapstream.kernels import cpu as kernels


class CpuAttention(AttentionBackend):
    """Needs the kernels of :mod:`snapstream.kernels.cpu`."""

    reads_all_keys_in_prefill = False
    narrow_values = True

    @staticmethod
    def unsupported(device: torch.device, dtype: torch.dtype, *sizes: int) -> str | None:
        """CPU, float32 or bfloat16, a head size the kernels can read in full vectors."""
        if device.type != "cpu":
            return f"the device is {device}"
        if dtype not in (torch.float32, torch.bfloat16):
            return f"the dtype is {dtype}; it takes float32 and bfloat16"
        if any(size % kernels.MULTIPLE or size > kernels.MOST_HEAD_SIZE for size in sizes):
            given = " and ".join(map(str, dict.fromkeys(sizes)))
            return f"the head size is {given}; it takes multiples of {kernels.MULTIPLE} up to {kernels.MOST_HEAD_SIZE}"
        return None

    def packed_shape(self, values: torch.Size, dtype: torch.dtype) -> tuple[int, ...]:
        """See :meth:`AttentionBackend.packed_shape`."""
        return kernels.packed_shape(values, kernels.prefill_instructions(dtype))

    def prefill_bytes(self, tokens: int, entries: int, heads: int, size: int, dtype: torch.dtype) -> int:
        """See :meth:`AttentionBackend.prefill_bytes`: what the kernel has of queries and sums."""
        return 2 * tokens * heads * size * 4

    def decode_bytes(self, slots: int, heads: int, columns: int, entries: int) -> int:
        """See :meth:`AttentionBackend.decode_bytes`: what is known of each head after each part of a cache."""
        return slots * heads * -(-entries // kernels.SPLIT) * (columns + kernels.STATE) * 4

    def prefill(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        start: Tensor,
        scale: float,
        *,
        packed: Tensor | None = None,
        packed_until: Tensor | None = None,
    ) -> Tensor:
        """See :meth:`AttentionBackend.prefill`."""
        return kernels.prefill_attention(query, keys, values, start, scale, packed=packed, packed_until=packed_until)

    def decode(self, query: Tensor, keys: Tensor, values: Tensor, valid: Tensor, scale: float) -> Tensor:
        """See :meth:`AttentionBackend.decode`."""
        return kernels.decode_attention(query, keys, values, valid, scale)

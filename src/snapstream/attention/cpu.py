"""The CPU: torch's fused attention for prefill, our own kernel for decode; both read valid entries only."""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.attention.base import AttentionBackend
from snapstream.kernels import cpu as kernels

_MAX_HEAD_DIM = 1024


class CpuAttention(AttentionBackend):
    """Needs the kernels of :mod:`snapstream.kernels.cpu`."""

    reads_all_keys_in_prefill = False

    @staticmethod
    def unsupported(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """CPU, float32 or bfloat16, a head size the kernels can read in full vectors."""
        if device.type != "cpu":
            return f"the device is {device}"
        if dtype not in (torch.float32, torch.bfloat16):
            return f"the dtype is {dtype}; it takes float32 and bfloat16"
        if head_dim % kernels.MULTIPLE or head_dim > _MAX_HEAD_DIM:
            return f"the head size is {head_dim}; it takes multiples of {kernels.MULTIPLE} up to {_MAX_HEAD_DIM}"
        return None

    def prefill(self, query: Tensor, keys: Tensor, values: Tensor, start: Tensor, scale: float) -> Tensor:
        """See :meth:`AttentionBackend.prefill`."""
        result: Tensor = torch.ops.snapstream.chunk_attention(query, keys, values, start, scale)
        return result

    def decode(self, query: Tensor, keys: Tensor, values: Tensor, valid: Tensor, scale: float) -> Tensor:
        """See :meth:`AttentionBackend.decode`."""
        return kernels.decode_attention(query, keys, values, valid, scale)


@torch.library.custom_op("snapstream::chunk_attention", mutates_args=())
def chunk_attention(query: Tensor, keys: Tensor, values: Tensor, start: Tensor, scale: float) -> Tensor:
    """Causal attention of a chunk in two unmasked parts: the past in full, the chunk itself causally.

    The two results are joined by their log-sum-exps, so nothing beyond the chunk's end is read. An operation of its
    own, since the length of the past is data; to the graph around it the shapes are fixed. Shapes as in
    :meth:`AttentionBackend.prefill`.
    """
    T, H, D = query.shape
    N = keys.shape[0]
    past = int(start)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    rows = query.transpose(0, 1)
    own = slice(past, past + T)
    own_keys = keys[:, own].repeat_interleave(H // N, 0)
    own_values = values[:, own].repeat_interleave(H // N, 0)
    out, lse = fused(rows[None], own_keys[None], own_values[None], 0.0, True, scale=scale)
    out, lse = out[0], lse.reshape(H, T)
    if past:
        # All heads of a group see the same keys: their queries are rows of one product. One KV head after the other,
        # as the library packs all keys and values it is given before it begins.
        grouped = rows.reshape(N, 1, H // N * T, D)
        parts = [
            fused(
                grouped[n][None], keys[None, n : n + 1, :past], values[None, n : n + 1, :past], 0.0, False, scale=scale
            )
            for n in range(N)
        ]
        before = torch.cat([part for part, _ in parts]).reshape(H, T, D)
        before_lse = torch.cat([part for _, part in parts]).reshape(H, T)
        share = torch.sigmoid(lse - before_lse)[..., None]
        out = torch.lerp(before.float(), out.float(), share)
    result: Tensor = out.transpose(0, 1).to(query.dtype).contiguous()
    return result


@chunk_attention.register_fake
def _chunk_attention_shape(query: Tensor, keys: Tensor, values: Tensor, start: Tensor, scale: float) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)

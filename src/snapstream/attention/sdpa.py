"""Torch's own attention with masks: runs on every device, reads every entry it is given."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.attention.base import AttentionBackend


class SdpaAttention(AttentionBackend):
    """``scaled_dot_product_attention`` with a mask made from lengths."""

    reads_all_keys_in_prefill = True

    @staticmethod
    def unsupported(device: torch.device, dtype: torch.dtype, *sizes: int) -> str | None:
        """Runs everywhere."""
        return None

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
        T, L = query.shape[0], keys.shape[1]
        key_position = torch.arange(L, device=query.device)
        mask = key_position <= start + torch.arange(T, device=query.device)[:, None]
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def decode(self, query: Tensor, keys: Tensor, values: Tensor, valid: Tensor, scale: float) -> Tensor:
        """See :meth:`AttentionBackend.decode`. The heads of a group become query rows, so keys are not expanded."""
        B, H, D = query.shape
        N, C = keys.shape[1], keys.shape[2]
        # A free slot attends to its first entry: a row with nothing to attend to would be NaN.
        mask = torch.arange(C, device=query.device) < valid.clamp(min=1)[:, None]
        mask = mask[:, None, None].expand(B, 1, H // N, C)
        grouped = query.reshape(B, N, H // N, D)
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale).reshape(B, H, -1)

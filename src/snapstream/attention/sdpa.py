"""Torch's own attention, which runs on every device. Where torch has a flash kernel, prefill needs no mask."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Self, override

from snapstream.attention import flash
from snapstream.attention.base import AttentionBackend
from snapstream.kernels import plain
from snapstream.kernels.buffers import PromptChunk
from snapstream.kernels.operations import Attend

WRITTEN_OUT = 2**22
"""Maximum numbers of keys that attention with caps or sinks takes at once in decoding."""


class SdpaAttention(AttentionBackend):
    """``scaled_dot_product_attention`` with masks built from lengths, or flash attention for prefill."""

    def __init__(self, *, with_flash: bool = False) -> None:
        """Choose how prefill attends.

        Args:
            with_flash: Use :mod:`snapstream.attention.flash` for prefill.
        """
        self.with_flash = with_flash
        self.reads_all_keys_in_prefill = not with_flash

    @classmethod
    @override
    def for_heads(cls, device: torch.device, dtype: torch.dtype, size: int, value_size: int | None = None) -> Self:
        return cls(with_flash=flash.fits(device, dtype, size, value_size or size))

    @staticmethod
    @override
    def unsupported(device: torch.device, dtype: torch.dtype, *sizes: int) -> str | None:
        """Runs everywhere."""
        return None

    @override
    def prefill_bytes(self, o: Attend, chunk: PromptChunk) -> int:
        pairs = chunk.slots.tokens * chunk.caches[o.layer].entries
        if o.cap or o.sinks is not None:  # a head's logits in several stages, in float32, and the mask
            return pairs * 24
        if self.with_flash:
            return 0
        # The mask as booleans and as floats, and torch's own copies of it.
        return pairs * (8 if chunk.dtype == torch.float32 else 20)

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
        is_usual = cap == 0.0 and sinks is None
        if (
            is_usual
            and self.with_flash
            and (not window or flash.has_windows(query.device, query.dtype, query.shape[2]))
        ):
            return flash.attend(query, keys, values, start, scale, window)
        return plain.attend_chunk(query, keys, values, start, scale, window, cap, sinks)

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
        # The heads of a group become query rows, so keys are not expanded.
        B, H, D = query.shape
        N, C = keys.shape[1], keys.shape[2]
        # A free slot attends to its first entry: a row with nothing to attend to would be NaN.
        mask = torch.arange(C, device=query.device) < valid.clamp(min=1)[:, None]
        mask = mask[:, None, None].expand(B, 1, H // N, C)
        wide = torch.promote_types(query.dtype, keys.dtype)
        grouped, keys, values = query.reshape(B, N, H // N, D).to(wide), keys.to(wide), values.to(wide)
        own = None if sinks is None else sinks.view(N, -1)
        if (cap == 0.0 and sinks is None) or keys.numel() <= WRITTEN_OUT:
            out = plain.attend(grouped, keys, values, mask, scale, cap, own)
        else:  # slot by slot, as there are copies of keys and values in float32, and all logits
            each = zip(grouped, keys, values, mask, strict=True)
            out = torch.stack([plain.attend(q, k, v, seen, scale, cap, own) for q, k, v, seen in each])
        return out.reshape(B, H, -1).to(query.dtype)

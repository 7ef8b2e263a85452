"""Sliding-window layers, whose cache already has a fixed size."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import StaticSlidingWindowLayer


class SlidingLayer(StaticSlidingWindowLayer):  # type: ignore[misc]
    """transformers' layer with a sliding window, extended by operations on batch rows."""

    is_croppable = False

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return int(self.keys.nbytes + self.values.nbytes) if self.is_initialized else 0

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        if self.is_initialized:
            for name in ("keys", "values"):
                setattr(self, name, getattr(self, name).repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only some of the sequences."""
        if self.is_initialized:
            for name in ("keys", "values"):
                setattr(self, name, getattr(self, name)[indices.to(self.device)])

"""What an attention backend has to do."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class AttentionBackend(ABC):
    """Attention of a prefill chunk and of a decode step; pure functions of fixed shape."""

    reads_all_keys_in_prefill: bool
    """Whether prefill reads the whole staging cache it is given, so that the caller should give no more than needed."""
    narrow_values: bool = False
    """Whether values may have fewer numbers than keys; else values of latents are given in full, and cut afterwards."""

    @staticmethod
    @abstractmethod
    def unsupported(device: torch.device, dtype: torch.dtype, *sizes: int) -> str | None:
        """Why the backend cannot run with these, or ``None`` if it can.

        Args:
            device: Where tensors are.
            dtype: Of what is attended to.
            sizes: Numbers of a key, and of a value if they differ.
        """

    def packed_shape(self, values: torch.Size, dtype: torch.dtype) -> tuple[int, ...]:
        """Shape in which prefill keeps values ``[N, L, V]`` in the order it multiplies; ``(0,)`` if it does not."""
        return (0,)

    def prefill_bytes(self, tokens: int, entries: int, heads: int, size: int, dtype: torch.dtype) -> int:
        """Bytes of temporaries, beside the result, of a chunk of so many tokens that sees so many entries.

        Args:
            tokens: Of the chunk.
            entries: That the staging cache has.
            heads: Query heads.
            size: Numbers of a head.
            dtype: Of the cache.
        """
        return 0

    def decode_bytes(self, slots: int, heads: int, columns: int, entries: int) -> int:
        """Bytes of temporaries that decoding holds for so many slots, query heads, numbers of a value, and entries."""
        return 0

    @abstractmethod
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
        """Attend causally from one chunk of a prompt to everything before it and to itself.

        Args:
            query: Rotated queries of tokens ``start .. start + T``, ``[T, H, D]``.
            keys: Staging cache, ``[N, L, D]``, which already holds the chunk's keys at ``start .. start + T``.
            values: ``[N, L, V]``; of latents, the first numbers of the keys.
            start: int64 scalar tensor.
            scale: Factor on the logits.
            packed: Memory of :meth:`packed_shape` that is kept from chunk to chunk of one layer.
            packed_until: Entries that chunks before this one have packed, int64 scalar tensor.

        Returns:
            ``[T, H, V]``.
        """

    @abstractmethod
    def decode(self, query: Tensor, keys: Tensor, values: Tensor, valid: Tensor, scale: float) -> Tensor:
        """Attend from one token per slot to the first ``valid`` entries of its cache; KV heads are not expanded.

        Args:
            query: ``[B, H, D]``.
            keys: ``[B, N, C, D]``.
            values: ``[B, N, C, D]``.
            valid: int64 ``[B]``; a free slot has 0, and its result means nothing.
            scale: Factor on the logits.

        Returns:
            ``[B, H, D]``.
        """
